"""`module_ranges`: a range for each module of a model, forward and backward."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from perfdoctor.errors import UsageError
from perfdoctor.watch.annotate import Overlapping, annotate
from perfdoctor.watch.module_hooks import ModuleHook, keep_from_scripting
from perfdoctor.watch.patches import Patches

_compiling = torch.compiler.is_compiling


def module_ranges(model: nn.Module, depth: int = 2) -> ModuleRanges:
    """Show each module of `model` down to `depth` (1: its children) as a range, until `remove()` or the block's end.

        with perfdoctor.module_ranges(model, depth=2):
            train(model)

    Ranges are named `blocks.0.mlp` and `blocks.0.mlp backward`. The backward range of a call begins when the gradient
    of its first output node is asked for and ends when those of its inputs are known; where no input comes out of a
    graph it ends with the whole backward pass. A module that hands its input on has none. Hooks on autograd's nodes and
    tensors only look: numerics and views stay as they are. A part that torch.compile wraps has one range for its call;
    what lies inside has none, since it runs as a graph. Parts compiled in place (`part.compile()`) and scripted ones
    are left out.

    Raises:
        UsageError: `model` is no nn.Module, or is compiled as a whole, or `depth` is under 1.
    """
    compiled = _compiled(model)
    if compiled is not None:
        raise UsageError(
            f"module_ranges() got a compiled {type(compiled).__name__} ({_spelt(model)}): its modules run inside "
            "graphs, where they have no ranges, and hooks on them would make torch compile again. Give the model as it "
            'was before compiling, or put `with perfdoctor.annotate("model"):` round the call'
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"module_ranges() needs an nn.Module, got {type(model).__name__}")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise UsageError(f"module_ranges(depth=...) must be 1 or more, got {depth!r}")
    return ModuleRanges(model, depth)


class ModuleRanges:
    """The hooks of one `module_ranges` call; `remove()` takes them away, also at the end of a `with` block."""

    def __init__(self, model: nn.Module, depth: int) -> None:
        self._open: dict[tuple[int, str], list[_Call]] = {}
        self._hooks: list[Any] = []
        self._patches = Patches()
        keep_from_scripting(self._patches)
        for name, module in _modules(model, depth):
            enter, leave = ModuleHook(self._entered(name)), ModuleHook(self._left(name))
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            # Also where forward() raises, so that its range ends.
            self._hooks.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks away, and end what this thread has open: a call that removes them midway is not told its end.
        Safe to call twice."""
        self._patches.undo()
        while self._hooks:
            self._hooks.pop().remove()
        own = [call for (thread, _), calls in self._open.items() if thread == threading.get_ident() for call in calls]
        for call in sorted(own, key=lambda call: call.number, reverse=True):  # they nest
            call.end()
        self._open = {key: calls for key, calls in self._open.items() if key[0] != threading.get_ident()}

    def _entered(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not _compiling():
                call = _Call(name, (args, kwargs))
                self._open.setdefault((threading.get_ident(), name), []).append(call)
                call.begin()

        return enter

    def _left(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls = self._open.get((threading.get_ident(), name)) if not _compiling() else None
            if calls:
                call = calls.pop()
                call.end()
                call.watch_backward(output)

        return leave


_numbers = itertools.count()


class _Call:
    """One call of a module: its forward range, and the backward range that its inputs will end."""

    __slots__ = ("_came", "_range", "_turn", "number")

    def __init__(self, name: str, inputs: Any) -> None:
        self.number = next(_numbers)
        self._range = annotate(name)
        # Not leaves: hooks on a weight that is passed in, or on data, outlive the graph, one more with every step.
        came = [tensor for tensor in _tensors(inputs) if tensor.grad_fn is not None] if torch.is_grad_enabled() else []
        self._turn = _BackwardRange(f"{name} backward", num_inputs=len(came))
        # Now: the module may change them in place, and they come from elsewhere then.
        self._came = [(tensor, tensor.grad_fn, tensor.output_nr, self._hooked(tensor)) for tensor in came]

    def _hooked(self, tensor: Tensor) -> Any:
        return tensor.register_hook(self._turn.arrived)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._range.__enter__()

    def end(self) -> None:
        self._range.__exit__(None, None, None)

    def watch_backward(self, output: Any) -> None:
        """Hook the nodes that the output came from. An input that is handed on as it came has no backward here."""
        if not torch.is_grad_enabled():
            return
        for tensor, node, _, hook in self._came:
            if tensor.grad_fn is node:  # after those of the modules inside, whose ranges lie in this one
                hook.remove()
                self._hooked(tensor)
        came = {(node, number) for _, node, number, _ in self._came}
        for tensor in _tensors(output):
            if tensor.grad_fn is not None and (tensor.grad_fn, tensor.output_nr) not in came:
                tensor.grad_fn.register_prehook(self._turn.begin)


def _compiled(model: Any) -> nn.Module | None:
    """The model that was compiled: by torch.compile, in place, or in place behind a `perfdoctor.compile_model`."""
    if _is_wrapped(model):
        return model._orig_mod  # type: ignore[no-any-return]
    inner = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    return inner if isinstance(inner, nn.Module) and _is_compiled_in_place(inner) else None


def _is_wrapped(module: object) -> bool:
    """Whether it is what `torch.compile(module)` gives. Loads nothing: where dynamo is not loaded there is none."""
    kind: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


def _is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def _spelt(model: Any) -> str:
    if _is_wrapped(model):
        return "torch.compile(model)"
    return "model.compile()" if isinstance(model, nn.Module) else f"the {type(model).__name__} of compile_model(model)"


def _modules(model: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Named as the user names them, each once, nothing inside a part that is compiled."""
    seen = {model}
    waiting = [(name, child, 1) for name, child in model.named_children()][::-1]
    while waiting:
        name, module, level = waiting.pop()
        if module in seen or isinstance(module, torch.jit.ScriptModule) or _is_compiled_in_place(module):
            continue
        seen.add(module)
        if type(module).forward is not _NOT_CALLED or _is_wrapped(module):
            yield name, module
        if level < depth and not _is_wrapped(module):
            waiting += [(f"{name}.{part}", child, level + 1) for part, child in module.named_children()][::-1]


_NOT_CALLED: Any = nn.Module.forward  # of ModuleList and ModuleDict, which only hold others


class _BackwardRange:
    """One call's backward: begun once, ended once, whichever thread of autograd's does it; again where the graph is
    kept for another pass."""

    __slots__ = ("_missing", "_name", "_num_inputs", "_range")

    def __init__(self, name: str, num_inputs: int) -> None:
        self._name = name
        self._missing = self._num_inputs = num_inputs
        self._range: Overlapping | None = None

    def begin(self, gradients: Any) -> None:
        if self._range is None and not _compiling():
            self._range = Overlapping(self._name)
            self._range.begin()
            # Also where an input gets no gradient, or none needs one.
            Variable._execution_engine.queue_callback(self.finished)  # type: ignore[attr-defined]

    def arrived(self, gradient: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.end()

    def end(self) -> None:
        if self._range is not None:
            self._range.end()
            self._range = None

    def finished(self) -> None:
        self.end()
        self._missing = self._num_inputs


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
