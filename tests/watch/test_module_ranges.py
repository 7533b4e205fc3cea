"""Ranges of modules, as torch.profiler records them: each with its forward and its backward, and numerics untouched."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import perfdoctor
from perfdoctor.errors import UsageError
from perfdoctor.watch.module_ranges import module_ranges


class Block(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(4, 4), nn.Linear(4, 4), fails

    def forward(self, x):
        if self.fails:
            raise RuntimeError("broken block")
        return self.second(torch.relu_(self.first(x)))  # in place on a module's output


def model_of(fails=False):
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.ModuleDict({"inner": Block(fails)})["inner"], nn.Linear(4, 1))


def recorded(work):
    """(name, start, end) of the named ranges, in order of their start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    rows = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events() if e.name[:1].isdigit()]
    return sorted(rows, key=lambda row: row[1])


def one_step(model):
    model(torch.ones(2, 4)).sum().backward()


def test_forward_and_backward_of_each_module():
    model = model_of()
    with module_ranges(model, depth=1):
        rows = recorded(lambda: one_step(model))
    assert [name for name, _, _ in rows] == ["0", "1", "2", "2 backward", "1 backward", "0 backward"]


def test_depth_names_the_children():
    model = model_of()
    with module_ranges(model, depth=2):
        names = [name for name, _, _ in recorded(lambda: one_step(model))]
    assert names[:7] == ["0", "0.first", "0.second", "1", "1.first", "1.second", "2"]
    assert set(names[7:]) == {f"{name} backward" for name in names[:7]}


def test_backward_of_a_module_holds_that_of_its_children():
    model = model_of()
    with module_ranges(model, depth=2):
        rows = {name: (start, end) for name, start, end in recorded(lambda: one_step(model))}
    block, first, second = (rows[f"1{part} backward"] for part in ("", ".first", ".second"))
    # The output of `second` is that of the block: both begin at the same node, in either order.
    assert max(block[0], second[0]) < second[1] <= first[0] < first[1] <= block[1]
    assert rows["2 backward"][1] <= min(block[0], second[0])


def test_numerics_and_hooks_are_as_before():
    plain, watched = model_of(), model_of()
    one_step(plain)
    with module_ranges(watched):
        one_step(watched)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())


def test_ends_where_forward_raises():
    model = model_of(fails=True)

    def step():
        with pytest.raises(RuntimeError, match="broken block"):
            one_step(model)
        torch.ones(2)

    with module_ranges(model, depth=1) as ranges:
        rows = recorded(step)
        assert [name for name, _, _ in rows] == ["0", "1"]
        assert not any(ranges._open.values())


def test_no_grad_has_no_backward():
    model = model_of()

    def evaluate():
        with torch.no_grad():
            model(torch.ones(2, 4))

    with module_ranges(model, depth=1):
        assert [name for name, _, _ in recorded(evaluate)] == ["0", "1", "2"]


def test_checkpointed_forward_is_seen_twice():
    model = model_of()
    x = torch.ones(2, 4, requires_grad=True)

    def step():
        checkpoint(model, x, use_reentrant=False).sum().backward()

    with module_ranges(model, depth=1):
        names = [name for name, _, _ in recorded(step)]
    assert names.count("0") == 2
    assert names.count("0 backward") >= 1


def test_a_module_called_twice():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with module_ranges(model, depth=1):
        names = [name for name, _, _ in recorded(lambda: one_step(model))]
    assert names.count("0") == 2  # the name under which the model lists it
    assert names.count("0 backward") == 2


def test_breaks_no_graph():
    model = model_of()
    with module_ranges(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(torch.ones(2, 4)).sum().backward()
    assert model[2].weight.grad is not None


def compiled_parts(how):
    model = model_of()
    if how == "torch.compile":
        return torch.compile(model, backend="eager")
    if how == "in place":
        model.compile(backend="eager")
        return model
    return perfdoctor.compile_model(model, backend="eager")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("torch.compile", r"a compiled Sequential \(torch\.compile\(model\)\)"),
        ("in place", r"a compiled Sequential \(model\.compile\(\)\)"),
        ("compile_model", r"a compiled Sequential \(the CompiledModel of compile_model\(model\)\)"),
    ],
)
def test_a_model_compiled_as_a_whole_is_refused_by_its_name(how, words):
    model = compiled_parts(how)
    with torch.no_grad():
        expected = model(torch.ones(2, 4))
    with pytest.raises(UsageError, match=words):
        module_ranges(model)
    modules = list(model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), expected)


def test_parts_compiled_one_by_one_are_one_range_each():
    """Regional compilation: the call of a wrapped part is a range; inside it, and in place, hooks would recompile."""
    model = model_of()
    model[0] = torch.compile(model[0], backend="eager", fullgraph=True)
    model[1].first.compile(backend="eager")
    one_step(model)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with module_ranges(model, depth=3):
        names = [name for name, _, _ in recorded(lambda: one_step(model))]
    assert [name for name in names if "backward" not in name] == ["0", "1", "1.second", "2"]
    assert sorted(name for name in names if "backward" in name) == [
        "0 backward", "1 backward", "1.second backward", "2 backward",
    ]  # fmt: skip
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize(
    ("model", "depth", "words"),
    [("net", 1, "nn.Module"), (nn.Linear(1, 1), 0, "1 or more"), (nn.Linear(1, 1), True, "1 or more")],
)
def test_bad_input(model, depth, words):
    with pytest.raises(UsageError, match=words):
        module_ranges(model, depth)


class Passing(nn.Module):
    """Changes its first input into something else and hands the others on."""

    def forward(self, x, *others):
        return (torch.tanh(x), *others)


class InPlace(nn.Module):
    def forward(self, x):
        return torch.relu_(x)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Sequential()])
def test_what_hands_its_input_on_has_no_backward(module):
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 1))
    with module_ranges(model, depth=1):
        rows = [name for name, _, _ in recorded(lambda: one_step(model))]
    assert rows == ["0", "1", "2", "2 backward", "0 backward"]


@pytest.mark.parametrize("module", [InPlace(), nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.Tanh()])
def test_backwards_come_one_after_the_other_in_place_too(module):
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4), nn.Linear(4, 1))
    with module_ranges(model, depth=1):
        rows = recorded(lambda: one_step(model))[4:]
    assert [name for name, _, _ in rows] == ["3 backward", "2 backward", "1 backward", "0 backward"]
    assert all(before[2] <= after[1] for before, after in itertools.pairwise(rows))


def test_an_input_that_goes_by_neither_begins_nor_lengthens_a_backward():
    class Model(nn.Sequential):
        def forward(self, x):
            made = self[0](x)
            changed, kept = self[1](made, made * 2)
            return self[2](changed) + kept.sum()

    model = Model(nn.Linear(4, 4), Passing(), nn.Linear(4, 1))
    with module_ranges(model, depth=1):
        rows = recorded(lambda: one_step(model))[3:]
    assert [name for name, _, _ in rows] == ["2 backward", "1 backward", "0 backward"]
    assert rows[1][2] <= rows[2][1]


def test_a_graph_that_is_kept_has_as_many_backwards_as_passes():
    model = model_of()

    def twice():
        loss = model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    with module_ranges(model, depth=1):
        rows = recorded(twice)[3:]
    assert [name for name, _, _ in rows] == ["2 backward", "1 backward", "0 backward"] * 2
    assert all(before[2] <= after[1] for before, after in zip(rows[:2] + rows[3:5], rows[1:3] + rows[4:], strict=True))


def test_no_hook_outlives_its_step():
    class Product(nn.Module):
        def forward(self, x, weight):
            return x @ weight

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.product = nn.Parameter(torch.ones(4, 4)), Product()

        def forward(self, x):
            return self.product(x, self.weight)

    model, given = Model(), torch.ones(2, 4, requires_grad=True)
    with module_ranges(model):
        for _ in range(3):
            model(given).sum().backward()
    assert not given._backward_hooks
    assert not model.weight._backward_hooks


@pytest.mark.parametrize("carried", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_no_ranges(carried):
    model = model_of()
    with module_ranges(model):
        one_step(model)
        copied = carried(model)
        names = [name for name, _, _ in recorded(lambda: one_step(copied))]
    assert names == []
    assert "perfdoctor" not in pickle.dumps(nn.ModuleList(copied.children())).decode("latin1")


def test_hooks_taken_away_in_the_middle_of_a_call():
    model = model_of()
    ranges = module_ranges(model, depth=2)
    model[1].first.register_forward_pre_hook(lambda *_: ranges.remove())
    rows = recorded(lambda: one_step(model))
    assert [name for name, _, _ in rows if "backward" not in name] == ["0", "0.first", "0.second", "1", "1.first"]
    assert recorded(lambda: one_step(model)) == []
