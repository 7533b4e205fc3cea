"""graph_breaks: every break with its line, and nothing left behind."""

from __future__ import annotations

import copy
import datetime
import logging
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame as convert_frame
import torch._dynamo.symbolic_convert as symbolic_convert
from graph_parts import line_of
from torch import nn

from perfdoctor.errors import UsageError
from perfdoctor.treat.graph_breaks import GraphBreaks, graph_breaks

logger = logging.getLogger("perfdoctor.tests.graph_breaks")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.linspace(-1, 1, 16).reshape(4, 4)


def places(found: GraphBreaks) -> list[tuple[int, str]]:
    return [(each.site.line, each.kind) for each in found]


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
