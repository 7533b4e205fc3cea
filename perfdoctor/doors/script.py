"""An unmodified training script, run in this process and watched."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

from perfdoctor.doors.script_stop import ScriptStop, ScriptStopped
from perfdoctor.doors.session import Session
from perfdoctor.errors import INTERRUPTED, UsageError
from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Capture
from perfdoctor.report.progress import ProgressLine
from perfdoctor.watch.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """How to watch a script. `keep_going` lets it run to its own end; `hits` is the log of an emulated device."""

    module: bool = False  # the target is a module's name, as after `python -m`
    warmup: int = 5
    active: int = 10
    keep_going: bool = False
    hits: HitLog | None = None
    profiled: bool | None = None
    progress: ProgressLine | None = None  # says how far the phases are
    around: Callable[[Session], AbstractContextManager[Any]] = nullcontext  # entered before the session is


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What came of a script. `exit_code` is its own, 0 where it was stopped on purpose."""

    capture: Capture
    exit_code: int
    stopped: bool
    num_steps: int  # that were seen, warm-up included


def run_script(target: str, arguments: Sequence[str] = (), options: ScriptOptions | None = None) -> ScriptRun:
    """Run `target`, a path or a module's name, as `python` would, and watch its training loop.

    Steps come from optimizer hooks, waits for data from torch's DataLoaders. Once every phase is over the script is
    ended by an exception at the end of a step, unless `keep_going`. An error of the script is printed as Python
    prints it, its exit code returned; the capture then holds the steps before it.

    Raises:
        UsageError: there is no such script or module, or it does not compile.
    """
    options = options or ScriptOptions()
    program = load_program(target, module=options.module)
    session = Session(Plan(warmup=options.warmup, active=options.active), hits=options.hits, profiled=options.profiled)
    stop = ScriptStop(throw_away=False)
    session.recorder.finished = lambda: _enough(options, stop)
    session.recorder.following = None if options.keep_going else lambda _: stop()  # it has caught what ends it
    if options.progress is not None:
        session.tell(options.progress)
    with as_main(program, arguments), options.around(session), session:
        session.recorder.batches.patch_loaders()
        exit_code, stopped = stop.run(partial(execute_program, program))
    num_steps = sum(row.complete for row in session.recorder.rows)
    return ScriptRun(capture=session.capture, exit_code=exit_code, stopped=stopped, num_steps=num_steps)


def _enough(options: ScriptOptions, stop: ScriptStop) -> None:
    if options.progress is not None:
        options.progress.close()
    if not options.keep_going:
        stop()


@contextmanager
def output_aside() -> Iterator[None]:
    """Standard output goes to standard error inside: that of Python, of C code and of child processes.

    For a report that must stand alone on standard output. What was written before comes out where it belongs.
    """
    before, error = sys.stdout, sys.stderr
    file = _descriptor(before) if _descriptor(error) is not None else None
    saved = None
    _flush(before)
    try:
        if file is not None:
            saved = os.dup(file)
            os.dup2(error.fileno(), file)
        sys.stdout = error
        yield
    finally:
        _flush(before)  # the script may hold it under another name, sys.__stdout__
        if file is not None and saved is not None:
            os.dup2(saved, file)
            os.close(saved)
        sys.stdout = before


def _descriptor(stream: TextIO | None) -> int | None:
    """Its file, None where it has none: a closed one, a notebook's, a test's."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


def _flush(stream: TextIO | None) -> None:
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):  # nobody reads it any more
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    code: CodeType
    file: str
    folder: str  # for sys.path[0]
    spec: importlib.machinery.ModuleSpec | None = None


def execute_program(program: _Program) -> tuple[int, bool]:
    main = sys.modules["__main__"]
    try:
        exec(program.code, main.__dict__)
    except ScriptStopped:
        return 0, True
    except BaseExceptionGroup as group:  # of asyncio's TaskGroup
        if group.split(ScriptStopped)[1] is None:
            return 0, True
        _print_error()
        return 1, False
    except SystemExit as error:
        return _exit_code(error.code), False
    except KeyboardInterrupt:
        _print_error()
        return INTERRUPTED, False
    except BaseException:  # as the interpreter does at the end of a script
        _print_error()
        return 1, False
    return 0, False


def _print_error() -> None:
    kind, error, trace = sys.exc_info()
    if error is None or kind is None:
        return
    # Without our own frames, which come first.
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(kind, error.with_traceback(trace), trace)
    else:
        traceback.print_exception(kind, error.with_traceback(trace), trace)


def _exit_code(code: object) -> int:
    """As the interpreter: None is 0, a number itself, anything else is printed and 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def load_program(target: str, *, module: bool) -> _Program:
    return _load_module(target) if module else _load_file(Path(target))


def _load_file(path: Path) -> _Program:
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give the script in it, or -m with a module's name")
    try:
        with io.open_code(str(path.absolute())) as file:
            code = compile(file.read(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"cannot read the script {path}: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the script {path} does not compile: {error}") from error
    return _Program(code=code, file=str(path), folder=str(path.resolve().parent))


def _load_module(name: str) -> _Program:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
        loader: Any = spec.loader if spec is not None else None
        code = loader.get_code(spec.name) if spec is not None and loader is not None else None
    except (ImportError, SyntaxError, ValueError) as error:
        raise UsageError(f"cannot load the module {name}: {error}") from error
    finally:
        sys.path.remove(folder)
    if spec is None or code is None:
        raise UsageError(f"no module named {name} to run: give a module, or a package with __main__.py")
    return _Program(code=code, file=spec.origin or name, folder=folder, spec=spec)


@contextmanager
def as_main(program: _Program, arguments: Sequence[str]) -> Iterator[None]:
    """`__main__`, `sys.argv` and `sys.path[0]` as the script expects them; ours again afterwards."""
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=program.file, __builtins__=builtins, __spec__=program.spec, __annotations__={}, __cached__=None
    )
    if program.spec is not None:
        main.__dict__.update(__package__=program.spec.parent, __loader__=program.spec.loader)
    before, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"] = main
    sys.argv = [program.file, *arguments]
    sys.path.insert(0, program.folder)
    try:
        yield
    finally:
        _FINISHED.append(main)
        sys.modules["__main__"], sys.argv, sys.path[:] = before, argv, path


_FINISHED: list[ModuleType] = []  # atexit functions and threads of a script still use its globals
