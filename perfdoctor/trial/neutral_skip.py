"""Calls that a step can do without: device synchronisation, emptied caches, collections, saves, loggers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutraliser import Mode, Neutraliser

SKIPPED = Mode(name="gone", text="skipped")


class NeutralSkip(Neutraliser):
    """Calls of some functions at one line, not made. The result of the first step of the block stands for theirs."""

    modes = (SKIPPED,)

    def __init__(self, place: Place, targets: Sequence[tuple[Any, str]]) -> None:
        super().__init__()
        self._place, self._targets = place, targets
        self._result: Any = None

    def install(self, hooks: CallHooks) -> None:
        for owner, name in self._targets:
            hooks.add(owner, name, self._place, self.call)

    def refusal(self) -> str:
        return "" if self.num_calls else "no call that can be skipped was seen at this line"

    def call(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call at the line."""
        if self.answering:
            return self._result
        self.num_calls += 1
        self._result = original(*args, **kwargs)
        return self._result


class NeutralWait(NeutralSkip):
    """Waits for the device. Times read from events that nobody waited for are those of the last waited step."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, waits())
        self._elapsed = 0.0

    def install(self, hooks: CallHooks) -> None:
        super().install(hooks)
        event = sys.modules["torch"].cuda.Event
        hooks.add(event, "elapsed_time", None, self.elapsed)

    def elapsed(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`Event.elapsed_time`, which raises where the event has not come."""
        if self.answering:
            return self._elapsed
        self._elapsed = original(*args, **kwargs)
        return self._elapsed


def waits() -> tuple[tuple[Any, str], ...]:
    """Every way to wait for the device outright."""
    torch = sys.modules["torch"]
    return (
        (torch._C, "_cuda_synchronize"),
        (torch.cuda, "synchronize"),
        (torch.cuda.Event, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
    )


def cache_calls() -> tuple[tuple[Any, str], ...]:
    """Every way to empty the allocator's cache."""
    torch = sys.modules["torch"]
    return ((torch._C, "_cuda_emptyCache"), (torch.cuda, "empty_cache"))


def collections() -> tuple[tuple[Any, str], ...]:
    """Collections by hand."""
    return ((gc, "collect"),)


def saves() -> tuple[tuple[Any, str], ...]:
    """Writers of device tensors."""
    return ((sys.modules["torch"], "save"),)
