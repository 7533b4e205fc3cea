"""One shape of a step as a graph: its fixed inputs, its gradients, its outputs, and how it is made.

Making it runs the step: a few times for real on a side stream, once for graph capture. Everything the step changed is
put back afterwards, with every address as the graph knows it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfdoctor.errors import TreatmentRefused
from perfdoctor.record.owners import PERFDOCTOR
from perfdoctor.record.sync_kinds import BLOCKING_COPY, HOST_SYNC, PAGEABLE_COPY
from perfdoctor.treat import graph_optimizers
from perfdoctor.treat.graph_batch import map_tensors
from perfdoctor.treat.graph_capture import (
    CapturedRun,
    GraphMemory,
    detached,
    gradients,
    on_a_device,
    output_leaves,
    warm_up,
)
from perfdoctor.treat.graph_failure import failure
from perfdoctor.treat.graph_python_state import Change, Place, PythonState, Reached, code_seen, is_users
from perfdoctor.treat.graph_randomness import is_torch_generator, own_generators, random_places
from perfdoctor.treat.graph_values import Content, described, described_change
from perfdoctor.treat.snapshot import Snapshot
from perfdoctor.watch.sync_guard import GuardedSite, SyncGuard, allow_sync, sync_guard

_STALLS = (HOST_SYNC, PAGEABLE_COPY, BLOCKING_COPY)
_ENDLESS = 1e18


class FrozenStateWarning(UserWarning):
    """Python state changes in the step; a replayed graph does not change it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step is made of."""

    train_step: Callable[..., Any]
    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    parameters: tuple[torch.Tensor, ...]
    generators: tuple[torch.Generator, ...]


@dataclass
class GradientBinding:
    """The `.grad` tensors that a graph reads and writes.

    A step that zeroes gradients in place, or adds to what is there, reads the tensors of graph capture: whatever the
    user bound meanwhile is copied into them. A step that drops gradients (`set_to_none`) makes its own.
    """

    parameters: tuple[torch.Tensor, ...]
    entry: list[torch.Tensor | None]
    exit: list[torch.Tensor | None]

    def __post_init__(self) -> None:
        pairs = zip(self.parameters, self.entry, self.exit, strict=True)
        self._in_place = [(p, grad) for p, grad, last in pairs if grad is not None and grad is last]
        self._without = [p for p, grad in zip(self.parameters, self.entry, strict=True) if grad is None]

    def enter(self) -> bool:
        """Before a replay; False where the graph expects a parameter without gradient that has one."""
        if any(p.grad is not None for p in self._without):
            return False
        empty = []
        for p, grad in self._in_place:
            held = p.grad
            if held is grad:
                continue
            if held is None:
                empty.append(grad)
            else:
                grad.copy_(held)
            p.grad = grad
        if empty:
            torch._foreach_zero_(empty)
        return True

    def leave(self) -> None:
        """After a replay: the user sees what the graph left."""
        for p, grad in zip(self.parameters, self.exit, strict=True):
            if p.grad is not grad:
                p.grad = grad


@dataclass(slots=True)
class StepGraph:
    """A step captured for one key."""

    captured: CapturedRun
    inputs: list[torch.Tensor]
    gradients: GradientBinding | None
    frozen: tuple[Place, ...] = ()  # names that the step reads and others may change: a graph holds what they held
    # What the graph reads and nobody else may hold any more: a mask that the first step made and kept in an attribute,
    # which is put back to nothing. Its memory would go to others.
    kept: tuple[Any, ...] = ()

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Fill the fixed inputs and launch; the outputs are overwritten by the next replay."""
        for fixed, given in zip(self.inputs, tensors, strict=True):
            if fixed is not given:
                fixed.copy_(given, non_blocking=True)
        outputs = self.captured.replay()
        if self.gradients is not None:
            self.gradients.leave()
        return outputs

    def ready(self) -> bool:
        """Whether gradients are as the graph expects them, after binding those that can be."""
        return self.gradients is None or self.gradients.enter()


def record_step(parts: Parts, batch: tuple[Any, ...], memory: GraphMemory, warmup: int) -> StepGraph:
    """Warm up and capture the step for `batch`.

    Raises:
        TreatmentRefused: it cannot be captured; the message names the line. Everything is as before.
    """
    drawn = {id(g): g for g in (*parts.generators, *own_generators(Reached(parts.train_step)))}
    with allow_sync("copies kept of what the step changes"):
        before = Snapshot.take([*parts.models, *parts.parameters], parts.optimizers, generators=drawn.values())
    values = state_values(before)
    python: PythonState | None = None
    try:
        with allow_sync("counters moved to the device"):
            for optimizer in parts.optimizers:
                graph_optimizers.make_capturable(optimizer)
        python = PythonState(parts.train_step)
        graph = _recorded(parts, batch, memory, warmup, (before, values, python))
    except TreatmentRefused:
        _put_back(before, python)
        raise
    except Exception as error:
        refused = failure(error, "the step could not be captured as a CUDA graph")
        _put_back(before, python)
        raise refused from error
    except BaseException:
        _put_back(before, python)
        raise
    return graph


def _put_back(before: Snapshot, python: PythonState | None) -> None:
    if python is not None:
        python.restore()
    with allow_sync("everything put back"):
        before.restore()


def _recorded(
    parts: Parts,
    batch: tuple[Any, ...],
    memory: GraphMemory,
    warmup: int,
    found: tuple[Snapshot, dict[tuple[int, str], torch.Tensor], PythonState],
) -> StepGraph:
    inputs: list[torch.Tensor] = []

    def fixed(tensor: torch.Tensor, path: str) -> torch.Tensor:
        inputs.append(tensor.detach().clone())
        return inputs[-1]

    static = map_tensors(batch, fixed, "batch", [])

    def run() -> Any:
        return detached(parts.train_step(*static), copy=False)

    initial, frozen = _warmed_up(parts, run, memory, warmup)
    graph_optimizers.check_state(parts.optimizers)
    captured = CapturedRun(run, memory)
    entry = gradients(parts.parameters)
    torch.clear_autocast_cache()  # a cast made outside the graph would be stale on replay
    captured.capture()
    torch.clear_autocast_cache()
    binding = None if captured.emulated else GradientBinding(parts.parameters, entry, gradients(parts.parameters))
    kept = _made_by_the_step(found[2].changes(), parts.models)
    _settle(parts, *found, initial)
    return StepGraph(captured, inputs, binding, frozen, kept)


def _made_by_the_step(changes: Sequence[Change], models: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """What the step has put into Python names and buffers, without the autograd graphs that its tensors may end."""
    values = [change.after.items if isinstance(change.after, Content) else change.after for change in changes]
    found = Reached(*values, *(list(model.buffers()) for model in models)).objects
    return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in found if not _is_walked(each))


def _is_walked(value: Any) -> bool:
    """Whether `Reached` has what this holds: it is kept itself, and a loss in here would keep its autograd graph."""
    if isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer):
        return False
    return isinstance(value, list | tuple | dict | set | deque) or is_users(type(value))


def _settle(parts: Parts, before: Snapshot, values: Any, python: PythonState, initial: Any) -> None:
    python.restore()
    with allow_sync("everything put back"), torch.no_grad():
        before.restore_tensors()
        for optimizer in parts.optimizers:
            graph_optimizers.settle_state(optimizer, values, initial)
    before.random.restore()


def state_values(before: Snapshot) -> dict[tuple[int, str], torch.Tensor]:
    """The optimizer state of a snapshot: values by parameter id and name."""
    found = {}
    for kept in before.optimizers:
        values = {id(row.tensor): row.values for row in kept.tensors}
        for p, state in kept.state.items():
            found.update({(id(p), name): values[id(t)] for name, t in state.items() if isinstance(t, torch.Tensor)})
    return found


def _warmed_up(
    parts: Parts, run: Callable[[], Any], memory: GraphMemory, times: int
) -> tuple[dict[tuple[int, str], Any], tuple[Place, ...]]:
    """Run the step `times` times.

    Returns the initial values of the optimizer state that the first one made, and the names that the step reads.

    Raises:
        TreatmentRefused: it waits for the device, or its results cannot come out of a graph.
    """
    with graph_optimizers.initial_state_noted(parts.optimizers) as initial, code_seen() as codes:
        first = warm_up(run, memory, 1)
    state = PythonState(parts.train_step)
    read = _with_values(state.found.read_by(codes))
    draws = _with_values(_host_generators(state.found))
    with _listening() as guard:
        later = warm_up(run, memory, max(1, times - 1))
    _check_stalls(guard.sites)
    _check_results(first + later)
    drawn = [place.name for place, held in draws if not place.same(held, place.held())]
    if drawn:
        raise TreatmentRefused(
            f"the step draws random numbers on the host ({', '.join(drawn)}), which a graph would freeze: draw them "
            "on the device (torch.rand(..., device=...)), or before the step and pass them as part of the batch"
        )
    changes = state.changes()
    if changes:
        warnings.warn(frozen_text(changes), FrozenStateWarning, stacklevel=_outside())
    # What the step changes itself stands still on replay, and would make each call one of a new kind.
    return initial, tuple(place for place, held in read if place.same(held, place.held()))


def _with_values(places: list[Place]) -> list[tuple[Place, Any]]:
    return [(place, place.held()) for place in places]


def _host_generators(reached: Reached) -> list[Place]:
    """Without torch's on the emulated device, which draws from them itself."""
    return [place for place in random_places(reached) if on_a_device() or not is_torch_generator(place)]


@contextlib.contextmanager
def _listening() -> Iterator[SyncGuard]:
    with sync_guard(budget=_ENDLESS, mode="record") as guard:
        yield guard


def _check_stalls(sites: Sequence[GuardedSite]) -> None:
    # perfdoctor's own kernels copy their tables otherwise while a graph is captured.
    found = [row for row in sites if row.meaning.code in _STALLS and not own_copy(row)]
    if found:
        lines = "\n  ".join(str(row) for row in found)
        raise TreatmentRefused(f"the step waits for the device, which a CUDA graph cannot hold:\n  {lines}")


def own_copy(row: GuardedSite) -> bool:
    """Whether a copy is one that perfdoctor's kernels make outside graph capture alone."""
    return row.site.owner == PERFDOCTOR and row.meaning.code in (PAGEABLE_COPY, BLOCKING_COPY)


def _check_results(results: list[Any]) -> None:
    leaves = [output_leaves(result) for result in results]
    for path, value in leaves[-1]:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu":
                raise TreatmentRefused(f"{path} is a host tensor, which a graph would freeze: return a device tensor")
        elif isinstance(value, float) or not isinstance(value, bool | int | str | type(None)):
            raise TreatmentRefused(
                f"{path} is {described(value)}, which a graph would freeze: return device tensors (loss.detach())"
            )
    plain = [[leaf for leaf in row if not isinstance(leaf[1], torch.Tensor)] for row in leaves]
    if any(row != plain[0] for row in plain):
        raise TreatmentRefused("the step returns another Python value each time, which a graph would freeze")


def frozen_text(changes: Sequence[Change]) -> str:
    """What changes in Python during a step, for a warning."""
    rows = "; ".join(f"{c.place} ({described_change(c.before, c.after)})" for c in changes[:6])
    more = f" and {len(changes) - 6} more" if len(changes) > 6 else ""
    return (
        f"Python state changes in the step and stays as it is on replay: {rows}{more}. Keep it outside the step, or as "
        "a device tensor changed in place; perfdoctor.graph_obstacles(train_step, *batch) names the lines."
    )


def _outside() -> int:
    """How many frames up the first one outside perfdoctor is, for `warnings.warn` called by our caller."""
    import sys

    level, frame = 1, sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("perfdoctor."):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level
