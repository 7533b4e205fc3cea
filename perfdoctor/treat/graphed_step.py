"""A whole training step as one CUDA graph: hundreds of launches become one.

    def train_step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(model(x), y)
        loss.backward()
        perfdoctor.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step = perfdoctor.graphed_step(train_step, *sample_batch, model=model, optimizer=optimizer)
    for batch in perfdoctor.DevicePrefetcher(loader, "cuda"):
        loss = step(*batch)
        scheduler.step()

The graph repeats kernels, not Python: what the step computes on the host is computed once. `graph_obstacles` lists
what in a step stands against that.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.record import crossings
from perfdoctor.treat import graph_optimizers
from perfdoctor.treat.graph_batch import batch_key
from perfdoctor.treat.graph_capture import GraphMemory, detached
from perfdoctor.treat.graph_key import difference, held, modes, module_numbers
from perfdoctor.treat.graph_parts import parameters_of, static_refusal, step_parts
from perfdoctor.treat.graph_python_state import Place, Reached
from perfdoctor.treat.graph_recording import FrozenStateWarning, Parts, StepGraph, record_step
from perfdoctor.treat.module_tree import ModuleTree
from perfdoctor.treat.snapshot import Models, Optimizers
from perfdoctor.treat.step_function import require_step
from perfdoctor.treat.treatment import Loop, Numerics, Treatment

__all__ = ["GRAPHED_STEP", "FrozenStateWarning", "GraphLimitWarning", "GraphedStep", "graphed_step"]

_MOST_NEW = 8
_MOST_SEEN = 10_000


class GraphLimitWarning(UserWarning):
    """More kinds of batches came than graphs are allowed; the rest run eagerly."""


def graphed_step(
    train_step: Callable[..., Any],
    *sample_batch: Any,
    model: Models = None,
    optimizer: Optimizers = None,
    max_graphs: int = 4,
    warmup: int = 3,
    clone_outputs: bool = True,
) -> GraphedStep:
    """Capture `train_step(*sample_batch)` as a CUDA graph; call the result in its place.

    `model` and `optimizer`: one or several; None takes those that `train_step` reaches. The sample is run `warmup`
    times and captured once; parameters, buffers, gradients, optimizer state, random states and the Python attributes
    of your own are then as before. The optimizer is made capturable in place: `param_groups[i]["lr"]` becomes a device
    tensor that schedulers go on changing, SGD becomes `fused=True`.

    Another shape (or dtype, Python value, train/eval flag, weight decay, ...) is another graph, captured when it comes
    the second time, at most `max_graphs` in all; the rest runs eagerly, the odd last batch for one. Outputs are
    detached copies, safe to keep; with `clone_outputs=False` the next call overwrites them. `.grad` shows the gradients
    of the last call and is overwritten by the next.

    With the emulated CUDA device the step runs eagerly. DistributedDataParallel is refused: its reducer needs eleven
    eager steps on a side stream before graph capture, and its hooks are not ours to put back.

    Raises:
        UsageError: wrong arguments.
        TreatmentRefused: the step cannot be a graph; the message names the line and the change. Nothing has changed.
    """
    require_step(train_step, "graphed_step")
    if isinstance(train_step, GraphedStep):
        raise UsageError("graphed_step got a graphed step: give it the train_step that this one was made from")
    if not isinstance(clone_outputs, bool):
        raise UsageError(f"graphed_step(clone_outputs={clone_outputs!r}): expected True or False")
    if not (_is_count(max_graphs, 1) and _is_count(warmup, 2)):
        raise UsageError(
            f"graphed_step(max_graphs={max_graphs!r}, warmup={warmup!r}): expected whole numbers, at least 1 graph and "
            "2 warm-up steps"
        )
    parts, device = step_parts(train_step, model, optimizer)
    step = GraphedStep(parts, device, max_graphs=max_graphs, warmup=warmup, clone_outputs=clone_outputs)
    try:
        step._capture(sample_batch)
    except BaseException:
        step._unhook()
        for each in parts.optimizers:
            graph_optimizers.let_go(each, step, is_as_before=True)
        raise
    return step


class GraphedStep:
    """What `graphed_step` returns: call it as the step."""

    def __init__(self, parts: Parts, device: torch.device, *, max_graphs: int, warmup: int, clone_outputs: bool):
        self.num_eager = 0  # calls that no graph served
        self.num_replays = 0
        self._parts = parts
        self._device = device
        self._max_graphs = max_graphs
        self._warmup = warmup
        self._clone = clone_outputs
        self._memory = GraphMemory.on(device, parts.generators)
        self._graphs: dict[Hashable, StepGraph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._refused: set[Hashable] = set()
        reached = {id(p) for p in parameters_of(parts.models, parts.optimizers, ())}
        self._loose = [p for p in parts.parameters if id(p) not in reached]
        self._look_over()
        self._frozen: tuple[Place, ...] = ()
        self._addresses: tuple[int, ...] = ()
        self._num_new = 0  # calls in a row that were of a new kind
        self._stale = False
        self._released = False
        self._warned = False
        self._rates = graph_optimizers.LearningRates(())
        self._hooks = [opt.register_load_state_dict_post_hook(_marking(self)) for opt in parts.optimizers]

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return len(self._graphs)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Run one step on `batch`: by replay where there is a graph for it, else eagerly.

        Raises:
            UsageError: something was passed by name.
            TreatmentRefused: a batch that is not on the model's device, or holds what a graph cannot be fed with.
        """
        if named:
            raise UsageError(
                f"a graphed step got {', '.join(named)} by name: pass the batch by position, as the sample was"
            )
        if self._released:
            self.num_eager += 1
            return detached(self._parts.train_step(*batch), copy=False)
        tensors, batch_part = batch_key(batch, self._device)
        self._check_owner()
        self._rates.follow()
        key = self._key(batch_part)
        graph = self._graphs.get(key) or self._admitted(key, batch)
        if graph is None or not graph.ready():
            self.num_eager += 1
            return detached(self._parts.train_step(*batch), copy=False)
        self.num_replays += 1
        self._num_new = 0
        return detached(graph.replay(tensors), copy=self._clone)

    def release(self) -> None:
        """Drop the graphs and give the optimizers their own form back (rate as a number, not capturable).

        Calls after it run the step eagerly. Safe to call twice.
        """
        if self._released:
            return
        self._released = True
        self._forget()
        self._unhook()
        for optimizer in self._parts.optimizers:
            graph_optimizers.let_go(optimizer, self)

    def __getstate__(self) -> Any:
        raise UsageError(
            "a graphed step cannot be copied or pickled: its graphs work on the memory of this model and optimizer. "
            "Call graphed_step again for the copies"
        )

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _capture(self, batch: tuple[Any, ...]) -> None:
        batch_key(batch, self._device)
        graph = record_step(self._parts, batch, self._memory, self._warmup)
        if not self._graphs:
            self._frozen = graph.frozen
        # The key is read now: making the optimizer capturable changed its groups.
        key = self._key(batch_key(batch, self._device)[1])
        self._graphs[key] = graph
        self._rates = graph_optimizers.LearningRates(self._parts.optimizers)
        self._addresses = self._found_addresses()

    def _admitted(self, key: Hashable, batch: tuple[Any, ...]) -> StepGraph | None:
        """A graph for a key that has none, where it may have one."""
        self._seen[key] += 1
        if self._seen[key] == 1:
            self._note_new(key)
        if key in self._refused or self._seen[key] < 2:
            return None
        if len(self._graphs) >= self._max_graphs:
            self._warn_of_limit(key, f"{len(self._graphs)} graphs (max_graphs={self._max_graphs}) are in use", 4)
            return None
        try:
            self._capture(batch)
        except TreatmentRefused as error:
            self._refused.add(key)
            warnings.warn(f"this kind of batch runs eagerly from now on: {error}", GraphLimitWarning, stacklevel=3)
            return None
        return self._graphs.get(key)

    def _note_new(self, key: Hashable) -> None:
        """Where each call brings something new there is never a second time, and so never a graph: say so."""
        self._num_new += 1
        if self._num_new >= _MOST_NEW and self._graphs:
            self._warn_of_limit(key, f"the last {self._num_new} calls were each of a kind that had not come before", 5)
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()

    def _warn_of_limit(self, key: Hashable, what: str, stacklevel: int) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{what}; {difference(key, self._graphs)}. Such steps run eagerly. Pad batches to a few fixed shapes, pass "
            "changing numbers as device tensors, or allow more graphs.",
            GraphLimitWarning,
            stacklevel=stacklevel,
        )

    def _key(self, batch_part: Hashable) -> tuple[Hashable, ...]:
        return (
            batch_part,
            graph_optimizers.frozen_numbers(self._parts.optimizers),
            tuple([m.training for m in self._modules]),
            tuple([p.requires_grad for p in self._parts.parameters]),
            modes(),
            tuple([held(place.read()) for place in self._frozen]),
            self._numbers(),
        )

    def _check_owner(self) -> None:
        """Drop graphs whose modules, parameters or optimizer state were replaced meanwhile; they are captured anew."""
        if not self._tree.is_current or self._num_groups != self._found_groups():
            self._look_over()
            self._stale = True
        if not self._stale and self._addresses == self._found_addresses():
            return
        self._forget()
        for optimizer in self._parts.optimizers:
            graph_optimizers.make_capturable(optimizer)
        self._rates = graph_optimizers.LearningRates(self._parts.optimizers)
        self._addresses = self._found_addresses()

    def _look_over(self) -> None:
        """Take down which modules, parameters and param groups there are now."""
        parts = self._parts
        self._parts = replace(parts, parameters=parameters_of(parts.models, parts.optimizers, self._loose))
        self._tree = ModuleTree(parts.models)
        self._modules = self._tree.modules
        self._numbers = module_numbers(self._modules)
        self._num_groups = self._found_groups()
        for optimizer in parts.optimizers:
            graph_optimizers.hold_form(optimizer, self)

    def _found_groups(self) -> int:
        return sum([len(optimizer.param_groups) for optimizer in self._parts.optimizers])

    def _found_addresses(self) -> tuple[int, ...]:
        return tuple([p.data_ptr() for p in self._parts.parameters])

    def _forget(self) -> None:
        for graph in self._graphs.values():
            graph.captured.release()
        self._graphs.clear()
        self._seen.clear()
        self._refused.clear()
        self._memory.renew()
        self._stale = False


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _marking(step: GraphedStep) -> Callable[[Any], None]:
    held = weakref.ref(step)

    def mark(_: Any) -> None:
        found = held()
        if found is not None:
            found._stale = True

    return mark


def _refuses(loop: Loop) -> str | None:
    if loop.train_step is None:
        return "the whole step is not known as one function: graphed_step needs train_step(*batch)"
    if loop.model is None or not loop.optimizers:
        return "the model or its optimizer is not known"
    if loop.sample_batch is None:
        return "no sample batch is known to capture the step with"
    if crossings.is_emulated():
        return "the emulated CUDA device replays no graphs"
    return static_refusal(loop.train_step, (loop.model,), loop.optimizers, Reached(loop.train_step))


@contextmanager
def _applied(loop: Loop) -> Iterator[Loop]:
    if loop.train_step is None or loop.sample_batch is None:
        raise TreatmentRefused(str(_refuses(loop)))
    step = graphed_step(loop.train_step, *loop.sample_batch, model=loop.model, optimizer=loop.optimizers)
    try:
        yield replace(loop, train_step=step)
    finally:
        step.release()


GRAPHED_STEP = Treatment(
    name="graphed_step",
    cures=("launch-bound",),
    numerics=Numerics(
        rtol=1e-3,
        atol=1e-5,
        why="a capturable optimizer keeps its rate and bias correction in float32 on the device: last bits differ",
    ),
    refuses=_refuses,
    applied=_applied,
    lines=(
        "step = perfdoctor.graphed_step(train_step, *batch, model=model, optimizer=optimizer)",
        "loss = step(*batch)   # in place of train_step(*batch)",
    ),
)
