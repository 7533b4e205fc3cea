"""A live model's forward and backward as two CUDA graphs, without its script knowing.

Made between two steps: warmed up and captured on copies of the inputs, with stand-ins for the parameters (the same
memory, autograd nodes of their own: those of the loop's last loss belong to the loop's stream). Parameters, gradients
and optimizer state are never touched; buffers and random states are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from perfdoctor.record import crossings
from perfdoctor.treat.graph_batch import map_tensors
from perfdoctor.treat.graph_capture import CapturedRun, GraphMemory, warm_up
from perfdoctor.treat.snapshot import RandomState

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_WARMUP = 3


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Whether the loop calls the model under autocast, and in which dtype."""

    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls) -> AutocastState:
        return cls(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))

    def again(self) -> Any:
        if not self.enabled:
            return nullcontext()
        return torch.autocast("cuda", dtype=self.dtype, cache_enabled=torch.is_autocast_cache_enabled())


class StandIns:
    """Parameters that require gradients, and for each another leaf over the same memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.originals = [p for p in model.parameters() if p.requires_grad]
        self.leaves = [_stand_in(p) for p in self.originals]
        twins = {id(p): leaf for p, leaf in zip(self.originals, self.leaves, strict=True)}
        self._places = [
            (module, name, p, twins[id(p)])
            for module in model.modules()
            for name, p in module._parameters.items()
            if p is not None and id(p) in twins
        ]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """In the model's own places; setattr and not the dict, as RNNs keep a list beside it."""
        try:
            for module, name, _, leaf in self._places:
                setattr(module, name, leaf)
            yield
        finally:
            for module, name, original, _ in self._places:
                setattr(module, name, original)

    def addresses(self) -> tuple[int, ...]:
        return tuple([p.data_ptr() for p in self.originals])

    def leaf_addresses(self) -> tuple[int, ...]:
        return tuple([leaf.data_ptr() for leaf in self.leaves])


def _stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    leaf = torch.nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)  # marks that a model may look for
    return leaf


class ModelGraph:
    """`capture`, `check`, then `call` in the place of the model's forward; `release` at the end.

    One call and its backward at a time: `pending` from the one to the other.
    """

    def __init__(
        self, model: torch.nn.Module, forward: Callable[..., Any], inputs: Inputs, autocast: AutocastState
    ) -> None:
        """`forward(model, *args, **kwargs)`: what the model's class calls so."""
        self.pending = False
        self.copying = False  # gradients are copied out: the loop adds others to them
        self._model, self._function, self._autocast = model, forward, autocast
        self._stand_ins = StandIns(model)
        self._static: list[torch.Tensor] = []
        self._arguments: Inputs = _map(inputs, self._fix)
        self._result: Any = None
        self._leaves: list[torch.Tensor] = []
        self._differentiable: list[int] = []
        self._given: list[torch.Tensor] = []  # gradients of the differentiable outputs
        self._memory = GraphMemory.on(self._stand_ins.originals[0].device)
        self._forward = CapturedRun(self._run_forward, self._memory)
        self._backward = CapturedRun(self._run_backward, self._memory)
        self._addresses = self._stand_ins.addresses()

    @property
    def current(self) -> bool:
        """Whether the parameters, and what stood in for them, still lie where the graphs expect them."""
        return self._addresses == self._stand_ins.addresses() == self._stand_ins.leaf_addresses()

    def _fix(self, tensor: torch.Tensor) -> torch.Tensor:
        self._static.append(tensor.detach().clone())
        return self._static[-1]

    # ---- what is captured

    def _run_forward(self) -> list[torch.Tensor]:
        with torch.enable_grad(), self._stand_ins.placed(), self._autocast.again():
            self._result = self._function(self._model, *self._arguments[0], **self._arguments[1])
        self._leaves = _tensors(self._result)
        return self._leaves

    def _run_backward(self) -> list[torch.Tensor | None]:
        outputs = [self._leaves[i] for i in self._differentiable]
        return list(torch.autograd.grad(outputs, self._stand_ins.leaves, self._given, allow_unused=True))

    def _run_both(self) -> None:
        self._run_forward()
        self._differentiable = [i for i, leaf in enumerate(self._leaves) if leaf.requires_grad]
        if not self._differentiable:
            raise RuntimeError("no output of the model carries a gradient")
        if not self._given:
            self._given = [torch.ones_like(self._leaves[i]) for i in self._differentiable]
        self._run_backward()
        self._leaves, self._result = [], None

    def warm_up(self) -> None:
        """Forward and backward, as often as lazy work takes."""
        warm_up(self._run_both, self._memory, _WARMUP)

    def capture(self) -> None:
        """Both graphs, one memory pool: they are always replayed in this order.

        Raises:
            Exception: what came out of the model or of CUDA; the process is usable again.
        """
        torch.clear_autocast_cache()  # a cast made outside the graph would be stale on replay
        try:
            self._forward.capture()
            self._backward.capture()
        finally:
            torch.clear_autocast_cache()
        if not self._forward.emulated:
            # Without its autograd graph, which is spent, and would keep the side stream's nodes alive.
            self._result = _map(self._result, torch.Tensor.detach)
            self._leaves = [leaf.detach() for leaf in self._leaves]
            self._forward.outputs = self._leaves

    # ---- what it does in a step

    def call(self, inputs: Inputs) -> Any:
        """The model's result on `inputs`, in tensors of its own."""
        self._fill(inputs)
        found = iter(_Replayed.apply(self, *self._stand_ins.originals))  # type: ignore[no-untyped-call]
        return _map(self._result, lambda _: next(found))

    def _fill(self, inputs: Inputs) -> None:
        for fixed, given in zip(self._static, _tensors(inputs), strict=True):
            fixed.copy_(given, non_blocking=True)

    def replay_forward(self) -> list[torch.Tensor]:
        self.pending = True
        self._forward.replay()
        return self._leaves

    def replay_backward(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of the parameters, for `given` of all outputs. Overwritten by the next call."""
        self._keep_apart()
        if not self.pending:
            self._forward.replay()  # a second backward: the first has used up what the forward left
        self.pending = False
        self._set_gradients(given)
        found: list[torch.Tensor | None] = self._backward.replay()
        return found

    def _set_gradients(self, given: Sequence[torch.Tensor]) -> None:
        for fixed, i in zip(self._given, self._differentiable, strict=True):
            fixed.copy_(given[i])

    def _keep_apart(self) -> None:
        """Gradients that the loop still holds, and will add to, may be views of what the replay overwrites."""
        if self.copying:
            return
        held = [p for p in self._stand_ins.originals if p.grad is not None]
        for parameter in held:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        self.copying = bool(held)

    def constant(self) -> list[int]:
        """Outputs that carry no gradient."""
        return [i for i in range(len(self._leaves)) if i not in self._differentiable]

    # ---- whether it is right

    def differences(self, batches: Sequence[Inputs], before: ModelState) -> str:
        """Compare results, gradients and buffers bit for bit with the model's own, on each batch; '' or what differs.

        Ordinary numbers stand for the gradients that come from the loss.
        """
        for inputs in batches:
            own = self._own(inputs, before)
            again = self._own(inputs, before)
            if not all(map(_same_bits, own, again)):
                return "the model's own results differ from run to run, so that a graph's cannot be compared with them"
            if not all(map(_same_bits, own, self._replayed(inputs, before))):
                return "results or gradients of the graph are not those of the model, bit for bit"
        return ""

    def _own(self, inputs: Inputs, before: ModelState) -> list[torch.Tensor | None]:
        before.restore()
        with torch.enable_grad(), self._stand_ins.placed(), self._autocast.again():
            leaves = _tensors(self._function(self._model, *inputs[0], **inputs[1]))
        outputs = [leaves[i] for i in self._differentiable]
        grads = torch.autograd.grad(outputs, self._stand_ins.leaves, _gradients(outputs), allow_unused=True)
        torch.clear_autocast_cache()
        return _copies([*leaves, *grads, *self._model.buffers()])

    def _replayed(self, inputs: Inputs, before: ModelState) -> list[torch.Tensor | None]:
        before.restore()
        self._fill(inputs)
        leaves = _copies(self.replay_forward())
        given = _gradients([self._leaves[i] for i in self._differentiable])
        places = dict(zip(self._differentiable, given, strict=True))
        self._set_gradients([places.get(i, leaf) for i, leaf in enumerate(self._leaves)])
        grads = self._backward.replay()
        self.pending = False
        return [*leaves, *_copies([*grads, *self._model.buffers()])]

    def release(self) -> None:
        """Drop the graphs. Gradients that the loop still holds keep their memory."""
        self._backward.release()
        self._forward.release()
        self._result, self._leaves, self._static, self._given = None, [], [], []


class _Replayed(torch.autograd.Function):
    """The two graphs as one node of the loop's autograd graph."""

    @staticmethod
    def forward(ctx: Any, graph: ModelGraph, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graph = graph
        outputs = tuple(leaf.detach().clone() for leaf in graph.replay_forward())
        ctx.mark_non_differentiable(*[outputs[i] for i in graph.constant()])
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[Any, ...]:
        grads = ctx.graph.replay_backward(given)
        if ctx.graph.copying:
            return (None, *(None if grad is None else grad.clone() for grad in grads))
        # A view, so that autograd takes it as `.grad` without a copy.
        return (None, *(None if grad is None else grad.detach() for grad in grads))


class ModelState:
    """What a forward leaves behind in a model: buffers and random states, kept."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._random = RandomState.take()

    def restore(self) -> None:
        """Put them back; may be called any number of times."""
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)
        self._random.restore()

    def draws_on_the_host(self) -> bool:
        """Whether Python's, numpy's or torch's random numbers of the host were drawn since."""
        now, then = RandomState.take(), self._random
        if not crossings.is_emulated() and not torch.equal(now.host, then.host):
            return True  # (the emulated device draws from the host's generator)
        return now.python != then.python or (now.numpy is not None and not _same_numpy(now.numpy, then.numpy))


def _same_numpy(one: Any, other: Any) -> bool:
    return bool((one[1] == other[1]).all()) and one[2:] == other[2:]


def _map(value: Any, visit: Callable[[torch.Tensor], Any]) -> Any:
    return map_tensors(value, lambda tensor, _: visit(tensor), "what the model takes or gives", [])


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(value, found.append)
    return found


def _gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same uneven numbers each time, without drawing any."""
    rows = [torch.arange(o.numel(), device=o.device, dtype=torch.float32).sin().to(o.dtype) for o in outputs]
    return [row.reshape(o.shape) for row, o in zip(rows, outputs, strict=True)]


def _copies(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if each is None else each.detach().clone() for each in tensors]


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rows = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]  # NaN is what it was
    return torch.equal(*rows)
