"""What a step to be graphed works on, and what of that no graph takes, as far as it shows without running the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from perfdoctor.errors import TreatmentRefused
from perfdoctor.record import crossings
from perfdoctor.treat import graph_optimizers
from perfdoctor.treat.compiled import module_of
from perfdoctor.treat.graph_python_state import Reached
from perfdoctor.treat.graph_recording import Parts
from perfdoctor.treat.snapshot import Models, Optimizers, as_tuple

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


def step_parts(train_step: Callable[..., Any], model: Models, optimizer: Optimizers) -> tuple[Parts, torch.device]:
    """What the step works on, and where.

    Raises:
        TreatmentRefused: it cannot be a graph for a reason that shows without running it.
    """
    reached = Reached(train_step)
    given = as_tuple(module_of(model), (torch.nn.Module, torch.Tensor))
    loose = [p for p in given if isinstance(p, torch.Tensor)]
    models = tuple(m for m in given if isinstance(m, torch.nn.Module)) or _roots(reached.of_type(torch.nn.Module))
    optimizers = as_tuple(optimizer, torch.optim.Optimizer) or tuple(reached.of_type(torch.optim.Optimizer))
    reason = static_refusal(train_step, models, optimizers, reached)
    if reason is not None:
        raise TreatmentRefused(reason)
    found = parameters_of(models, optimizers, loose)
    generators = tuple(g for g in reached.of_type(torch.Generator) if torch.device(g.device).type == "cuda")
    return Parts(train_step, models, optimizers, found, generators), found[0].device


def parameters_of(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], loose: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """All of them, each once."""
    stepped = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    found = {id(p): p for p in (*loose, *(p for m in models for p in m.parameters()), *stepped)}
    return tuple(found.values())


def static_refusal(
    train_step: Callable[..., Any],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    reached: Reached,
) -> str | None:
    """Why this step cannot be a graph, as far as it shows without running it; None where nothing does."""
    if not (crossings.is_emulated() or torch.cuda.is_available()):
        return "a CUDA graph needs a CUDA device, and torch sees none here: call train_step itself on this machine"
    parameters = [p for m in models for p in m.parameters()]
    parameters += [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    if not parameters:
        return "no parameters found: pass model= and optimizer= (train_step reaches no module and no optimizer)"
    devices = {str(p.device) for p in parameters}
    if len(devices) > 1 or not next(iter(devices)).startswith("cuda"):
        return f"the parameters are on {', '.join(sorted(devices))}; a graph needs all of them on one CUDA device"
    for module in (m for model in models for m in model.modules()):
        kinds = {base.__name__ for base in type(module).__mro__}
        if kinds & set(_WRAPPERS):
            return (
                f"{type(module).__name__} inside a graphed step is not supported: its reducer needs eleven eager steps "
                "on a side stream before graph capture. Graph the step of one device, or follow torch's own recipe for "
                "whole-network capture with DistributedDataParallel"
            )
    for scaler in reached.of_type(torch.amp.GradScaler):
        if scaler.is_enabled():
            return "GradScaler decides on the host each step whether to update: use bfloat16 autocast, which needs none"
    if _keeps_casts():
        return (
            "an autocast region that keeps its casts is open around the step: eager steps would go on with weights "
            "cast before the last update. Open autocast inside train_step, or with cache_enabled=False"
        )
    return next((reason for opt in optimizers if (reason := graph_optimizers.refusal(opt)) is not None), None)


def _roots(modules: list[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return tuple(module for module in modules if id(module) not in inner)


def _keeps_casts() -> bool:
    """Whether a cast of a weight made now is used after the next update too: only the outermost region drops them."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting > 0 and torch.is_autocast_cache_enabled()
