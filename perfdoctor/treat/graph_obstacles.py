"""What stands between a training step and a CUDA graph, with the line and the change: `graph_obstacles`.

    print(perfdoctor.graph_obstacles(train_step, *batch))

The step is run a few times and watched; what it changed is put back. Worst first: what a graph would get wrong in
silence, then what stops graph capture, then what `graphed_step` takes care of.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from perfdoctor.errors import UsageError
from perfdoctor.record import crossings
from perfdoctor.record.call_site import user_frame
from perfdoctor.record.capture import Site
from perfdoctor.record.sync_kinds import BLOCKING_COPY, PAGEABLE_COPY
from perfdoctor.treat import graph_optimizers, graph_sources
from perfdoctor.treat.compiled import module_of
from perfdoctor.treat.graph_batch import map_tensors, plain_values
from perfdoctor.treat.graph_bindings import Bindings, gradient_lines
from perfdoctor.treat.graph_emulation import Batch, on_emulated_device
from perfdoctor.treat.graph_obstacle import GraphObstacles, Obstacle
from perfdoctor.treat.graph_python_state import Place, PythonState, Reached, host_tensor_places
from perfdoctor.treat.graph_randomness import own_generators, random_places
from perfdoctor.treat.graph_recording import own_copy
from perfdoctor.treat.graph_surroundings import Ran, Stepped, definition, surroundings
from perfdoctor.treat.graph_trace import Line, StepTrace, site_at
from perfdoctor.treat.graph_values import described_change
from perfdoctor.treat.iterator_position import Position
from perfdoctor.treat.snapshot import Models, Optimizers, Snapshot, as_tuple
from perfdoctor.treat.step_function import require_step
from perfdoctor.watch.sync_guard import GuardedSite, sync_guard

_COPIES = (PAGEABLE_COPY, BLOCKING_COPY)
_ENDLESS = 1e18


def graph_obstacles(
    train_step: Callable[..., Any],
    *batch: Any,
    batches: Sequence[Batch] = (),
    model: Models = None,
    optimizer: Optimizers = None,
) -> GraphObstacles:
    """Run `train_step(*batch)` watched and list what a CUDA graph of it would break on or freeze.

    `batches`: more batches, each a tuple of arguments, whose shapes are compared. `model` and `optimizer` add to those
    that `train_step` reaches. Without a GPU the step runs on the emulated CUDA device, batch and model may be on the
    CPU. Parameters, optimizer state, random states and Python state that the step reaches are as before afterwards;
    only iterators that it draws from, files that it writes and a DeviceMetrics that it updates have gone on.

    Raises:
        UsageError: `train_step` is no function, or `batches` holds something else than tuples.
        Exception: what the step itself raises.
    """
    require_step(train_step, "graph_obstacles")
    if not isinstance(batches, Iterable):
        raise UsageError(f"graph_obstacles(batches=...): a list of tuples of arguments, got {type(batches).__name__}")
    for given in batches:
        if not isinstance(given, tuple):
            raise UsageError(f"graph_obstacles(batches=...): each is a tuple of arguments, got {type(given).__name__}")
    spaces = graph_sources.name_spaces(train_step)
    extra = (*as_tuple(module_of(model), (torch.nn.Module, torch.Tensor)), *as_tuple(optimizer, torch.optim.Optimizer))
    everything = [batch, *batches]
    place: Any = contextlib.nullcontext(everything)
    if not (crossings.is_emulated() or torch.cuda.is_available()):
        place = on_emulated_device(train_step, extra, everything, spaces)
    shapes = list(_varying_shapes(train_step, everything, spaces))
    values = list(_varying_values(train_step, everything))
    with place as moved:
        watch = _watched(train_step, moved, extra)
    # Where the batches differ in shape, so does all that is made from them.
    rows = [*(shapes or _unstable_shapes(watch)), *values, *_in_the_step(watch), *surroundings(watch.ran(), spaces)]
    return GraphObstacles.ranked(rows, watch.notes())


@dataclass(slots=True)
class _Watch:
    """What was seen while the step ran."""

    traces: list[StepTrace] = field(default_factory=list)
    syncs: tuple[GuardedSite, ...] = ()
    optimizers: dict[int, Stepped] = field(default_factory=dict)
    modules: list[torch.nn.Module] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    emulated: bool = False

    @property
    def order(self) -> dict[Line, int]:
        return self.traces[-1].lines

    def ran(self) -> Ran:
        """What the code around the step is held against."""
        return Ran(
            optimizers=tuple(self.optimizers.values()),
            modules=self.modules,
            objects=self.objects,
            lines=tuple(self.order),
            clears_gradients=any(kind == "zero-grad" for trace in self.traces for _, kind, _ in trace.calls)
            or any(trace.bindings.dropped for trace in self.traces),
        )

    def notes(self) -> tuple[str, ...]:
        return ("watched on the emulated CUDA device",) if self.emulated else ()


def _watched(train_step: Callable[..., Any], batches: list[Batch], extra: tuple[Any, ...]) -> _Watch:
    reached = Reached(train_step, *extra)
    watch = _Watch(emulated=crossings.is_emulated(), objects=reached.objects)
    watch.modules = reached.of_type(torch.nn.Module)
    for optimizer in reached.of_type(torch.optim.Optimizer):
        watch.optimizers[id(optimizer)] = Stepped(optimizer)
    loose = [t for t in reached.objects if isinstance(t, torch.Tensor)]
    optimizers = [stepped.optimizer for stepped in watch.optimizers.values()]
    before = Snapshot.take([*watch.modules, *loose], optimizers, generators=own_generators(reached))
    python = PythonState(train_step, *extra)
    try:
        with _steppers(watch.optimizers):
            _run(train_step, batches, extra, watch, reached)
    finally:
        python.restore()
        before.restore()
    return watch


def _run(
    train_step: Callable[..., Any], batches: list[Batch], extra: tuple[Any, ...], watch: _Watch, reached: Reached
) -> None:
    """Once for what only a first step does, once to see what changes, and once more to see where."""
    train_step(*batches[0])
    state = PythonState(train_step, *extra)
    unseen = [*random_places(reached), *host_tensor_places(reached)]
    before = [(place, place.held()) for place in unseen]
    for stepped in watch.optimizers.values():
        stepped.ready = graph_optimizers.is_ready(stepped.optimizer)
    tensors = _bound(reached, watch)
    with sync_guard(budget=_ENDLESS, mode="record") as guard:
        watch.traces.append(_traced(train_step, batches[0], (), tensors))
        changed: list[Place] = [change.place for change in state.changes()]
        changed += [place for place, held in before if not place.same(held, place.held())]
        for more in (*batches[1:], batches[0]):
            watch.traces.append(_traced(train_step, more, changed, tensors))
    watch.syncs = guard.sites


def _bound(reached: Reached, watch: _Watch) -> list[torch.Tensor]:
    """The parameters and buffers of the step."""
    found = [t for m in watch.modules for t in (*m.parameters(), *m.buffers())]
    found += [t for t in reached.objects if isinstance(t, torch.Tensor) and t.requires_grad]
    found += [p for each in watch.optimizers.values() for group in each.optimizer.param_groups for p in group["params"]]
    return list({id(t): t for t in found}.values())


def _traced(
    train_step: Callable[..., Any], batch: Batch, places: Sequence[Place], tensors: Sequence[torch.Tensor]
) -> StepTrace:
    trace = StepTrace(places, Bindings(tensors))
    with trace.watching():
        train_step(*batch)
    return trace


@contextlib.contextmanager
def _steppers(found: dict[int, Stepped]) -> Iterator[None]:
    """Inside, every optimizer that steps is added to `found`, with the line that stepped it."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def note(optimizer: Any, *_: Any) -> None:
        stepped = found.setdefault(id(optimizer), Stepped(optimizer))
        frame = user_frame(sys._getframe(1))
        if stepped.site is None and frame is not None:
            stepped.site = graph_sources.site(frame.f_code.co_filename, frame.f_lineno)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _in_the_step(watch: _Watch) -> Iterator[Obstacle]:
    yield from _frozen_places(watch)
    yield from _frozen_calls(watch)
    yield from _rebound(watch)
    for row in (row for row in watch.syncs if not own_copy(row)):
        copy = row.meaning.code in _COPIES
        yield Obstacle(
            code="capture-host-tensor" if copy else "capture-sync", site=row.site, severity="stops",
            text=f"{row.meaning.phrase}: {'no host memory' if copy else 'no wait'} is allowed during graph capture",
            change=_change(row),
        )  # fmt: skip


def _rebound(watch: _Watch) -> Iterator[Obstacle]:
    found = [trace.bindings for trace in watch.traces]
    calls = [(line, kind) for trace in watch.traces for line, kind, _ in trace.calls]
    by_name, clearing = ([line for line, kind in calls if kind == which] for which in ("setattr", "zero-grad"))
    for line in gradient_lines(found, by_name, clearing):
        yield Obstacle(
            code="capture-grad-rebound", site=site_at(line), severity="silent",
            text="binds another tensor to .grad: a graph reads and writes the one it was captured with",
            change="change gradients in place (p.grad.mul_(...), torch._foreach_mul_), or zero_grad(set_to_none=False)",
        )  # fmt: skip
    for line, tensor in ((line, tensor) for one in found for line, tensor in one.moved.items()):
        yield _frozen(
            site_at(line), f"gives a {type(tensor).__name__} of shape {tuple(tensor.shape)} other memory: a graph goes "
            "on with the memory of graph capture",
            "write into it in place (p.copy_(...), p.clamp_(...), with torch.no_grad())",
        )  # fmt: skip


def _change(row: GuardedSite) -> str:
    if row.kind in ("item", "cpu", "numpy", "tolist", "format_tensor", "print_tensor"):
        return "return the tensor and read it outside the step, every N steps"
    if row.meaning.code in _COPIES:
        return "build it on the device once, before the step (register_buffer, torch.full), or pass it in the batch"
    if row.kind == "grad_scaler":
        return "use bfloat16 autocast, which needs no scaler"
    if row.kind == "tensor_to_bool":
        return "select on the device (torch.where, or multiply by the condition); branch outside the step"
    return row.meaning.advice


def _frozen_places(watch: _Watch) -> Iterator[Obstacle]:
    by_line: dict[Line, list[Any]] = {}
    for trace in watch.traces:
        for line, change in trace.changes:
            by_line.setdefault(line, []).append(change)
    for line, changes in by_line.items():
        names = list(dict.fromkeys(str(change.place) for change in changes))
        first = changes[0]
        if first.place.owner == "random":
            yield _frozen(
                site_at(line), f"draws from {first.place.name} on the host: the draw of graph capture is repeated",
                "draw on the device (torch.rand(..., device=...)), or outside the step and pass it in the batch",
            )  # fmt: skip
            continue
        if first.place.owner == "host memory":
            yield _frozen(
                site_at(line), f"changes {first.place.name} in place: a graph does no work on the host",
                "keep it on the device (device='cuda', register_buffer)",
            )  # fmt: skip
            continue
        if isinstance(first.after, Position):
            yield _frozen(
                site_at(line), f"draws from the iterator {', '.join(names[:4])}: that happens once, at graph capture, "
                "and a replay goes on with what was drawn then",
                "draw outside the step and pass it in the batch, as a device tensor",
            )  # fmt: skip
            continue
        tensor = isinstance(first.after, torch.Tensor)
        what = "binds another tensor to" if tensor else "changes"
        yield _frozen(
            site_at(line),
            f"{what} {', '.join(names[:4])} in Python ({described_change(first.before, first.after)}): "
            "that happens once, at graph capture, and not on replay",
            "write into a fixed device tensor in place (buffer.copy_(value), counter.add_(1)), or return the value and "
            "keep it outside the step",
        )


def _frozen(site: Site, text: str, change: str) -> Obstacle:
    return Obstacle(code="capture-python-state", site=site, text=text, change=change, severity="silent")


_CALLS = {
    "clock": ("reads the clock", "take times outside the step, or with CUDA events around it"),
    "print": ("prints", "print outside the step"),
    "log": ("logs", "log outside the step"),
    "warn": ("warns", "warn outside the step"),
    "entropy": ("draws random bytes on the host", "draw on the device, or outside the step and pass it in the batch"),
    "file": ("writes to a file", "write outside the step"),
    "thread": (
        "hands work to another thread",
        "start it outside the step, and keep its CUDA calls out of graph capture",
    ),
    "queue": ("uses a queue", "hand over and take outside the step, device tensors as part of the batch"),
    "seed": ("seeds a random generator", "seed before the step"),
    "loader": ("draws a batch inside the step", "draw batches outside and pass them: step(*batch)"),
}


def _frozen_calls(watch: _Watch) -> Iterator[Obstacle]:
    synced = {(row.site.frame.file, row.site.frame.line) for row in watch.syncs}
    for line, kind in dict.fromkeys((line, kind) for trace in watch.traces for line, kind, _ in trace.calls):
        site = site_at(line)
        if kind == "host-copy":
            if (site.frame.file, site.frame.line) not in synced:
                yield Obstacle(
                    code="capture-host-tensor", site=site, severity="silent",
                    text="copies host memory to the device: a graph repeats the copy from the address it had then",
                    change="copy before the step and pass the device tensor (perfdoctor.DevicePrefetcher)",
                )  # fmt: skip
            continue
        if kind not in _CALLS:
            continue
        text, change = _CALLS[kind]
        row = _frozen(site, f"{text}: that happens once, at graph capture, and not on replay", change)
        yield replace(row, code="capture-other-thread") if kind == "thread" else row


def _unstable_shapes(watch: _Watch) -> Iterator[Obstacle]:
    """The first variable whose tensor has another shape in another call: what follows differs because of it."""
    first, *later = [trace.shapes for trace in watch.traces]
    for line, name in first:
        seen = dict.fromkeys(tuple(run[line, name]) for run in (first, *later) if (line, name) in run)
        if len(seen) > 1:
            some = ", ".join(str(run[0]) for run in list(seen)[:5]) + (", ..." if len(seen) > 5 else "")
            yield Obstacle(
                code="capture-dynamic-shape", site=site_at(line), severity="stops",
                text=f"{name} has {len(seen)} shapes in {len(watch.traces)} calls ({some}): each needs its own graph",
                change="pad to one length, or to a few fixed ones (a graph for each), and mask what is padding",
            )  # fmt: skip
            return


def _varying_values(train_step: Callable[..., Any], batches: list[Batch]) -> Iterator[Obstacle]:
    """Numbers and texts in the batch that are not the same each time."""
    seen: dict[str, dict[Any, None]] = {}
    for batch in batches:
        for path, value in plain_values(batch, "batch"):
            seen.setdefault(path, {})[value] = None
    for path, values in seen.items():
        if len(values) > 1:
            some = ", ".join(map(repr, list(values)[:5])) + (", ..." if len(values) > 5 else "")
            yield Obstacle(
                code="capture-baked-value", site=definition(train_step), severity="silent",
                text=f"{path} is a Python value and differs from batch to batch ({some}): a graph goes on with that of "
                "graph capture (graphed_step takes another graph for each, and runs eagerly where there are too many)",
                change=f"pass {path} as a device tensor",
            )  # fmt: skip


def _varying_shapes(
    train_step: Callable[..., Any], batches: list[Batch], spaces: list[graph_sources.NameSpace]
) -> Iterator[Obstacle]:
    shapes: dict[str, dict[tuple[int, ...], None]] = {}
    keys: dict[Hashable, Batch] = {}
    for batch in batches:
        key: list[Hashable] = []
        map_tensors(batch, lambda t, path: shapes.setdefault(path, {}).setdefault(tuple(t.shape)), "batch", key)
        keys.setdefault(tuple(key), batch)
    varying = {path: list(seen) for path, seen in shapes.items() if len(seen) > 1}
    if not varying:
        return
    rows = "; ".join(
        f"{path}: {', '.join(map(str, seen[:5]))}{', ...' if len(seen) > 5 else ''}" for path, seen in varying.items()
    )
    others = [item for batch in list(keys.values())[1:] for item in batch]
    made = [site for item in others if (site := graph_sources.assignment(item, spaces)) is not None]
    yield Obstacle(
        code="capture-dynamic-shape", site=made[0] if made else definition(train_step), severity="stops",
        text=f"{len(keys)} different batch shapes in {len(batches)} batches ({rows}): each needs a graph of its own",
        change="pad to one length, or to a few fixed ones; drop_last=True where only the last batch differs",
    )  # fmt: skip
