"""A command recorded with Nsight Systems, from its words to captures that are ready for the diagnosis."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from perfdoctor.doors.nsys_command import RANK, UMASK, NsysCommand, Options, build_command
from perfdoctor.doors.nsys_process import Ending, cuda_is_there, export, find_nsys, read_help, run_nsys
from perfdoctor.doors.nsys_start import begin_noticed
from perfdoctor.errors import CaptureError, NotATraceError, UsageError
from perfdoctor.record.capture import Capture, Note
from perfdoctor.record.load import load_capture
from perfdoctor.record.sites_file import SUFFIX, read_sites
from perfdoctor.watch.plan import Plan, Stage

_NEEDED = ("numpy", "msgspec", "nvtx", "torch")
_MISSING = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
_MOST_STARTS = 3  # of nsys, until the script begins
_ROOT = Path(__file__).resolve().parents[2]
_DEBIAN_IMPORTER = Path("/usr/lib/nsight-systems/host-linux-x64")
_DEBIAN_LINK = Path("/usr/lib/x86_64-linux-gnu/nsight-systems/host-linux-x64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What nsys and the session left of one rank (or of the only process). None: not there."""

    name: str  # NAME of NAME.nsys-rep
    report: Path | None  # .nsys-rep
    unimported: Path | None  # .qdstrm
    sites: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NsysRun:
    """What came of a command. `captures` may be empty; `messages` say why, and what the user must know."""

    captures: tuple[Capture, ...]
    exit_code: int
    interrupted: bool
    messages: tuple[str, ...]
    missing: Mapping[int, str] = field(default_factory=dict)  # ranks that left nothing, and why


def record(
    words: Sequence[str], options: Options, tell: Callable[[str], None], *, whole: bool = False, limit_s: float = 600.0
) -> NsysRun:
    """Run `words` under nsys, export what it recorded, and join the lines that the session saw.

    `tell` gets the command and remarks before it runs. `whole` records the whole run where otherwise only the window
    that the session opens would be recorded. nsys has `limit_s` seconds after the script to write its report.

    Raises:
        UsageError: nsys is missing, the command cannot be recorded, or its Python lacks a package.
    """
    nsys = find_nsys()
    _check_words(words)
    options = replace(options, window=options.window and not whole and cuda_is_there())
    command = build_command(words, options, nsys, read_help(nsys))
    environment = _environment()
    _check_files(words[0], command.script)
    _check_python(command.python, environment)
    for remark in command.remarks:
        tell(remark)
    _clear_sites(command.name)
    before = _stamps(command.name)
    tell(_spelt(command.words))
    ending = _run(command, environment, before, limit_s, tell)
    found = list(_recordings(command.name, before))
    captures: list[Capture] = []
    messages = list(_complaints(ending, limit_s))
    exit_code = ending.exit_code
    for recording in found:
        _restrict(recording.report)
        _restrict(recording.unimported)
        capture, code, remarks = _read(recording, nsys, options)
        if command.python and recording.sites is None:
            messages.append(_WITHOUT_LINES.format(recording.name))
        captures += [_of_rank(capture, command.name, recording.name)] if capture is not None else []
        messages += remarks
        exit_code = code if code is not None else exit_code
    messages += _secrets([capture.path for capture in captures if _holds_variables(capture)])
    if not found:
        messages.append(f"nsys left no {command.name}.nsys-rep (it ended with exit code {ending.exit_code})")
    return NsysRun(
        captures=tuple(captures),
        exit_code=exit_code,
        interrupted=ending.interrupted,
        messages=tuple(messages),
        missing=_missing(captures),
    )


def _environment() -> dict[str, str]:
    """That of this process, with perfdoctor importable by whatever Python the command names, and with its umask: nsys
    starts programs with none, so that every file of theirs could be written by everybody."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": str(_ROOT) + (os.pathsep + path if path else ""),
        UMASK: f"{_umask():o}",
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _restrict(path: Path | None) -> None:
    """What nsys wrote gets no more rights than the user's other files."""
    if path is not None:
        with suppress(OSError):  # of somebody else
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_umask())


def _check_words(words: Sequence[str]) -> None:
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode("utf-8", "backslashreplace").decode()
            raise UsageError(f"nsys takes only words in UTF-8, not {shown}: give it another name") from error


def _check_files(program: str, script: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"no program {program} to run: not on PATH, or not executable")
    if script and not Path(script).is_file():
        raise UsageError(f"no script {script} to run: it is not there, or a folder")


def _check_python(python: Sequence[str], environment: dict[str, str]) -> None:
    """Complain before the recording about a Python that could not run the session."""
    if not python:
        return
    try:
        done = subprocess.run(
            (*python, "-c", _MISSING, "perfdoctor", *_NEEDED), env=environment, capture_output=True, text=True,
            errors="replace", stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"cannot run {python[0]}: {error.strerror or error}") from error
    if done.returncode != 0:
        raise UsageError(f"{' '.join(python)} does not start: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    if missing := done.stdout.split():
        raise UsageError(
            f"{python[0]} lacks {', '.join(missing)}, which the session inside nsys needs: "
            f"{python[0]} -m pip install {' '.join(missing)} (nvtx 0.2.11 for nsys before 2024)"
        )


def _run(
    command: NsysCommand,
    environment: dict[str, str],
    before: dict[Path, int],
    limit_s: float,
    tell: Callable[[str], None],
) -> Ending:
    def ended_at() -> float | None:
        written = [path.stat().st_mtime for path in _fresh(command.name, before) if path.name.endswith(SUFFIX)]
        return max(written, default=None)

    with begin_noticed(environment) as (noticed, begun):
        for left in reversed(range(_MOST_STARTS)):
            try:
                ending = run_nsys(
                    command.words, noticed, ended_at, limit_s, tell, begun if command.python else lambda: True
                )
            except OSError as error:
                raise UsageError(f"cannot run {command.words[0]}: {error.strerror or error}") from error
            if ending.begun or ending.exit_code == 0 or ending.interrupted or not left:
                break
            did = "hung" if ending.hung else f"ended with exit code {ending.exit_code}"
            tell(f"nsys {did} before the script began: starting it again")
    return ending


def _candidates(name: str) -> list[Path]:
    """Every file that a recording called `name` may have left, of any rank."""
    folder, stem = Path(name).parent, Path(name).name
    pattern = re.compile(
        re.escape(stem).replace(re.escape(RANK), r"\d+") + r"(?:\.nsys-rep|\.qdstrm|" + re.escape(SUFFIX) + ")"
    )
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name)) if folder.is_dir() else []


def _clear_sites(name: str) -> None:
    """Those of an earlier run would be joined to this one's recording, should it leave none."""
    for path in _candidates(name):
        if path.name.endswith(SUFFIX):
            path.unlink()


def _stamps(name: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in _candidates(name)}


def _fresh(name: str, before: dict[Path, int]) -> list[Path]:
    """Those written since: files of an earlier run are no part of this one."""
    return [path for path in _candidates(name) if path.stat().st_mtime_ns != before.get(path)]


def _recordings(name: str, before: dict[Path, int]) -> Iterator[Recording]:
    """One for each rank, in order."""
    fresh = set(_fresh(name, before))
    names = {re.sub(r"(?:\.nsys-rep|\.qdstrm|\.sites\.json)$", "", str(path)) for path in fresh}

    def there(path: str) -> Path | None:
        return Path(path) if Path(path) in fresh else None

    for each in sorted(
        names, key=lambda text: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
    ):
        yield Recording(
            name=each,
            report=there(each + ".nsys-rep"),
            unimported=there(each + ".qdstrm"),
            sites=there(each + SUFFIX),
        )


def _read(recording: Recording, nsys: str, options: Options) -> tuple[Capture | None, int | None, list[str]]:
    """(capture, the script's exit code, messages) of one rank."""
    try:
        sites = read_sites(recording.sites) if recording.sites is not None else None
    except CaptureError as error:
        return None, None, [str(error)]
    code = sites.exit_code if sites is not None else None
    messages: list[str] = []
    if recording.report is None:
        busy = [note.text for note in (sites.capture.notes if sites else ()) if note.code == "profiler-busy"]
        messages += busy or [_without_report(recording, options)]
        return (replace(sites.capture, notes=(*sites.capture.notes, _NO_RECORDING)) if sites else None), code, messages
    target = Path(recording.name + ".sqlite")
    problem = export(nsys, recording.report, target)
    if problem:
        return (sites.capture if sites else None), code, [f"{recording.report} could not be exported: {problem}"]
    try:
        capture = load_capture(target)
    except NotATraceError:
        messages.append(f"{target} holds neither CUDA calls nor NVTX ranges: nothing to diagnose")
        return (sites.capture if sites else None), code, messages
    except CaptureError as error:
        return (sites.capture if sites else None), code, [str(error)]
    return capture, code, messages


_NO_RECORDING = Note(
    code="no-recording", text="nsys's recording could not be read here: lines, counts and bare times only"
)


_WITHOUT_LINES = (
    "the script's process left no {}" + SUFFIX + " (it was killed, or left by os._exit): no lines, no bare step times"
)


def _of_rank(capture: Capture, template: str, name: str) -> Capture:
    """With the rank that the file's name tells, where the session could not say it."""
    before, found, after = template.partition(RANK)
    number = name[len(before) : len(name) - len(after)]
    if not found or capture.environment.rank is not None or not number.isdigit():
        return capture
    return replace(capture, environment=replace(capture.environment, rank=int(number)))


def _missing(captures: Sequence[Capture]) -> dict[int, str]:
    """Ranks of which there is neither a recording nor a sites file."""
    there = {capture.environment.rank for capture in captures}
    world_size = max((capture.environment.world_size or 0 for capture in captures), default=0)
    return {rank: "its process left no recording" for rank in range(world_size) if rank not in there}


def _without_report(recording: Recording, options: Options) -> str:
    """Why there is no .nsys-rep, and what to do."""
    if recording.unimported is None:
        if options.window:
            return (
                f"nsys recorded nothing for {recording.name}: the window was never opened. The loop must use CUDA and "
                f"take some {_num_steps(options)} steps: lower --warmup and --active, or give --whole"
            )
        return f"nsys left no {recording.name}.nsys-rep"
    name = recording.name
    text = (
        f"nsys left {recording.unimported} and could not import it: only the recording half of Nsight Systems is "
        f"installed here. "
    )
    if _DEBIAN_IMPORTER.is_dir() and not _DEBIAN_LINK.exists():
        return text + f"Debian puts the other half where nsys does not look: ln -sfn {_DEBIAN_IMPORTER} {_DEBIAN_LINK}"
    return text + (
        f"Where the whole of the same version is installed (Debian: nsight-systems), run "
        f"`QdstrmImporter -i {Path(name).name}.qdstrm` (in its host-linux-x64 folder), then "
        f"`perfdoctor analyze {Path(name).name}.nsys-rep` with {Path(name).name}{SUFFIX} beside it"
    )


def _num_steps(options: Options) -> int:
    plan = Plan(warmup=options.warmup, active=options.active)
    return plan.total((Stage.WARMUP, Stage.BARE, Stage.SITES, Stage.LIGHT))


def _holds_variables(capture: Capture) -> bool:
    return any(note.code == "environment-variables" for note in capture.notes)


def _secrets(exports: Sequence[str]) -> Iterator[str]:
    if exports:
        yield (
            f"{', '.join(exports)} and the .nsys-rep of it hold the environment variables of this machine's processes "
            f"(passwords, keys). Before you share an export: perfdoctor nsys --scrub {shlex.join(exports)}; "
            "a .nsys-rep cannot be scrubbed"
        )


def _complaints(ending: Ending, limit_s: float) -> Iterator[str]:
    if not ending.begun:
        yield f"the script never began: nsys {'hung' if ending.hung else 'ended'} before it"
    elif ending.hung:
        yield (
            f"nsys was ended: it had not written its report {limit_s:g} s after the script (nsys 2022.4 sometimes "
            "never ends); --limit sets the time"
        )
    if ending.interrupted:
        yield "interrupted: what follows is from the steps before that"


def _spelt(words: Sequence[str]) -> str:
    return "$ " + shlex.join(words)
