"""`graph_breaks`: where torch.compile ends one graph and starts another, and what makes it compile again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, MethodType
from typing import Any

from perfdoctor.errors import UsageError
from perfdoctor.record.call_site import user_frame
from perfdoctor.treat.compile_log import CompileLog
from perfdoctor.treat.dynamo_state import forced_backend, fresh_dynamo
from perfdoctor.treat.graph_break_reasons import GraphBreak, parse_break
from perfdoctor.treat.graph_python_state import PythonState, Reached
from perfdoctor.treat.graph_randomness import own_generators
from perfdoctor.treat.graph_sources import name_spaces
from perfdoctor.treat.loader_causes import with_loaders
from perfdoctor.treat.recompilations import Recompilation
from perfdoctor.treat.snapshot import Snapshot
from perfdoctor.treat.step_function import require_step


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreaks(Sequence[GraphBreak]):
    """A list of breaks (`len`, iteration, indexing), and beside it `recompilations`.

    `num_graphs`: graphs that were traced. `whole`: the function was compiled as a whole for this; False where it calls
    compiled functions of its own, which were watched as they are.
    """

    breaks: tuple[GraphBreak, ...]
    recompilations: tuple[Recompilation, ...] = ()
    num_graphs: int = 0
    num_calls: int = 1
    ended: bool = False  # a break was an error (fullgraph=True), and what comes after it was not traced
    whole: bool = True

    def __len__(self) -> int:
        return len(self.breaks)

    def __getitem__(self, index: Any) -> Any:
        return self.breaks[index]

    def __iter__(self) -> Iterator[GraphBreak]:
        return iter(self.breaks)

    def __str__(self) -> str:
        what = "the function as a whole" if self.whole else "the compiled functions that it calls"
        again = sum(each.count for each in self.recompilations)
        head = (
            f"{_count(len(self.breaks), 'graph break')}, {_count(again, 'recompilation')} "
            f"in {_count(self.num_calls, 'call')} ({what}; {_count(self.num_graphs, 'graph')})"
        )
        tail = ["fullgraph=True ended the calls here; look again after the change"] if self.ended else []
        return "\n".join([head, *map(str, self.breaks), *map(str, self.recompilations), *tail])


def graph_breaks(fn: Callable[..., Any], *batch: Any, calls: Iterable[Sequence[Any]] | None = None) -> GraphBreaks:
    """Call `fn(*batch)` and list every graph break with its line, the reason and the change to make.

    `fn`: a module, a function, or a whole training step with backward and optimizer inside. Where it calls functions
    that are compiled already, those are watched with the settings they were made with; else `fn` is compiled as a
    whole. `calls`, in place of the batch, is a list of argument tuples, called in order: recompilations show from the
    second on (`[batch] * 9 + [last_batch]`). Only the tracing is real: graphs run eagerly, so no C++ or Triton compiler
    is needed.

    Everything that `fn` reaches is put back: parameters, buffers, gradients, optimizers, random states, lists and
    counters in its closure and globals. Iterators that it advances are not. Compiled versions of the functions on the
    way are dropped and compile again at their next call. Raises `UsageError` for wrong arguments, and what `fn` raises.
    """
    rounds = _rounds(fn, batch, calls)
    spaces = name_spaces(fn)
    # A function that torch.compile made hides what it was made from.
    reached = Reached(fn, _as_written(fn), rounds)
    restore = _kept_aside(reached, PythonState(fn, _as_written(fn)))
    try:
        found = _both_ways(fn, rounds, reached, restore)
        return replace(found, recompilations=with_loaders(found.recompilations, spaces))
    finally:
        restore()


def _both_ways(
    fn: Callable[..., Any], rounds: list[tuple[Any, ...]], reached: Reached, restore: Callable[[], None]
) -> GraphBreaks:
    found = _watched(fn, rounds, reached, as_it_is=True)
    written = _as_written(fn)
    if found.num_graphs and not found.ended and (written is fn or not found.breaks):
        return found
    # Nothing is compiled in it; or fn was compiled with fullgraph=True, where the first break ends the tracing.
    restore()
    whole = _watched(written, rounds, reached, as_it_is=False)
    if not found.num_graphs:
        return whole
    return replace(found, breaks=whole.breaks, ended=False) if len(whole) > len(found) else found


def _rounds(fn: object, batch: tuple[Any, ...], calls: Iterable[Sequence[Any]] | None) -> list[tuple[Any, ...]]:
    require_step(fn, "graph_breaks", "a function or a module")
    if calls is None:
        return [batch]
    if batch:
        raise UsageError("graph_breaks takes a batch, or calls=[(x, y), ...], not both: put the batch into calls")
    rounds = list(calls) if isinstance(calls, Iterable) else []
    wrong = [type(each).__name__ for each in rounds if not isinstance(each, tuple | list)]
    if wrong or not rounds:
        given = f"a list with a {wrong[0]} in it" if wrong else "an empty list"
        given = given if isinstance(calls, Iterable) else f"a {type(calls).__name__}"
        raise UsageError(f"calls= needs a list of argument tuples, one for each call ([(x, y), (x, y)]), not {given}")
    return [tuple(each) for each in rounds]


def _kept_aside(reached: Reached, python: PythonState) -> Callable[[], None]:
    """Keep what a step may change; the function that comes back puts it back."""
    import torch

    tensors = [tensor for tensor in reached.of_type(torch.Tensor) if not isinstance(tensor, torch.nn.Parameter)]
    kept = Snapshot.take(
        [*reached.of_type(torch.nn.Module), *tensors],
        reached.of_type(torch.optim.Optimizer),
        generators=own_generators(reached),
    )

    def restore() -> None:
        python.restore()
        kept.restore()

    return restore


def _codes(reached: Reached) -> set[CodeType]:
    """Of every function that was reached, and of every module's forward."""
    import torch

    functions = [*reached.of_type(FunctionType), *(each.__func__ for each in reached.of_type(MethodType))]
    functions += [type(module).forward for module in reached.of_type(torch.nn.Module)]
    return {function.__code__ for function in functions if isinstance(function, FunctionType)}


def _as_written(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function or module inside what torch.compile made of it, whose `fullgraph=True` would stop at one break."""
    inner: Callable[..., Any] = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", None) or fn
    return inner


def _watched(fn: Callable[..., Any], rounds: list[tuple[Any, ...]], reached: Reached, *, as_it_is: bool) -> GraphBreaks:
    import torch

    graphs = 0

    def run_eagerly(graph: Any, _: object) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    with fresh_dynamo(_codes(reached)), _log() as log:
        called: Callable[..., Any] = fn if as_it_is else torch.compile(fn, backend=run_eagerly)
        with forced_backend(run_eagerly):
            ended = _call(called, rounds, log)
    return GraphBreaks(
        breaks=tuple(log.breaks),
        recompilations=log.recompilations(),
        num_graphs=graphs,
        num_calls=len(rounds),
        whole=not as_it_is,
        ended=ended,
    )


def _log() -> CompileLog:
    return CompileLog(only_thread=threading.get_ident(), outside=user_frame(sys._getframe(1)))


def _call(called: Callable[..., Any], rounds: list[tuple[Any, ...]], log: CompileLog) -> bool:
    for log.call_index, arguments in enumerate(rounds):
        try:
            called(*arguments)
        except Exception as error:
            if log.limit_hit and (is_dynamo_error(error) or "fullgraph" in str(error)):
                return True  # under fullgraph=True the limit of recompilations is an error too
            # Under fullgraph=True a break is an error. It is listed like any other; there is nothing to go on with.
            if not is_break(error) or parse_break(str(error)) is None:
                raise
            log.add_break(str(error))
            return True
    return False


def is_dynamo_error(error: BaseException) -> bool:
    """Whether torch.compile refused to trace, as opposed to an error of the traced code."""
    return any(kind.__module__ == "torch._dynamo.exc" for kind in type(error).__mro__)


def is_break(error: BaseException) -> bool:
    """Whether that refusal names a line that cannot be traced, as opposed to a failure of the compiler itself."""
    return is_dynamo_error(error) and any(kind.__name__ in ("Unsupported", "UserError") for kind in type(error).__mro__)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
