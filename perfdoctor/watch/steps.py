"""Where one step ends and the next begins.

A step is one optimizer update. Marks by hand come first, then optimizer hooks, then the batches that were handed out,
then backward passes: all that a loop shows which updates its parameters by hand.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from perfdoctor.watch.clocks import capturing
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.uncompiled import frame_evaluation, keep_uncompiled

# So many batches or backward passes without any optimizer update, and torch's hooks do not reach what updates.
PATIENCE = 16
# And so many passes where nothing has built a torch optimizer. Some loops build theirs after the first batch.
_WITHOUT_OPTIMIZER = 2
# Where one has been built it may still step: gradients are added up over hundreds of passes in some loops.
_BESIDE_OPTIMIZER = 256

HOOKS, BATCHES, BACKWARDS, MARKS = "optimizer hooks", "batches", "backward passes", "session.step()"


class StepDetector:
    """Calls `ended(stamp)` at the end of each step; `stamp` is what `stamp_now()` gave at that moment.

    With several optimizers a new step begins when one that has stepped steps again, so that the first cycle is known
    one update late; from then on the step ends with the last update of the cycle. Where batches are seen, one that
    steps again on the same batch is still in its step: a critic that is updated five times for each update of the
    generator. `restarted()` is called where an optimizer steps for the first time after batches, backward passes or
    the updates of such a critic had been taken for steps.
    """

    def __init__(
        self, stamp_now: Callable[[], Any], ended: Callable[[Any], None], restarted: Callable[[], None] = lambda: None
    ) -> None:
        self._stamp_now = stamp_now
        self._ended = ended
        self._restarted = restarted
        self._handles: list[Any] = []
        self._patches = Patches()
        self.passes: list[Any] = []  # the stamps of backward passes without an update, as far as patience goes
        self._seen: set[int] = set()
        self._cycle: frozenset[int] = frozenset()
        self._last: Any = None
        self._updated = False
        self._num_batches = 0  # since the last update
        self._asked = False  # whether the loop was ever seen to ask for a batch
        self._is_split = False  # steps have ended between two updates on one batch
        self._num_ended = 0
        self._num_updates: Counter[int] = Counter()  # of each optimizer, since the last of them was met
        self._patience = PATIENCE
        self.idle = False  # set once nobody waits for steps any more
        self.source = HOOKS
        self.num_skipped = 0  # updates that a GradScaler left out
        self.optimizers: dict[int, weakref.ref[Any]] = {}

    def install(self) -> None:
        """Register with every torch optimizer there is or will be."""
        import torch
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import register_optimizer_step_post_hook

        compiling = torch.compiler.is_compiling

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            # A step inside a compiled region is traced, not run: the batches count instead, and nothing breaks.
            if not (compiling() or self.idle):
                self.updated(optimizer)

        self._handles.append(register_optimizer_step_post_hook(stepped))
        update: Any = GradScaler.update

        def updated(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = update(scaler, *args, **kwargs)
            if not self.idle:
                self.scaled()
            return result

        self._patches.replace(GradScaler, "update", updated)
        _ENGINE.add(self)

    def remove(self) -> None:
        """Take the hooks back."""
        _ENGINE.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.undo()

    def updated(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        # While a CUDA graph is captured no step runs, and an event recorded here would become part of the graph.
        if self.source == MARKS or capturing():
            return
        key = id(optimizer)
        on_same_batch = self._asked and not self._num_batches
        if key not in self.optimizers:
            self._meet(optimizer)
        if self.source in (BATCHES, BACKWARDS):
            self._restarted()
        _ENGINE.discard(self)
        self.passes.clear()
        self.expect(self._num_batches)
        self.source, self._updated, self._num_batches = HOOKS, True, 0
        several = len(self._seen | self._cycle) > 1
        if key in self._seen and not (several and on_same_batch):  # the cycle ended with the update before this one
            self._cycle = frozenset(self._seen)
            self._end(self._last)
        self._is_split |= on_same_batch and not several
        self._seen.add(key)
        self._num_updates[key] += 1
        self._last = self._stamp_now()
        if self._cycle and self._seen >= self._cycle:
            self._end(self._last)

    def updates_per_step(self) -> list[tuple[Any, float]]:
        """Each optimizer that is still there, and how often it stepped in a step, in the order of first updates."""
        living = [(key, reference()) for key, reference in self.optimizers.items()]
        steps = max(self._num_ended, 1)
        return [(each, self._num_updates[key] / steps) for key, each in living if each is not None]

    def _meet(self, optimizer: Any) -> None:
        """An optimizer steps for the first time: which ones make a step is to be learnt again."""
        self.optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._cycle = frozenset()
        self._num_updates.clear()
        self._num_ended = 0
        if self._is_split:
            self._is_split = False
            self._restarted()

    def scaled(self) -> None:
        """A GradScaler has updated its scale: the end of a step whose update was left out, if no optimizer stepped."""
        if self.source == HOOKS and not self._updated:
            self.num_skipped += 1
            self._end(self._stamp_now())
        self._updated = False

    def expect(self, micro_batches: int) -> None:
        """An update may take so many batches: gradients are accumulated over more of them than patience lasts."""
        self._patience = max(self._patience, 2 * micro_batches)

    def requested(self) -> None:
        """The loop asks for its next batch."""
        if self.source == MARKS or self.idle:
            return
        self._num_batches += 1
        self._asked = True
        if self.source == BATCHES:
            self._end(self._stamp_now())
        elif self.source == HOOKS and self._num_batches > self._patience:
            self.source = BATCHES

    def passed(self) -> None:
        """A backward pass has ended, and no optimizer has stepped so far."""
        if self.source == BACKWARDS:
            self._end(self._stamp_now())
        elif self.source == HOOKS and not self.optimizers:
            self.passes.append(self._stamp_now())
            if len(self.passes) > (_BESIDE_OPTIMIZER if _optimizer_built() else _WITHOUT_OPTIMIZER):
                self._give_up_updates()

    def _give_up_updates(self) -> None:
        """Batches come before passes: a loop may make several passes over each."""
        if self._num_batches > 1:
            self.source = BATCHES
        elif not self._num_batches or len(self.passes) > PATIENCE:
            self.source = BACKWARDS

    def mark(self) -> None:
        """The user says that a step ends here."""
        self.source = MARKS
        self._end(self._stamp_now())

    def _end(self, stamp: Any) -> None:
        self._seen.clear()
        self._num_ended += 1
        self._ended(stamp)


class _Engine:
    """Tells the detectors that wait for a first update of each backward pass. All go through one name.

    One wrapper for all of them: of two, the inner one could not be taken away first.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._detectors: list[StepDetector] = []

    def add(self, detector: StepDetector) -> None:
        self._detectors.append(detector)
        if self._patches:
            return
        torch: Any = sys.modules["torch"]
        run: Any = torch.autograd._engine_run_backward
        frames = frame_evaluation()
        compiling = torch.compiler.is_compiling

        @functools.wraps(run)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            # torch.compile traces passes while it compiles; reentrant checkpointing runs a pass inside a pass.
            if compiling() or torch._C._current_graph_task_id() != -1:
                return result
            # A compiled step breaks at backward(), and what that calls would be compiled in its turn: not this.
            compiler = frames.set_eval_frame(None)
            try:
                for each in () if capturing() else tuple(self._detectors):
                    if not each.idle:
                        each.passed()
            finally:
                frames.set_eval_frame(compiler)
            return result

        wrapper: Any = counted
        if keep_uncompiled(wrapper.__code__):  # else the passes are not counted
            self._patches.replace(torch.autograd, "_engine_run_backward", counted)

    def discard(self, detector: StepDetector) -> None:
        """Safe to call twice."""
        self._detectors = [each for each in self._detectors if each is not detector]
        if not self._detectors:
            self._patches.undo()


_ENGINE = _Engine()


def _optimizer_built() -> bool:
    """Whether this process has built an optimizer whose steps the hooks would see: torch marks the class then."""
    torch: Any = sys.modules["torch"]
    kinds = [torch.optim.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


def now() -> int:
    """The clock of every mark: Unix time in ns, as in CUDA-only recordings."""
    return time.time_ns()
