"""graphed_step where what it was made of changes: modules, param groups, other graphed steps of the same optimizer."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections import OrderedDict, UserList, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from graphed_parts import batch, build, numbers, same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.utils import ModelOutput

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat.graphed_step import FrozenStateWarning, graphed_step

pytestmark = pytest.mark.usefixtures("emulated")


def _replace(model: nn.Sequential) -> None:
    model[3] = nn.Linear(8, 2).cuda()


def _append(model: nn.Sequential) -> None:
    model.append(nn.Dropout(0.5))


def _take_out(model: nn.Sequential) -> None:
    del model[1]


def _first_child(model: nn.Sequential) -> None:
    model[2].inner = nn.Linear(8, 8).cuda()  # a dropout, which had none


@pytest.mark.parametrize("change", [_replace, _append, _take_out, _first_child])
def test_other_modules_are_another_graph(change: Callable[[nn.Sequential], None]) -> None:
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    step(*batch())
    change(model)
    step(*batch())
    assert (step.num_graphs, step.num_replays, step.num_eager) == (0, 1, 1)
    for _ in range(3):
        step(*batch())
    assert (step.num_graphs, step.num_replays, step.num_eager) == (1, 4, 1)
    assert {id(p) for p in model.parameters()} <= {id(p) for p in step._parts.parameters}


def test_a_param_group_that_was_added_gets_its_own_form_back_too() -> None:
    model, opt, train_step = build()
    form = {name: value for name, value in opt.param_groups[0].items() if name != "params"}
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    added = nn.Parameter(torch.ones(2, device="cuda"))
    opt.add_param_group({"params": [added], "lr": 0.5})
    for _ in range(3):
        step(*batch())
    assert step.num_replays == 2
    assert isinstance(opt.param_groups[1]["lr"], torch.Tensor)
    assert any(parameter is added for parameter in step._parts.parameters)
    step.release()
    for group, rate in zip(opt.param_groups, (form["lr"], 0.5), strict=True):
        assert {name: value for name, value in group.items() if name != "params"} == {**form, "lr": rate}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(("kind", "options"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})])
def test_the_last_of_several_that_share_an_optimizer_gives_its_form_back(
    kind: Any, options: dict[str, Any], order: tuple[int, ...]
) -> None:
    model, opt, train_step = build(kind, **options)
    before = {name: value for name, value in opt.param_groups[0].items() if name != "params"}
    steps = [graphed_step(train_step, *batch(), model=model, optimizer=opt) for _ in range(3)]
    for index in order:
        assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)  # those that are left read it
        assert all(s["step"].is_cuda for s in opt.state.values() if "step" in s)
        steps[index](*batch())
        steps[index].release()
        steps[index].release()
    assert {name: value for name, value in opt.param_groups[0].items() if name != "params"} == before
    train_step(*batch())


def test_one_that_fails_takes_nothing_from_those_before_it() -> None:
    model, opt, train_step = build()
    first = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    with pytest.raises(TreatmentRefused):
        graphed_step(lambda x, y: train_step(x, y).item(), *batch(), model=model, optimizer=opt)
    assert opt.param_groups[0]["capturable"] is True
    first.release()
    assert opt.param_groups[0]["capturable"] is False
    with pytest.raises(TreatmentRefused):
        graphed_step(lambda x, y: train_step(x, y).item(), *batch(), model=model, optimizer=opt)
    assert (opt.param_groups[0]["capturable"], opt.param_groups[0]["lr"]) == (False, 1e-2)


@pytest.mark.parametrize("fails", [False, True])
def test_one_that_was_dropped_without_a_release_does_not_keep_the_form(fails: bool) -> None:
    model, opt, train_step = build()
    dropped = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    del dropped
    if fails:
        with pytest.raises(TreatmentRefused):
            graphed_step(lambda x, y: train_step(x, y).item(), *batch(), model=model, optimizer=opt)
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    step.release()
    assert (opt.param_groups[0]["capturable"], opt.param_groups[0]["lr"]) == (False, 1e-2)


def test_the_form_of_an_optimizer_does_not_keep_it_alive() -> None:
    def dropped() -> weakref.ref[torch.optim.Optimizer]:
        model, opt, train_step = build()
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad if opt.param_groups else None)
        graphed_step(train_step, *batch(), model=model, optimizer=opt)(*batch())
        return weakref.ref(opt)

    optimizer = dropped()
    gc.collect()
    assert optimizer() is None


def test_a_rate_in_host_memory_comes_back_as_the_same_tensor_with_the_value_of_now() -> None:
    rate = torch.tensor(0.01)
    model, opt, train_step = build(lr=rate)
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    opt.param_groups[0]["lr"].fill_(0.5)
    step(*batch())
    step.release()
    assert opt.param_groups[0]["lr"] is rate
    assert (rate.device.type, float(rate)) == ("cpu", 0.5)


class _OwnRate(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"capturable": True, "rate": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["rate"])


def test_an_optimizer_whose_rate_has_another_name() -> None:
    model, opt, train_step = build(_OwnRate)
    before = {name: value for name, value in opt.param_groups[0].items() if name != "params"}
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    step(*batch())
    assert step.num_replays == 1
    step.release()
    assert {name: value for name, value in opt.param_groups[0].items() if name != "params"} == before


def test_dampening_without_momentum_has_no_first_step() -> None:
    model, opt, train_step = build(torch.optim.SGD, dampening=0.5)
    assert graphed_step(train_step, *batch(), model=model, optimizer=opt).num_graphs == 1


@dataclass
class _Answer(ModelOutput):  # type: ignore[misc]
    loss: Any = None
    logits: Any = None


@pytest.mark.parametrize(
    ("pack", "get"),
    [
        (lambda loss: _Answer(loss=loss), lambda out: out.loss),
        (lambda loss: OrderedDict(loss=loss), lambda out: out["loss"]),
        (lambda loss: defaultdict(list, loss=loss), lambda out: out["loss"]),
    ],
)
def test_outputs_keep_their_class(pack: Callable[[Any], Any], get: Callable[[Any], Any]) -> None:
    model, opt, train_step = build()
    step = graphed_step(lambda x, y: pack(train_step(x, y)), *batch(), model=model, optimizer=opt)
    kept, later = step(*batch()), step(*batch(6, 2))
    assert type(kept) is type(pack(None))
    assert not get(kept).requires_grad
    assert float(get(kept)) != float(get(later))


def test_a_batch_by_name_or_within_itself_is_named() -> None:
    model, opt, train_step = build()
    x, y = batch()
    around: list[Any] = [x, y]
    around.append(around)
    before = numbers(model)
    with pytest.raises(TreatmentRefused, match="contains itself"):
        graphed_step(lambda b: train_step(b[0], b[1]), around, model=model, optimizer=opt)
    assert same(before, numbers(model))
    assert opt.param_groups[0]["capturable"] is False
    step = graphed_step(train_step, x, y, model=model, optimizer=opt)
    with pytest.raises(UsageError, match="x, y by name"):
        step(x=x, y=y)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_rate_written_as_a_tensor_of_one_element_is_followed(shape: tuple[int, ...]) -> None:
    model, opt, train_step = build(torch.optim.SGD)
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    opt.param_groups[0]["lr"] = torch.full(shape, 0.125)
    step(*batch())
    assert float(opt.param_groups[0]["lr"]) == 0.125
    assert step.num_replays == 1


@pytest.mark.parametrize(
    ("config", "key", "make"),
    [
        ({"scale": 1.0, "other": 5}, "scale", lambda c: lambda loss: loss * c["scale"]),
        ([1.0, 5.0], 0, lambda c: lambda loss: loss * c[0]),
        ({0: 1.0}, 0, lambda c: lambda loss: loss * c[0]),
        (SimpleNamespace(inner={"scale": 1.0}), "scale", lambda c: lambda loss: loss * c.inner["scale"]),
        ({"outer": {"scale": 1.0}}, "scale", lambda c: lambda loss: loss * c["outer"]["scale"]),
    ],
)
def test_an_item_that_the_step_reads_and_others_change_is_never_frozen_in_silence(
    config: Any, key: Any, make: Callable[[Any], Callable[[Any], Any]]
) -> None:
    model, opt, train_step = build()
    scaled = make(config)
    step = graphed_step(lambda x, y: scaled(train_step(x, y)), *batch(), model=model, optimizer=opt)
    step(*batch())
    held = config.inner if isinstance(config, SimpleNamespace) else config
    held = held.get("outer", held) if isinstance(held, dict) else held
    for value in (2.0, 2.0, 1.0):
        held[key] = value
        step(*batch())
    assert (step.num_graphs, step.num_replays, step.num_eager) == (2, 3, 1)


def test_items_that_the_step_writes_do_not_keep_it_from_replaying() -> None:
    model, opt, train_step = build()
    log: dict[str, Any] = {"loss": None, "steps": 0}

    def logging_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = train_step(x, y)
        log["loss"] = loss.detach()
        log["steps"] += 1
        return loss

    with pytest.warns(FrozenStateWarning, match="log"):
        step = graphed_step(logging_step, *batch(), model=model, optimizer=opt)
    for _ in range(4):
        step(*batch())
    assert (step.num_graphs, step.num_replays, step.num_eager) == (1, 4, 0)


@pytest.mark.parametrize(
    ("generator", "draw", "state"),
    [
        (np.random.default_rng(3), lambda g: g.random(), lambda g: repr(g.bit_generator.state)),
        # Four numbers at a time: its counter stands still for the next three.
        (np.random.Generator(np.random.Philox(3)), lambda g: g.random(), lambda g: repr(g.bit_generator.state)),
        (np.random.RandomState(3), lambda g: g.rand(), lambda g: repr(g.get_state())),
        (random.Random(3), lambda g: g.random(), lambda g: repr(g.getstate())),
    ],
)
def test_draws_from_a_generator_of_the_users_own_are_refused_and_taken_back(
    generator: Any, draw: Callable[[Any], float], state: Callable[[Any], str]
) -> None:
    model, opt, train_step = build()
    before, weights = state(generator), numbers(model)
    with pytest.raises(TreatmentRefused, match="draws random numbers on the host"):
        graphed_step(lambda x, y: train_step(x * draw(generator), y), *batch(), model=model, optimizer=opt)
    assert state(generator) == before
    assert same(weights, numbers(model))


class _Logged:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class _Trainer:
    def __init__(self) -> None:
        self.last: Any = None
        self.model, _, self.plain = build()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.plain(x, y)
        self.last = _Logged(loss)
        return loss


@pytest.mark.filterwarnings("ignore::perfdoctor.treat.graphed_step.FrozenStateWarning")
def test_no_autograd_graph_of_the_capture_outlives_it() -> None:
    trainer = _Trainer()
    step = graphed_step(trainer.step, *batch())
    kept = next(iter(step._graphs.values())).kept
    assert any(isinstance(each, torch.Tensor) and each.dim() == 0 for each in kept)  # the loss
    assert not any(isinstance(each, _Logged) or getattr(each, "grad_fn", None) for each in kept)


class _Lazy(nn.Module):
    """Makes what it needs in its first call, as a mask or a table of positions often is."""

    memory: ClassVar[UserList[StorageWeakRef]] = (
        UserList()
    )  # a kind that is not put back with the rest of the Python state

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.mask: Any = None
        self.tables: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, device=x.device)
            self.tables["sin"] = torch.ones(4, device=x.device)
            self.register_buffer("positions", torch.ones(4, device=x.device))
            for made in (self.mask, self.tables["sin"], self.positions):
                self.memory.append(StorageWeakRef(made.untyped_storage()))
        product: torch.Tensor = x * self.mask * self.tables["sin"] * self.positions
        return self.inner(product)  # type: ignore[no-any-return]


def test_what_the_first_step_made_lives_as_long_as_the_graph_that_reads_it() -> None:
    model = _Lazy().cuda()
    opt = torch.optim.AdamW(model.parameters())

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss

    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    gc.collect()
    assert len(_Lazy.memory) == 3
    assert (model.mask, model.tables, "positions" in model._buffers) == (None, {}, False)
    assert not any(each.expired() for each in _Lazy.memory)
    step.release()
    gc.collect()
    assert all(each.expired() for each in _Lazy.memory)
