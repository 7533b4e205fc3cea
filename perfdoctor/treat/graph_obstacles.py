"""What stands between a training step and a CUDA graph, with the line and the change: `graph_obstacles`.

    print(perfdoctor.graph_obstacles(train_step, *batch))

The step is run a few times and watched; what it changed is put back. Worst first: what a graph would get wrong in
silence, then what stops graph capture, then what `graphed_step` takes care of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from perfdoctor.errors import UsageError
from perfdoctor.record import crossings
from perfdoctor.record.capture import Frame, Site
from perfdoctor.record.owners import USER, shown_file
from perfdoctor.record.sync_kinds import BLOCKING_COPY, PAGEABLE_COPY
from perfdoctor.treat import graph_optimizers, graph_sources
from perfdoctor.treat.graph_batch import map_tensors
from perfdoctor.treat.graph_emulation import Batch, on_emulated_device
from perfdoctor.treat.graph_obstacle import GraphObstacles, Obstacle
from perfdoctor.treat.graph_python_state import Place, PythonState, Reached, described_change, variable_names
from perfdoctor.treat.graph_randomness import random_places
from perfdoctor.treat.graph_recording import own_copy
from perfdoctor.treat.graph_trace import Line, StepTrace, gradient_writes, pinning_threads, site_at
from perfdoctor.treat.iterator_position import Position
from perfdoctor.treat.rate_writes import rate_writes
from perfdoctor.treat.snapshot import Models, Optimizers, Snapshot, as_tuple
from perfdoctor.watch.sync_guard import GuardedSite, sync_guard

_COPIES = (PAGEABLE_COPY, BLOCKING_COPY)
_ENDLESS = 1e18
_NOWHERE = Site(frame=Frame(file="<unknown>", line=0, function=""), exact=False)


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
    if not callable(train_step):
        raise UsageError(f"graph_obstacles needs a function first, got {type(train_step).__name__}")
    if not isinstance(batches, Iterable):
        raise UsageError(f"graph_obstacles(batches=...): a list of tuples of arguments, got {type(batches).__name__}")
    for given in batches:
        if not isinstance(given, tuple):
            raise UsageError(f"graph_obstacles(batches=...): each is a tuple of arguments, got {type(given).__name__}")
    spaces = graph_sources.name_spaces(train_step)
    extra = (*as_tuple(model, (torch.nn.Module, torch.Tensor)), *as_tuple(optimizer, torch.optim.Optimizer))
    everything = [batch, *batches]
    place: Any = contextlib.nullcontext(everything)
    if not (crossings.is_emulated() or torch.cuda.is_available()):
        place = on_emulated_device(train_step, extra, everything)
    shapes = list(_varying_shapes(train_step, everything, spaces))
    with place as moved:
        watch = _watched(train_step, moved, extra)
    # Where the batches differ in shape, so does all that is made from them.
    rows = [*(shapes or _unstable_shapes(watch)), *_in_the_step(watch), *_around(watch, spaces)]
    return GraphObstacles.ranked(rows, watch.notes())


@dataclass(slots=True)
class _Watch:
    """What was seen while the step ran."""

    traces: list[StepTrace] = field(default_factory=list)
    syncs: tuple[GuardedSite, ...] = ()
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)
    ready: dict[int, bool] = field(default_factory=dict)
    emulated: bool = False

    @property
    def order(self) -> dict[Line, int]:
        return self.traces[-1].lines

    def notes(self) -> tuple[str, ...]:
        return ("watched on the emulated CUDA device",) if self.emulated else ()


def _watched(train_step: Callable[..., Any], batches: list[Batch], extra: tuple[Any, ...]) -> _Watch:
    reached = Reached(train_step, *extra)
    watch = _Watch(emulated=crossings.is_emulated())
    for optimizer in reached.of_type(torch.optim.Optimizer):
        watch.optimizers[id(optimizer)] = optimizer
    modules = [*reached.of_type(torch.nn.Module), *(t for t in reached.objects if isinstance(t, torch.Tensor))]
    generators = [g for g in reached.of_type(torch.Generator) if not isinstance(g, type)]
    before = Snapshot.take(modules, list(watch.optimizers.values()), generators=generators)
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
    random = [(place, place.held()) for place in random_places(reached, watch.emulated)]
    watch.ready = {key: graph_optimizers.is_ready(optimizer) for key, optimizer in watch.optimizers.items()}
    with sync_guard(budget=_ENDLESS, mode="record") as guard:
        watch.traces.append(_traced(train_step, batches[0], ()))
        changed: list[Place] = [change.place for change in state.changes()]
        changed += [place for place, held in random if not place.same(held, place.held())]
        for more in (*batches[1:], batches[0]):
            watch.traces.append(_traced(train_step, more, changed))
    watch.syncs = guard.sites


def _traced(train_step: Callable[..., Any], batch: Batch, places: Sequence[Place]) -> StepTrace:
    trace = StepTrace(places)
    with trace.watching():
        train_step(*batch)
    return trace


@contextlib.contextmanager
def _steppers(found: dict[int, torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, every optimizer that steps is added to `found`."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def note(optimizer: Any, *_: Any) -> None:
        found.setdefault(id(optimizer), optimizer)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _in_the_step(watch: _Watch) -> Iterator[Obstacle]:
    yield from _frozen_places(watch)
    yield from _frozen_calls(watch)
    for line in gradient_writes(list(watch.order)):
        yield Obstacle(
            code="capture-grad-rebound", site=site_at(line), severity="silent",
            text="binds another tensor to .grad: a graph reads and writes the one it was captured with",
            change="change gradients in place (p.grad.mul_(...), torch._foreach_mul_), or zero_grad(set_to_none=False)",
        )  # fmt: skip
    for row in (row for row in watch.syncs if not own_copy(row)):
        copy = row.meaning.code in _COPIES
        yield Obstacle(
            code="capture-host-tensor" if copy else "capture-sync", site=row.site, severity="stops",
            text=f"{row.meaning.phrase}: {'no host memory' if copy else 'no wait'} is allowed during graph capture",
            change=_change(row),
        )  # fmt: skip


def _change(row: GuardedSite) -> str:
    if row.kind in ("item", "cpu", "numpy", "tolist", "format_tensor", "print_tensor"):
        return "return the tensor and read it outside the step, every N steps"
    if row.meaning.code in _COPIES:
        return "build it on the device once, before the step (register_buffer, torch.full), or pass it in the batch"
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
        code="capture-dynamic-shape", site=made[0] if made else _definition(train_step), severity="stops",
        text=f"{len(keys)} different batch shapes in {len(batches)} batches ({rows}): each needs a graph of its own",
        change="pad to one length, or to a few fixed ones; drop_last=True where only the last batch differs",
    )  # fmt: skip


def _definition(train_step: Callable[..., Any]) -> Site:
    code = getattr(getattr(train_step, "__func__", train_step), "__code__", None)
    if code is None:
        return _NOWHERE
    frame = Frame(file=shown_file(code.co_filename), line=code.co_firstlineno, function=code.co_qualname, owner=USER)
    return Site(frame=frame)


def _around(watch: _Watch, spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    """Optimizers, schedules and loaders: built outside the step, in the way inside it."""
    optimizers = list(watch.optimizers.values())
    for optimizer in optimizers:
        yield from _optimizer_rows(optimizer, watch.ready.get(id(optimizer), False), spaces)
    for scheduler in graph_sources.instances(spaces, torch.optim.lr_scheduler.LRScheduler):
        if any(scheduler.optimizer is optimizer and _float_rate(optimizer) for optimizer in optimizers):
            built = graph_sources.construction(scheduler, spaces) or _NOWHERE
            sites = graph_sources.step_calls(scheduler, spaces) or [built]
            yield from (_baked(site, type(scheduler).__name__) for site in sites)
    written = rate_writes([optimizer for optimizer in optimizers if _float_rate(optimizer)], spaces)
    yield from (_baked(site, "this line") for site in written)
    yield from _loader_rows(spaces)
    yield from _loop_numbers(watch, spaces)


def _loop_numbers(watch: _Watch, spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    """Numbers of the surrounding code that the step reads and the loop changes."""
    codes = {code for code, _ in watch.order}
    names = {name for code in codes for name in variable_names(code)}
    inside = {(code.co_filename, line) for code, line in watch.order}
    for name, site in graph_sources.loop_changes(names, spaces):
        if (site.frame.file, site.frame.line) not in inside:
            yield Obstacle(
                code="capture-baked-value", site=site, severity="silent",
                text=f"the loop changes {name}, a Python number that the step reads: a graph goes on with the value of "
                "graph capture (graphed_step runs eagerly then)",
                change=f"keep {name} in a device tensor that the loop fills ({name}.fill_(...)), or in the batch",
            )  # fmt: skip


def _float_rate(optimizer: torch.optim.Optimizer) -> bool:
    return any(not isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups)


def _optimizer_rows(
    optimizer: torch.optim.Optimizer, ready: bool, spaces: list[graph_sources.NameSpace]
) -> Iterator[Obstacle]:
    site = graph_sources.construction(optimizer, spaces) or _NOWHERE
    reason = graph_optimizers.refusal(optimizer)
    name = type(optimizer).__name__
    if reason is not None:
        what, _, change = reason.partition("; ")
        yield Obstacle(
            code="capture-optimizer", site=site, text=what, change=change or "use AdamW(capturable=True)",
            severity="stops",
        )  # fmt: skip
    elif not ready:
        yield Obstacle(
            code="capture-optimizer", site=site, severity="handled",
            text=f"{name} keeps its step counters on the host: its step() cannot be captured",
            change=f"{name}(..., capturable=True), or give it to graphed_step(optimizer=...)",
        )  # fmt: skip


def _baked(site: Site, who: str) -> Obstacle:
    return Obstacle(
        code="capture-baked-value", site=site, severity="handled",
        text=f"the learning rate is a Python number, so a graph goes on with that of graph capture: {who} is ignored",
        change="lr=torch.tensor(..., device='cuda') (SGD: with fused=True), or graphed_step, which does that",
    )  # fmt: skip


def _loader_rows(spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    from torch.utils.data import DataLoader

    loaders = [loader for loader in graph_sources.instances(spaces, DataLoader) if loader.pin_memory]
    sites = [graph_sources.construction(loader, spaces) or _NOWHERE for loader in loaders]
    if not sites and pinning_threads():
        sites = [_NOWHERE]
    for site in sites:
        yield Obstacle(
            code="capture-other-thread", site=site, severity="handled",
            text="its pinning thread allocates host memory at any moment, which fails a graph capture of mode 'global' "
            "(torch.cuda.graph's default)",
            change="capture before the loader's iterator exists, or with capture_error_mode='thread_local', as "
            "graphed_step does",
        )  # fmt: skip
