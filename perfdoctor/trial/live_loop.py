"""The objects of a running loop that nobody handed over: its model, optimizers, loader, losses, batches.

The model is the first module called whose parameters cover most of what the optimizers hold: of a model and its parts
that is the outermost. Losses are the tensors on which `.backward()` is called.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, dataloader

from perfdoctor.treat.treatment import Loop
from perfdoctor.trial.loader_replay import fresh
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

NUM_BATCHES = 8


class LiveLoop:
    """Hooks from `install` to `remove`. While not `held`, batches go through untouched."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.listening = False  # keep the losses
        self.held = False  # batches come from here: the same few in every run
        self._replayed = True
        self._loader: Any = None
        self._iterator: Any = None
        self._source: Iterator[Any] | None = None
        self._cache: list[Any] = []
        self._position = 0
        self._busy = False
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._modules: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._handles: list[Any] = []
        self._module_handle: Any = None
        self._patches = Patches()

    def install(self) -> None:
        """Hook module calls, optimizer steps, `.backward()` and DataLoaders."""
        self._module_handle = register_module_forward_pre_hook(self._called)
        self._handles.append(register_optimizer_step_post_hook(self._stepped))
        self._patches.replace(torch.Tensor, "backward", TensorMethod(torch.Tensor.backward, self._backward))
        single: Any = dataloader._BaseDataLoaderIter
        fetch, begin = single.__next__, DataLoader.__iter__

        def fetched(iterator: Any) -> Any:
            return self._next(iterator, fetch)

        def begun(loader: Any) -> Any:
            iterator = begin(loader)
            self._loaders[iterator] = loader
            return iterator

        self._patches.replace(single, "__next__", fetched)
        self._patches.replace(DataLoader, "__iter__", begun)

    def remove(self) -> None:
        """Take every hook back, and let go of what was seen."""
        self.stop_looking()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.undo()
        self._source = self._iterator = self._loader = None
        self._cache.clear()
        self.losses.clear()
        self._modules.clear()
        self._optimizers.clear()

    def stop_looking(self) -> None:
        """The model is known: its calls need no hook any more (a hook on every module costs, and breaks graphs)."""
        if self._module_handle is not None:
            self._module_handle.remove()
            self._module_handle = None

    def loop(self) -> Loop:
        """What was seen so far."""
        held = {id(p) for opt in self._optimizers.values() for group in opt.param_groups for p in group["params"]}
        model, covered = None, 0
        for module in self._modules.values():
            count = sum(id(p) in held for p in module.parameters())
            if count > covered:
                model, covered = module, count
        parameter = next(
            (p for opt in self._optimizers.values() for group in opt.param_groups for p in group["params"]), None
        )
        device = torch.device("cpu") if parameter is None else parameter.device
        return Loop(device=device, model=model, optimizers=tuple(self._optimizers.values()), loader=self._loader)

    def rewind(self) -> None:
        """The next batch is the first of the kept ones again."""
        self._position = 0

    def restart(self, *, replayed: bool) -> None:
        """Begin the loader anew, as a treatment may have changed it; `replayed` goes back to the kept batches."""
        self._replayed = replayed
        self._source = None
        self._position = 0

    def values(self) -> list[float]:
        """The losses kept, as numbers; waits for the device."""
        kept, self.losses = self.losses, []
        return [float(value) for value in torch.stack([loss.double() for loss in kept]).tolist()] if kept else []

    def _called(self, module: torch.nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._modules.setdefault(id(module), module)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._optimizers.setdefault(id(optimizer), optimizer)

    def _backward(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.listening and not torch.compiler.is_compiling() and tensor.numel() == 1:
            self.losses.append(tensor.detach().clone().reshape(()))
        return original(tensor, *args, **kwargs)

    def _next(self, iterator: Any, fetch: Any) -> Any:
        if self._busy or not _trains():
            return fetch(iterator)
        if not self.held:
            self._iterator, self._loader = iterator, self._loaders.get(iterator)
            batch = fetch(iterator)
            if len(self._cache) < NUM_BATCHES:
                self._cache.append(batch)
            return batch
        if iterator is not self._iterator:
            return fetch(iterator)  # what a treatment's own loader fetches from
        self._busy = True
        try:
            batch = self._sourced(iterator, fetch)
        finally:
            self._busy = False
        if not self._replayed or not self._cache:
            return batch
        self._position += 1
        return fresh(self._cache[(self._position - 1) % len(self._cache)])

    def _sourced(self, iterator: Any, fetch: Any) -> Any:
        """A batch from the loader as it now is, begun again where it ends."""
        if self._source is None:
            if self._loader is None:
                return fetch(iterator)
            self._source = iter(self._loader)
        try:
            return next(self._source)
        except StopIteration:
            self._source = iter(self._loader)
            return next(self._source)


def _trains() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())
