"""The objects of a running loop that nobody handed over: its model, optimizers, loader, losses, batches.

The model is the first module called whose parameters cover most of what is trained: of a model and its parts that is
the outermost. Trained is what the optimizers hold; in a loop without any, what backward passes reach. Losses are the
tensors on which `.backward()` is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from perfdoctor.treat.snapshot import tensors_in
from perfdoctor.treat.treatment import Loop
from perfdoctor.trial.loader_replay import fresh, note_loaders
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

NUM_BATCHES = 8


class LiveLoop:
    """Hooks from `install` to `remove`. While not `held`, batches go through untouched.

    While `held`, each batch is fetched from the loader as it then is, begun anew by `restart`. `replayed` says which
    the loop gets: one of the few that were kept (the one fetched is thrown away), or the one fetched.
    """

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.listening = False  # keep the losses
        self.requested: Callable[[], None] = _nothing  # called before each batch: where no optimizer steps, a step ends
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
        self._leaves: dict[int, torch.Tensor] = {}  # what the gradients of a loss go to
        self._looking = False
        self._device: torch.device | None = None  # of a loss
        self._handles: list[Any] = []
        self._module_handle: Any = None
        self._patches = Patches()
        self._begins = Patches()

    def prepare(self) -> None:
        """Before the loop begins: note which loader an iterator comes from, and the optimizers. Costs next to nothing.

        (A hook on optimizers cannot be added at the end of a step: torch is iterating over them then.)
        """
        note_loaders(self._begins, self._loaders)
        self._handles.append(register_optimizer_step_post_hook(self._stepped))

    def install(self) -> None:
        """Hook module calls, `.backward()` and the batches of DataLoaders."""
        if not self._begins:
            self.prepare()
        self._looking = True
        self._module_handle = register_module_forward_pre_hook(self._called)
        self._patches.replace(torch.Tensor, "backward", TensorMethod(torch.Tensor.backward, self._backward))
        single: Any = dataloader._BaseDataLoaderIter
        fetch = single.__next__

        def fetched(iterator: Any) -> Any:
            return self._next(iterator, fetch)

        self._patches.replace(single, "__next__", fetched)

    def remove(self) -> None:
        """Take every hook back, and let go of what was seen."""
        self.stop_looking()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.undo()
        self._begins.undo()
        self._source = self._iterator = self._loader = None
        self._cache.clear()
        self.losses.clear()
        self._modules.clear()
        self._optimizers.clear()
        self._leaves.clear()

    def stop_looking(self) -> None:
        """The model is known: its calls need no hook any more (a hook on every module costs, and breaks graphs)."""
        self._looking = False
        if self._module_handle is not None:
            self._module_handle.remove()
            self._module_handle = None

    def loop(self) -> Loop:
        """What was seen so far."""
        trained = {id(p): p for opt in self._optimizers.values() for group in opt.param_groups for p in group["params"]}
        trained = trained or self._leaves or self._trainable()
        model, covered = None, 0
        for module in self._modules.values():
            count = sum(id(p) in trained for p in module.parameters())
            if count > covered:
                model, covered = module, count
        device = self._device_of(trained.values())
        return Loop(device=device, model=model, optimizers=tuple(self._optimizers.values()), loader=self._loader)

    def _trainable(self) -> dict[int, torch.Tensor]:
        """Of the modules called, where no pass on a loss was seen."""
        found = (p for module in self._modules.values() for p in module.parameters() if p.requires_grad)
        return {id(p): p for p in found}

    def _device_of(self, trained: Iterable[torch.Tensor]) -> torch.device:
        """Where the loop computes: what it trains, else a loss, else parts that it calls or its batches."""
        called = (p for module in self._modules.values() for p in module.parameters())
        found = [next((each.device for each in kind), None) for kind in (trained, called, tensors_in(self._cache))]
        devices = (found[0], self._device, *found[1:])
        return next((each for each in devices if each is not None), torch.device("cpu"))

    def leaves(self) -> list[torch.Tensor]:
        """What is trained in a loop without optimizers, as far as backward passes on a loss reached it."""
        return [] if self._optimizers else list(self._leaves.values())

    def restart(self, *, replayed: bool) -> None:
        """Let go of the loader's iterator: the next batch begins a new one, of the loader as it then is."""
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
        if (self.listening or self._looking) and not torch.compiler.is_compiling():
            self._look_at(tensor)
        return original(tensor, *args, **kwargs)

    def _look_at(self, tensor: torch.Tensor) -> None:
        if self.listening and tensor.numel() == 1:
            self.losses.append(tensor.detach().clone().reshape(()))
        if self._looking:
            self._device = tensor.device
            if not self._optimizers:
                self._leaves.update({id(each): each for each in _leaves_of(tensor)})

    def _next(self, iterator: Any, fetch: Any) -> Any:
        if self._busy or not torch.is_grad_enabled():
            return fetch(iterator)
        self.requested()
        if not self.held:
            self._iterator, self._loader = iterator, self._loaders.get(iterator)
            batch = fetch(iterator)
            if len(self._cache) < NUM_BATCHES:
                self._cache.append(batch)
            return batch
        if iterator is not self._iterator and (self._loader is None or self._loaders.get(iterator) is not self._loader):
            return fetch(iterator)  # another loader of the script's
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


def _leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a backward pass adds gradients to."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        waiting += [each for each, _ in node.next_functions]


def _nothing() -> None:
    pass
