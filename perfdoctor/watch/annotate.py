"""`annotate`: a named range that Nsight Systems and torch.profiler show.

The `nvtx` package's own decorator leaves its range open where the function raises, and counts a generator as done when
it is made; a range here ends on every way out, and a generator's range covers each of its turns.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch
from torch.autograd import profiler as _profiler

from perfdoctor.errors import UsageError

try:
    import nvtx
except ImportError:  # there is no wheel for the newest Python
    nvtx = None

DOMAIN = "perfdoctor"

P = ParamSpec("P")
R = TypeVar("R")

_SUSPENDING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Whoever hands a range to an ExitStack may leave it on another turn too.
_ENTER_CONTEXT = contextlib.ExitStack.enter_context.__code__  # AsyncExitStack inherits the same one
_compiling = torch.compiler.is_compiling
_thread = threading.get_ident


class annotate:
    """A range named `name`, as a context manager or a decorator.

        with perfdoctor.annotate("augment"):
            batch = augment(batch)

        @perfdoctor.annotate("loss")
        def loss_of(output, target): ...

    It is an NVTX range in the domain "perfdoctor", and a profiler range while a torch.profiler runs. When nobody
    listens a range costs less than 1 us. Ranges end on every way out of the block. In a generator or a coroutine the
    block may be left on another turn than the one that entered it, so there NVTX's start/end ranges are used, which
    may overlap, in place of its push/pop ranges, which must nest. Inside a graph of torch.compile it is left out, and
    breaks no graph: make it there, `with annotate("name"):`, since torch cannot enter an object made outside.

    Raises:
        UsageError: `name` is no string, or is empty.
    """

    __slots__ = ("_name", "_open")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise UsageError(f"annotate() needs a name, a string that is not empty; got {name!r}")
        # NVTX and torch take UTF-8: a file's name may hold what is none.
        self._name = name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()
        self._open: list[tuple[int, Any, Any]] = []  # (thread, NVTX range, profiler range)

    def __enter__(self) -> Self:
        if not _compiling():
            code = sys._getframe(1).f_code
            self._begin(code.co_flags & _SUSPENDING or code is _ENTER_CONTEXT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not _compiling():
            self._end()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, each of whose calls is a range.

        Raises:
            UsageError: it is no function: a class, say, would no longer be one.
        """
        name = self._name
        if isinstance(function, classmethod | staticmethod):
            return type(function)(self(function.__func__))  # type: ignore[return-value]
        if isinstance(function, type) or not callable(function):
            raise UsageError(
                f"@annotate({name!r}) belongs on a function, not on {function!r}; of a class, on its methods, "
                "and under @property"
            )
        if inspect.isgeneratorfunction(function):
            return cast("Callable[P, R]", _annotated_generator(name, function))
        if inspect.isasyncgenfunction(function):
            return cast("Callable[P, R]", _annotated_async_generator(name, function))
        if inspect.iscoroutinefunction(function):
            return cast("Callable[P, R]", _annotated_coroutine(name, function))

        @functools.wraps(function)
        def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
            with annotate(name):
                return function(*args, **kwargs)

        return annotated

    def _begin(self, suspending: int | bool) -> None:
        handle = _start(self._name) if suspending else _push(self._name)
        record = None
        if _profiler._is_profiler_enabled:
            record = torch._C._profiler._RecordFunctionFast(self._name)
            record.__enter__()
        self._open.append((_thread(), handle, record))

    def _end(self) -> None:
        if not self._open:  # entered while torch.compile traced it
            return
        _, handle, record = self._open.pop() if len(self._open) == 1 else self._pop_own()
        if record is not None:
            record.__exit__(None, None, None)
        if handle is not None:
            _finish(handle)

    def _pop_own(self) -> tuple[int, Any, Any]:
        """One object may be entered in several threads: the newest of this one, if it has any."""
        thread = _thread()
        own = [index for index, entry in enumerate(self._open) if entry[0] == thread]
        return self._open.pop(own[-1] if own else -1)


_pushes: dict[str, Any] = {}  # the nvtx.annotate of each name: made once, it costs half as much as nvtx.push_range
_MOST_NAMES = 4096


def _push(name: str) -> Any:
    if nvtx is None:
        return None
    pushed = _pushes.get(name)
    if pushed is None:
        if len(_pushes) >= _MOST_NAMES:  # names with numbers in them
            _pushes.clear()
        pushed = _pushes[name] = nvtx.annotate(name, domain=DOMAIN)
    pushed.__enter__()
    return pushed


def _start(name: str) -> Any:
    return nvtx.start_range(name, domain=DOMAIN) if nvtx is not None else None


def _finish(handle: Any) -> None:
    if isinstance(handle, nvtx.annotate):
        handle.__exit__(None, None, None)
    else:
        nvtx.end_range(handle)


def _annotated_generator(name: str, function: Callable[..., Any]) -> Any:
    """The generator with a range round each of its turns: between them its caller's code runs."""

    @functools.wraps(function)
    def annotated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if _compiling():
            return (yield from function(*args, **kwargs))
        turns = function(*args, **kwargs)
        resume: Callable[[], Any] = functools.partial(next, turns)
        while True:
            try:
                with _plain(name):
                    value = resume()
            except StopIteration as stop:
                return stop.value
            resume = yield from _handed(turns, value)

    return annotated


def _handed(turns: Generator[Any, Any, Any], value: Any) -> Generator[Any, Any, Callable[[], Any]]:
    """Hand `value` out; what the caller sends, throws or closes goes on to the generator."""
    try:
        sent = yield value
    except GeneratorExit:
        turns.close()
        raise
    except BaseException as error:
        return functools.partial(turns.throw, error)
    return functools.partial(turns.send, sent)


def _annotated_async_generator(name: str, function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    async def annotated(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        turns = function(*args, **kwargs)
        resume: Callable[[], Any] = turns.__anext__
        while True:
            try:
                with annotate(name):
                    value = await resume()
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                await turns.aclose()
                raise
            except BaseException as error:
                resume = functools.partial(turns.athrow, error)
            else:
                resume = functools.partial(turns.asend, sent)

    return annotated


def _annotated_coroutine(name: str, function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    async def annotated(*args: Any, **kwargs: Any) -> Any:
        with annotate(name):
            return await function(*args, **kwargs)

    return annotated


class _plain(annotate):
    """A range whose block is not left while it is open, whatever the frame around it is."""

    __slots__ = ()

    def __enter__(self) -> Self:
        if not _compiling():
            self._begin(0)
        return self


class Overlapping(annotate):
    """A range that need not nest, opened and closed by calls: its end may come on another thread, in another order."""

    __slots__ = ()

    def begin(self) -> None:
        """Open it."""
        self._begin(1)

    def end(self) -> None:
        """Close it; does nothing where it is closed."""
        self._end()

    def __enter__(self) -> Self:
        self.begin()
        return self
