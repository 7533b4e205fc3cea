"""graph_obstacles names each line that a CUDA graph would break on or freeze, and leaves everything as it was."""

import logging
import random
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from graph_parts import found_in, line_of, parts
from torch import nn

import perfdoctor
from perfdoctor.errors import UsageError
from perfdoctor.treat.graph_obstacles import graph_obstacles

found = partial(found_in, __file__)


def test_a_clean_step_has_none(device):
    model, opt, x, y = parts(device)

    def train_step(x, y):
        opt.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.detach()

    result = graph_obstacles(train_step, x, y)
    assert list(result) == []
    assert result.graphable
    assert "Nothing found" in str(result)


def test_reads_and_branches_in_order(device):
    model, opt, x, y = parts(device)

    def train_step(x, y):
        loss = nn.functional.mse_loss(model(x), y)
        if loss > 1e9:
            return None
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    result = graph_obstacles(train_step, x, y)
    assert found(result) == [
        ("capture-sync", line_of(train_step, "if loss")),
        ("capture-sync", line_of(train_step, "return loss.item")),
    ]
    assert not result.graphable
    assert all(row.severity == "stops" for row in result)


class Counting(nn.Module):
    seen = 0

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.calls = 0
        self.history = []
        self.table = {}
        self.ready = False
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        if not self.ready:
            self.ready = True  # once: a first call is no change from step to step
        self.calls += 1
        Counting.seen += 1
        out = self.body(x)
        self.history.append(out.detach().mean())
        self.table["last"] = out.detach()
        self.mean.copy_(out.detach().mean(0))
        self.mean = self.mean * 0.5
        return out


def test_python_state_is_found_where_it_changes(device):
    model, opt, x, y = parts(device)
    net = Counting(model).to(device)
    net(x)
    kept = dict(vars(net))
    before = (net.calls, len(net.history), Counting.seen, net.mean)

    def train_step(x, y):
        opt.zero_grad()
        net(x).square().sum().backward()
        opt.step()

    result = graph_obstacles(train_step, x, y)
    expected = [
        line_of(Counting, text)
        for text in ("self.calls += 1", "Counting.seen += 1", "self.history.append", 'self.table["last"]', "* 0.5")
    ]
    assert [line for _, line in found(result, "capture-python-state")] == expected
    assert {row.severity for row in result} == {"silent"}
    assert (net.calls, len(net.history), Counting.seen) == before[:3]
    assert net.mean is before[3]
    assert vars(net).keys() == kept.keys()


GLOBAL_COUNT = 0


def test_globals_closures_schedules_and_clocks(device, caplog):
    model, opt, x, y = parts(device)
    sched = torch.optim.lr_scheduler.StepLR(opt, 5, 0.5)
    calls = 0
    log = logging.getLogger("graph-obstacles-test")

    def train_step(x, y):
        nonlocal calls
        global GLOBAL_COUNT
        calls += 1
        GLOBAL_COUNT = GLOBAL_COUNT + 1
        start = time.perf_counter()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        log.debug("took %s", start)
        print("step", file=sys.stderr)

    result = graph_obstacles(train_step, x, y)
    texts = ("calls += 1", "GLOBAL_COUNT =", "perf_counter", "sched.step", "log.debug", "print(")
    assert [line for _, line in found(result, "capture-python-state")] == [line_of(train_step, t) for t in texts]
    assert calls == 0
    assert GLOBAL_COUNT == 0
    assert sched.last_epoch == 0


def test_host_randomness(device):
    model, opt, x, y = parts(device)
    generator, own = np.random.default_rng(3), random.Random(4)

    def train_step(x, y):
        scale = 1.0
        if random.random() < 0.5:
            scale = 2.0
        scale *= np.random.rand()
        scale *= generator.random()
        scale *= own.random()
        (model(x) * scale).sum().backward()
        opt.step()
        opt.zero_grad()

    state = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    result = graph_obstacles(train_step, x, y)
    texts = ("if random", "np.random", "generator.random", "own.random")
    assert [line for _, line in found(result, "capture-python-state")] == [line_of(train_step, t) for t in texts]
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == state[:2]
    assert torch.equal(torch.get_rng_state(), state[2])


def test_host_tensors_in_the_step(device):
    model, opt, x, y = parts(device)
    host = torch.ones(4)

    def train_step(x, y):
        scale = torch.tensor(0.5, device=x.device)
        moved = torch.as_tensor([1.0, 2.0, 3.0, 4.0]).to(x.device)
        (model(x * scale * moved)).sum().backward()
        opt.step()
        opt.zero_grad()

    assert host.device.type == "cpu"
    result = graph_obstacles(train_step, x, y)
    assert found(result, "capture-host-tensor") == [
        ("capture-host-tensor", line_of(train_step, "torch.tensor(0.5")),
        ("capture-host-tensor", line_of(train_step, "torch.as_tensor")),
    ]


def test_a_copy_from_pinned_memory_waits_for_nothing_and_is_frozen():
    with perfdoctor.emulate_cuda():
        model, opt, _, y = parts("cuda")
        pinned = torch.ones(6, 4).pin_memory()

        def train_step(y):
            moved = pinned.to("cuda", non_blocking=True)
            (model(moved) - y).sum().backward()
            opt.step()
            opt.zero_grad()

        (row,) = graph_obstacles(train_step, y)
        assert (row.code, row.severity) == ("capture-host-tensor", "silent")
        assert row.site.frame.line == line_of(train_step, "pinned.to")


def test_shapes_that_change_inside_and_between_batches(device):
    model, opt, x, y = parts(device)
    lengths = iter([6, 4, 5, 3, 6, 2, 7])
    emb = nn.Embedding(10, 4).to(device)

    def varying():
        ids = torch.zeros(next(lengths), dtype=torch.long, device=x.device)
        out = model(emb(ids))
        out.sum().backward()

    result = graph_obstacles(varying)
    assert found(result, "capture-dynamic-shape") == [("capture-dynamic-shape", line_of(varying, "ids ="))]

    def fixed(x, y):
        (model(x) - y).sum().backward()
        opt.step()
        opt.zero_grad()

    longer = torch.ones(9, 4, device=x.device)
    result = graph_obstacles(fixed, x, y, batches=[(longer, torch.zeros(9, 2, device=x.device)), (x, y)])
    (row,) = [row for row in result if row.code == "capture-dynamic-shape"]
    assert "2 different batch shapes in 3 batches" in row.text
    assert "(6, 4), (9, 4)" in row.text
    assert row.site.frame.line == line_of(test_shapes_that_change_inside_and_between_batches, "longer = ")
    assert not [row for row in graph_obstacles(fixed, x, y, batches=[(x, y)]) if row.code == "capture-dynamic-shape"]


def test_a_number_that_the_loop_changes(device):
    model, opt, x, y = parts(device)
    scale, fixed, step = 1.0, 2.0, 0

    def train_step(x, y):
        (model(x) * scale * fixed).sum().backward()
        opt.step()
        opt.zero_grad()

    for step in range(2):
        scale = 1.0 / (step + 1)
        result = graph_obstacles(train_step, x, y)
    me = test_a_number_that_the_loop_changes
    assert found(result) == [("capture-baked-value", line_of(me, "scale = 1.0 / "))]
    assert not result.graphable


def test_everything_is_as_before_and_trains_on_alike(device):
    results = []
    for watched in (False, True):
        model, opt, x, y = parts(device, torch.optim.AdamW)

        def train_step(x, y, model=model, opt=opt):
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return loss

        train_step(x, y)
        if watched:
            tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
            held = [(t, t.data_ptr(), type(t)) for t in tensors]
            grads = [p.grad for p in model.parameters()]
            graph_obstacles(train_step, x, y)
            assert all(t.data_ptr() == address and type(t) is kind for t, address, kind in held)
            assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
            assert all(row["step"].device.type == "cpu" for row in opt.state.values())
        results.append([train_step(x, y).item() for _ in range(3)])
    assert results[0] == results[1]


def test_an_error_in_the_step_comes_out_and_nothing_stays(device):
    model, opt, x, y = parts(device)
    before = [p.detach().clone() for p in model.parameters()]

    def train_step(x, y):
        model(x).sum().backward()
        opt.step()
        raise ValueError("mine")

    tracers = sys.gettrace(), sys.getprofile()
    with pytest.raises(ValueError, match="mine"):
        graph_obstacles(train_step, x, y)
    assert (sys.gettrace(), sys.getprofile()) == tracers
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert device == "cuda" or not torch.cuda.is_available()


def test_wrong_arguments():
    with pytest.raises(UsageError, match="function"):
        graph_obstacles(3)
    with pytest.raises(UsageError, match="tuple"):
        graph_obstacles(print, batches=[torch.ones(1)])
    with pytest.raises(UsageError, match="got int"):
        graph_obstacles(print, batches=3)


def test_it_prints_ranked(device):
    model, opt, x, y = parts(device, torch.optim.Adam)
    count = [0]

    def train_step(x, y):
        loss = model(x).sum()
        loss.backward()
        opt.step()
        count[0] += 1
        return float(loss.detach())

    result = graph_obstacles(train_step, x, y)
    text = str(result)
    severities = [row.severity for row in result]
    assert severities == ["silent", "stops", "handled"]
    assert text.index("silently wrong") < text.index("stops graph capture") < text.index("takes care")
    assert f"{__file__}:{line_of(train_step, 'count[0]')}" in text
    assert all(row.change for row in result)
