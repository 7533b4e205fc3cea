"""The script in processes of its own, one after the other: with treatments, or as it is (treatment_child.py)."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from perfdoctor.doors.nsys_process import end_tree
from perfdoctor.trial.process_run import ProcessOrder, ProcessRun
from perfdoctor.trial.sudden_end import cleaned_at_sudden_end

_ROOT = Path(__file__).parents[2]
_CHILD = "perfdoctor.doors.treatment_child"
_SILENT = "no answer"


class TreatmentProcesses:
    """Runs `order` with other names and counts, in the given environment, `seconds_left()` at most.

    What a process writes lies in one folder, gone at the end of the block: scratch files of a process that had to be
    ended, and the cache of compiled code, which the processes share.
    """

    def __init__(self, order: ProcessOrder, environment: Mapping[str, str], seconds_left: Callable[[], float]) -> None:
        self._order = order
        self._environment = environment
        self._seconds_left = seconds_left
        self._folder = ""
        self._server: subprocess.Popen[str] | None = None
        self._guard = ExitStack()

    def __enter__(self) -> TreatmentProcesses:
        self._folder = tempfile.mkdtemp(prefix="perfdoctor-processes-")
        self._guard.enter_context(cleaned_at_sudden_end(self._clean))
        try:
            self._begin()  # now: its imports are not part of what a process takes
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_server()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._guard.close()

    def _clean(self) -> None:
        """At a signal that ends this process at once: nothing of it may wait."""
        if self._server is not None:
            end_tree(self._server.pid)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, names: tuple[str, ...], counted: int, dry: bool) -> ProcessRun | None:
        """One process, to its end; None where the time was spent before it came there."""
        order = replace(self._order, names=names, counted=counted, dry=dry)
        order_path, run_path, said_path = (os.path.join(self._folder, each) for each in ("order", "run", "said"))
        Path(order_path).write_text(order.to_json(), "utf-8")
        for path in (run_path, said_path):
            Path(path).unlink(missing_ok=True)
        answer = self._ask("\t".join((order_path, run_path, said_path)))
        if answer is None:
            return None
        if os.path.exists(run_path):
            return ProcessRun.from_json(Path(run_path).read_text("utf-8"))
        last = _last_line(said_path) or _last_line(os.path.join(self._folder, "server"))
        return ProcessRun(failure=f"failed: the process ended with {answer}: {last}", started=True)

    def _ask(self, line: str) -> str | None:
        """The server's answer; None where the time was spent. A server that is left so is ended."""
        answer = None
        try:
            if self._server is None:
                said = self._begin()
                if self._server is None:
                    return said
            assert self._server.stdin is not None
            self._server.stdin.write(line + "\n")
            self._server.stdin.flush()
            answer = self._answer()
        except BrokenPipeError:
            answer = _SILENT
        finally:
            if answer in (None, _SILENT):
                self._end_server()
        return answer

    def _begin(self) -> str | None:
        """Start the server; what it says then. One that was not ready in time is ended: it would answer later."""
        self._server = self._start_server()
        said = self._answer()
        if said in (None, _SILENT):
            self._end_server()
        return said

    def _answer(self) -> str | None:
        """The next line of the server; None where none comes in time."""
        assert self._server is not None
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], max(self._seconds_left(), 0.1))
        return (self._server.stdout.readline().strip() or _SILENT) if ready else None

    def _start_server(self) -> subprocess.Popen[str]:
        # -P: the folder we are in is no part of sys.path, as it is none for `python script.py`.
        words = (sys.executable, "-P", "-m", _CHILD)
        with open(os.path.join(self._folder, "server"), "wb") as said:
            pipe = subprocess.PIPE
            return subprocess.Popen(words, env=self._completed(), stdin=pipe, stdout=pipe, stderr=said, text=True)

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        end_tree(server.pid)
        server.wait()
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _completed(self) -> dict[str, str]:
        """The environment, with our package to be found, hashes alike, and temporary files where they are deleted."""
        path = self._environment.get("PYTHONPATH")
        found = {"PYTHONHASHSEED": "0", "TORCHINDUCTOR_CACHE_DIR": os.path.join(self._folder, "compiled")}
        return {
            **found,
            **self._environment,
            "PYTHONPATH": (path + os.pathsep if path else "") + str(_ROOT),
            "TMPDIR": self._folder,
        }


def _last_line(path: str) -> str:
    text = Path(path).read_text("utf-8", "replace").strip() if os.path.exists(path) else ""
    return " ".join(text.splitlines()[-1:])[:300]
