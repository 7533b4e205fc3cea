"""The command that records a command with Nsight Systems: pure functions on words."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perfdoctor.errors import UsageError
from perfdoctor.record.sites_file import SUFFIX

CHILD = "perfdoctor.doors.nsys_child"
RANK = "%q{RANK}"  # nsys and the child put the environment's RANK there
UMASK = "PERFDOCTOR_UMASK"  # the environment variable that tells the child the user's umask, in octal
_PYTHON = re.compile(r"^(?:python|pypy)[\d.]*(?:\.exe)?$")
_SHEBANG = re.compile(rb"^#!\s*(?:/usr/bin/env\s+(?:-S\s+)?)?(\S*?(?:python|pypy)[\d.]*)(?:\s|$)")
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")  # python's own options that take the next word
# Python programs that start the training script in processes of their own, which are not watched.
_LAUNCHERS = ("accelerate", "deepspeed", "fabric", "lightning", "composer")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to record: steps of each phase, where the files go, and whether a window or the whole run is recorded."""

    name: str  # NAME of NAME.nsys-rep
    warmup: int = 5
    active: int = 10
    keep_going: bool = False
    window: bool = True  # record only the window that the session opens through the profiler API of CUDA
    trace: str = "cuda,nvtx,osrt"
    extra: tuple[str, ...] = ()  # further options for nsys


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python program in a command line: `python` runs `target`, a file or (`module`) a module's name."""

    python: tuple[str, ...]  # with its own options
    target: str
    module: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NsysCommand:
    """What to run. `python` is the interpreter that needs perfdoctor; () where the command is no Python."""

    words: tuple[str, ...]
    python: tuple[str, ...]  # with its own options
    name: str  # of the files; of several ranks with RANK in it
    script: str = ""  # the file that `python` runs; '' for a module
    remarks: tuple[str, ...] = ()  # what was left out, and why


def build_command(words: Sequence[str], options: Options, nsys: str, help_text: str) -> NsysCommand:
    """`words` as the user typed them, recorded by `nsys`, whose `profile --help` said `help_text`.

    Raises:
        UsageError: torchrun's own options are wrong, or it would start nothing.
    """
    launcher = _launcher(words)
    if launcher is not None:
        return _build_torchrun(words, launcher, options, nsys, help_text)
    flags, remarks = nsys_flags(options, help_text)
    program = python_program(words)
    if program is None:
        remarks.append(
            f"{' '.join(words[:2])} is no Python script: the whole run is recorded, without lines and bare step times"
        )
        flags, _ = nsys_flags(replace(options, window=False), help_text)
        command = (nsys, "profile", *flags, *words)
        return NsysCommand(words=command, python=(), name=options.name, remarks=tuple(remarks))
    command = (nsys, "profile", *flags, *_child(program, options))
    return NsysCommand(
        words=command, python=program.python, script=_script(program), name=options.name, remarks=tuple(remarks)
    )


def nsys_flags(options: Options, help_text: str) -> tuple[list[str], list[str]]:
    """The options for `nsys profile`, and remarks on those that this nsys does not know."""
    wanted = [
        ("trace", options.trace, ""),
        ("sample", "none", ""),
        ("cpuctxsw", "none", ""),
        ("cuda-graph-trace", "node", "kernels inside CUDA graphs may be missing"),
    ]
    if options.window:
        wanted += [
            ("capture-range", "cudaProfilerApi", "the whole run is recorded"),
            ("capture-range-end", "stop", "the script may be ended at the end of the window"),
        ]
    flags, remarks = [], []
    for flag, value, loss in wanted:
        if f"--{flag}=" in help_text or not help_text:
            flags.append(f"--{flag}={value}")
        elif loss:
            remarks.append(f"this nsys has no --{flag}: {loss}")
    return [*flags, "--force-overwrite=true", f"--output={options.name}", *options.extra], remarks


def python_program(words: Sequence[str]) -> Program | None:
    """The Python program that `words` run; None where it is something else, `python -c` and the like included."""
    if not _PYTHON.match(Path(words[0]).name):
        python = _interpreter_of(words[0])
        if not python or Path(words[0]).name in _LAUNCHERS:
            return None
        return Program(python=(python,), target=_found(words[0]), module=False, arguments=tuple(words[1:]))
    at = 1
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word in ("-c", "-", "--help", "--version", "-h", "-V"):
            return None
        cluster = re.fullmatch(r"-([a-zA-Z]*?)([mc])(.*)", word) if not word.startswith(("--", "-W", "-X")) else None
        if cluster is not None:
            return _module_program(words, at, *cluster.groups())
        at += 2 if word in _PYTHON_VALUES else 1
    if at >= len(words):
        return None
    return Program(python=tuple(words[:at]), target=words[at], module=False, arguments=tuple(words[at + 1 :]))


def _module_program(words: Sequence[str], at: int, before: str, letter: str, after: str) -> Program | None:
    """`-m name`, `-mname` or `-um name`: the module at word `at`."""
    rest = ((after,) if after else ()) + tuple(words[at + 1 :])
    if letter == "c" or not rest:
        return None
    own = (f"-{before}",) if before else ()
    return Program(python=(*words[:at], *own), target=rest[0], module=True, arguments=rest[1:])


def _script(program: Program) -> str:
    return "" if program.module else program.target


def _child(program: Program, options: Options) -> tuple[str, ...]:
    """The program, run by the child in its place."""
    flags = ["--sites", options.name + SUFFIX, "--warmup", str(options.warmup), "--active", str(options.active)]
    flags += ["--keep-going"] if options.keep_going else []
    flags += ["--module"] if program.module else []
    return (*program.python, "-m", CHILD, *flags, "--", program.target, *program.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    num_words: int  # of the command, before torchrun's own options
    python: str


def _launcher(words: Sequence[str]) -> _Launcher | None:
    """Whether torchrun is called, by its name or as a module, and with which interpreter."""
    if Path(words[0]).name in ("torchrun", "torchrun.exe"):
        return _Launcher(num_words=1, python=_interpreter_of(words[0]) or "python")
    program = python_program(words)
    if program is not None and program.module and program.target in _TORCHRUN_MODULES:
        return _Launcher(num_words=len(words) - len(program.arguments), python=program.python[0])
    return None


def _build_torchrun(
    words: Sequence[str], launcher: _Launcher, options: Options, nsys: str, help_text: str
) -> NsysCommand:
    """Each rank runs its own nsys: `torchrun ... --no-python nsys profile ... python -m CHILD ... script`."""
    own, program, raw = _split_torchrun(words[launcher.num_words :], launcher.python)
    options = replace(options, name=f"{options.name}_{RANK}")
    flags, remarks = nsys_flags(options if program else replace(options, window=False), help_text)
    started = _child(program, options) if program else raw
    if program is None:
        remarks.append(f"{raw[0]} is no Python script: each rank's whole run is recorded, without lines")
    command = (*words[: launcher.num_words], *own, "--no-python", nsys, "profile", *flags, *started)
    python, script = (program.python, _script(program)) if program else ((), "")
    return NsysCommand(words=command, python=python, script=script, name=options.name, remarks=tuple(remarks))


def _split_torchrun(words: Sequence[str], python: str) -> tuple[list[str], Program | None, tuple[str, ...]]:
    """(torchrun's own options, the program that each rank runs, the words where that is none)."""
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as error:
        raise UsageError(f"torchrun's options cannot be read without torch ({error}): install it here too") from error
    try:
        parsed = get_args_parser().parse_args(list(words))
    except SystemExit as stop:  # torchrun's parser has said why
        raise UsageError("torchrun would not take these options (see above)") from stop
    arguments = tuple(parsed.training_script_args)
    own = [word for word in words[: len(words) - len(arguments) - 1] if word not in ("-m", "--module", "--no-python")]
    own = [word for word in own if word not in ("--no_python", "--")]
    script = parsed.training_script
    if parsed.no_python:
        return own, python_program((script, *arguments)), (script, *arguments)
    # torchrun runs its scripts unbuffered.
    return own, Program(python=(python, "-u"), target=script, module=parsed.module, arguments=arguments), ()


def _found(word: str) -> str:
    return word if os.sep in word else shutil.which(word) or word


def _interpreter_of(word: str) -> str:
    """The Python in the first line of an executable script; '' where it is something else."""
    try:
        with open(_found(word), "rb") as file:
            match = _SHEBANG.match(file.readline(512))
    except OSError:
        return ""
    return os.fsdecode(match[1]) if match else ""


def default_name(words: Sequence[str]) -> str:
    """`train_nsys` for `python train.py`."""
    launcher = _launcher(words)
    program = python_program(words)
    if launcher is not None:
        _, program, raw = _split_torchrun(words[launcher.num_words :], launcher.python)
        words = raw or words
    target = program.target if program is not None else words[0]
    stem = target.rsplit(".", 1)[-1] if program is not None and program.module else Path(target).stem
    return re.sub(r"[^\w-]", "_", stem) + "_nsys"
