"""A budget of syncs for a block of code, on a real GPU and on the emulated device.

    with sync_guard(budget=0):                # raises at the call that goes over it
        train_step(batch)

    with sync_guard(budget=0.1, mode="warn") as guard:
        for batch in loader:
            train_step(batch)                 # one read on every tenth step is in the budget
            guard.step()

    with allow_sync("checkpoint"):
        torch.save(model.state_dict(), path)

A block is one step unless `guard.step()` is called. Guards nest and count their own thread only; a sync that autograd's
thread makes is charged to the `backward()` line of the thread that called it.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from perfdoctor.errors import SyncBudgetExceeded, UsageError
from perfdoctor.record import crossings
from perfdoctor.record.call_site import Hit, HitLog
from perfdoctor.record.capture import Site
from perfdoctor.record.sync_kinds import GARBAGE_COLLECTION, KINDS, SyncKind
from perfdoctor.units import format_plural
from perfdoctor.watch.clocks import capturing

Mode = Literal["error", "warn", "record"]
# One call of these makes several raw syncs (print of a scalar: 8 on an H200), microseconds apart: one hit each.
_RAW_SEVERAL = frozenset(("print_tensor", "format_tensor", "repeat_interleave", "bincount", "ctc_loss"))
_SAME_CALL_NS = 500_000


@dataclass(slots=True)
class GuardedSite:
    """One line and kind of sync that a guard saw."""

    site: Site
    kind: str
    first_step: int = 0  # in the first step: lazy initialisation is told apart from what every step does
    later_steps: int = 0

    @property
    def meaning(self) -> SyncKind:
        """The row of the table of kinds: code, phrase and advice."""
        return KINDS[self.kind]

    def __str__(self) -> str:
        return f"{self.site.frame}: {self.kind}: {self.meaning.phrase}; {self.meaning.advice}"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.guards: list[SyncGuard] = []
        self.allowed = 0


_thread = _Thread()
_lock = threading.RLock()
_first_uses: set[tuple[str, int]] = set()


class SyncGuard:
    """What `sync_guard` returns: a context manager, a decorator, and afterwards the record of what was seen."""

    def __init__(self, budget: float, mode: Mode) -> None:
        if mode not in ("error", "warn", "record"):
            raise UsageError(f"sync_guard(mode={mode!r}): expected 'error', 'warn' or 'record'")
        if budget < 0:
            raise UsageError(f"sync_guard(budget={budget}): a budget is 0 or more")
        self.budget = budget
        self.mode = mode
        self.num_steps = 0  # that are over; the block's rest counts as one
        self.allowed: list[Hit] = []
        self._sites: dict[tuple[int, str], GuardedSite] = {}
        self._in_step = 0
        self._steps_before = 0
        self._total = 0
        self._warned = False
        self._last: Hit | None = None

    def __enter__(self) -> Self:
        return self._open()

    def _open(self) -> Self:
        if not _has_device():
            _warn_blind()
        _source.open()
        _thread.guards.append(self)
        self._begin_step()
        self._steps_before = self.num_steps
        return self

    def __exit__(self, *_: object) -> None:
        _thread.guards.remove(self)
        _source.close()
        if self._in_step or self.num_steps == self._steps_before:
            self.num_steps += 1

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Guard each call of `function` as one step."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._open()
            try:
                return function(*args, **kwargs)
            finally:
                self.__exit__()

        return guarded

    def step(self) -> None:
        """A step ends here: the budget holds for the next one anew."""
        self.num_steps += 1
        self._begin_step()

    def _begin_step(self) -> None:
        self._in_step = 0
        self._warned = False

    @property
    def sites(self) -> tuple[GuardedSite, ...]:
        """What was seen, most frequent first."""
        return tuple(sorted(self._sites.values(), key=lambda row: -(row.first_step + row.later_steps)))

    @property
    def syncs_per_step(self) -> float:
        """Mean over the steps; the first is left out where there are several."""
        if self.num_steps > 1:
            return sum(row.later_steps for row in self._sites.values()) / (self.num_steps - 1)
        return float(sum(row.first_step for row in self._sites.values()))

    def _count(self, hit: Hit, log: HitLog) -> str:
        """Count a hit; what to say of it where it goes over the budget, else ''."""
        repeated = _same_call(self._last, hit)
        self._last = hit
        if repeated:
            return ""
        if _thread.allowed:
            self.allowed.append(hit)
            return ""
        key = (hit.site, hit.kind)
        row = self._sites.setdefault(key, GuardedSite(log.sites.sites[hit.site], hit.kind))
        if self.num_steps:
            row.later_steps += 1
        else:
            row.first_step += 1
        self._in_step += 1
        self._total += 1
        syncs = format_plural(self._in_step, "sync")
        return f"{syncs} in a step, {self.budget:g} allowed; {row}" if self._exceeded() else ""

    def _exceeded(self) -> bool:
        if self.budget == int(self.budget):
            return self._in_step > self.budget
        return self._total > math.ceil(self.budget * (self.num_steps + 1))

    def _complain(self, text: str) -> None:
        if self.mode == "error":
            raise SyncBudgetExceeded("\n  ".join([text, *(str(row) for row in self.sites if str(row) not in text)]))
        if self.mode == "warn" and not self._warned:
            self._warned = True
            warnings.warn(text, SyncBudgetWarning, stacklevel=2)


class SyncBudgetWarning(UserWarning):
    """A guarded block went over its budget (mode "warn")."""


class NoDeviceWarning(UserWarning):
    """A guard sees nothing: torch has no CUDA device here, and none is emulated. Its budget holds whatever runs in it.

    Never an error, not under `-W error` either, where it is one line on standard error: code that guards itself on
    every machine is right as it is.
    """


_BLIND = (
    "sync_guard: torch sees no CUDA device here, so this guard sees no sync and its budget always holds; put it inside "
    "`with perfdoctor.emulate_cuda():`, which finds syncs without a GPU"
)
_said: set[str] = set()  # on standard error, once a process


def _warn_blind() -> None:
    try:
        warnings.warn(_BLIND, NoDeviceWarning, stacklevel=4)  # at the `with` or the call of a guarded function
    except NoDeviceWarning:
        if _BLIND not in _said:
            _said.add(_BLIND)
            print(f"perfdoctor: {_BLIND}", file=sys.stderr)


def _has_device() -> bool:
    import torch

    return crossings.is_emulated() or torch.cuda.is_available()


def sync_guard(budget: float = 0, mode: Mode = "error") -> SyncGuard:
    """Allow `budget` syncs a step in a block (`with`) or in each call of a function (decorator).

    What makes the host wait is counted, `torch.cuda.synchronize()` and silent pageable copies included. Without a GPU
    it sees nothing, and says so by a `NoDeviceWarning`, unless it is inside `emulate_cuda()`.

    Raises:
        UsageError: an unknown mode, or a negative budget.
        SyncBudgetExceeded: from inside the block, at the call that goes over the budget (mode "error").
    """
    return SyncGuard(budget, mode)


@contextmanager
def allow_sync(reason: str, *, first_only: bool = False) -> Iterator[None]:
    """Let the syncs inside be, for `reason`. With `first_only` only the first time this line is reached.

    Raises:
        UsageError: no reason was given.
    """
    if not reason:
        raise UsageError("allow_sync needs a reason")
    caller = sys._getframe(2)
    place = (caller.f_code.co_filename, caller.f_lineno)
    allowed = not (first_only and place in _first_uses)
    _first_uses.add(place)
    _thread.allowed += allowed
    try:
        yield
    finally:
        _thread.allowed -= allowed


def _same_call(last: Hit | None, hit: Hit) -> bool:
    return (
        last is not None
        and hit.kind in _RAW_SEVERAL
        and (last.site, last.kind) == (hit.site, hit.kind)
        and hit.start_ns - last.end_ns < _SAME_CALL_NS
        and not crossings.is_emulated()
    )


class _Source:
    """The hooks that all guards share: in place while one is open."""

    def __init__(self) -> None:
        self._log = HitLog()
        self._log.listeners.append(self._heard)
        self._num_open = 0
        self._hooks: Any = None
        self._joined = False

    def open(self) -> None:
        with _lock:
            self._num_open += 1
            if self._num_open == 1:
                self._install()

    def close(self) -> None:
        with _lock:
            self._num_open -= 1
            if self._num_open == 0:
                self._remove()

    def _install(self) -> None:
        import torch

        if crossings.is_emulated():
            crossings.join(self._log)
            self._joined = True
        elif torch.cuda.is_available() and not capturing():
            from perfdoctor.watch.call_sites import CallSiteHooks

            self._hooks = CallSiteHooks(self._log)
            self._hooks.catch_warnings()
            self._hooks.patch_calls()

    def _remove(self) -> None:
        if self._joined:
            crossings.leave(self._log)
            self._joined = False
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _heard(self, hit: Hit) -> None:
        self._log.hits.clear()  # the guards keep what they count; a guard may stay open for days
        guards = _thread.guards
        if not guards or KINDS[hit.kind].code == GARBAGE_COLLECTION or capturing():
            return
        # All count before one raises; the innermost speaks first.
        complaints = [(guard, guard._count(hit, self._log)) for guard in reversed(guards)]
        for guard, text in complaints:
            if text:
                guard._complain(text)


_source = _Source()
