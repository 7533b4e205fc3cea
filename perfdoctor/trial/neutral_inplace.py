"""A loop of in-place operations on many tensors (an EMA by hand): torch._foreach_* on the whole lists.

While observed, the calls of a step between the first and the last line of the loop are noted. If each step repeats them
on the same tensors with the same numbers, the first call of an answered step makes all of them as multi-tensor calls,
and the others do nothing. Operands may be tensors that stay, or the gradients of parameters.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from typing import Any

from perfdoctor.record.syntax import tree_of
from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutraliser import Mode, Neutraliser

_METHODS = ("mul_", "add_", "sub_", "div_", "lerp_", "copy_", "addcmul_", "addcdiv_", "zero_", "clamp_")
_MIN_TENSORS = 4


@dataclass(slots=True)
class _Call:
    name: str
    target: Any
    operands: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.name, *map(_identity, (self.target, *self.operands)), *sorted(self.keywords.items()))


class NeutralInplace(Neutraliser):
    """See the module's text."""

    modes = (Mode(name="multi-tensor", text="torch._foreach_* on all tensors at once"),)

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = loop_around(place)
        self._calls: list[_Call] = []
        self._last: list[_Call] = []
        self._changed = ""
        self._batches: list[tuple[str, list[_Call]]] = []
        self._expected = 0
        self._position = 0

    def install(self, hooks: CallHooks) -> None:
        for name in _METHODS:
            hooks.add(sys.modules["torch"].Tensor, name, self._place, self.update)

    def switch(self, mode: str) -> None:
        super().switch(mode)
        self._position = 0

    def stepped(self) -> None:
        super().stepped()
        self._position = 0
        if self.observing and self._calls:
            if self._last and [c.key for c in self._calls] != [c.key for c in self._last]:
                self._changed = "the loop works on other tensors or numbers from step to step"
            self._last = self._calls
        self._calls = []

    def refusal(self) -> str:
        if len(self._last) < _MIN_TENSORS:
            return "no in-place calls that Python sees were made in this loop"
        if self._changed:
            return self._changed
        rows: dict[int, list[_Call]] = {}
        turns: dict[Any, int] = {}
        for call in self._last:
            target = _identity(call.target)  # p.data is another object each time
            turn = turns[target] = turns.get(target, -1) + 1
            rows.setdefault(turn, []).append(call)
        for calls in rows.values():
            first = calls[0]
            if any(_form(call) != _form(first) for call in calls):
                return "the tensors of the loop are not all treated alike"
            if not hasattr(sys.modules["torch"], f"_foreach_{first.name}"):
                return f"{first.name} has no multi-tensor form"
        if _crosses(self._last):
            return "a tensor of the loop is written in one turn and read in another"
        self._batches = [(calls[0].name, calls) for calls in rows.values()]
        self._expected = len(self._last)
        return ""

    def update(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the loop."""
        if self.answering and self._batches and self._position < self._expected:
            if self._position == 0:
                self._run()
            self._position += 1
            return args[0]
        if self.observing:
            self._calls.append(_Call(original.__name__, args[0], args[1:], dict(kwargs)))
        return original(*args, **kwargs)

    def _run(self) -> None:
        torch: Any = sys.modules["torch"]
        with torch.no_grad():
            for name, calls in self._batches:
                lists = [
                    [call.operands[i] for call in calls] if isinstance(each, torch.Tensor) and each.ndim else each
                    for i, each in enumerate(calls[0].operands)
                ]
                keywords = dict(calls[0].keywords)
                getattr(torch, f"_foreach_{name}")([call.target for call in calls], *lists, **keywords)

    def remove(self) -> None:
        self._batches, self._last, self._calls = [], [], []


def loop_around(place: Place) -> Place:
    """The lines of the innermost `for` around a place; the place itself where there is none or it is the whole loop
    over the batches (one that holds a `backward`)."""
    tree = tree_of(place.file)
    if tree is None:
        return place
    found = place
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.lineno <= place.first <= (node.end_lineno or 0):
            names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            if not names & {"backward", "step"}:
                found = Place(file=place.file, first=node.lineno, last=node.end_lineno or node.lineno)
    return found


def _identity(value: Any) -> Any:
    return (value.data_ptr(), value.shape) if isinstance(value, sys.modules["torch"].Tensor) else value


def _form(call: _Call) -> tuple[Any, ...]:
    tensor = sys.modules["torch"].Tensor
    kinds = tuple("tensor" if isinstance(each, tensor) and each.ndim else each for each in call.operands)
    return (call.name, kinds, tuple(sorted(call.keywords.items())))


def _crosses(calls: list[_Call]) -> bool:
    """Whether a tensor that one turn writes is an operand of another: all at once would compute something else."""
    tensor = sys.modules["torch"].Tensor
    written = {call.target.data_ptr() for call in calls}
    read = {each.data_ptr() for call in calls for each in call.operands if isinstance(each, tensor)}
    own = all(
        each.data_ptr() == call.target.data_ptr() or each.data_ptr() not in written
        for call in calls
        for each in call.operands
        if isinstance(each, tensor)
    )
    return bool(written & read) and not own
