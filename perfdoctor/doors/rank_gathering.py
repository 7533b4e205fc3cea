"""The recordings of several ranks brought to rank 0 at the end of a run, without any collective.

Each rank puts its recording where rank 0 can take it: into the rendezvous store (torchrun's, or that of the process
group), or into a folder that all ranks see. Rank 0 waits for a limited time. A rank whose process has died, or that has
nothing to give, is named with the reason; nothing waits for it.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from perfdoctor.diagnose import diagnose, diagnose_ranks
from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.errors import CaptureError, UsageError
from perfdoctor.record.capture import Capture, read_capture

TIMEOUT_S = 60.0
NOT_SELECTED = "not among the ranks that record"
_POLL_S = 0.05
# Ranks announce themselves when they begin to watch, long before the end: one that has not by then never will.
_GRACE_S = 5.0
_PIECE_BYTES = 1 << 20  # the store takes no value above 8 MB
_CAPTURE, _REASON = b"C", b"R"
_CONNECT_S = 10.0
# Every rank joins as often as the others, in the same order: the count keeps one session's recordings from the next's.
_numbers = itertools.count()


class Exchange(Protocol):
    """A place for small named values that all ranks can reach."""

    def put(self, key: str, value: bytes) -> None:
        """Keep `value`; a later `take` sees all of it or nothing."""

    def take(self, key: str) -> bytes | None:
        """What was put under `key`; None while there is nothing. Never waits."""


class FolderExchange:
    """A folder that every rank sees, one file a value."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, value: bytes) -> None:
        """Write the file whole or not at all."""
        target = self._folder / key
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            partial.write_bytes(value)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def take(self, key: str) -> bytes | None:
        """The file's content, None where there is no file."""
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            return None


class StoreExchange:
    """A `torch.distributed` store. Large values go in pieces, their number last."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        """Keep the pieces, then say how many there are."""
        pieces = [value[at : at + _PIECE_BYTES] for at in range(0, len(value), _PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            self._store.set(f"{key}/{i}", piece)
        self._store.set(key, str(len(pieces)))

    def take(self, key: str) -> bytes | None:
        """The pieces together; None until their number is there."""
        if not self._store.check([key]):
            return None
        return b"".join(self._store.get(f"{key}/{i}") for i in range(int(self._store.get(key))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What reached rank 0: a recording for each rank that had one, and why the others have none."""

    captures: tuple[Capture, ...]
    missing: dict[int, str]


@dataclass(slots=True, kw_only=True)
class RankGroup:
    """The ranks of this run, seen from one of them.

    `ranks`: those that record; all where it is empty. Call `announce` at the start, so that a death is seen at once,
    and at the end `publish` on every rank but 0 and `collect` on rank 0.
    """

    rank: int
    world_size: int
    exchange: Exchange
    ranks: tuple[int, ...] = ()
    timeout_s: float = TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    problem: str = field(default="", init=False)

    @property
    def selected(self) -> bool:
        """Whether this rank records."""
        return is_selected(self.rank, self.ranks)

    def announce(self) -> None:
        """Say which process this rank is."""
        self._put(f"process{self.rank}", f"{socket.gethostname()} {os.getpid()}".encode())

    def publish(self, capture: Capture | None, reason: str = "") -> None:
        """Hand in this rank's recording, or the reason why there is none. Never raises, never waits for a rank."""
        message = _REASON + (reason or "it has no recording").encode()
        if capture is not None and self.selected:
            message = _CAPTURE + as_bytes(capture)
        elif not self.selected:
            message = _REASON + NOT_SELECTED.encode()
        self._put(f"recording{self.rank}", message)

    def collect(self, own: Capture | None) -> Gathered:
        """On rank 0: everything that comes within `timeout_s`, and what became of the rest."""
        found: dict[int, Capture] = {}
        missing: dict[int, str] = {}
        if own is not None and self.selected:
            found[self.rank] = own
        elif not self.selected:
            missing[self.rank] = NOT_SELECTED
        waiting = [rank for rank in range(self.world_size) if rank != self.rank]
        start = self.clock()
        while waiting:
            waiting = [rank for rank in waiting if not self._arrived(rank, found, missing)]
            waited = self.clock() - start
            if waited >= _GRACE_S:
                silent = [rank for rank in waiting if self._process(rank) is None]
                missing.update(dict.fromkeys(silent, "it never began to watch"))
                waiting = [rank for rank in waiting if rank not in silent]
            if waiting and waited >= self.timeout_s:
                why = f"no recording came within {self.timeout_s:g} s: still running, hung, or dead on another host"
                missing.update(dict.fromkeys(waiting, why))
                break
            if waiting:
                time.sleep(_POLL_S)
        return Gathered(captures=tuple(found[rank] for rank in sorted(found)), missing=missing)

    def _arrived(self, rank: int, found: dict[int, Capture], missing: dict[int, str]) -> bool:
        dead = self._is_dead(rank)  # asked first: what a dying process put last is there by then
        try:
            message = self.exchange.take(f"recording{rank}")
            if message is None and dead:
                missing[rank] = "its process ended without handing in a recording"
            elif message is not None and message[:1] == _CAPTURE:
                found[rank] = from_bytes(message[1:], rank)
            elif message is not None:
                missing[rank] = message[1:].decode("utf-8", "replace")
        except (CaptureError, OSError, RuntimeError) as error:  # DistError is a RuntimeError
            missing[rank] = f"its recording could not be fetched: {error}"
        return rank in found or rank in missing

    def _is_dead(self, rank: int) -> bool:
        """Whether the process is known to be gone: it announced itself on this host and does not exist any more."""
        host, _, pid = (self._process(rank) or "").rpartition(" ")
        return host == socket.gethostname() and not _exists(int(pid))

    def _process(self, rank: int) -> str | None:
        """'host pid' of a rank, as it announced it; None where it did not."""
        try:
            announced = self.exchange.take(f"process{rank}")
        except (OSError, RuntimeError):
            return None
        return None if announced is None else announced.decode()

    def _put(self, key: str, value: bytes) -> None:
        try:
            self.exchange.put(key, value)
        except (OSError, RuntimeError) as error:  # the host of the store may be gone: that must not end the user's run
            self.problem = f"rank {self.rank} could not reach rank 0: {error}"


class Gathering:
    """What a session does about the other ranks: `begin` at its start, `hand_in` at its end, then `diagnosis`."""

    def __init__(self, *, ranks: Sequence[int] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """`ranks`: those that record; all where it is None or empty.

        Raises:
            UsageError: they are no whole numbers from 0 up, or `timeout_s` is no time to wait.
        """
        check_ranks(ranks, timeout_s)
        self._ranks = tuple(ranks or ())
        self._timeout_s = timeout_s
        self._group: RankGroup | None = None
        self._gathered: Gathered | None = None
        self._handed_in = False

    def begin(self) -> bool:
        """Join the others; whether this rank is to record."""
        self._group = join_ranks(self._ranks, timeout_s=self._timeout_s)
        return is_selected(rank_of_run()[0] or 0, self._ranks)

    def hand_in(self, recording: Callable[[], Capture]) -> None:
        """On every rank but 0: give rank 0 what was recorded. Whatever goes wrong in here must not end the run."""
        group = self._group
        if group is None or group.rank == 0 or self._handed_in:
            return
        self._handed_in = True
        try:
            group.publish(recording() if group.selected else None)
        except Exception as error:
            group.publish(None, f"its recording could not be put together: {error!r}")

    def diagnosis(self, own: Capture) -> Diagnosis:
        """On rank 0 that of all ranks, waiting for them at most as long as was asked; elsewhere that of this rank."""
        group = self._group
        if group is None or group.rank != 0:
            return diagnose(own)
        if self._gathered is None:
            self._gathered = group.collect(own)
        if not self._gathered.captures:
            return diagnose(own)
        return diagnose_ranks(self._gathered.captures, self._gathered.missing)

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What `diagnosis` has gathered, this rank's own among it."""
        return () if self._gathered is None else self._gathered.captures


def check_ranks(ranks: object, timeout_s: object) -> None:
    """Raise UsageError where `ranks` cannot be ranks, or where waiting for `timeout_s` would have no end."""
    listed = isinstance(ranks, Sequence) and not isinstance(ranks, str)
    if ranks is not None and not (listed and all(_is_rank(rank) for rank in cast("Sequence[object]", ranks))):
        raise UsageError(f"ranks={ranks!r}: expected whole numbers from 0 up in a list, say [0, 3], or None for all")
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (number and 0 <= cast("float", timeout_s) < float("inf")):
        raise UsageError(f"a timeout of {timeout_s!r} for the ranks: expected seconds, 0 or more")


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_selected(rank: int, ranks: Sequence[int] | None) -> bool:
    """Whether a rank is to record: all are where `ranks` is None or empty."""
    return not ranks or rank in ranks


def join_ranks(
    ranks: Sequence[int] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> RankGroup | None:
    """The ranks of this run; None where there is one only, or where the others cannot be reached.

    Args:
        ranks: those that record; None for all.
        folder: exchange through this folder, which all ranks see, in place of the rendezvous store. A new, empty one.
        timeout_s: how long rank 0 waits at the end.

    Raises:
        UsageError: no such ranks, or no such time.
    """
    check_ranks(ranks, timeout_s)
    rank, world_size = rank_of_run()
    if rank is None or world_size < 2:
        return None
    if unknown := [each for each in ranks or () if each >= world_size]:
        raise UsageError(f"ranks={list(ranks or ())}: this run has the ranks 0 to {world_size - 1}, no {unknown[0]}")
    exchange = FolderExchange(folder) if folder is not None else _store_exchange(next(_numbers))
    if exchange is None:
        return None
    group = RankGroup(
        rank=rank, world_size=world_size, exchange=exchange, ranks=tuple(ranks or ()), timeout_s=timeout_s
    )
    group.announce()
    return group


def rank_of_run() -> tuple[int | None, int]:
    """(rank, world size): of the process group, else as torchrun says. (None, 1) for a process on its own."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None, 1


def _store_exchange(number: int) -> StoreExchange | None:
    """torchrun's store, which outlives every rank; else that of the process group."""
    try:
        distributed: Any = import_module("torch.distributed")
        store = _agent_store(distributed) or _group_store(distributed)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return (
            None if store is None else StoreExchange(distributed.PrefixStore(f"perfdoctor/{restart}/{number}", store))
        )
    except (RuntimeError, ValueError, KeyError, ImportError, OSError):
        return None


def _agent_store(distributed: Any) -> Any:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=_CONNECT_S)
    return distributed.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _group_store(distributed: Any) -> Any:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def as_bytes(capture: Capture) -> bytes:
    """A capture as the content of its file."""
    with tempfile.TemporaryDirectory(prefix="perfdoctor_") as folder:
        path = Path(folder) / "capture.perfdoctor"
        capture.save(path)
        return path.read_bytes()


def from_bytes(content: bytes, rank: int) -> Capture:
    """The capture behind `as_bytes`.

    Raises:
        CaptureError: the content is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="perfdoctor_") as folder:
        path = Path(folder) / f"rank{rank}.perfdoctor"
        path.write_bytes(content)
        return _without_path(read_capture(path))


def _without_path(capture: Capture) -> Capture:
    return replace(capture, path="", full=None if capture.full is None else replace(capture.full, path=""))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A zombie has ended: its parent has not asked yet.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
