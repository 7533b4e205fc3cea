"""Gradients that stay over a call of a model whose passes torch replays as CUDA graphs.

Under `mode="reduce-overhead"` and `"max-autotune"` the backward pass writes gradients into its graph's own memory, and
autograd takes those tensors as `.grad`. The next replay writes there again, so what is to be added to them (gradient
accumulation, `zero_grad(set_to_none=False)`) is gone: torch raises, or adds to what was overwritten
(github.com/pytorch/pytorch/issues/169545). Such a gradient is moved into memory of its own before the next call; from
then on autograd adds to it in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

GraphMemory = Callable[[torch.device], frozenset[int] | None]


class StayingGradients:
    """The gradients of `parameters`, looked at before each call: one that is there and new is moved if it must be."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], graph_memory: GraphMemory | None = None) -> None:
        self._parameters = list(parameters)
        self._safe: list[weakref.ref[torch.Tensor] | None] = [None] * len(self._parameters)
        self._graph_memory = graph_memory or storages_of_graphs

    def keep(self) -> int:
        """Move what the next replay would overwrite; how many gradients that were. No wait for the device."""
        gradients = [parameter.grad for parameter in self._parameters]
        new = [
            (index, gradient)
            for index, gradient in enumerate(gradients)
            if gradient is not None and ((safe := self._safe[index]) is None or safe() is not gradient)
        ]
        if not new:
            return 0
        owned = {device: self._graph_memory(device) for device in {gradient.device for _, gradient in new}}
        moving = [(index, gradient) for index, gradient in new if _is_in(gradient, owned[gradient.device])]
        self._move(moving)
        for index, _ in new:
            kept = self._parameters[index].grad
            assert kept is not None
            self._safe[index] = weakref.ref(kept)
        return len(moving)

    def _move(self, moving: list[tuple[int, torch.Tensor]]) -> None:
        if not moving:
            return
        with torch.no_grad():
            sources = [gradient for _, gradient in moving]
            copies = [torch.empty_like(source) for source in sources]
            torch._foreach_copy_(copies, sources)  # a launch for all, where a clone each would be one for each
        for (index, _), copy in zip(moving, copies, strict=True):
            self._parameters[index].grad = copy


def storages_of_graphs(device: torch.device) -> frozenset[int] | None:
    """Addresses of the storages that torch's graphs of this device gave out in their last run.

    None where this version of torch does not tell (the structure is torch's own): then any may be one.
    """
    try:
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(device.index or 0, create_if_none_exists=False)
        node = None if manager is None else manager.current_node
        if node is None:
            return frozenset()
        outputs = [output for each in node._path_from_root for output in each.outputs_weakrefs]
        return frozenset(output.data_ptr() for output in outputs if output is not None)
    except (ImportError, AttributeError, KeyError):
        return None


def _is_in(gradient: torch.Tensor, storages: frozenset[int] | None) -> bool:
    if gradient.layout is not torch.strided or gradient.numel() == 0:
        return False  # graphs give out dense tensors only
    try:
        address = gradient.untyped_storage().data_ptr()
    except RuntimeError:  # gone already, by a graph that another model replayed; torch says so to whoever reads it
        return False
    return storages is None or address in storages
