"""What a training step changes, kept aside and put back bit for bit: tensors in place, so addresses stay.

    before = Snapshot.take(model, optimizer)
    try:
        train_step(*batch)
    finally:
        before.restore()

Taken: parameters, gradients, buffers, train/eval flags, optimizer state and param groups, and the random states of
Python, numpy, torch on the CPU and on CUDA. Python attributes of the user's own are not.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from perfdoctor.errors import UsageError
from perfdoctor.record import crossings

# Copies stay on the device while they leave this share of what is free there to the step itself.
_DEVICE_SHARE = 0.4
Models = torch.nn.Module | torch.Tensor | Iterable[torch.nn.Module | torch.Tensor] | None
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def as_tuple(value: Any, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """One thing, several, or None (none), as a tuple.

    Raises UsageError for anything of another kind.
    """
    if value is None:
        return ()
    kinds = kind if isinstance(kind, tuple) else (kind,)
    several = tuple(value) if isinstance(value, Iterable) and not isinstance(value, kind) else (value,)
    for each in several:
        if not isinstance(each, kind):
            names = " or ".join(f"{one.__module__}.{one.__qualname__}" for one in kinds)
            raise UsageError(f"expected a {names}, one or several; got a {type(each).__name__}")
    return several


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor and a copy of its values. `memory` shares the tensor's storage, also where `.data` is swapped later."""

    tensor: torch.Tensor
    memory: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, keep: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        memory = tensor.detach()
        return cls(tensor, memory, keep(memory))

    def put_back(self) -> None:
        """The values into the memory they came from, and the tensor back onto that memory."""
        if not same_memory(self.tensor, self.memory):
            self.tensor.data = self.memory
        if self.values.shape != self.memory.shape:  # somebody resized the storage
            self.memory.resize_(self.values.shape)
        self.memory.copy_(self.values)


@dataclass(frozen=True, slots=True)
class _KeptParameter:
    kept: KeptTensor
    grad: KeptTensor | None
    requires_grad: bool

    def put_back(self) -> None:
        tensor = self.kept.tensor
        self.kept.put_back()
        tensor.grad = None if self.grad is None else self.grad.tensor
        if self.grad is not None:
            self.grad.put_back()
        if tensor.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _KeptModule:
    module: torch.nn.Module
    training: bool
    buffers: dict[str, KeptTensor | None]

    def put_back(self) -> None:
        self.module.training = self.training
        held = self.module._buffers
        for name in [name for name in held if name not in self.buffers]:
            del held[name]
        for name, kept in self.buffers.items():
            held[name] = None if kept is None else kept.tensor
            if kept is not None:
                kept.put_back()


@dataclass(frozen=True, slots=True)
class KeptOptimizer:
    """State and param groups of one optimizer: tensors kept in place, everything else by reference."""

    optimizer: torch.optim.Optimizer
    state: dict[Any, dict[str, Any]]
    groups: tuple[tuple[dict[str, Any], dict[str, Any]], ...]  # the group itself, and what it held
    tensors: tuple[KeptTensor, ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, keep: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        state = {p: _copied(held) for p, held in optimizer.state.items()}
        groups = tuple((group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups)
        found = [*tensors_in(list(state.values())), *tensors_in([{**held, "params": ()} for _, held in groups])]
        unique = {id(tensor): tensor for tensor in found}
        return cls(optimizer, state, groups, tuple(KeptTensor.of(tensor, keep) for tensor in unique.values()))

    def put_back(self) -> None:
        """State tensors that came since are dropped, those that went are back, all with their values."""
        state = self.optimizer.state
        state.clear()
        state.update({p: _copied(held) for p, held in self.state.items()})
        for group, held in self.groups:
            group.clear()
            group.update({**held, "params": list(held["params"])})
        self.optimizer.param_groups[:] = [group for group, _ in self.groups]
        for kept in self.tensors:
            kept.put_back()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A training step's state at one moment. `restore` may be called any number of times."""

    parameters: tuple[_KeptParameter, ...]
    modules: tuple[_KeptModule, ...]
    optimizers: tuple[KeptOptimizer, ...]
    random: RandomState

    @classmethod
    def take(cls, models: Models, optimizers: Optimizers = (), *, generators: Iterable[Any] = ()) -> Snapshot:
        """Copy the state of modules (or bare parameters) and optimizers, any number of each, and random states.

        Copies lie on the tensors' own device where they leave room for a step, else on the host. `generators`: those
        beside the default ones: torch's, numpy's or Python's own. Waits for the device only where the host has to hold
        the copies.
        """
        roots = as_tuple(models, (torch.nn.Module, torch.Tensor))
        opts = as_tuple(optimizers, torch.optim.Optimizer)
        modules = _unique(m for root in roots if isinstance(root, torch.nn.Module) for m in root.modules())
        loose = [root for root in roots if isinstance(root, torch.Tensor)]
        held = [p for m in modules for p in m._parameters.values() if p is not None]
        stepped = [p for opt in opts for group in opt.param_groups for p in group["params"]]
        parameters = _unique([*loose, *held, *stepped])
        keep = _keeper(parameters, modules, opts)
        with torch.no_grad():
            return cls(
                tuple(_kept_parameter(p, keep) for p in parameters),
                tuple(_kept_module(m, keep) for m in modules),
                tuple(KeptOptimizer.of(opt, keep) for opt in opts),
                RandomState.take(generators),
            )

    def restore(self) -> None:
        """Put everything back: values in place, bindings as they were, new state dropped, random states rewound."""
        with torch.no_grad():
            self.restore_tensors()
            for optimizer in self.optimizers:
                optimizer.put_back()
        self.random.restore()

    def restore_tensors(self) -> None:
        """Parameters, gradients and modules alone."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.put_back()
            for module in self.modules:
                module.put_back()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random states of Python, numpy (where it is loaded), torch, CUDA (where it is in use) and `generators`."""

    python: object
    numpy: Any
    host: torch.Tensor
    device: tuple[torch.Tensor, ...]
    generators: tuple[tuple[Any, Any], ...]

    @classmethod
    def take(cls, generators: Iterable[Any] = ()) -> RandomState:
        numpy = sys.modules.get("numpy")
        return cls(
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if _cuda_in_use() else (),
            tuple((generator, _state_of(generator)) for generator in generators),
        )

    def restore(self) -> None:
        random.setstate(self.python)  # type: ignore[arg-type]
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device and _cuda_in_use():
            torch.cuda.set_rng_state_all(self.device)
        for generator, state in self.generators:
            _set_state(generator, state)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    numpys = getattr(generator, "bit_generator", None)
    return copy.deepcopy(numpys.state) if numpys is not None else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie over the same elements of the same memory."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype


def _cuda_in_use() -> bool:
    return crossings.is_emulated() or bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _unique(found: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in found}.values())


def _kept_parameter(p: torch.Tensor, keep: Callable[[torch.Tensor], torch.Tensor]) -> _KeptParameter:
    grad = p.grad if p.is_leaf else None
    return _KeptParameter(KeptTensor.of(p, keep), None if grad is None else KeptTensor.of(grad, keep), p.requires_grad)


def _kept_module(module: torch.nn.Module, keep: Callable[[torch.Tensor], torch.Tensor]) -> _KeptModule:
    buffers = {name: None if b is None else KeptTensor.of(b, keep) for name, b in module._buffers.items()}
    return _KeptModule(module, module.training, buffers)


def _copied(value: Any) -> Any:
    """A copy of nested dicts and lists; what they hold is shared."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _keeper(
    parameters: Sequence[torch.Tensor], modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Callable[[torch.Tensor], torch.Tensor]:
    if not torch.cuda.is_available() or crossings.is_emulated():
        return torch.clone
    grads = [p.grad for p in parameters if p.is_leaf and p.grad is not None]
    buffers = [b for m in modules for b in m._buffers.values() if b is not None]
    state = [tensor for opt in optimizers for tensor in tensors_in(list(opt.state.values()))]
    needed = sum(t.numel() * t.element_size() for t in (*parameters, *grads, *buffers, *state) if t.is_cuda)
    if not needed:
        return torch.clone
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.clone if needed < _DEVICE_SHARE * free else _to_host


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.is_cuda else tensor.clone()
