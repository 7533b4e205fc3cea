"""What a graph is filed under beside its batch: modes, flags and numbers that it holds as they were."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from perfdoctor.record.owners import TORCH, file_owner

_PARTS = (
    "another shape, dtype or Python value in the batch came", "another number in a param group came",
    "train/eval was switched", "requires_grad was switched", "autocast or grad mode was switched",
    "a variable or attribute that the step reads was changed outside it (pass it in the batch, as a device tensor)",
    "a number of a torch module was changed (a dropout's p, a norm's momentum)",
)  # fmt: skip


def difference(key: Any, known: dict[Hashable, Any]) -> str:
    """What tells `key` from the graph that is nearest to it."""
    others: list[Any] = list(known)
    nearest = min(others, key=lambda other: sum(a != b for a, b in zip(key, other, strict=True)))
    return ", ".join(text for text, a, b in zip(_PARTS, key, nearest, strict=True) if a != b)


def modes() -> Hashable:
    """torch's modes that change what a step launches."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


def held(value: Any) -> Hashable:
    """A value that a step reads by name, as part of a key: a tensor by its address."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value if isinstance(value, bool | int | float | str) else None


def _is_torchs(module: torch.nn.Module) -> bool:
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return code is not None and file_owner(code.co_filename) == TORCH


def module_numbers(modules: Iterable[torch.nn.Module]) -> Callable[[], Hashable]:
    """A function that reads the floats of torch's own modules (Dropout.p, BatchNorm.momentum): 0.04 us each a call.

    The user's own modules are read by name, as far as their code reads them.
    """
    rows = [
        (vars(module), name)
        for module in modules
        if _is_torchs(module)
        for name, value in vars(module).items()
        if type(value) is float
    ]
    return lambda: tuple([names.get(name) for names, name in rows])
