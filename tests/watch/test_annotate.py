"""Ranges end on every way out; who listens sees them. NVTX itself is looked at through nsys elsewhere."""

import asyncio
import contextlib
import threading

import pytest
import torch

from perfdoctor.errors import UsageError
from perfdoctor.watch import annotate as home
from perfdoctor.watch.annotate import annotate

nvtx = pytest.importorskip("nvtx")


@pytest.fixture
def calls(monkeypatch):
    """What reaches the nvtx package: the package is real, and is listened to at its functions."""
    seen = []

    def note(owner, attribute, kind, name_of):
        real = getattr(owner, attribute)

        def noted(first=None, *args, **kwargs):
            seen.append((kind, name_of(first), threading.get_ident()))
            return real(first, *args, **kwargs)

        monkeypatch.setattr(owner, attribute, noted)

    note(nvtx.annotate, "__enter__", "push_range", lambda made: made.attributes.message.string)
    note(nvtx.annotate, "__exit__", "pop_range", lambda made: None)
    note(nvtx, "start_range", "start_range", lambda name: name)
    note(nvtx, "end_range", "end_range", lambda handle: None)
    return seen


def names(calls):
    return [(kind.removesuffix("_range"), name) for kind, name, _ in calls]


def test_block(calls):
    with annotate("outer"), annotate("inner"):
        pass
    assert names(calls) == [("push", "outer"), ("push", "inner"), ("pop", None), ("pop", None)]


def test_ends_after_an_exception(calls):
    @annotate("work")
    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    with pytest.raises(ZeroDivisionError), annotate("block"):
        _ = 1 / 0
    assert names(calls) == [("push", "work"), ("pop", None), ("push", "block"), ("pop", None)]


def test_decorated_function_keeps_its_name_and_value(calls):
    @annotate("twice")
    def double(number: int) -> int:
        """Twice."""
        return 2 * number

    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Twice.")


def test_one_object_entered_again_and_in_threads(calls):
    shared = annotate("shared")

    def use():
        with shared, shared:
            pass

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ident in {call[2] for call in calls}:
        own = [call[0] for call in calls if call[2] == ident]
        assert own.count("push_range") == own.count("pop_range")
    assert len(calls) == 16


def test_generator_is_a_range_for_each_turn(calls):
    @annotate("turn")
    def count():
        got = yield 1
        yield got + 1
        return 7

    generator = count()
    assert calls == []  # nothing has run
    assert next(generator) == 1
    assert names(calls) == [("push", "turn"), ("pop", None)]  # closed while the caller works
    assert generator.send(41) == 42
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == 7
    assert names(calls) == [("push", "turn"), ("pop", None)] * 3


def test_generator_passes_on_what_is_thrown_and_closed(calls):
    log = []

    @annotate("turn")
    def listen():
        try:
            while True:
                try:
                    yield "ready"
                except ValueError as error:
                    log.append(str(error))
        finally:
            log.append("closed")

    generator = listen()
    next(generator)
    assert generator.throw(ValueError("thrown")) == "ready"
    generator.close()
    assert log == ["thrown", "closed"]
    assert names(calls).count(("push", "turn")) == names(calls).count(("pop", None))


def test_block_that_is_left_on_another_turn_may_overlap(calls):
    def first():
        with annotate("first"):
            yield

    def second():
        with annotate("second"):
            yield

    one, two = first(), second()
    next(one)
    next(two)
    next(one, None)
    next(two, None)
    assert names(calls) == [("start", "first"), ("start", "second"), ("end", None), ("end", None)]


def test_coroutines(calls):
    @annotate("wait")
    async def wait(seconds):
        await asyncio.sleep(seconds)
        return seconds

    async def both():
        return await asyncio.gather(wait(0.01), wait(0))

    assert asyncio.run(both()) == [0.01, 0]
    assert sorted(kind for kind, _ in names(calls)) == ["end", "end", "start", "start"]


def test_profiler_sees_the_range():
    with torch.profiler.profile() as profiler, annotate("seen"):
        torch.ones(2).sum()
    assert "seen" in {event.key for event in profiler.key_averages()}


def test_profiler_started_inside():
    with annotate("before"), torch.profiler.profile() as profiler:
        torch.ones(2)
    assert "before" not in {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_needed(name):
    with pytest.raises(UsageError, match="needs a name"):
        annotate(name)


def test_breaks_no_graph(calls):
    @annotate("decorated")
    def double(x):
        return x * 2

    def step(x):
        with annotate("block"):
            return double(x) + 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert calls == []


def test_without_nvtx(monkeypatch):
    monkeypatch.setattr(home, "nvtx", None)
    with annotate("quiet"):
        pass
    with torch.profiler.profile() as profiler, annotate("seen"):
        torch.ones(2)
    assert "seen" in {event.key for event in profiler.key_averages()}


def test_async_generator_is_a_range_for_each_turn(calls):
    log = []

    @annotate("turn")
    async def listen():
        try:
            got = yield 1
            try:
                yield got + 1
            except ValueError as error:
                log.append(str(error))
            yield 7
        finally:
            log.append("closed")

    async def use():
        turns = listen()
        assert calls == []  # nothing has run
        assert await anext(turns) == 1
        assert names(calls) == [("start", "turn"), ("end", None)]  # closed while the caller works
        assert await turns.asend(41) == 42
        assert await turns.athrow(ValueError("thrown")) == 7
        await turns.aclose()
        assert [number async for number in count()] == [0, 1, 2]

    @annotate("count")
    async def count():
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    asyncio.run(use())
    assert log == ["thrown", "closed"]
    assert [kind for kind, _ in names(calls)] == ["start", "end"] * (3 + 4)


@pytest.mark.parametrize("target", [dict, 3, None, property(lambda self: 1)])
def test_only_functions_are_decorated(target):
    with pytest.raises(UsageError, match="belongs on a function"):
        annotate("load")(target)


def test_methods_of_every_kind_whichever_decorator_is_first(calls):
    class Loss:
        @annotate("a")
        @staticmethod
        def outer_static(x):
            return x

        @staticmethod
        @annotate("b")
        def inner_static(x):
            return x

        @annotate("c")
        @classmethod
        def outer_class(cls, x):
            return cls, x

        @classmethod
        @annotate("d")
        def inner_class(cls, x):
            return cls, x

        @annotate("e")
        @classmethod
        async def waits(cls, x):
            return x

        @property
        @annotate("f")
        def scale(self):
            return 2

    loss = Loss()
    assert loss.outer_static(1) == Loss.outer_static(1) == loss.inner_static(1) == Loss.inner_static(1) == 1
    assert loss.outer_class(1) == Loss.outer_class(1) == loss.inner_class(1) == Loss.inner_class(1) == (Loss, 1)
    assert asyncio.run(loss.waits(3)) == 3
    assert loss.scale == 2
    assert [name for kind, name in names(calls) if kind in ("push", "start")] == list("aabbccddef")
    assert [kind for kind, _ in names(calls)] == ["push", "pop"] * 8 + ["start", "end"] + ["push", "pop"]


def test_block_held_by_a_stack_may_overlap_too(calls):
    def batches(name):
        with contextlib.ExitStack() as stack:
            stack.enter_context(annotate(name))
            yield 1

    first, second = batches("first"), batches("second")
    next(first), next(second)
    assert list(first) == list(second) == []
    assert names(calls) == [("start", "first"), ("start", "second"), ("end", None), ("end", None)]


def test_a_generator_breaks_no_graph(calls):
    @annotate("turn")
    def parts(x):
        for number in range(3):
            yield x * number

    compiled = torch.compile(lambda x: sum(parts(x)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert calls == []
    assert torch.equal(sum(parts(torch.ones(2))), torch.full((2,), 3.0))
    assert [name for _, name in names(calls)].count("turn") == 4  # the last turn ends it


@pytest.mark.parametrize("name", ["\udc80.bin", "a\0b", "\u00fc\u4e16"])
def test_any_text_is_a_name(name):
    with torch.profiler.profile(), annotate(name):
        torch.ones(2)
    annotate(name)(torch.ones)(2)
