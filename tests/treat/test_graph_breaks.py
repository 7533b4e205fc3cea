"""graph_breaks: every break with its line, every recompilation with its guard, and nothing left behind."""

from __future__ import annotations

import copy
import datetime
import inspect
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame as convert_frame
import torch._dynamo.symbolic_convert as symbolic_convert
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.errors import UsageError
from perfdoctor.treat.graph_breaks import GraphBreaks, graph_breaks
from perfdoctor.treat.recompilations import explain_guard, first_guard

logger = logging.getLogger("perfdoctor.tests.graph_breaks")
X = torch.linspace(-1, 1, 16).reshape(4, 4)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def line_of(fn: Callable[..., Any], text: str) -> int:
    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, line in enumerate(lines) if text in line)


def places(found: GraphBreaks) -> list[tuple[int, str]]:
    return [(each.site.line, each.kind) for each in found]


# ---- breaks


def prints(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    print("shape", y.shape)
    y = y.cos()
    logger.info("mean of %s", tuple(y.shape))
    return y.exp()


def branches(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.sum() > 0:
        y = y + 1
    scale = y.abs().max().item()
    return y / scale


def masks(x: torch.Tensor) -> torch.Tensor:
    kept = x[x > 0]
    return kept.sum()


def reads_the_clock(x: torch.Tensor) -> torch.Tensor:
    start = time.perf_counter()
    y = x.sin()
    return y * start


def draws(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y = y * random.Random(3).random()
    return y.cos()


def loops(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x.sin()
        print(x.shape)
    return x


def inner(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    print("inner")
    return x.cos()


def outer(x: torch.Tensor) -> torch.Tensor:
    return inner(x * 2) + 1


def makes_a_parameter(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(4, requires_grad=True)
    return (x * weight).sum()


def measures_a_text(x: torch.Tensor) -> torch.Tensor:
    text = f"{x.sum():.3f}"
    return x * len(text)


def tells_the_day(x: torch.Tensor) -> torch.Tensor:
    day = datetime.datetime.now()
    return x * day.day


LOCK = threading.Lock()


def locks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    with LOCK:
        y = y.cos()
    return y


def counts_up_to_a_tensor(x: torch.Tensor) -> torch.Tensor:
    for _ in range((x > 0).sum()):  # type: ignore[call-overload]
        x = x.sin()
    return x


def sorts_in_python(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(sorted(x[0]))  # type: ignore[type-var]


def encodes(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot((x > 0).long()).sum()


def copies(x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(x).sin()


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).relu().sum()


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (prints, [("print(", "print"), ("logger.info", "logging")]),
        (branches, [("if y.sum()", "branch"), (".item()", "item")]),
        (masks, [("x[x > 0]", "mask")]),
        (reads_the_clock, [("perf_counter", "clock")]),
        (loops, [("print(x.shape)", "print")]),
        (makes_a_parameter, [("requires_grad=True", "requires_grad")]),
        (measures_a_text, [("len(text)", "exception")]),
        (tells_the_day, [("datetime.now", "clock")]),
        (locks, [("with LOCK", "thread")]),
        (counts_up_to_a_tensor, [("range(", "item")]),
        (sorts_in_python, [("sorted(", "item")]),
        (encodes, [("one_hot", "mask")]),
        (copies, [("deepcopy", "deepcopy")]),
        (whole, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_break_has_its_line_its_kind_and_a_change(fn: Any, wanted: list[tuple[str, str]]) -> None:
    found = graph_breaks(fn, X)
    assert places(found) == [(line_of(fn, text), kind) for text, kind in wanted]
    for each, (text, _) in zip(found, wanted, strict=True):
        assert each.site.file == __file__
        assert text in each.text
        assert each.reason
        assert each.change


def test_python_random_is_named() -> None:
    assert ("random" in {each.kind for each in graph_breaks(draws, X)}) or not graph_breaks(draws, X)


def test_a_break_in_a_callee_is_at_the_callees_line() -> None:
    assert places(graph_breaks(outer, X)) == [(line_of(inner, "print("), "print")]


def test_a_break_in_a_loop_says_that_the_rest_was_not_looked_at() -> None:
    (found,) = graph_breaks(loops, X)
    assert found.runs_eagerly
    assert "not looked at" in str(found)
    assert not graph_breaks(prints, X)[0].runs_eagerly


def test_a_function_that_is_compiled_already_is_watched_as_it_is() -> None:
    fast = torch.compile(prints, backend="eager")
    fast(X)  # torch has its code, and has reported its breaks once
    found = graph_breaks(fast, X)
    assert places(found) == places(graph_breaks(prints, X))
    assert not found.whole


def test_under_fullgraph_all_breaks_are_listed_not_only_the_first() -> None:
    fast = torch.compile(prints, backend="eager", fullgraph=True)
    assert [kind for _, kind in places(graph_breaks(fast, X))] == ["print", "logging"]


def test_a_training_step_names_backward_and_the_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    kinds = {each.kind for each in graph_breaks(step, X)}
    assert {"backward", "optimizer"} <= kinds


# ---- recompilations


def test_a_ragged_last_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    calls = [(torch.randn(6, 4),)] * 3 + [(torch.randn(2, 4),)] * 2
    (again,) = graph_breaks(torch.compile(model, backend="eager"), calls=calls).recompilations
    assert (again.kind, again.count, again.at_calls, again.limit_hit) == ("size", 1, (3,), False)
    assert "dimension 0 was 6 and is now 2" in again.reason
    assert "drop_last=True" in again.change


def scaled(x: torch.Tensor, lr: float) -> torch.Tensor:
    return x * lr


def test_a_float_that_changes_until_the_limit() -> None:
    fast = torch.compile(scaled, backend="eager", dynamic=False)
    found = graph_breaks(fast, calls=[(X, 0.1 * 0.9**i) for i in range(12)])
    (again,) = found.recompilations
    assert (again.kind, again.limit_hit) == ("number", True)
    assert again.count == torch._dynamo.config.cache_size_limit  # the last one is refused: it runs eagerly
    assert again.guard == "lr == 0.1"
    assert "tensor" in again.change
    assert again.function.line == line_of(scaled, "def scaled")
    assert len(found) == 0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.linear(x) * self.step


def test_a_step_counter_on_the_module() -> None:
    model = Counting()
    (again,) = graph_breaks(model, calls=[(X,)] * 4).recompilations
    assert (again.kind, again.count) == ("attribute", 3)
    assert "counter outside" in again.change
    assert model.step == 0


TICKS = 0


def uses_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * TICKS


def counts_a_global(x: torch.Tensor) -> torch.Tensor:
    global TICKS
    TICKS += 1
    return torch.compile(uses_a_global, backend="eager", dynamic=False)(x)


def test_a_global_counter() -> None:
    found = graph_breaks(counts_a_global, calls=[(X,)] * 4)
    (again,) = found.recompilations
    assert (again.kind, again.count) == ("global", 3)
    assert "TICKS" in again.reason
    assert TICKS == 0


def test_dtype_and_grad_mode() -> None:
    for other, kind in ((X.double(), "dtype"), (X.clone().requires_grad_(), "grad mode"), (X.t(), "stride")):
        (again,) = graph_breaks(whole, calls=[(X,), (other,), (X,)]).recompilations
        assert (again.kind, again.count, again.at_calls) == (kind, 1, (1,))


@pytest.mark.parametrize(
    ("guard", "kind"),
    [
        ("tensor 'L['x']' size mismatch at index 1. expected 24, actual 8", "size"),
        ("tensor 'x' dtype mismatch. expected Float, actual Double", "dtype"),
        ("L['lr'] == 0.01", "attribute"),
        ("lr == 1e-05", "number"),
        ("mode == 'train'", "value"),
        ("G['STEP'] == 3", "global"),
        ("self.step == 3", "attribute"),
        ("self.training", "training mode"),
        ("len(xs) == 3", "length"),
        ("___check_obj_id(fn, 140)", "object"),
        ("G['CONFIG']['w'] == 2", "global"),
        ("args[1] == 0.5", "number"),
        ("list(dict.keys(d))[0] == 'a'", "keys"),
        ("set.__contains__(names, 'a')", "keys"),
        ("expected type of 'x' to be a tensor type, ' but found <class 'torch.nn.parameter.Parameter'>", "object"),
        ("GLOBAL_STATE changed: grad_mode", "grad mode"),
        ("something new", "other"),
    ],
)
def test_guards_in_plain_words(guard: str, kind: str) -> None:
    words = explain_guard(guard)
    assert words.kind == kind
    assert words.reason
    assert words.change
    assert "{" not in words.reason + words.change


def test_the_guard_is_cut_out_of_dynamos_line() -> None:
    assert (
        first_guard(["3/0: s.step == 0           # def forward(s): ...  # a.py:3 in forward\nUser stack"])
        == "s.step == 0"
    )
    assert first_guard(["0/0: BACKEND_MATCH failure: another backend"]) is None
    assert first_guard([]) is None


def test_the_limit_under_fullgraph_is_listed_and_no_error() -> None:
    fast = torch.compile(scaled, backend="eager", dynamic=False, fullgraph=True)
    found = graph_breaks(fast, calls=[(X, 0.1 * 0.9**i) for i in range(12)])
    (again,) = found.recompilations
    assert (again.kind, again.limit_hit, found.ended) == ("number", True, True)
    assert again.count == torch._dynamo.config.cache_size_limit


def summed(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


@pytest.mark.parametrize("compiled", [True, False])
def test_the_loader_of_a_ragged_last_batch_is_named(compiled: bool) -> None:
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=8)
    DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=7)
    fn = torch.compile(nn.Linear(4, 4), backend="eager") if compiled else summed
    (again,) = graph_breaks(fn, calls=[(x,) for (x,) in loader]).recompilations
    assert again.cause is not None
    assert again.cause.line == line_of(test_the_loader_of_a_ragged_last_batch_is_named, "loader = ")
    assert f"the last batch of the loader built at {again.cause}" in str(again)


def test_sizes_that_no_loader_gives_have_no_cause() -> None:
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=8, drop_last=True)
    assert len(loader) == 2
    (again,) = graph_breaks(scaled, calls=[(torch.randn(8, 4), 2.0), (torch.randn(4, 4), 2.0)]).recompilations
    assert again.cause is None


def test_the_line_that_asked_is_no_call_of_the_function() -> None:
    (again,) = graph_breaks(scaled, calls=[(X, 0.1), (X, 0.2)]).recompilations
    assert again.call is None
    assert str(again).startswith(f"{__file__}:{line_of(scaled, 'def scaled')}")


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.tau


def test_the_advice_for_a_float_attribute_works() -> None:
    model = Annealed()

    def step(x: torch.Tensor) -> Any:
        out = fast(x)
        model.tau *= 0.5
        return out

    fast = torch.compile(model, backend="eager", dynamic=False)
    (again,) = graph_breaks(step, calls=[(X,)] * 4).recompilations
    assert "tau = torch.tensor(1.0, device=...)" in again.change
    assert "tau.fill_(value)" in again.change
    model.tau = torch.tensor(1.0)  # type: ignore[assignment]
    assert not graph_breaks(step, calls=[(X,)] * 4).recompilations


# ---- nothing stays


def test_everything_the_step_changes_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    history: list[float] = []
    count = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        history.append(loss.item())
        return loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator, rates = torch.get_rng_state(), (schedule.last_epoch, optimizer.param_groups[0]["lr"])
    graph_breaks(step, calls=[(X,)] * 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert (history, count) == ([], 0)
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == rates


def dynamo_state() -> dict[str, Any]:
    return {
        "log": (symbolic_convert.graph_break_log, convert_frame.graph_break_log),
        "seen": symbolic_convert.graph_break_dup_warning_checker,
        "reasons": convert_frame.get_and_maybe_log_recompilation_reasons,
        "input_codes": convert_frame.input_codes,
        "config": torch._dynamo.config.get_config_copy(),
        "counters": {name: dict(counts) for name, counts in torch._dynamo.utils.counters.items()},
        "break_reasons": len(torch._dynamo.output_graph.graph_break_reasons),
        "callbacks": len(torch._dynamo.callback.callback_handler.start_callbacks),
    }


def test_dynamo_is_as_before_after_a_result_and_after_an_error() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        print("soon")
        raise ZeroDivisionError("the user's own")

    torch.compile(prints, backend="eager")(X)
    before = dynamo_state()
    graph_breaks(branches, X)
    assert dynamo_state() == before
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        graph_breaks(fails, X)
    assert dynamo_state() == before


def test_other_compiled_functions_keep_their_code() -> None:
    compiled = []

    def backend(graph: Any, _: object) -> Any:
        compiled.append(graph)
        return graph.forward

    other = torch.compile(whole, backend=backend)
    other(X)
    graph_breaks(branches, X)
    other(X)
    assert len(compiled) == 1


def test_sizes_seen_here_do_not_make_later_compilations_dynamic() -> None:
    seen: list[list[Any]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        seen.append([type(each).__name__ for each in inputs])
        return graph.forward

    graph_breaks(whole, calls=[(torch.randn(n, n),) for n in (3, 4, 5)])
    torch.compile(whole, backend=backend)(torch.randn(6, 6))
    assert "SymInt" not in {name for names in seen for name in names}


# ---- wrong use


def test_wrong_use_says_what_is_needed() -> None:
    with pytest.raises(UsageError, match="a function or a module as its first argument, got Tensor"):
        graph_breaks(X)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not both"):
        graph_breaks(whole, X, calls=[(X,)])
    with pytest.raises(UsageError, match="list with a Tensor in it"):
        graph_breaks(whole, calls=[X])
    with pytest.raises(UsageError, match="list with a NoneType in it"):
        graph_breaks(whole, calls=[None])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="not a int"):
        graph_breaks(whole, calls=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="an empty list"):
        graph_breaks(whole, calls=[])
