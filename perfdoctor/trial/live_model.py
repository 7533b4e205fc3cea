"""The model of a running loop, found among the living objects by the parameters that the optimizers hold."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "OptimizedModule")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def model_chain(optimizers: Iterable[Any]) -> list[torch.nn.Module]:
    """The module that covers most of what the optimizers hold, then its part that covers as much, and so on inwards.

    Which of them the loop calls shows only when it does: a LightningModule, say, or the network in it.
    """
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    # By type(), not isinstance(): a lazy object would be woken by being asked for its __class__.
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    roots = [(_cover(module, held), module) for module in modules if id(module) not in inner]
    covered, at = max(roots, key=lambda row: row[0], default=(0, None))
    chain: list[torch.nn.Module] = []
    while at is not None and covered:
        chain.append(at)
        at = next((child for child in at.children() if _cover(child, held) == covered), None)
    return chain


def buffers_of(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """The buffers of every living model of which these optimizers hold a parameter: running statistics, say."""
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    found = [buffer for module in modules if _cover(module, held) for buffer in module.buffers()]
    return list({id(buffer): buffer for buffer in found}.values())


def _cover(module: torch.nn.Module, held: set[int]) -> int:
    if "_parameters" not in vars(module):  # not initialised
        return 0
    return sum(id(p) in held for p in module.parameters())


def graph_refusal(model: torch.nn.Module) -> str:
    """Why no CUDA graph can stand for this model, as far as it shows without running it; '' where nothing does."""
    parameters = list(model.parameters())
    devices = {str(p.device) for p in parameters}
    if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
        return f"a CUDA graph needs the whole model on one CUDA device; it is on {', '.join(sorted(devices))}"
    if not any(p.requires_grad for p in parameters):
        return "no parameter of the model requires a gradient"
    for name, module in model.named_modules():
        title = f"{type(module).__name__} {name}".strip()
        kinds = {base.__name__ for base in type(module).__mro__}
        if kinds & set(_WRAPPERS) or getattr(module, "_compiled_call_impl", None) is not None:
            return f"{title} is compiled or wrapped for several devices: it launches in its own way"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{title} is a TorchScript module"
        if isinstance(module, torch.nn.RNNBase):
            return f"{title} lays its weights out anew for whatever stands in for them, which a graph would not follow"
        if "forward" in vars(module):
            return f"the forward of {title} was replaced by another tool"
        if module is not model and any(getattr(module, each, None) for each in _HOOKS):
            return f"{title} has hooks, which a graph would not call: remove them and try again"
    strange = next((p for p in parameters if type(p).__name__ not in ("Parameter", "CudaTensor", "Tensor")), None)
    return "" if strange is None else f"a parameter is a {type(strange).__name__}, not a plain tensor"
