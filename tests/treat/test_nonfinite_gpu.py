"""The watch on a GPU: no sync, the lag bounded, graphs, skipped updates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from perfdoctor.errors import NonFiniteError, UsageError
from perfdoctor.kernels import walker
from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm
from perfdoctor.treat.nonfinite import NonFiniteWatch
from perfdoctor.watch.sync_guard import sync_guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node"),  # warm-up and capture use streams of their own
]
LONG = 500_000_000  # cycles: about a quarter of a second


def model_and_optimizer(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).cuda()
    return model, kind(model.parameters(), **options)


@pytest.mark.parametrize("by_hand", [True, False])
def test_no_sync_and_the_right_name(by_hand: bool) -> None:
    model, optimizer = model_and_optimizer(fused=True)
    watch = NonFiniteWatch(model, max_lag=100)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            loss = model(torch.randn(8, 16, device="cuda")).square().mean()
            loss.backward()
            if step == 30:
                model[2].weight.grad[0, 3:5].fill_(math.inf)  # type: ignore[index]
            watch.check(loss)
            optimizer.step()
            optimizer.zero_grad()
            watch.step()

    with pytest.raises(NonFiniteError, match=r"step 30: the gradient of 2\.weight: 2 values are not finite"):  # noqa: PT012
        if by_hand:
            train(1, 3)
            with sync_guard(budget=0):
                train(3, 60)
            watch.finish()
        with watch:
            train(1, 3)
            with sync_guard(budget=0):
                train(3, 60)
    assert watch.num_waits == 0


def test_the_lag_is_bounded() -> None:
    model, _ = model_and_optimizer()
    watch = NonFiniteWatch(model, max_lag=4)
    watch.check(torch.zeros((), device="cuda"))
    watch.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    watch.check(torch.full((), math.nan, device="cuda"))
    watch.step()
    with pytest.raises(NonFiniteError, match="step 2: the loss is not finite"):  # noqa: PT012
        for _ in range(20):
            watch.check(torch.zeros((), device="cuda"))
            watch.step()
    assert watch.hits[0].num_steps_later == 4
    assert watch.num_waits == 1


@pytest.mark.parametrize("skips", [False, True])
def test_in_a_graph(skips: bool) -> None:
    model, optimizer = model_and_optimizer(torch.optim.AdamW, fused=True, capturable=True)
    x = torch.randn(8, 16, device="cuda")
    with NonFiniteWatch(model, optimizer, on_hit="skip" if skips else "raise", max_lag=20) as watch:

        def step() -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            watch.check(loss)
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                watch.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            step()
            with pytest.raises(UsageError, match="after each replay"):
                watch.step()
        with sync_guard(budget=0):
            graph.replay()
            watch.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        good = x.clone()
        if skips:
            x.fill_(math.nan)
            graph.replay()
            watch.step()
            assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            x.copy_(good)
            graph.replay()
            watch.step()
            watch.finish()
            assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            assert [(hit.parameter, hit.num_parameters, hit.skipped) for hit in watch.hits] == [(None, 0, True)]
            return
        with torch.no_grad():
            model[2].bias.fill_(math.inf)
        graph.replay()
        with pytest.raises(NonFiniteError, match=f"step {watch._num_steps + 1}: the loss is not finite"):  # noqa: PT012
            watch.step()
            watch.finish()


def test_the_first_check_in_a_graph_is_refused() -> None:
    model, _ = model_and_optimizer()
    watch = NonFiniteWatch(model)
    loss = torch.ones((), device="cuda")
    with pytest.raises(UsageError, match="one watched step before"), torch.cuda.graph(torch.cuda.CUDAGraph()):  # noqa: PT012
        loss + 1.0  # torch warns about a graph with nothing in it
        watch.check(loss)
    torch.cuda.synchronize()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler(fused: bool) -> None:
    model, optimizer = model_and_optimizer(torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    with NonFiniteWatch(model, scaler=scaler) as watch:
        for step in range(5):
            loss = model(torch.ones(4, 16, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            if step in (1, 2):
                model[0].weight.grad[0, 0] = math.inf  # type: ignore[index]
            watch.check(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step()
        assert scaler.get_scale() == 2.0**14
    assert watch.hits == ()


def test_sparse_gradients() -> None:
    table = nn.Embedding(100, 8, sparse=True, device="cuda")
    watch = NonFiniteWatch(table)
    index = torch.tensor([1, 5, 5], device="cuda")
    with pytest.raises(NonFiniteError, match="step 3: the gradient of weight: 1 value"):  # noqa: PT012
        for step in range(3):
            table.zero_grad()
            table(index).sum().backward()
            if step == 2:
                table.weight.grad._values()[1, 2] = math.nan  # type: ignore[union-attr]
            with sync_guard(budget=0 if step else 100):
                watch.check()
                watch.step()
        watch.finish()


ONE_CYCLE = pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle:UserWarning")


@ONE_CYCLE  # there is only one cycle
def test_two_launches_a_step() -> None:
    """One for all gradients and the loss, one that takes the record; the copy is no kernel."""
    model, _ = model_and_optimizer()
    model(torch.randn(8, 16, device="cuda")).square().mean().backward()
    watch, loss = NonFiniteWatch(model), torch.ones((), device="cuda")

    def step() -> None:
        watch.check(loss)
        watch.step()

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in kernels if "memcpy" not in name.lower()]
    assert sorted(set(kernels)) == ["finite_kernel", "take_kernel"]
    assert len(kernels) == 10
    if walker.compiled_walker() is not None:
        assert watch._launches.num_prepared == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_that_move_are_read_where_they_are(dtype: torch.dtype) -> None:
    """New memory for every gradient in every step; the old memory is NaN, and would be an alarm."""
    model = nn.Sequential(*[nn.Linear(index + 1, index + 2) for index in range(20)]).cuda().to(dtype)
    watch = NonFiniteWatch(model, max_lag=100)
    kept: list[torch.Tensor] = []
    bad = {7: ("3.weight", 4), 12: ("19.bias", 1), 15: ("0.weight", 2)}
    seen = []
    watch._on_hit = seen.append
    for step in range(1, 20):
        for parameter in model.parameters():
            if parameter.grad is not None and step % 3:
                continue  # it stays for two steps
            if parameter.grad is not None:
                parameter.grad.fill_(math.nan)
                kept.append(parameter.grad)
            parameter.grad = torch.full_like(parameter, 0.5)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(0.5)
            if step in bad and bad[step][0] == name:
                parameter.grad.view(-1)[: bad[step][1]].fill_(math.inf)
        watch.check(torch.ones((), device="cuda", dtype=dtype))
        watch.step()
    watch.finish()
    assert [(hit.step, hit.parameter, hit.num_values) for hit in seen] == [(step, *what) for step, what in bad.items()]


def test_other_streams() -> None:
    model, _ = model_and_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found: list[Any] = []
    watch, loss = NonFiniteWatch(model, on_hit=found.append, max_lag=100), torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    for step in range(1, 7):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            model[2].bias.grad.fill_(math.nan if step == 3 else 0.0)  # type: ignore[union-attr]
            watch.check(loss)
            watch.step()
        torch.cuda.current_stream().wait_stream(side)
    watch.finish()
    assert [(hit.step, hit.parameter) for hit in found] == [(3, "2.bias")]


def test_a_loss_alone_after_counts_that_are_gone() -> None:
    """float64 gradients are counted apart, into memory that lives for one check and is then used for other numbers."""
    model, _ = model_and_optimizer()
    model.double()
    hits: list[Any] = []
    watch = NonFiniteWatch(model, on_hit=hits.append)
    zero = torch.zeros((), device="cuda")
    for _ in range(20):
        with watch:
            watch.check(zero)
            watch.step()
        model(torch.ones(2, 16, dtype=torch.float64, device="cuda")).sum().backward()
        watch.check(zero)
        watch.step()
        others = [torch.full((64,), 7, dtype=torch.int64, device="cuda") for _ in range(64)]
        with watch:
            watch.check(zero)
            watch.step()
        del others
    watch.finish()
    assert hits == []


def test_memory_that_is_gone_is_not_read() -> None:
    parameter = nn.Parameter(torch.zeros(2, device="cuda"))
    whole = torch.ones(8, device="cuda")
    parameter.grad = whole[2:4]
    for read in (grad_norm, lambda items: clip_grad_norm_(items, 1.0)):
        assert float(read([parameter])) > 0
    whole.untyped_storage().resize_(0)
    for read in (grad_norm, lambda items: clip_grad_norm_(items, 1.0)):
        with pytest.raises(UsageError, match="has no memory"):
            read([parameter])
    torch.cuda.synchronize()


def test_a_loss_inside_a_function_transform() -> None:
    watch = NonFiniteWatch(nn.Linear(2, 1).cuda(), on_hit=lambda _: None)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = (x * math.inf).sum()
        watch.check(loss)
        return loss

    for _ in range(3):
        torch.func.grad(loss_of)(torch.ones(2, device="cuda"))
        watch.step()
    watch.finish()
    assert [hit.step for hit in watch.hits] == [1, 2, 3]
