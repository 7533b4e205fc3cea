"""Launch cost: the model's forward and backward as CUDA graphs, while on; the loss, the optimizer, the rest as it is.

The loop is a script, so no graph of its whole step can be captured from outside; its model can. While observed, the
model's calls are noted; if each is alike and followed by one backward, both are captured between two steps, and what
the graphs give is compared bit for bit with the model's own results and gradients on the trial's batches. A call that
is not like those observed runs as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from perfdoctor.errors import TreatmentRefused
from perfdoctor.record.sync_kinds import BLOCKING_COPY, HOST_SYNC, PAGEABLE_COPY
from perfdoctor.treat.graph_batch import batch_key, map_tensors
from perfdoctor.treat.graph_failure import failure
from perfdoctor.treat.graph_python_state import PythonState
from perfdoctor.treat.graph_recording import own_copy
from perfdoctor.trial.call_hooks import CallHooks
from perfdoctor.trial.live_model import graph_refusal, model_chain
from perfdoctor.trial.model_graph import AutocastState, Inputs, ModelGraph, ModelState
from perfdoctor.trial.neutraliser import Mode, Neutraliser
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.sync_guard import allow_sync, sync_guard

GRAPH = Mode(
    name="graph", text="the model's forward and backward as CUDA graphs, the loss and the optimizer as they are"
)
_ENDLESS = 1e18
_STALLS = (HOST_SYNC, PAGEABLE_COPY, BLOCKING_COPY)


@dataclass(slots=True)
class _Call:
    """One call of the model while observed; `backwards` holds the autograd runs that came through its outputs."""

    inputs: Inputs
    key: Hashable
    autocast: AutocastState
    backwards: set[int]


class NeutralGraph(Neutraliser):
    """See the module's text."""

    modes = (GRAPH,)

    def __init__(self, optimizers: Sequence[Any], batch: Callable[[], int] = lambda: 0) -> None:
        """`batch()`: which of the replayed batches the step trains on."""
        super().__init__()
        self.num_replays = self.num_others = 0  # calls answered, and calls not like those observed, while on
        self._optimizers, self._batch = tuple(optimizers), batch
        self._patches = Patches()
        self._hooks: CallHooks | None = None
        self._chain: list[Any] = []  # modules one of which is the model; `_forwards` goes by their ids: held
        self._forwards: dict[int, Callable[..., Any]] = {}  # by module id
        self._model: Any = None
        self._calls: dict[int, _Call] = {}  # the last one on each batch
        self._last: _Call | None = None
        self._problem = ""
        self._adds = False  # gradients are added to what is there
        self._depth = 0
        self._graph: ModelGraph | None = None
        self._key: Hashable = None
        self._moved = False  # parameters lie elsewhere than the graphs expect

    def install(self, hooks: CallHooks) -> None:
        """Stand in front of the forward of every module that may be the model: of its class, as a deep copy of the
        model would take a function that hangs on the model along, and call the wrong one."""

        self._hooks = hooks
        chain = model_chain(self._optimizers)
        self._problem = graph_refusal(chain[0]) if chain else "no module that holds the optimizer's parameters is alive"
        if self._problem:
            return
        self._chain = chain
        for kind in {type(module) for module in chain}:
            original: Any = kind.forward
            self._forwards.update({id(module): original for module in chain if type(module) is kind})
            self._patches.replace(kind, "forward", self._standing_for(original))

    def _standing_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        compiling = torch.compiler.is_compiling

        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._forwards or compiling() or self._depth:
                return original(module, *args, **kwargs)
            return self._call(module, original, (args, kwargs))

        return forward

    def _call(self, module: Any, original: Callable[..., Any], inputs: Inputs) -> Any:
        if self.observing:
            if self._model is None:
                self._model = module  # the outermost is called first
            if module is self._model:
                return self._observe(original, inputs)
        elif module is self._model and self.answering and self._graph is not None and self._fits(inputs):
            self.num_replays += 1
            return self._graph.call(inputs)
        return original(module, *inputs[0], **inputs[1])

    # ---- while observed

    def _observe(self, original: Callable[..., Any], inputs: Inputs) -> Any:
        self._depth += 1
        try:
            result = original(self._model, *inputs[0], **inputs[1])
        finally:
            self._depth -= 1
        if not torch.is_grad_enabled() or self._problem:
            return result
        try:
            call = _Call(inputs, self._key_of(inputs), AutocastState.now(), set())
            self._note(call, result)
        except TreatmentRefused as error:
            self._problem = str(error)
        return result

    def _note(self, call: _Call, result: Any) -> None:
        last, self._last = self._last, call
        if last is not None and len(last.backwards) != 1:
            self._problem = "its calls of the model and of backward do not take turns, one for one"
        elif last is not None and last.key != call.key:
            self._problem = (
                "the model is called with other shapes, modes or Python values from step to step: each kind would need "
                "a graph of its own (pad to a few fixed shapes)"
            )
        self.num_calls += 1
        self._calls[self._batch()] = call

        def listen(tensor: Any, _: str) -> Any:
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._passed, call))
            return tensor

        map_tensors(result, listen, "the model's result", [])

    def _passed(self, call: _Call, _: Any) -> None:
        """A gradient came to an output of `call`."""
        if torch.is_grad_enabled():
            self._problem = "it takes gradients of gradients, which a graph's backward cannot give"
        if not call.backwards:
            self._adds |= any(p.grad is not None for p in self._model.parameters())
        call.backwards.add(torch._C._current_graph_task_id())

    def _key_of(self, inputs: Inputs) -> Hashable:
        device = next(iter(self._model.parameters())).device
        _, key = batch_key(inputs, device)
        return key, AutocastState.now(), tuple([module.training for module in self._model.modules()])

    # ---- between two steps

    def refusal(self) -> str:
        if self._problem:
            return self._problem
        if self._last is None:
            return "the model is not called as a whole in Python: its parts are, or code that is compiled"
        if len(self._last.backwards) != 1:
            return "its calls of the model and of backward do not take turns, one for one"
        try:
            with self._undisturbed():
                return self._captured(self._last)
        except Exception as error:  # of the model, of CUDA, of the allocator: all mean that there is no graph here
            return self._failed(error)
        finally:
            self._calls.clear()
            self._last = None

    def _captured(self, call: _Call) -> str:
        python = PythonState(self._model)
        with allow_sync("copies kept of what the model changes"):
            before = ModelState(self._model)
        graph = self._graph = ModelGraph(self._model, self._forwards[id(self._model)], call.inputs, call.autocast)
        graph.copying = self._adds
        try:
            why = self._warmed_up(graph, before, python)
            if not why:
                graph.capture()
                with allow_sync("the graph compared with the model"):
                    why = graph.differences([each.inputs for each in self._calls.values()], before)
        finally:
            python.restore()
            before.restore()
        if why:
            self._drop()
            return why
        self._key = call.key
        if self._adds:
            self.modes = (replace(GRAPH, text=f"{GRAPH.text} (gradients copied out, as the loop adds them up)"),)
        return ""

    def _warmed_up(self, graph: ModelGraph, before: Any, python: Any) -> str:
        graph.warm_up()  # lazy work over, so that the guard hears the model alone
        python.restore()
        before.restore()
        if not graph.current:
            return "the model moves its parameters when it is called, which a graph would not follow"
        with sync_guard(budget=_ENDLESS, mode="record") as guard:
            graph.warm_up()
        found = [row for row in guard.sites if row.meaning.code in _STALLS and not own_copy(row)]
        if found:
            return f"the model waits for the device in its forward or backward, which a graph cannot hold: {found[0]}"
        if before.draws_on_the_host():
            return "the model draws random numbers on the host, which a graph would freeze"
        if changes := python.changes():
            return f"the model changes {changes[0].place} in Python at each call, which a graph would freeze"
        return ""

    def _failed(self, error: Exception) -> str:
        text = str(error if isinstance(error, TreatmentRefused) else failure(error, "the model cannot be captured"))
        self._drop()
        return " ".join(text.split())

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The model runs for us: no neutraliser looks at what it does."""
        assert self._hooks is not None
        self._depth += 1
        local = self._hooks.local
        before, local.inside = local.inside, True
        try:
            yield
        finally:
            local.inside = before
            self._depth -= 1

    # ---- while on

    def _fits(self, inputs: Inputs) -> bool:
        graph = self._graph
        assert graph is not None
        if not torch.is_grad_enabled():
            return False
        if self.step_in_block == 1:  # once a block: it takes 20 us for 300 parameters
            self._moved = not graph.current
        try:
            fits = not graph.pending and not self._moved and self._key_of(inputs) == self._key
        except TreatmentRefused:
            fits = False
        self.num_others += not fits
        return fits

    def switch(self, mode: str) -> None:
        super().switch(mode)
        if self._graph is not None:
            self._graph.pending = False

    def remark(self) -> str:
        if not self.num_others:
            return ""
        return (
            f"of {self.num_replays + self.num_others} calls of the model with its graphs on, {self.num_others} were "
            "not like those observed and ran as ever: the graphs would give more than was measured"
        )

    def _drop(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.release()

    def remove(self) -> None:
        self._patches.undo()
        self._forwards.clear()
        self._calls.clear()
        self._drop()
        self._model, self._last, self._chain = None, None, []
