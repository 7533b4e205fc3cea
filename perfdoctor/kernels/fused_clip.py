"""Clipping by a fused optimizer: it reads the gradients anyway, so scaling them costs it nothing.

grad_scale = max(1, (norm + 1e-6) / max_norm)    in the optimizer: gradient / grad_scale
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from perfdoctor.errors import UsageError
from perfdoctor.kernels.grad_stats import grad_norm


def clip_in_optimizer(optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Has the optimizer's next step clip the gradients to `max_norm`; returns their norm from before, as `grad_norm`.

    In the place of `clip_grad_norm_(parameters, max_norm)` before `optimizer.step()`, without the pass that scales. The
    gradients are read once, nothing waits for the device, and the scale holds for one step.

    Raises UsageError where the optimizer is not fused (`fused=True`: Adam, AdamW, SGD, Adagrad) or has a `grad_scale`
    already: a GradScaler sets one, so unscale and clip with `clip_grad_norm_` there.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(f"{type(optimizer).__name__} was not made with fused=True: use clip_grad_norm_")
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UsageError("the optimizer has a grad_scale already (from a GradScaler, or a clip without a step)")
    norm = grad_norm([parameter for group in optimizer.param_groups for parameter in group["params"]], norm_type)
    optimizer.grad_scale = torch.clamp((norm + 1e-6) / float(max_norm), min=1.0)  # type: ignore[attr-defined]

    def forget(*_: Any) -> None:
        handle.remove()
        del optimizer.grad_scale  # type: ignore[attr-defined]

    handle = optimizer.register_step_post_hook(forget)
    return norm
