"""The objects of a running loop that nobody handed over: its model, optimizers, loader, losses, batches.

The model is the first module called whose parameters cover most of what is trained: of a model and its parts that is
the outermost. Trained is what the optimizers hold; in a loop without any, what backward passes reach. Losses are the
tensors on which `.backward()` is called. Of several loaders it is the one whose batches take longest to fetch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from perfdoctor.treat.switches_precision import autocasts
from perfdoctor.treat.treatment import Loop
from perfdoctor.trial.loader_places import LoaderPlace, LoaderPlaces, LoaderUse
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

NUM_BATCHES = 8
_COSTLIER = 1.25  # times as long, and another loader than the first is the loop's


class LiveLoop:
    """Hooks from `install` to `remove`. While not `held`, batches go through untouched.

    While `held`, each batch is fetched from its loader as that then is, begun anew by `restart`. `replayed` says which
    the loop gets: one of the few that were kept (the one fetched is thrown away), or the one fetched. A loader that the
    loop begins anew, or makes anew, is begun anew behind it too, except while losses are kept: there the loop may be
    anywhere in its epoch, and every run is to get the same batches. A batch that an epoch was left with before it was
    trained on is given again there.
    """

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.listening = False  # keep the losses
        self.requested: Callable[[], None] = _nothing  # called before each batch: where no optimizer steps, a step ends
        self._replayed = True
        self._places = LoaderPlaces(NUM_BATCHES)
        self._modules: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._leaves: dict[int, torch.Tensor] = {}  # what the gradients of a loss go to
        self._looking = False
        self._autocast = False  # a module was called under it
        self._device: torch.device | None = None  # of a loss
        self._handles: list[Any] = []
        self._module_handle: Any = None
        self._patches = Patches()
        self._begins = Patches()

    @property
    def held(self) -> bool:
        """Whether batches come from here: the same few in every run."""
        return self._places.settled

    @held.setter
    def held(self, value: bool) -> None:
        self._places.settled = value

    def prepare(self) -> None:
        """Before the loop begins: note which loader an iterator comes from, and the optimizers. Costs next to nothing.

        (A hook on optimizers cannot be added at the end of a step: torch is iterating over them then.)
        """
        self._places.install(self._begins)
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
        self._places.clear()
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
        place = self._place()
        return Loop(
            device=device,
            model=model,
            optimizers=tuple(self._optimizers.values()),
            loader=None if place is None else place.loader,
            fetch_cpu_share=None if place is None else place.fetches.share,
            autocast=self._autocast,
        )

    def loader_use(self) -> LoaderUse:
        """Of the loader in `loop()`, so far."""
        place = self._place()
        if place is None:
            return LoaderUse()
        return LoaderUse(loader=place.loader, epoch=place.epoch, made_anew=place.made_anew)

    def _place(self) -> LoaderPlace | None:
        """The one that costs most; the first where none costs clearly more."""
        asked = [place for place in self._places.places if place.fetch_ns]
        costliest = max(asked, key=lambda place: place.fetch_ns, default=None)
        if costliest is None:
            return None
        return costliest if costliest.fetch_ns > _COSTLIER * asked[0].fetch_ns else asked[0]

    def _trainable(self) -> dict[int, torch.Tensor]:
        """Of the modules called, where no pass on a loss was seen."""
        found = (p for module in self._modules.values() for p in module.parameters() if p.requires_grad)
        return {id(p): p for p in found}

    def _device_of(self, trained: Iterable[torch.Tensor]) -> torch.device:
        """Where the loop computes: what it trains, else a loss, else parts that it calls or its batches."""
        called = (p for module in self._modules.values() for p in module.parameters())
        given = (each for place in self._places.places for batch in place.batches.kept for each in batch.tensors())
        found = [next((each.device for each in kind), None) for kind in (trained, called, given)]
        devices = (found[0], self._device, *found[1:])
        return next((each for each in devices if each is not None), torch.device("cpu"))

    def leaves(self) -> list[torch.Tensor]:
        """What is trained in a loop without optimizers, as far as backward passes on a loss reached it."""
        return [] if self._optimizers else list(self._leaves.values())

    def restart(self, *, replayed: bool) -> None:
        """Let go of the loaders' iterators: the next batch begins a new one, of the loader as it then is."""
        self._replayed = replayed
        for place in self._places.places:
            place.end()
            place.batches.restart()

    def values(self) -> list[float]:
        """The losses kept, as numbers; waits for the device."""
        kept, self.losses = self.losses, []
        return [float(value) for value in torch.stack([loss.double() for loss in kept]).tolist()] if kept else []

    def _called(self, module: torch.nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._modules.setdefault(id(module), module)
            self._autocast = self._autocast or autocasts()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._optimizers.setdefault(id(optimizer), optimizer)
            self._places.num_steps += optimizer is next(iter(self._optimizers.values()))
            self._places.use()

    def _backward(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (self.listening or self._looking) and not torch.compiler.is_compiling():
            self._look_at(tensor)
        return original(tensor, *args, **kwargs)

    def _look_at(self, tensor: torch.Tensor) -> None:
        self._places.use()
        if self.listening and tensor.numel() == 1:
            self.losses.append(tensor.detach().clone().reshape(()))
        if self._looking:
            self._device = tensor.device
            if not self._optimizers:
                self._leaves.update({id(each): each for each in _leaves_of(tensor)})

    def _next(self, iterator: Any, fetch: Any) -> Any:
        if self._places.nested or not torch.is_grad_enabled():
            return fetch(iterator)
        self.requested()
        place = self._places.asked(iterator)
        again = self.listening and place.has_left_unused
        self._places.nested = True
        try:
            batch = place.unused if again else self._fetched(place, iterator, lambda: fetch(iterator))
        finally:
            self._places.nested = False
        place.unused = batch if self.listening else None
        if self.held and self._replayed:
            return place.batches.take(batch, again=again)
        if not self.held and not place.batches.full:
            place.batches.keep(batch)
        return batch

    def _fetched(self, place: LoaderPlace, iterator: Any, fetch: Callable[[], Any]) -> Any:
        if self.held:
            if not self.listening:
                place.renew()
            return place.fetched(fetch)
        began = time.perf_counter_ns()
        batch = place.fetches.fetched(iterator, fetch)
        place.fetch_ns += time.perf_counter_ns() - began
        return batch


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
