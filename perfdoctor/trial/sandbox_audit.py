"""What gets around the replaced functions, noticed through Python's audit events.

An audit hook cannot be taken away again; ours does nothing while no sandbox is open. A deletion or truncation of the
user's files that comes by an unknown way is refused; a plain write is let happen and said.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from perfdoctor.record.owners import PERFDOCTOR, PYTHON, TORCH, USER, file_owner
from perfdoctor.trial.sandbox_view import View

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REMOVING = frozenset({"os.remove", "os.rmdir", "os.truncate", "os.rename"})
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn"})
_EVENTS = frozenset({"open", "os.mkdir", "sqlite3.connect", "socket.connect"}) | _REMOVING | _PROGRAMS
# Programs that only look at the machine.
_LOOKING = frozenset({"uname", "lscpu", "nvidia-smi", "ldconfig", "git", "which", "lsb_release", "file", "ld"})
_LOGGERS = ("wandb", "mlflow", "comet_ml", "neptune", "neptune_scale", "clearml", "aim")
_MAX_NOTED = 50


class Escapes:
    """Notes what escapes from a sandbox while it is the current one."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.noted: dict[str, None] = {}

    def note(self, text: str) -> None:
        if len(self.noted) < _MAX_NOTED:
            self.noted[text] = None

    def judge(self, event: str, args: tuple[Any, ...]) -> None:
        """Note or refuse one audit event.

        Raises:
            PermissionError: it would delete or empty a file of the user's.
            ConnectionRefusedError: a logger would send something.
        """
        if event == "socket.connect":
            self._judge_connection(args)
        elif event in _PROGRAMS:
            self._judge_program(args)
        elif event == "open":
            self._judge_open(*args)
        elif event in _REMOVING:
            self._judge_removal(event, args)
        elif (path := self.view.touched(_plain(args[0]))) is not None:
            self.note(f"{path}: {event} by a way that the sandbox does not lead")

    def _judge_open(self, path: Any, _mode: Any, flags: Any) -> None:
        if not isinstance(flags, int) or not flags & _WRITING:
            return
        found = self.view.touched(path)
        if found is None or not (os.path.isfile(found) or not os.path.lexists(found)):
            return
        if flags & os.O_TRUNC and os.path.isfile(found):
            raise _refusal("empty", found)
        self.note(f"{found}: opened for writing by a way that the sandbox does not lead")

    def _judge_removal(self, event: str, args: tuple[Any, ...]) -> None:
        paths = ((args[0], args[2]), (args[1], args[3])) if event == "os.rename" else ((args[0], _folder(event, args)),)
        for path, dir_fd in paths:
            found = self.view.touched(path, dir_fd if isinstance(dir_fd, int) and dir_fd >= 0 else None)
            if found is not None and os.path.lexists(found):
                raise _refusal(event.removeprefix("os."), found)

    def _judge_program(self, args: tuple[Any, ...]) -> None:
        command = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) and args[1] else args[0]
        words = command.split() if isinstance(command, str) else command
        first = os.path.basename(os.fsdecode(words[0] if isinstance(words, list | tuple) and words else words))
        if caller := _logger_on_stack():
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"perfdoctor's trial keeps {caller} from starting {first}")
        if first not in _LOOKING and not _is_torchs():
            self.note(f"the program {first} was started: what it writes is not redirected")

    def _judge_connection(self, args: tuple[Any, ...]) -> None:
        if isinstance(args[1], tuple) and (caller := _logger_on_stack()):
            self.note(f"{caller} tried to connect to {args[1][0]}: refused")
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"perfdoctor's trial keeps {caller} off the network")


def _plain(path: Any) -> Any:
    """The file behind what sqlite3.connect was given; a descriptor, which leads nowhere, for one in memory."""
    if not isinstance(path, str):
        return path
    plain = path.removeprefix("file:").partition("?")[0] if path.startswith("file:") else path
    return -1 if plain in ("", ":memory:") or "mode=memory" in path else plain


def _folder(event: str, args: tuple[Any, ...]) -> Any:
    return args[1] if event in ("os.remove", "os.rmdir") and len(args) > 1 else None


def _refusal(what: str, path: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"perfdoctor's trial does not let a run {what} a file of yours this way", path)


def _is_torchs() -> bool:
    """Whether torch or Triton starts the program, a compiler of theirs: it writes into their caches."""
    frame: Any = sys._getframe(1)
    while frame is not None and (owner := file_owner(frame.f_code.co_filename)) in (PERFDOCTOR, PYTHON):
        frame = frame.f_back
    return frame is not None and owner == TORCH


def _logger_on_stack() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _LOGGERS:
            return str(package)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


_current: Escapes | None = None
_installed = False
_left: weakref.WeakKeyDictionary[threading.Thread, View] = weakref.WeakKeyDictionary()  # threads of runs that are over


def watch_escapes(escapes: Escapes) -> Callable[[], None]:
    """Make `escapes` the current one; the returned function ends that."""
    global _current, _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    known = set(threading.enumerate())
    _current = escapes

    def end() -> None:
        global _current
        _left.update({thread: escapes.view for thread in threading.enumerate() if thread not in known})
        _current = None

    return end


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    escapes = _current
    if escapes is None:
        if _left:
            _end_left_thread(event, args)
        return
    if escapes.view.busy:
        return
    with escapes.view.quiet():
        escapes.judge(event, args)


def _end_left_thread(event: str, args: tuple[Any, ...]) -> None:
    """A thread of the user's whose run is over would now write to the real files: it ends, as daemon threads do."""
    thread = threading.current_thread()
    view = _left.get(thread)
    if view is None or view.busy:
        return
    with view.quiet():
        writes = event in _REMOVING or event in ("os.mkdir", "sqlite3.connect")
        writes = writes or (event == "open" and isinstance(args[2], int) and bool(args[2] & _WRITING))
        ends = writes and view.touched(_plain(args[0])) is not None and _is_users(sys._getframe(1))
    if ends:
        raise SystemExit  # which a thread ends with in silence


def _is_users(frame: Any) -> bool:
    while frame is not None:
        if file_owner(frame.f_code.co_filename) == USER:
            return True
        frame = frame.f_back
    return False
