"""What the tests of the switches share: a small loop, its training, and everything that a switch may touch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.treat.switches import TREATMENTS
from perfdoctor.treat.treatment import Loop

CPU = torch.device("cpu")
OWN = ("graphed_step",)  # tested where it is written
NAMES = [each.name for each in TREATMENTS if each.name not in OWN]
# What torch.compile needs a C++ compiler for is tested in test_compiled.
LIGHT = [name for name in NAMES if not name.startswith("compile")]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
}


def small_loop(kind: str = "adam", workers: int = 0) -> Loop:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 6 * 6, 5)
    )
    data = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(0, 5, (24,)))
    loader = DataLoader(data, batch_size=8, num_workers=workers)
    return Loop(device=CPU, model=model, optimizers=(OPTIMIZERS[kind](model.parameters()),), loader=loader)


def train(loop: Loop, steps: int) -> list[float]:
    """As a user's script would, on the loop's live objects."""
    losses = []
    model, optimizer = loop.model, loop.optimizers[0]
    assert model is not None
    batches = [batch for _ in range(steps) for batch in loop.loader or ()][:steps]
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        imported_by_name(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def configuration(loop: Loop) -> dict[str, Any]:
    """Everything of a loop and of the process that a treatment may touch, but no trained value."""
    model, optimizer, loader = loop.model, loop.optimizers[0], loop.loader
    assert model is not None
    tensors = dict(model.state_dict(keep_vars=True))
    return {
        "addresses": {name: (tensor.data_ptr(), tensor.stride(), tensor.dtype) for name, tensor in tensors.items()},
        "modules": [sorted(vars(each)) for each in model.modules()],
        "hooks": [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()],
        "compiled": model._compiled_call_impl,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "optimizer": sorted(vars(optimizer)),
        "state": {
            (index, name): (value.device, value.dtype, value.stride())
            for index, held in enumerate(optimizer.state.values())
            for name, value in held.items()
            if isinstance(value, torch.Tensor)
        },
        "loader": {k: v for k, v in vars(loader).items() if isinstance(v, bool | int | str | type(None))},
        "loader_type": type(loader),
        "gc": (gc.isenabled(), gc.get_freeze_count()),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": torch.backends.cudnn.benchmark,
        "tensor": {name: vars(torch.Tensor).get(name) for name in ("item", "tolist", "__float__", "__int__")},
        "clip": imported_by_name.__closure__[0].cell_contents,
    }
