"""The kernels as torch custom ops, so that torch.compile keeps them in one graph.

`once`: the list is of parameters, where a second mention of a gradient does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfdoctor.kernels import reference


@torch.library.custom_op(
    "perfdoctor::grad_norm", mutates_args=(), schema="(Tensor[] gradients, float norm_type, bool once) -> Tensor"
)
def grad_norm(gradients: Sequence[Tensor], norm_type: float, once: bool) -> Tensor:
    """The norm of all gradients, float32 []."""
    from perfdoctor.kernels.grad_stats import norm_of_gradients

    return norm_of_gradients(list(gradients), norm_type, once)


@torch.library.custom_op(
    "perfdoctor::clip_grads_",
    mutates_args=("gradients",),
    schema="(Tensor(a!)[] gradients, float max_norm, float norm_type, bool once) -> Tensor",
)
def clip_grads_(gradients: Sequence[Tensor], max_norm: float, norm_type: float, once: bool) -> Tensor:
    """The norm of all gradients, float32 []; scales them in place."""
    from perfdoctor.kernels.grad_stats import clip_gradients_

    return clip_gradients_(list(gradients), max_norm, norm_type, once)


@torch.library.custom_op("perfdoctor::grad_stats", mutates_args=(), schema="(Tensor[] gradients) -> (Tensor, Tensor)")
def grad_stats(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """float32 [4, n + 1] (sum, mean, L2, abs-max; total last) and int64 [n + 1] counts of non-finite values."""
    from perfdoctor.kernels.grad_stats import stats_of

    return stats_of(list(gradients))


def _empty_norm(gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        return torch.empty((), dtype=torch.float32)
    return gradients[0].new_empty((), dtype=reference.result_type(gradients))


@grad_norm.register_fake
def _(gradients: Sequence[Tensor], norm_type: float, once: bool) -> Tensor:
    return _empty_norm(gradients)


@clip_grads_.register_fake
def _(gradients: Sequence[Tensor], max_norm: float, norm_type: float, once: bool) -> Tensor:
    return _empty_norm(gradients)


@grad_stats.register_fake
def _(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device = gradients[0].device if gradients else torch.device("cpu")
    columns = len(gradients) + 1
    out = torch.empty((4, columns), dtype=torch.float32, device=device)
    return out, torch.empty(columns, dtype=torch.int64, device=device)
