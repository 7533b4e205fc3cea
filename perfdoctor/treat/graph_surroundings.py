"""What stands around a step and in the way of a graph of it: optimizers, schedules, loaders, what its loop changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from perfdoctor.record.capture import Frame, Site
from perfdoctor.record.owners import USER, file_owner, shown_file
from perfdoctor.treat import graph_optimizers, graph_sources
from perfdoctor.treat.gpu_settings import on_with_a_gpu
from perfdoctor.treat.graph_obstacle import Obstacle
from perfdoctor.treat.graph_python_state import variable_names
from perfdoctor.treat.graph_trace import Line, pinning_threads
from perfdoctor.treat.loop_writes import Surroundings, gradient_drops, state_writes
from perfdoctor.treat.rate_writes import rate_writes

_NOWHERE = Site(frame=Frame(file="<unknown>", line=0, function=""), exact=False)
_RATE = "lr"
_DEVICE_WORDS = frozenset(("cuda", "to", "pin_memory", "device", "synchronize", "item", "cpu", "non_blocking"))


@dataclass(slots=True)
class Stepped:
    """An optimizer of the step: whether it was capturable as it came, and the line that stepped it."""

    optimizer: torch.optim.Optimizer
    ready: bool = False
    site: Site | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What is known of the step from having run it."""

    optimizers: Sequence[Stepped]
    modules: Sequence[torch.nn.Module]
    objects: list[Any]  # all that it reaches
    lines: Sequence[Line]
    clears_gradients: bool


def surroundings(ran: Ran, spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    """Optimizers, schedules and loaders: built outside the step, in the way inside it; and what the loop changes."""
    optimizers = [stepped.optimizer for stepped in ran.optimizers]
    inside = {(shown_file(code.co_filename), line) for code, line in ran.lines}
    for stepped in ran.optimizers:
        yield from _optimizer_rows(stepped, spaces)
    yield from (
        row for row in _changes(ran, optimizers, spaces) if (row.site.frame.file, row.site.frame.line) not in inside
    )
    yield from _loader_rows(spaces)
    yield from _thread_rows(spaces)


def _changes(ran: Ran, optimizers: list[Any], spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    """What is changed between two calls of the step."""
    for scheduler in graph_sources.instances(spaces, torch.optim.lr_scheduler.LRScheduler):
        if any(scheduler.optimizer is optimizer and _float_rate(optimizer) for optimizer in optimizers):
            built = graph_sources.construction(scheduler, spaces) or _NOWHERE
            sites = graph_sources.step_calls(scheduler, spaces) or [built]
            yield from (_baked(site, type(scheduler).__name__) for site in sites)
        if getattr(scheduler, "cycle_momentum", False) and any(scheduler.optimizer is each for each in optimizers):
            cycled = "betas" if "betas" in scheduler.optimizer.param_groups[0] else "momentum"
            yield from (_baked_setting(site, cycled) for site in graph_sources.step_calls(scheduler, spaces))
    for site, name in rate_writes(optimizers, spaces):
        if name != _RATE:
            yield _baked_setting(site, name)
        elif any(map(_float_rate, optimizers)):
            yield _baked(site, "this line")
    names = {name for code, _ in ran.lines for name in variable_names(code)}
    yield from (_baked_state(name, 0, site) for name, site in graph_sources.loop_changes(names, spaces))
    around = Surroundings(spaces, frozenset(code for code, _ in ran.lines))
    yield from (_baked_state(*write) for write in state_writes(around, ran.objects))
    if not ran.clears_gradients:
        yield from (_dropped(site) for site in gradient_drops(around, [*optimizers, *ran.modules]))


def _baked_state(name: str, held: Any, site: Site) -> Obstacle:
    what, change = "a Python number", f"keep {name} in a device tensor that the loop fills ({name}.fill_(...))"
    if isinstance(held, torch.Tensor):
        what, change = "a tensor, to another one", f"write into the same tensor ({name}.copy_(...))"
    return Obstacle(
        code="capture-baked-value", site=site, severity="silent",
        text=f"the loop changes {name}, {what} that the step reads: a graph goes on with that of graph capture "
        "(graphed_step runs eagerly then)",
        change=f"{change}, or pass it in the batch",
    )  # fmt: skip


def _dropped(site: Site) -> Obstacle:
    return Obstacle(
        code="capture-grad-rebound", site=site, severity="handled",
        text="unbinds the gradients between steps: a graph goes on reading and writing those of graph capture, where "
        "they pile up",
        change="zero them inside the step, or in place (zero_grad(set_to_none=False))",
    )  # fmt: skip


def _float_rate(optimizer: torch.optim.Optimizer) -> bool:
    return any(not isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups)


def _optimizer_rows(stepped: Stepped, spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    optimizer = stepped.optimizer
    site = graph_sources.construction(optimizer, spaces) or stepped.site or _NOWHERE
    reason = graph_optimizers.refusal(optimizer)
    name = type(optimizer).__name__
    if reason is not None:
        what, _, change = reason.partition("; ")
        yield Obstacle(
            code="capture-optimizer", site=site, text=what, change=change or "use AdamW(capturable=True)",
            severity="stops",
        )  # fmt: skip
    elif not stepped.ready:
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


def _baked_setting(site: Site, name: str) -> Obstacle:
    return Obstacle(
        code="capture-baked-value", site=site, severity="silent",
        text=f"{name} of a param group is a Python number: a graph goes on with that of graph capture (graphed_step "
        "takes another graph for each value, and runs eagerly where there are too many)",
        change=f"keep {name} the same from step to step (a scheduler's cycle_momentum=False)",
    )  # fmt: skip


def _loader_rows(spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    from torch.utils.data import DataLoader

    loaders = [
        loader
        for loader in graph_sources.instances(spaces, DataLoader)
        if loader.pin_memory or on_with_a_gpu(loader, "pin_memory", spaces, default=False)
    ]
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


def _thread_rows(spaces: list[graph_sources.NameSpace]) -> Iterator[Obstacle]:
    """Threads of the user's that are alive and whose code names what works on a device."""
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None) or type(thread).run
        function = getattr(target, "func", getattr(target, "__func__", target))
        code = getattr(function, "__code__", None)
        if code is None or file_owner(code.co_filename) != USER:
            continue
        words = ", ".join(sorted(_all_names(code) & _DEVICE_WORDS))
        if words:
            yield Obstacle(
                code="capture-other-thread", site=graph_sources.construction(thread, spaces) or definition(function),
                severity="handled",
                text=f"the thread {thread.name!r} may call CUDA at any moment ({words}), which fails a graph capture "
                "of mode 'global' (torch.cuda.graph's default)",
                change="start it after graph capture, or capture with capture_error_mode='thread_local', as "
                "graphed_step does",
            )  # fmt: skip


def _all_names(code: CodeType) -> set[str]:
    """Names and texts in a function and those inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return {*code.co_names, *texts}.union(*(_all_names(each) for each in inner))


def definition(train_step: Callable[..., Any]) -> Site:
    """Where a function is defined."""
    code = getattr(getattr(train_step, "__func__", train_step), "__code__", None)
    if code is None:
        return _NOWHERE
    frame = Frame(file=shown_file(code.co_filename), line=code.co_firstlineno, function=code.co_qualname, owner=USER)
    return Site(frame=frame)
