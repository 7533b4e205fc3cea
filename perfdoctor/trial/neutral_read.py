"""Reads of a device value at one line: answered with the value of the step before, or read every N steps."""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.control_flow import Tested, find_test, outcome_is_fixed
from perfdoctor.trial.neutraliser import Mode, OrderedCalls

EVERY = 10
GONE = Mode(name="gone", text="answered with the value of the step before")
SPARSE = Mode(name="every", text=f"read every {EVERY} steps", prediction=False, multiple=EVERY)

_METHODS = (
    "item", "tolist", "cpu", "numpy", "to", "type", "equal", "allclose", "is_nonzero", "__bool__", "__float__",
    "__int__", "__index__", "__complex__", "__format__", "__repr__", "__array__", "__contains__",
)  # fmt: skip
_FUNCTIONS = ("equal", "allclose", "is_nonzero")
_SMALL = 4096


class NeutralRead(OrderedCalls):
    """Reads keyed by their ordinal within the step: the third read of a line is answered with the third of before."""

    modes = (GONE, SPARSE)

    def __init__(self, place: Place, caller: Place | None = None, *, line: int = 0) -> None:
        """`place`: where to answer; `line`: where the value is read, if that is not the first line of `place`."""
        super().__init__()
        self._place, self._caller, self._line = place, caller, line or place.first
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._seen: dict[int, list[Any]] = {}
        self._names: set[str] = set()  # of the calls that read

    def install(self, hooks: CallHooks) -> None:
        torch = sys.modules["torch"]
        for name in _METHODS:
            hooks.add(torch.Tensor, name, self._place, self.read)
        for name in _FUNCTIONS:
            hooks.add(torch, name, self._place, self.read)

    def refusal(self) -> str:
        if not self.num_calls:
            return "no call that Python sees reads a tensor here: the read is inside C++"
        tested = find_test(self._place.file, self._line, self._caller, self._names)
        if tested is None or self._outcome_fixed(tested):
            return ""
        where = f"line {tested.line}" if tested.file == self._place.file else f"{tested.file}:{tested.line}"
        return f"cannot be neutralised safely: {where} decides by the value ({tested.text})"

    def _outcome_fixed(self, tested: Tested) -> bool:
        values = [value for row in self._seen.values() for value in row]
        if any(len(row) < 2 for row in self._seen.values()):
            return False
        same = all(len({repr(value) for value in row}) == 1 for row in self._seen.values())
        return same or (tested.direct and outcome_is_fixed(tested, values))

    def read(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call at the line."""
        tensor = args[0]
        if not tensor.is_cuda:
            return original(*args, **kwargs)
        ordinal = self._next_ordinal()
        if not self.mode:
            value = original(*args, **kwargs)
            if self.observing:
                self._observe(original.__name__, ordinal, value)
            return value
        signature = (original.__name__, tensor.shape, tensor.dtype)
        kept = self._kept.get(ordinal)
        if kept is None or kept[0] != signature or self._due():
            value = original(*args, **kwargs)
            self._kept[ordinal] = (signature, value)
            return _handed(value)
        return _handed(kept[1])

    def _due(self) -> bool:
        # In the sparse arm the real read comes once in each ten counted steps, never in the first of them.
        return not self.answering or (
            self.mode == SPARSE.name and (self.step_in_block - self.edge) % EVERY == EVERY // 2
        )

    def _observe(self, name: str, ordinal: int, value: Any) -> None:
        if getattr(value, "is_cuda", False):
            return  # .to() from device to device
        self._names.add(name)
        self.num_calls += 1
        kind = type(value)
        kept = value if kind in (bool, int, float, complex, str) else (tuple(value) if kind is list else id(value))
        self._seen.setdefault(ordinal, []).append(kept)


def _handed(value: Any) -> Any:
    """What the loop gets: its own copy of what it may change, where that is cheap."""
    if type(value) is list:
        return list(value)
    tensor = sys.modules["torch"].Tensor
    if isinstance(value, tensor) and value.numel() <= _SMALL:
        return value.clone()
    return value
