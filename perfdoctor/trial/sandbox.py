"""A throw-away run in this process: its files go to a scratch folder that is deleted, its loggers stay silent.

    with Sandbox() as box:
        run_the_script()
    box.files     # what it wrote, under the names it used; all of it is gone
    box.kept      # files of the user's that it deleted, renamed or emptied: they are untouched
    box.escaped   # what may have got around

A process that ends at once (SIGTERM, SIGHUP, `os._exit`) deletes the scratch folder first; one that is killed cannot.
Later reads see the redirected files. Processes that fork inherit all of this; those that are spawned do not, which is
said. Only one sandbox is open at a time in a process.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing.process import current_process
from types import TracebackType
from typing import Any

from perfdoctor.errors import TrialRefused
from perfdoctor.trial.sandbox_audit import Escapes, watch_escapes
from perfdoctor.trial.sandbox_files import FilePatches
from perfdoctor.trial.sandbox_survey import Survey, standing_files
from perfdoctor.trial.sandbox_view import View
from perfdoctor.trial.sudden_end import cleaned_at_sudden_end
from perfdoctor.watch.patches import Patches

# Packages whose writers open files from C or Rust: nothing in Python sees it.
_UNSEEN = ("pyarrow", "cv2", "tensorflow", "zarr", "aim", "deepspeed", "imageio")

_MOST_DELETIONS = 3
_SHOWN = 5  # names in one note: in a folder that others work in, thousands change


class Sandbox:
    """Redirects what a run writes until the block ends; see the module's text.

    Raises:
        TrialRefused: one is open already.
    """

    _open: Sandbox | None = None

    def __init__(self) -> None:
        self.files: tuple[str, ...] = ()
        self.kept: tuple[str, ...] = ()
        self.escaped: tuple[str, ...] = ()
        self.scratch = ""

    def __enter__(self) -> Sandbox:
        if Sandbox._open is not None:
            raise TrialRefused("a sandbox is open already in this process: one trial at a time")
        self._own_sockets = _make_socket_folder()
        self._owner, self._cwd, self._tempdir = os.getpid(), os.getcwd(), tempfile.tempdir
        self.scratch = os.path.realpath(tempfile.mkdtemp(prefix="perfdoctor-sandbox-"))
        self._view = View(self.scratch)
        self._files, self._names = FilePatches(self._view), Patches()
        self._environment = dict(os.environ)
        self._escapes = Escapes(self._view)
        self._before = _sizes_of_open_files()
        self._survey = Survey(self._cwd, lambda path: self._view.locate(path) is None)
        self._writers = {id(writer) for writer in _event_writers()}
        self._stop_watching = watch_escapes(self._escapes)
        Sandbox._open = self
        self._guard = ExitStack()
        try:
            self._guard.enter_context(cleaned_at_sudden_end(self._delete))
            self._install()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._owner:
            return  # a forked worker that unwinds: the scratch folder is its parent's
        try:
            self._note_unseen()
            self._close_event_writers()
        finally:
            self._restore()

    def _install(self) -> None:
        for name in ("files", "tmp"):
            os.mkdir(os.path.join(self.scratch, name))
        self._silence_loggers()
        tempfile.tempdir = os.path.join(self.scratch, "tmp")
        self._files.install()
        self._notice_spawns()

    def _silence_loggers(self) -> None:
        os.environ.update(
            WANDB_MODE="disabled",
            MLFLOW_TRACKING_URI=f"file://{self.scratch}/mlruns",
            COMET_START_ONLINE="0",
            NEPTUNE_MODE="offline",
            CLEARML_OFFLINE_MODE="1",
        )

    def _notice_spawns(self) -> None:
        import multiprocessing.popen_forkserver as forkserver
        import multiprocessing.popen_spawn_posix as spawn

        kinds: tuple[Any, ...] = (spawn.Popen, forkserver.Popen)
        for kind in kinds:
            self._names.replace(kind, "_launch", self._noting(kind._launch))

    def _noting(self, launch: Any) -> Any:
        def noted(popen: Any, process: Any) -> Any:
            # Workers that are started in each epoch are many: one note stands for all of a name.
            kind = process.name.rstrip("0123456789:")
            name = f"processes {kind}N were" if kind.endswith("-") else f"the process {process.name} was"
            self._escapes.note(f"{name} spawned, not forked: what they write is not redirected")
            return launch(popen, process)

        return noted

    def _note_unseen(self) -> None:
        for name in _UNSEEN:
            if name in sys.modules:
                self._escapes.note(f"{name} is loaded: files that it writes from C are neither seen nor redirected")
        for path, size in self._before.items():
            if os.path.exists(path) and os.path.getsize(path) != size and self._view.locate(path) is not None:
                self._escapes.note(f"{path}: was open before the sandbox, and has been written to")

    def _restore_environment(self) -> None:
        """What the run set goes too: the cache folder of torch's compiler, say, that lies below the scratch one."""
        for name in [name for name in os.environ if name not in self._environment]:
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _note_changes(self) -> None:
        """What C code or another process did in the working directory: after the run, with everything put back."""
        told = " ".join(self._escapes.noted)
        changed = [path for path in self._survey.changes() if path not in told]
        if changed:
            names = ", ".join(changed[:_SHOWN]) + (
                f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            )
            was = "was" if len(changed) == 1 else "were"
            self._escapes.note(f"{names}: {was} changed by something that the sandbox does not see, and stays so")

    def _close_event_writers(self) -> None:
        """TensorBoard's threads write later what they hold, by then to the real folder."""
        for writer in _event_writers():
            if id(writer) not in self._writers:
                writer.close()

    def _restore(self) -> None:
        self._files.undo()
        self._names.undo()
        self._stop_watching()
        Sandbox._open = None
        tempfile.tempdir = self._tempdir
        self._restore_environment()
        os.chdir(self._cwd)
        self._note_changes()
        self.files = tuple(path for path in self._view.files() if not path.endswith(".moving"))
        self.kept = tuple(sorted(self._view.hidden_paths | {path for path in self.files if os.path.lexists(path)}))
        self.escaped = tuple(self._escapes.noted)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._guard.close()

    def _delete(self) -> None:
        """The process ends now: a thread or a worker may still write while the folder goes."""
        with self._view.quiet():
            for folder in (*[self.scratch] * _MOST_DELETIONS, *self._own_sockets):
                shutil.rmtree(folder, ignore_errors=True)


def _make_socket_folder() -> tuple[str, ...]:
    """multiprocessing keeps its sockets in a folder that it makes once and uses to the end of the process.

    Gives that folder where it was made here.
    """
    if "multiprocessing.util" not in sys.modules:
        return ()
    known = current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    made = sys.modules["multiprocessing.util"].get_temp_dir()
    return () if known else (made,)


def _event_writers() -> list[Any]:
    module = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if module is None:
        return []
    return [found for found in gc.get_objects() if type(found) is module.EventFileWriter]


def _sizes_of_open_files() -> dict[str, int]:
    """Regular files that this process can write to at this moment."""
    sizes: dict[str, int] = {}
    standing = set(standing_files())
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
            with open(f"/proc/self/fdinfo/{number}") as lines:
                flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
            if flags & (os.O_WRONLY | os.O_RDWR) and os.path.isfile(path) and os.path.realpath(path) not in standing:
                sizes[path] = os.path.getsize(path)
        except (OSError, StopIteration):
            continue
    return sizes
