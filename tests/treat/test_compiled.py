"""compile_model: in place, with a report, a loud refusal, and everything back when undone."""

from __future__ import annotations

import copy
import gc
import inspect
import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch._dynamo.convert_frame as convert_frame
from torch import nn

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat.compiled import compile_model
from perfdoctor.treat.graph_breaks import graph_breaks
from perfdoctor.treat.graph_obstacles import graph_obstacles
from perfdoctor.treat.switches import treatment
from perfdoctor.treat.treatment import Loop

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on the CPU needs g++")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()  # models of this test end their logs


class Small(nn.Module):
    """Breaks on batches of seven."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).relu()
        if x.shape[0] == 7:
            print("seven")
        return h.square()


def test_a_reset_of_dynamo_does_not_end_the_timing() -> None:
    held = compile_model(Small(), backend="aot_eager")
    torch._dynamo.reset()
    other = compile_model(Small(), backend="aot_eager")
    torch._dynamo.reset()
    for _ in range(2):  # the first frame after a reset tells us of it
        held(torch.randn(5, 4)).sum().backward()
        torch.compile(nn.Linear(4, 4), backend="aot_eager")(torch.randn(5, 4))
        other(torch.randn(5, 4)).sum().backward()
    assert other.report().compile_s > 0
    held.undo()
    other.undo()


def test_what_a_step_does_to_a_compiled_model_is_put_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.calls = 0  # type: ignore[assignment]
    compiled = compile_model(model, fullgraph=False, backend="eager")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step(x: torch.Tensor) -> torch.Tensor:
        model.calls += 1  # type: ignore[operator]
        loss: torch.Tensor = compiled(x).sum()
        loss.backward()
        return loss

    for watch in (graph_breaks, graph_obstacles):
        for given in (step, compiled):
            watch(given, torch.randn(6, 4))
            assert model.calls == 0
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            assert all(p.grad is None for p in model.parameters())
    compiled.undo()


def test_calls_are_compiled_in_place_with_the_keys_as_before() -> None:
    model = Small()
    keys, x = list(model.state_dict()), torch.randn(5, 4)
    wanted = model(x)
    compiled = compile_model(model, backend="aot_eager")
    assert torch.allclose(compiled(x), wanted)
    assert torch.allclose(model(x), wanted)
    assert list(compiled.state_dict()) == list(model.state_dict()) == keys
    assert compiled.report().num_calls == 2
    compiled.undo()


def test_the_report_tells_the_first_call_from_steady_state() -> None:
    compiled = compile_model(Small(), backend="aot_eager")
    empty = compiled.report()
    assert (empty.num_calls, empty.first_call_s, empty.steady_ns) == (0, None, None)
    for _ in range(5):
        compiled(torch.randn(5, 4)).sum().backward()
    report = compiled.report()
    assert report.first_call_s is not None
    assert report.steady_ns is not None
    assert report.compile_s > 0
    assert (report.num_recompilations, report.breaks) == (0, ())
    assert "recompilations   0" in str(report)
    compiled.undo()


def test_a_recompilation_is_counted_with_its_guard_and_call() -> None:
    with compile_model(Small(), backend="eager") as compiled:
        for size in (5, 5, 3):
            compiled(torch.randn(size, 4))
        (again,) = compiled.report().recompilations
    assert (again.kind, again.count, again.at_calls) == ("size", 1, (2,))
    assert "size mismatch at index 0. expected 5, actual 3" in again.guard


def test_a_break_refuses_with_line_and_change_and_leaves_the_model_eager() -> None:
    model = Small()
    compiled = compile_model(model, backend="eager")
    lines, start = inspect.getsourcelines(Small)
    line = start + next(i for i, text in enumerate(lines) if 'print("seven")' in text)
    with pytest.raises(TreatmentRefused, match=rf"test_compiled\.py:{line} .*print.*\n.*\n  do: print after"):
        compiled(torch.randn(7, 4))
    assert compiled.report().undone
    assert model._compiled_call_impl is None
    assert model(torch.randn(7, 4)).shape == (7, 4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo itself, after a break
def test_without_fullgraph_breaks_are_listed() -> None:
    with compile_model(Small(), fullgraph=False, backend="eager") as compiled:
        compiled(torch.randn(7, 4))
        assert [each.kind for each in compiled.report().breaks] == ["print"]


def test_an_error_of_the_models_own_stays_what_it_is() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    with compile_model(Raises(), fullgraph=False, backend="eager") as compiled, pytest.raises(ValueError, match="mine"):
        compiled(torch.randn(2))


def test_undone_model_and_dynamo_are_as_before() -> None:
    model = Small()
    attributes = dict(vars(model))
    seams = (convert_frame.graph_break_log, convert_frame.get_and_maybe_log_recompilation_reasons)
    callbacks = len(torch._dynamo.callback.callback_handler.start_callbacks)
    with suppress(KeyboardInterrupt), compile_model(model, backend="eager") as compiled:
        compiled(torch.randn(2, 4))
        raise KeyboardInterrupt
    assert vars(model) == attributes
    assert (convert_frame.graph_break_log, convert_frame.get_and_maybe_log_recompilation_reasons) == seams
    assert len(torch._dynamo.callback.callback_handler.start_callbacks) == callbacks


def test_two_models_in_any_order_of_undoing() -> None:
    seams = (convert_frame.graph_break_log, convert_frame.get_and_maybe_log_recompilation_reasons)
    one, two = compile_model(Small(), backend="eager"), compile_model(Small(), backend="eager")
    for size in (5, 3):
        one(torch.randn(size, 4))
    two(torch.randn(3, 4))
    assert (one.report().num_recompilations, two.report().num_calls) == (1, 1)
    one.undo()
    two.undo()
    assert (convert_frame.graph_break_log, convert_frame.get_and_maybe_log_recompilation_reasons) == seams


def test_a_copy_is_not_compiled_and_a_compiled_part_may_be_compiled_as_part_of_a_whole() -> None:
    model = Small()
    with compile_model(model, backend="eager"):
        assert copy.deepcopy(model)._compiled_call_impl is None
        outer = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
        assert torch.allclose(outer(torch.ones(2, 4)), model.forward(torch.ones(2, 4)) + 1)


def test_wrong_use_and_refusals() -> None:
    with pytest.raises(UsageError, match="Module, not function"):
        compile_model(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="mode='fast' is none of default"):
        compile_model(Small(), mode="fast")
    with pytest.raises(UsageError, match="fullgraph='yes'"):
        compile_model(Small(), fullgraph="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="dynamic='yes'"):
        compile_model(Small(), dynamic="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="backend=3"):
        compile_model(Small(), backend=3)
    with pytest.raises(UsageError, match="leave one of the two out"):
        compile_model(Small(), mode="max-autotune", backend="eager")
    with pytest.raises(TreatmentRefused, match="compiled already"):
        compile_model(torch.compile(Small(), backend="eager"))  # type: ignore[arg-type]
    with compile_model(Small(), backend="eager") as compiled, pytest.raises(TreatmentRefused, match="compiled already"):
        compile_model(compiled.model)


def test_a_model_of_torchs_own_modules_is_compiled_too_and_only_once() -> None:
    graphs = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    for number in (1, 2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        for _ in range(2):
            with compile_model(model, backend=backend) as compiled:
                for _ in range(3):
                    compiled(torch.randn(2, 4))
        assert len(graphs) == number


def test_each_model_has_its_own_limit_and_sizes() -> None:
    for size in range(2, 14):
        with compile_model(nn.Sequential(nn.Linear(size, 4)), backend="eager") as compiled:
            compiled(torch.randn(size, size))
            assert compiled.report().recompilations == ()


@needs_compiler
def test_the_treatment_compiles_for_the_time_of_the_block() -> None:
    model = Small()
    loop = Loop(device=torch.device("cpu"), model=model)
    x = torch.randn(5, 4)
    wanted = model(x)
    assert treatment("compile").refuses(loop) is None
    with treatment("compile").applied(loop):
        assert model._compiled_call_impl is not None
        assert treatment("compile").refuses(loop) is not None
        assert torch.allclose(model(x), wanted, rtol=treatment("compile").numerics.rtol)
    assert model._compiled_call_impl is None


def test_a_backend_that_torch_does_not_know_is_named_before_anything_changes() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"backend='turbo' is none of .*inductor"):
        compile_model(model, backend="turbo")
    assert model._compiled_call_impl is None


def test_a_loop_takes_what_compile_model_returned_for_the_module_in_it() -> None:
    model = nn.Linear(2, 2)
    compiled = compile_model(model, backend="eager")
    loop = Loop(device=torch.device("cpu"), model=compiled)  # type: ignore[arg-type]
    assert loop.model is model
    assert "compiled already" in str(treatment("compile").refuses(loop))
    compiled.undo()
    assert treatment("compile").refuses(Loop(device=torch.device("cpu"), model=compiled)) is None  # type: ignore[arg-type]


def test_a_compiled_model_is_compiled_once_and_again_when_undone() -> None:
    model = nn.Linear(2, 2)
    compiled = compile_model(model, backend="eager")
    with pytest.raises(TreatmentRefused, match="compiled already"):
        compile_model(compiled)  # type: ignore[arg-type]
    compiled.undo()
    with compile_model(compiled, backend="eager") as again:  # type: ignore[arg-type]
        assert again.model is model
