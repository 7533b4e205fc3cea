"""The graphed arm on the emulated device: the same numbers bit for bit, or a reason; and nothing is left behind."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from perfdoctor.trial.call_hooks import CallHooks
from perfdoctor.trial.live_model import model_chain
from perfdoctor.trial.neutral_graph import NeutralGraph
from perfdoctor.trial.neutraliser import OFF

OBSERVED, ON, STEPS = 6, 6, 16


class Tied(nn.Module):
    """One weight used twice, a buffer that follows, a frozen part; takes a keyword and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.second(self.first(x).tanh()) * scale
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return {"out": self.frozen(hidden), "mask": x > 0, "none": None}


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 4))


def value_of(result: Any) -> torch.Tensor:
    out = result["out"] if isinstance(result, dict) else result
    loss: torch.Tensor = out.square().mean()
    return loss


class Run:
    """Sixteen steps of a loop, with the arm from the seventh to the twelfth, or without it at all."""

    def __init__(
        self,
        model: nn.Module,
        *,
        neutral: bool,
        to_none: bool = True,
        micro: Callable[[int], int] = lambda _: 1,
        call: Callable[[nn.Module, torch.Tensor], Any] = lambda model, x: model(x),
        rows: Callable[[int], int] = lambda _: 4,
        backward: Callable[[torch.Tensor], None] = lambda loss: loss.backward(),
    ) -> None:
        torch.manual_seed(0)
        self.model = model.to("cuda")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        self.losses: list[float] = []
        self.why: str | None = None
        self.arm = NeutralGraph([optimizer])
        hooks = CallHooks()
        numbers = torch.Generator().manual_seed(1)
        self.before = vars(type(model)).get("forward")
        kept = []
        try:
            if neutral:
                self.arm.install(hooks)
                hooks.install()
            for step in range(STEPS):
                if neutral and step == OBSERVED:
                    self.why = self.arm.refusal()
                    self.arm.observing = False
                    self.arm.switch("" if self.why else "graph")
                if neutral and step == OBSERVED + ON:
                    self.arm.switch(OFF)
                for _ in range(micro(step)):
                    x = torch.randn(rows(step), 8, generator=numbers).to("cuda")
                    loss = value_of(call(model, x))
                    backward(loss)
                    kept.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
                self.arm.stepped()
        finally:
            self.arm.remove()
            hooks.remove()
        self.losses = [each.item() for each in kept]
        self.state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        self.random = torch.get_rng_state()
        assert vars(type(model)).get("forward") is self.before
        assert "forward" not in vars(model)


def both(make: Callable[[], nn.Module], **options: Any) -> Run:
    """With the arm and without it: everything is the same, bit for bit."""
    runs = []
    for neutral in (False, True):
        torch.manual_seed(7)
        runs.append(Run(make(), neutral=neutral, **options))
    plain, tried = runs
    assert tried.why == ""
    assert tried.losses == plain.losses
    assert list(map(torch.equal, tried.state.values(), plain.state.values())) == [True] * len(plain.state)
    assert torch.equal(tried.random, plain.random)
    return tried


def test_the_losses_are_those_of_the_loop(device: Any) -> None:
    run = both(mlp)
    assert (run.arm.num_replays, run.arm.num_others) == (ON - 1, 0)  # the first step of a block still runs


@pytest.mark.parametrize("between", [nn.Dropout(0.2), nn.BatchNorm1d(16), nn.LayerNorm(16)], ids=str)
def test_random_states_and_buffers_go_on_as_they_would(device: Any, between: nn.Module) -> None:
    both(lambda: mlp(copy.deepcopy(between)))


def test_tied_weights_frozen_parts_keywords_and_a_dict(device: Any) -> None:
    run = both(Tied, call=lambda model, x: model(x, scale=0.5))
    assert run.arm.num_replays == ON - 1


def test_gradients_that_are_added_up(device: Any) -> None:
    run = both(mlp, micro=lambda _: 3)
    assert run.arm.num_replays == 3 * (ON - 1)
    assert "copied out" in run.arm.modes[0].text
    both(mlp, to_none=False)


def test_gradients_added_up_only_after_the_observed_steps(device: Any) -> None:
    both(mlp, micro=lambda step: 2 if step in (9, 10) else 1)


def test_calls_without_gradients_and_other_shapes_run_as_ever(device: Any) -> None:
    def with_validation(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.no_grad():
            model(x[:2])
        return model(x)

    assert both(mlp, call=with_validation).arm.num_others == 0
    run = both(mlp, rows=lambda step: 3 if step == 8 else 4)
    assert (run.arm.num_replays, run.arm.num_others) == (ON - 2, 1)


def test_autocast_is_part_of_the_graph(device: Any) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x)

    assert both(mlp, call=call).arm.num_replays == ON - 1


class Awkward(nn.Module):
    """A model with something in its forward that no graph can hold."""

    def __init__(self, act: Callable[["Awkward", torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.act, self.turn = nn.Linear(8, 4), act, 0

    def forward(self, x: torch.Tensor) -> Any:
        result = self.layer(x)
        given = self.act(self, result)
        return result if given is None else given


def counts(model: Awkward, _: torch.Tensor) -> None:
    model.turn += 1


def reads(_: Awkward, result: torch.Tensor) -> None:
    result.sum().item()


def draws(_: Awkward, result: torch.Tensor) -> torch.Tensor:
    return result * 2 if random.random() < 0.5 else result * 1


def gives_an_object(_: Awkward, result: torch.Tensor) -> Any:
    return {"out": result, "model": object()}


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (counts, "turn in Python"),
        (reads, "waits for the device"),
        (draws, "random numbers on the host"),
        (gives_an_object, "object"),
    ],
)
def test_a_forward_that_no_graph_can_hold_is_refused(device: Any, act: Any, words: str) -> None:
    state = random.getstate()
    plain = Run(Awkward(act), neutral=False)
    random.setstate(state)
    model = Awkward(act)
    model.load_state_dict(Awkward(act).state_dict())
    tried = Run(model, neutral=True)
    assert words in (tried.why or "")
    assert tried.arm.num_replays == 0
    assert model.turn == plain.model.turn  # our own runs of it are not counted
    assert len(tried.losses) == STEPS


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)  # type: ignore[operator,union-attr]
    return model


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def of_gradients(loss: torch.Tensor) -> None:
    loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("options", "make", "words"),
    [
        ({"rows": lambda step: 3 + step % 2}, mlp, "other shapes"),
        ({"call": lambda model, x: model(x) + model(x)}, mlp, "take turns"),
        ({"backward": twice}, mlp, "take turns"),
        ({"backward": of_gradients}, mlp, "gradients of gradients"),
        ({"call": lambda model, x: model[1](model[0](x))}, mlp, "its parts are"),
        ({}, hooked, "has hooks"),
    ],
)
def test_a_loop_around_which_no_graph_fits_is_refused(device: Any, options: Any, make: Any, words: str) -> None:
    run = Run(make(), neutral=True, **options)
    assert words in (run.why or "")
    assert len(run.losses) == STEPS


def test_without_a_gpu_it_is_refused() -> None:
    model = mlp()
    arm = NeutralGraph([torch.optim.SGD(model.parameters(), lr=0.1)])
    arm.install(CallHooks())
    assert "one CUDA device" in arm.refusal()
    assert NeutralGraph([]).refusal() != ""


def test_a_deep_copy_made_meanwhile_is_a_model_of_its_own(device: Any) -> None:
    model = mlp().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arm, hooks = NeutralGraph([optimizer]), CallHooks()
    x = torch.ones(4, 8).cuda()
    arm.install(hooks)
    try:
        for _ in range(4):
            value_of(model(x)).backward()
            optimizer.zero_grad()
            arm.stepped()
        assert arm.refusal() == ""
        arm.observing = False
        arm.switch("graph")
        arm.stepped()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert value_of(twin(x)).item() == 0.0
        assert value_of(model(x)).item() > 0.0
    finally:
        arm.remove()


def test_parameters_that_were_moved_are_not_replayed(device: Any) -> None:
    model = mlp().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arm, hooks = NeutralGraph([optimizer]), CallHooks()
    x = torch.ones(4, 8).cuda()
    arm.install(hooks)
    try:
        for _ in range(4):
            value_of(model(x)).backward()
            optimizer.zero_grad()
            arm.stepped()
        assert arm.refusal() == ""
        arm.observing = False
        for p in model.parameters():
            p.data = torch.zeros_like(p)
        arm.switch("graph")
        for _ in range(3):
            arm.stepped()
            assert value_of(model(x)).item() == 0.0
        assert (arm.num_replays, arm.num_others) == (0, 3)
        assert "3 were not like those observed" in arm.remark()
    finally:
        arm.remove()


def test_the_model_is_the_part_that_the_loop_calls() -> None:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.metric = mlp(), nn.Linear(2, 2)

    trainer, other = Trainer(), mlp()
    optimizer = torch.optim.SGD(trainer.net.parameters(), lr=0.1)
    assert model_chain([optimizer]) == [trainer, trainer.net]
    assert model_chain([torch.optim.SGD(other.parameters(), lr=0.1)]) == [other]
