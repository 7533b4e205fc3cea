"""What happens rarely in a training run, and takes long when it does: seen by hooks that cost nothing in between."""

from __future__ import annotations

import functools
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Site
from perfdoctor.watch.batches import BatchWaits
from perfdoctor.watch.clocks import cuda_active
from perfdoctor.watch.garbage import CollectionHook
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.pauses import Pause

CHECKPOINT, EVALUATION, EPOCH_END = "checkpoint", "evaluation", "epoch end"
COLLECTION, RECOMPILATION, ALLOCATION = "garbage collection", "recompilation", "memory from the driver"
DATA_WAIT, UNKNOWN = "data wait", "not known"

# Young collections take microseconds and come every step: none of them makes an outlier.
_LEAST_COLLECTION_NS = 200_000
# Reading the allocator's counters takes about 0.1 ms: only of steps that took long, and now and then.
_ALLOCATOR_EVERY, _LONG = 64, 1.5
# Functions that write checkpoints, where the loop has imported their module.
_WRITERS = (("torch", "save"), ("torch.distributed.checkpoint", "save"), ("safetensors.torch", "save_file"))


class Happening(NamedTuple):
    """Something rare, on the host's Unix clock. `start_ns == end_ns`: only the step is known, not how long it took."""

    cause: str
    start_ns: int
    end_ns: int
    site: Site | None = None


class Happenings:
    """Everything rare that happened, in the order of its end, and what each step waited for data."""

    def __init__(self) -> None:
        self.rows: list[Happening] = []
        self._pauses: list[Pause] = []
        self.batches = BatchWaits(self._pauses, lambda samples, waited: None)
        self._log = HitLog()
        self._collections = CollectionHook(self._log, self._pauses)
        self._patches = Patches()
        self._data_ns = array("q")
        self._writing = False
        self._evaluating_ns = 0  # when model.eval() was called
        self._epoch_ns = 0  # when a DataLoader was iterated anew, until its first batch is there
        self._compilations = 0
        self._allocations = 0
        self._last_ns = 0
        self._usual_ns = 0.0

    def install(self, requested: Callable[[], None]) -> None:
        """Begin. `requested` is called before each batch that is trained on, where DataLoaders give it."""
        import torch
        from torch.utils.data import DataLoader

        self.batches.on_request(requested)
        self.batches.patch_loaders()
        self._collections.install()
        for module_name, function in _WRITERS:
            if (module := sys.modules.get(module_name)) is not None and hasattr(module, function):
                self._patches.replace(module, function, self.as_checkpoint(getattr(module, function)))
        self._patches.replace(torch.nn.Module, "train", self._mode(torch.nn.Module.train))
        self._patches.replace(DataLoader, "__iter__", self._iterated(DataLoader.__iter__))
        self._compilations, self._last_ns = _num_compilations(), time.time_ns()

    def remove(self) -> None:
        """Put everything back."""
        self._patches.undo()
        self._collections.remove()
        self.batches.remove()

    @property
    def data_ns(self) -> NDArray[np.int64]:
        """Host ns that each step waited for its batches. Shape (num_steps,)."""
        return np.array(self._data_ns, np.int64)

    def step_ended(self, now_ns: int) -> None:
        """Sort what the hooks saw since the last step."""
        data_ns = self._data_ns
        data_ns.append(self._sorted_pauses() if self._pauses else 0)
        self._evaluating_ns = 0  # a model left in eval() is no evaluation
        compilations = _num_compilations()
        if compilations != self._compilations:
            self._compilations = compilations
            self.rows.append(Happening(RECOMPILATION, now_ns - 1, now_ns - 1))
        length = now_ns - self._last_ns
        self._last_ns = now_ns
        if length > _LONG * self._usual_ns or not len(data_ns) % _ALLOCATOR_EVERY:
            self._ask_allocator(now_ns)
        self._usual_ns += (length - self._usual_ns) / min(len(data_ns), 50)

    def _sorted_pauses(self) -> int:
        """Turn pauses into happenings; returns the ns waited for training batches."""
        waited, evaluated = 0, (0, 0)
        for pause in self._pauses:
            if pause.name == "data":
                waited += pause.end_ns - pause.start_ns
                if self._epoch_ns and self._epoch_ns < pause.end_ns:  # earlier ones are of the epoch that has ended
                    self.rows.append(Happening(EPOCH_END, self._epoch_ns, pause.end_ns))
                    self._epoch_ns = 0
                if evaluated[0]:  # what comes after its last batch is still the evaluation
                    self.rows.append(Happening(EVALUATION, evaluated[0], max(evaluated[1], pause.start_ns)))
                    evaluated = (0, 0)
            elif pause.name == "eval-data":
                evaluated = (evaluated[0] or pause.start_ns, pause.end_ns)
            elif pause.name.startswith("gc:") and pause.end_ns - pause.start_ns >= _LEAST_COLLECTION_NS:
                self.rows.append(Happening(COLLECTION, pause.start_ns, pause.end_ns))
        if evaluated[0]:
            self.rows.append(Happening(EVALUATION, *evaluated))
        self._pauses.clear()
        self._log.hits.clear()
        return waited

    def _ask_allocator(self, now_ns: int) -> None:
        if not cuda_active():
            return
        stats: Any = sys.modules["torch"].cuda.memory_stats()
        allocations = int(stats.get("num_device_alloc", 0)) + int(stats.get("num_alloc_retries", 0))
        if allocations > self._allocations and self._allocations:
            self.rows.append(Happening(ALLOCATION, now_ns - 1, now_ns - 1))
        self._allocations = allocations

    def epoch_ended(self) -> None:
        """An epoch is over: until the first batch of the next one, what runs is its end."""
        self._epoch_ns = self._epoch_ns or time.time_ns()

    def as_evaluation(self, run: Any) -> Any:
        """`run`, each of whose calls is an evaluation: where a library says so itself, nothing is guessed."""

        @functools.wraps(run)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            start, switched, seen = time.time_ns(), self._evaluating_ns, len(self._pauses)
            try:
                return run(*args, **kwargs)
            finally:
                self.rows.append(Happening(EVALUATION, start, time.time_ns()))
                self._evaluating_ns = switched
                self._pauses[seen:] = [pause for pause in self._pauses[seen:] if pause.name != "eval-data"]

        return evaluated

    def as_checkpoint(self, write: Any) -> Any:
        """`write`, each of whose calls writes a checkpoint; what it calls in turn is part of the same one."""

        @functools.wraps(write)
        def written(*args: Any, **kwargs: Any) -> Any:
            if self._writing:
                return write(*args, **kwargs)
            self._writing, start = True, time.time_ns()
            try:
                return write(*args, **kwargs)
            finally:
                self._writing = False
                site = self._log.sites.sites[self._log.sites.at(sys._getframe(1))]
                self.rows.append(Happening(CHECKPOINT, start, time.time_ns(), site))

        return written

    def _mode(self, train: Any) -> Any:
        @functools.wraps(train)
        def switched(module: Any, mode: bool = True) -> Any:
            if not mode and not self._evaluating_ns:
                self._evaluating_ns = time.time_ns()
            elif mode and self._evaluating_ns:
                self.rows.append(Happening(EVALUATION, self._evaluating_ns, time.time_ns()))
                self._evaluating_ns = 0
            return train(module, mode)

        return switched

    def _iterated(self, iterate: Any) -> Any:
        @functools.wraps(iterate)
        def iterated(loader: Any) -> Any:
            if sys.modules["torch"].is_grad_enabled() and not self._evaluating_ns:
                self.epoch_ended()
            return iterate(loader)

        return iterated


def _num_compilations() -> int:
    # Only where the loop itself has imported it: importing torch._dynamo takes seconds.
    module: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(module, "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0
