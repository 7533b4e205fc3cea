"""Treatments of the optimizer's part of a step: fused kernels, gradients set to None, our clip."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch

from perfdoctor.errors import TreatmentRefused
from perfdoctor.kernels.grad_stats import clip_grad_norm_
from perfdoctor.treat.cures import CURES
from perfdoctor.treat.optimizer_hooks import start_momentum
from perfdoctor.treat.stand_in import StandIn
from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.watch.patches import Patches

NO_OPTIMIZER = "the loop's optimizer is not known: pass optimizers="
# Kinds whose fused kernel exists on CUDA since torch 2.4; a subclass may have overridden step.
_FUSED = {"cuda": ("Adam", "AdamW", "SGD"), "cpu": ("Adam", "AdamW", "SGD", "Adagrad")}
_ALWAYS_NONE, _OURS = "_perfdoctor_always_none", "_perfdoctor_clip"  # mark what stands in for torch's
_STEP = "step"  # the state that a fused kernel wants on the device


def _refuse_fused(loop: Loop) -> str | None:
    if not loop.optimizers:
        return NO_OPTIMIZER
    kinds = _FUSED.get(loop.device.type, ())
    sparse = _sparse_weights(loop.model)
    for optimizer in loop.optimizers:
        if any(id(p) in sparse for group in optimizer.param_groups for p in group["params"]):
            return "an embedding of the model gives sparse gradients (sparse=True); fused kernels take dense ones"
        refusal = _refuse_fused_kind(optimizer, kinds, loop.device.type)
        if refusal:
            return refusal
    if all(map(_is_fused, loop.optimizers)):
        return "the optimizer is fused already"
    return None


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _sparse_weights(model: torch.nn.Module | None) -> set[int]:
    """By identity: those whose gradients will be sparse, as is seen before there are any."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = () if model is None else model.modules()
    return {id(module.weight) for module in modules if isinstance(module, kinds) and module.sparse}


def _refuse_fused_kind(optimizer: torch.optim.Optimizer, kinds: tuple[str, ...], device: str) -> str | None:
    kind = type(optimizer)
    name = kind.__name__
    if name not in kinds or kind is not getattr(torch.optim, name, None):
        return f"{kind.__module__}.{name} has no fused kernel on {device} ({', '.join(kinds)} of torch.optim have)"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        return f"the parameters lie on several devices ({', '.join(devices)})"
    if devices and not devices[0].startswith(device):
        return f"the parameters lie on {devices[0]}, the loop runs on {device}"
    odd = next((p.dtype for p in parameters if not p.is_floating_point()), None)
    if odd is not None:
        return f"a parameter is {odd}; fused kernels take real floating-point parameters"
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return "a gradient is sparse; fused kernels take dense ones"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True excludes fused=True"
    if (
        kind is torch.optim.SGD
        and not optimizer.state
        and any(group.get("dampening") and group.get("momentum") for group in optimizer.param_groups)
    ):
        return "SGD(dampening=...) treats its first step otherwise, which a GradScaler may skip: take one step before"
    return None


@contextmanager
def _fused(loop: Loop) -> Iterator[Loop]:
    undo: list[Callable[[], None]] = []
    try:
        for optimizer in loop.optimizers:
            if not _is_fused(optimizer):
                undo.append(_fuse(optimizer))
        yield loop
    finally:
        for back in reversed(undo):
            back()


def _fuse(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Switch the groups over; step counters go to the device and, with what they count by then, back again."""
    flags = ("fused", "foreach")
    kept = [{name: group[name] for name in flags if name in group} for group in optimizer.param_groups]
    attributes = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
    before = {name: vars(optimizer)[name] for name in attributes if name in vars(optimizer)}
    homes = {p: held[_STEP].device for p, held in optimizer.state.items() if isinstance(held.get(_STEP), torch.Tensor)}
    plain_home = torch.device("cpu")  # where a counter starts that is neither fused nor capturable
    hooks = _hooks_for_momentum(optimizer)

    def back() -> None:
        for hook in hooks:
            hook.remove()
        # The groups of now: load_state_dict has put others in their place. One that was added kept its own flags.
        for before_it, group in zip(kept, optimizer.param_groups, strict=False):
            for name in flags:
                group.pop(name, None)
            group.update(before_it)
        for name in attributes:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)
        capturable = {p for group in optimizer.param_groups if group.get("capturable") for p in group["params"]}
        for p, held in optimizer.state.items():
            if isinstance(held.get(_STEP), torch.Tensor):
                home = homes.get(p, p.device if p in capturable else plain_home)
                held[_STEP] = held[_STEP].to(home)

    try:
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
        # What the constructor sets with fused=True: GradScaler then leaves unscaling to the kernel and reads nothing.
        vars(optimizer)["_step_supports_amp_scaling"] = True
        for p, held in optimizer.state.items():
            if isinstance(held.get(_STEP), torch.Tensor):
                held[_STEP] = held[_STEP].to(device=p.device, dtype=torch.float32)
    except BaseException:
        back()
        raise
    return back


def _hooks_for_momentum(optimizer: torch.optim.Optimizer) -> list[Any]:
    """A GradScaler leaves an overflowing step to the fused kernel, and its first one is often such a step."""

    def before(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            start_momentum(optimizer)

    return [optimizer.register_step_pre_hook(before)] if isinstance(optimizer, torch.optim.SGD) else []


def _refuse_set_to_none(loop: Loop) -> str | None:
    if not loop.optimizers and loop.model is None:
        return NO_OPTIMIZER
    owners = _owners_of_zero_grad(loop)
    if not owners:
        name = type((*loop.optimizers, loop.model)[0]).__name__
        return f"{name}.zero_grad takes no set_to_none: it zeroes in its own way"
    return "zero_grad sets to None already" if all(hasattr(o.zero_grad, _ALWAYS_NONE) for o in owners) else None


def _owners_of_zero_grad(loop: Loop) -> list[Any]:
    """Those with torch's signature; what another one does is its own."""
    owners: list[Any] = [*loop.optimizers, *([loop.model] if loop.model is not None else [])]
    return [owner for owner in owners if _takes_set_to_none(owner.zero_grad)]


def _takes_set_to_none(zero_grad: Callable[..., None]) -> bool:
    found = inspect.signature(zero_grad).parameters.values()
    return any(each.name == "set_to_none" or each.kind is each.VAR_KEYWORD for each in found)


@contextmanager
def _set_to_none(loop: Loop) -> Iterator[Loop]:
    patches = Patches()
    try:
        for owner in _owners_of_zero_grad(loop):
            if hasattr(owner.zero_grad, _ALWAYS_NONE):
                continue
            stand_in = StandIn(owner.zero_grad, _zero_to_none)
            setattr(stand_in, _ALWAYS_NONE, True)
            patches.replace(owner, "zero_grad", stand_in)
        yield loop
    finally:
        patches.undo()


def _zero_to_none(original: Callable[..., None], set_to_none: bool = True, **others: Any) -> None:
    original(set_to_none=True, **others)


def _refuse_clip(loop: Loop) -> str | None:
    if loop.device.type != "cuda":
        return f"our clip is one kernel on a CUDA device; the loop runs on {loop.device}"
    if not loop.optimizers and loop.model is None:
        return "neither model nor optimizer is known: pass one"
    if _is_clip_ours():
        return "torch's clip_grad_norm_ is ours already"
    if _clip_cell() is None:
        return f"torch {torch.__version__} builds clip_grad_norm_ otherwise; call perfdoctor.clip_grad_norm_ instead"
    return None


def _clip_cell() -> CellType | None:
    """Where torch's clip_grad_norm_ keeps the function that it calls under no_grad.

    Exchanged there, it is ours for everybody who has imported the name before.
    """
    outer: Any = torch.nn.utils.clip_grad_norm_
    inner = getattr(outer, "__wrapped__", None)
    cells = outer.__closure__ or () if isinstance(outer, FunctionType) else ()
    return next((cell for cell in cells if inner is not None and cell.cell_contents is inner), None)


def _is_clip_ours() -> bool:
    outer: Any = torch.nn.utils.clip_grad_norm_
    return any(hasattr(cell.cell_contents, _OURS) for cell in getattr(outer, "__closure__", None) or ())


@contextmanager
def _our_clip(loop: Loop) -> Iterator[Loop]:
    if _is_clip_ours():
        yield loop
        return
    cell = _clip_cell()
    if cell is None:
        raise TreatmentRefused(f"our_clip: {_refuse_clip(loop)}")
    original = cell.cell_contents
    ours: Callable[..., Any] = _through(original)
    try:
        cell.cell_contents = ours
        yield loop
    finally:
        if cell.cell_contents is ours:
            cell.cell_contents = original


def _through(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our clip with torch's signature. What ours leaves to torch comes back here, and then takes torch's own way."""
    inside = False

    def clip(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        nonlocal inside
        if inside:
            result: torch.Tensor = original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            return result
        inside = True
        try:
            return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        finally:
            inside = False

    setattr(clip, _OURS, True)
    return clip


OPTIMIZER = (
    Treatment(
        name="fused_optimizer",
        cures=CURES["fused_optimizer"],
        numerics=Numerics(
            rtol=1e-4, why="the same formula in one kernel: products and sums are contracted (1e-7 a step)"
        ),
        refuses=_refuse_fused,
        applied=_fused,
        lines=("optimizer = torch.optim.AdamW(model.parameters(), lr=..., fused=True)  # or yours",),
    ),
    Treatment(
        name="set_to_none",
        cures=CURES["set_to_none"],
        numerics=Numerics(
            why="the same gradients, as long as each parameter gets one every step; where one gets none, the optimizer "
            "skips it, instead of applying momentum and weight decay to a gradient of zeros",
        ),
        refuses=_refuse_set_to_none,
        applied=_set_to_none,
        lines=("optimizer.zero_grad(set_to_none=True)",),
    ),
    Treatment(
        name="our_clip",
        cures=CURES["our_clip"],
        numerics=Numerics(rtol=1e-5, why="one float32 norm over all gradients instead of a norm of rounded norms"),
        refuses=_refuse_clip,
        applied=_our_clip,
        lines=("perfdoctor.clip_grad_norm_(model.parameters(), max_norm)",),
    ),
)
