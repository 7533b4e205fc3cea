"""`compile_model`: torch.compile in place, that says what it did and refuses where it would not hold."""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from types import CellType, CodeType, FunctionType, TracebackType
from typing import Any

import torch

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat.compile_log import CompileLog
from perfdoctor.treat.graph_break_reasons import GraphBreak, parse_break
from perfdoctor.treat.graph_breaks import is_break, is_dynamo_error
from perfdoctor.treat.graph_sources import name_spaces
from perfdoctor.treat.loader_causes import with_loaders
from perfdoctor.treat.recompilations import Recompilation
from perfdoctor.treat.staying_gradients import StayingGradients
from perfdoctor.units import format_ms
from perfdoctor.watch.device_events import new_event
from perfdoctor.watch.patches import Patches

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_KEPT_CALLS = 64
_FEWEST_STEADY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What compiling a model cost and gave.

    `first_call_s`: host time of the first call, compilation of the forward pass in it. `compile_s`: time that torch
    spent compiling since, forward and backward, of everything in the process. `steady_ns`: median of the later calls in
    which nothing was compiled (the last 64), None for fewer than three; on CUDA the device's time between two events,
    else the host's.
    """

    num_calls: int
    first_call_s: float | None
    compile_s: float
    steady_ns: float | None
    recompilations: tuple[Recompilation, ...]
    breaks: tuple[GraphBreak, ...]
    undone: bool

    @property
    def num_recompilations(self) -> int:
        return sum(each.count for each in self.recompilations)

    def __str__(self) -> str:
        first = "not called yet" if self.first_call_s is None else f"{self.first_call_s:.2f} s, compilation in it"
        steady = "not reached yet" if self.steady_ns is None else f"{format_ms(self.steady_ns)} a forward pass"
        lines = [
            f"first call       {first}",
            f"compiling        {self.compile_s:.2f} s in all, backward included",
            f"steady state     {steady}",
            f"recompilations   {self.num_recompilations}",
            f"graph breaks     {len(self.breaks)}",
        ]
        return "\n".join([*lines, *map(str, self.recompilations), *map(str, self.breaks)])


class CompiledModel:
    """A model whose calls are compiled, in place: `model(...)` and `compiled(...)` are the same call.

    Everything that is not listed here is the model's: `compiled.parameters()`, `.train()`, `.state_dict()` with the
    keys it had before (no `_orig_mod.`). Give `compiled.model` to what wants an `nn.Module`. As a context manager it
    undoes itself at the end of the block.
    """

    def __init__(self, model: torch.nn.Module, call: _WatchedCall) -> None:
        self.model = model
        self._call = call
        self._patches = Patches()
        self._patches.replace(model, "_compiled_call_impl", call)
        call.undo = self.undo
        # The log must not outlive the model, and holds nothing of it.
        self._finalizer = weakref.finalize(model, call.log.close)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"CompiledModel({self.model!r})"

    def report(self) -> CompileReport:
        """What happened so far. On CUDA it waits for the last call that is timed."""
        report = self._call.report(undone=not self._patches)
        spaces = name_spaces(self.model.forward)
        return replace(report, recompilations=with_loaders(report.recompilations, spaces))

    def undo(self) -> None:
        """The model runs eagerly again, as before. Safe to call twice. Compiled code stays in torch's memory."""
        self._patches.undo()
        self._call.log.close()


def module_of(model: Any) -> Any:
    """The module behind what `compile_model` returned; anything else as it is."""
    return model.model if isinstance(model, CompiledModel) else model


def compile_model(
    model: torch.nn.Module,
    fullgraph: bool = True,
    mode: str = "default",
    *,
    dynamic: bool | None = None,
    backend: Any = "inductor",
) -> CompiledModel:
    """Compile the calls of `model` in place, as one graph.

    `mode`: as in torch.compile ("default", "reduce-overhead", "max-autotune", ...). With `fullgraph=True` the first
    call that cannot be traced as one graph raises `TreatmentRefused`, which names the line and the change, and the
    model runs eagerly again; with False the breaks are listed in `report()`. Numerics: fused kernels keep intermediate
    results in float32 and reduce in another order; losses agree to about 1e-5 (float32), not bit for bit. In the modes
    that replay CUDA graphs, gradients that are still there at the next call are moved out of the graphs' memory first
    (one launch): accumulated gradients and `zero_grad(set_to_none=False)` stay right, which with torch.compile alone
    raises or gives wrong sums.

    Raises `UsageError` for what is no module, mode, flag or backend, `TreatmentRefused` for a model that is compiled
    already.
    """
    model = module_of(model)
    _check(model, mode, backend)
    if not isinstance(fullgraph, bool) or not (dynamic is None or isinstance(dynamic, bool)):
        raise UsageError(
            f"compile_model(fullgraph={fullgraph!r}, dynamic={dynamic!r}): expected True or False (dynamic may be None)"
        )
    log = CompileLog()
    log.listening = False
    log.open()
    try:
        options: dict[str, Any] = {} if mode == "default" or not _takes_mode(backend) else {"mode": mode}
        compile_call: Any = torch.compile
        with warnings.catch_warnings():
            # Importing the compiler warns of parts of torch that it uses itself; under `-W error` it would fail.
            warnings.simplefilter("ignore", DeprecationWarning)
            compiled = compile_call(
                _whole_call(model), fullgraph=fullgraph, dynamic=dynamic, backend=backend, **options
            )
        on_cuda = any(p.device.type == "cuda" for p in model.parameters())
        as_graphs = on_cuda and mode in _GRAPH_MODES
        return CompiledModel(model, _WatchedCall(compiled, model, log, timed_on_device=on_cuda, as_graphs=as_graphs))
    except BaseException:
        log.close()
        raise


def _whole_call(model: torch.nn.Module) -> FunctionType:
    """A function that calls the model, for torch.compile to start from.

    Not `model._call_impl`, which `nn.Module.compile` takes: dynamo skips torch's own files, and of a model whose
    forward lies there too (nn.Sequential) nothing would be compiled. Each model has a code object and a name of its
    own: dynamo keeps compiled versions, their limit and its marks of dynamic sizes by those. The same one comes again
    when a model is compiled again, and what was compiled with the same settings is found again.
    """
    known = _WHOLE_CALLS.get(model)
    if known is not None:
        return _calling(model, known)
    name = f"{type(model).__name__}_{next(_NUMBERS)}"
    code = _call_model.__code__.replace(co_name=name, co_qualname=type(model).__qualname__)
    _WHOLE_CALLS[model] = code
    return _calling(model, code)


def _calling(model: torch.nn.Module, code: CodeType) -> FunctionType:
    # A bound default would be guarded by value; a closure is what dynamo knows modules from.
    return FunctionType(code, globals(), code.co_name, None, (CellType(model),))


def _template(model: torch.nn.Module) -> FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call  # type: ignore[return-value]


_call_model = _template(torch.nn.Module())
_WHOLE_CALLS: weakref.WeakKeyDictionary[torch.nn.Module, CodeType] = weakref.WeakKeyDictionary()
_NUMBERS = itertools.count()
_WITH_GRAPHS: weakref.WeakSet[StayingGradients] = weakref.WeakSet()


def _takes_mode(backend: Any) -> bool:
    return bool(backend == "inductor")


def _check(model: object, mode: str, backend: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"compile_model needs a torch.nn.Module, not {type(model).__name__}; for functions use torch.compile"
        )
    if mode not in _MODES:
        raise UsageError(f"compile_model: mode={mode!r} is none of {', '.join(_MODES)}")
    if not (isinstance(backend, str) or callable(backend)):
        raise UsageError(f"compile_model: backend={backend!r}: expected a backend's name or a function")
    if isinstance(backend, str) and backend not in torch._dynamo.list_backends(exclude_tags=()):  # type: ignore[no-untyped-call]
        known = ", ".join(torch._dynamo.list_backends())  # type: ignore[no-untyped-call]
        raise UsageError(f"compile_model: backend={backend!r} is none of {known}")
    if mode != "default" and not _takes_mode(backend):
        raise UsageError(f"compile_model: mode={mode!r} is a mode of the backend 'inductor'; leave one of the two out")
    reason = compile_obstacle(model)
    if reason:
        raise TreatmentRefused(f"compile_model: {reason}")


def compile_obstacle(model: torch.nn.Module) -> str | None:
    """Why this model cannot be compiled in place, or None."""
    if isinstance(model, torch.jit.ScriptModule):
        return "the model is a TorchScript module; give the nn.Module that it was made from"
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        return "the model is compiled already; give the model as it was before torch.compile"
    return None


class _WatchedCall:
    """What stands in a module's `_compiled_call_impl`: calls the compiled code and notes what that took."""

    def __init__(
        self, compiled: Any, model: torch.nn.Module, log: CompileLog, *, timed_on_device: bool, as_graphs: bool
    ) -> None:
        self.log = log
        self.undo: Any = log.close
        self._compiled = compiled
        self._plain: Any = model._call_impl
        self._on_device = timed_on_device
        self._as_graphs = as_graphs
        self._model = model
        self._gradients = _listed_gradients(model) if as_graphs else None
        self._num_calls = 0
        self._first_ns: int | None = None
        self._steady: deque[Any] = deque(maxlen=_KEPT_CALLS)  # ns, or a pair of events

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a larger compiled function, which traces through
            return self._plain(*args, **kwargs)
        log = self.log
        compiled_before = log.num_compiled
        if self._as_graphs:
            for each in list(_WITH_GRAPHS):  # of every model whose graphs share the memory that this call writes to
                each.keep()
        log.call_index, log.listening = self._num_calls, True
        event = self._event()
        start = time.perf_counter_ns()
        try:
            result = self._compiled(*args, **kwargs)
        except Exception as error:
            if not is_dynamo_error(error) or type(error).__name__ == "TorchRuntimeError":
                raise  # an error of the model's own
            raise self._refusal(error) from error
        finally:
            log.listening = False
        steady = log.num_compiled == compiled_before
        self._note(time.perf_counter_ns() - start, event, steady=steady)
        if self._as_graphs and not steady:  # parameters may have been replaced
            self._gradients = _listed_gradients(self._model)
        return result

    def report(self, *, undone: bool) -> CompileReport:
        times = [_elapsed_ns(each) for each in self._steady]
        return CompileReport(
            num_calls=self._num_calls,
            first_call_s=None if self._first_ns is None else self._first_ns / 1e9,
            compile_s=self.log.compile_ns / 1e9,
            steady_ns=median(times) if len(times) >= _FEWEST_STEADY else None,
            recompilations=self.log.recompilations(),
            breaks=tuple(self.log.breaks),
            undone=undone,
        )

    def _event(self) -> Any:
        """A timing event, where there is a device and nobody captures a graph (which no timing may enter)."""
        if not self._on_device or self._is_sampled_out() or torch.cuda.is_current_stream_capturing():
            return None
        event: Any = new_event(timed=True)
        event.record()
        return event

    def _is_sampled_out(self) -> bool:
        """Two events cost a launch each: with enough times kept, one call in sixteen is timed."""
        return len(self._steady) == _KEPT_CALLS and self._num_calls % 16 != 0

    def _note(self, host_ns: int, event: Any, *, steady: bool) -> None:
        if self._first_ns is None:
            self._first_ns = host_ns
        elif steady and not self._on_device:
            self._steady.append(host_ns)
        elif steady and event is not None:
            self._steady.append((event, self._event()))
        self._num_calls += 1

    def _refusal(self, error: Exception) -> TreatmentRefused:
        self.undo()
        found = parse_break(str(error)) if is_break(error) else None
        if found is not None:
            return TreatmentRefused(
                f"compile_model: no single graph: {found.site}  {found.text}\n  {found.reason}\n  do: {found.change}\n"
                "  or fullgraph=False. The model runs eagerly again. perfdoctor.graph_breaks lists all breaks at once."
            )
        again = self.log.recompilations()
        if again:
            return TreatmentRefused(f"compile_model: compiled too often:\n{again[-1]}\nThe model runs eagerly again.")
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return TreatmentRefused(
            f"compile_model: torch.compile failed ({type(error).__name__}: {first}). The model runs eagerly again; "
            "scripts/perfdoctor env tries the compiler itself."
        )


def _listed_gradients(model: torch.nn.Module) -> StayingGradients:
    gradients = StayingGradients(model.parameters())
    _WITH_GRAPHS.add(gradients)
    return gradients


def _elapsed_ns(entry: Any) -> float:
    if isinstance(entry, int):
        return float(entry)
    start, end = entry
    if end is None:
        return 0.0
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6
