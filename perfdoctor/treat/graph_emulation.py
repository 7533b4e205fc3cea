"""Everything that a step reaches, on the emulated CUDA device for a block: the step runs as if there were a GPU.

The very tensors become device tensors and host tensors again, so optimizers, closures and attributes need no change;
memory is shared, so nothing is copied. Names that hold the device "cpu" hold "cuda" meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfdoctor.emulate import emulate_cuda
from perfdoctor.emulate.tensor import CudaTensor, adopt, plain
from perfdoctor.emulate.transfers import become
from perfdoctor.treat.gpu_settings import scalers_on
from perfdoctor.treat.graph_batch import map_tensors
from perfdoctor.treat.graph_python_state import Place, Reached
from perfdoctor.treat.graph_sources import NameSpace

Batch = tuple[Any, ...]


@contextmanager
def on_emulated_device(
    train_step: Callable[..., Any], extra: tuple[Any, ...], batches: list[Batch], spaces: list[NameSpace]
) -> Iterator[list[Batch]]:
    """Inside, all that `train_step` and `extra` (modules, optimizers) reach, and the batches, are on that device.

    `spaces`: names of the code around, which tell a GradScaler that is off for want of a GPU.
    """
    reached = Reached(train_step, *extra)
    tensors = _tensors(reached)
    places = [place for place in reached.places if _names_the_host(place)]
    kept = [(place, place.read()) for place in places]
    grads = [(t, t.grad) for t in tensors if t.is_leaf and t.grad is not None]
    with emulate_cuda(), scalers_on(reached.of_type(torch.amp.GradScaler), spaces):
        try:
            for tensor in tensors:
                _enter(tensor)
            for place, value in kept:
                place.write("cuda" if isinstance(value, str) else torch.device("cuda"))
            yield [_moved(batch) for batch in batches]
        finally:
            for place, value in kept:
                place.write(value)
            for tensor in tensors:
                _leave(tensor)
            for tensor, grad in grads:
                tensor.grad = grad


def _tensors(reached: Reached) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [
        value for value in reached.objects if isinstance(value, torch.Tensor) and _movable(value)
    ]
    for module in reached.of_type(torch.nn.Module):
        found += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    for optimizer in reached.of_type(torch.optim.Optimizer):
        found += [p for group in optimizer.param_groups for p in group["params"]]
        for state in optimizer.state.values():
            # Counters stay where they are, as on a GPU.
            found += [v for name, v in state.items() if isinstance(v, torch.Tensor) and (name != "step" or v.dim() > 0)]
    unique = {id(t): t for t in found}
    return [t for t in unique.values() if not isinstance(t, CudaTensor)]


def _movable(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _names_the_host(place: Place) -> bool:
    value = place.read()
    return "dev" in place.name.lower() and (value == "cpu" if isinstance(value, str) else value == torch.device("cpu"))


def _enter(tensor: torch.Tensor) -> None:
    tensor.grad = None
    become(tensor, adopt(tensor.detach()))


def _leave(tensor: torch.Tensor) -> None:
    if isinstance(tensor, CudaTensor):
        tensor.grad = None
        become(tensor, plain(tensor))


def _moved(batch: Batch) -> Batch:
    moved: Batch = map_tensors(batch, lambda t, _: t if isinstance(t, CudaTensor) else adopt(t.detach()), "batch", [])
    return moved
