"""The bookkeeping around replays, with a stand-in for the GPU's graph: a tape of device operations, run again.

What is tested is perfdoctor's own part: which graph a batch gets, that inputs, gradients and state are the tensors that
the graph was captured with, and what stays after a failure. `torch.cuda.CUDAGraph` is patched for that, because there
is no device here to replay a graph on: the tape repeats the operations of graph capture on the very same tensors, with
no Python of the step in between. It is no evidence of what CUDA does (streams, memory pools, what it forbids in a graph
capture, speed): test_graphed_step_gpu.py runs real graphs.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import perfdoctor
from perfdoctor.emulate.tensor import plain
from perfdoctor.errors import TreatmentRefused
from perfdoctor.treat import graph_capture
from perfdoctor.treat.graph_optimizers import make_capturable
from perfdoctor.treat.graphed_step import GraphLimitWarning, graphed_step

ALIVE = []


class Tape(TorchDispatchMode):
    """Records operations while captured; `replay` runs them again into the same memory."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        held = tree_map(bare, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.rows.append((func, *held, tree_map(bare, out)))
        return out

    def capture_begin(self, pool=None, capture_error_mode="global"):
        ALIVE.append(self)
        self.random = torch.get_rng_state()
        self.__enter__()

    def capture_end(self):
        ALIVE.remove(self)
        self.__exit__(None, None, None)
        torch.set_rng_state(self.random)

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, out in self.rows:
                again = func(*args, **kwargs)
                if not func.is_view:
                    refill(out, again)

    def reset(self):
        self.rows = []

    def register_generator_state(self, generator):
        raise AssertionError("no generator of the user's own in these tests")


def bare(value):
    """The memory of a tensor, below autograd."""
    return plain(value) if isinstance(value, torch.Tensor) else value


def refill(out, again):
    if isinstance(out, tuple | list):
        for a, b in zip(out, again, strict=True):
            refill(a, b)
    elif isinstance(out, torch.Tensor) and out.data_ptr() != again.data_ptr():
        out.copy_(again)


@pytest.fixture(autouse=True)
def taped(monkeypatch):
    with perfdoctor.emulate_cuda():
        monkeypatch.setattr(graph_capture, "on_a_device", lambda: True)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(graph_capture, "_streams", {})
        yield
    assert not ALIVE


def subject(zero, optimizer, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.GELU(), nn.Linear(8, 2)).cuda()
    opt = optimizer(model.parameters(), lr=0.05, **options)
    make_capturable(opt)

    def train_step(x, y):
        if zero in ("none", "in place"):
            opt.zero_grad(set_to_none=zero == "none")
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        if zero == "after":
            opt.zero_grad(set_to_none=True)
        return loss

    return model, opt, train_step


def batches(count, rows):
    generator = torch.Generator().manual_seed(rows)
    return [
        (torch.randn(rows, 4, generator=generator).cuda(), torch.randn(rows, 2, generator=generator).cuda())
        for _ in range(count)
    ]


def trained(graphed, zero, order, between, optimizer=torch.optim.AdamW, **options):
    model, opt, step = subject(zero, optimizer, **options)
    sched = torch.optim.lr_scheduler.StepLR(opt, 3, 0.8)
    torch.manual_seed(9)
    run = graphed_step(step, *order[0], model=model, optimizer=opt, max_graphs=2) if graphed else step
    losses, grads = [], []
    for index, batch in enumerate(order):
        between(index, model, opt)
        losses.append(run(*batch).detach())
        sched.step()
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    numbers = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return run, torch.stack(losses), grads, numbers


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def nothing(index, model, opt):
    """Between the steps the user does nothing."""


def clears(index, model, opt):
    if index % 3 == 1:
        opt.zero_grad(set_to_none=index % 2 == 0)


def scales(index, model, opt):
    if index % 4 == 2:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5


def changes_decay(index, model, opt):
    opt.param_groups[0]["weight_decay"] = 0.1 if 8 <= index < 12 else 0.0
    model.train(index != 14)


def order():
    wide, narrow, odd = batches(12, 6), batches(12, 5), batches(12, 3)
    return [row for rows in zip(wide, narrow, odd, narrow, wide, strict=True) for row in rows][:30]


@pytest.mark.filterwarnings("ignore::perfdoctor.treat.graphed_step.GraphLimitWarning")
@pytest.mark.parametrize("between", [nothing, clears, scales, changes_decay])
@pytest.mark.parametrize("zero", ["none", "in place", "after", "outside"])
@pytest.mark.parametrize(
    ("optimizer", "options"), [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01})]
)
def test_losses_gradients_and_numbers_are_those_of_the_eager_step(optimizer, options, zero, between):
    given = order()
    _, losses, grads, numbers = trained(False, zero, given, between, optimizer, **options)
    run, again, grads_again, numbers_again = trained(True, zero, given, between, optimizer, **options)
    assert torch.equal(losses, again)
    assert all(same(a, b) for a, b in zip(grads, grads_again, strict=True))
    assert same(numbers, numbers_again)
    assert len(losses.unique()) == len(losses)
    assert run.num_replays > 5
    assert run.num_eager > 3
    assert run.num_graphs == 2


def test_a_failed_graph_capture_leaves_the_first_graph_and_everything_else_as_it_was():
    wide, narrow = batches(6, 6), batches(6, 5)
    results = []
    for graphed in (False, True):
        model, opt, step = subject("none", torch.optim.AdamW)

        def picky(x, y, step=step):
            loss = step(x, y)
            if len(x) == 5 and ALIVE:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return loss

        torch.manual_seed(9)
        run = graphed_step(picky, *wide[0], model=model, optimizer=opt) if graphed else picky
        losses = []
        for index, (a, b) in enumerate(zip(wide, narrow, strict=True)):
            losses.append(run(*a).detach())
            if graphed and index == 1:
                with pytest.warns(GraphLimitWarning, match="keep the value on the device"):
                    losses.append(run(*b).detach())
            else:
                losses.append(run(*b).detach())
        results.append(torch.stack(losses))
    assert torch.equal(*results)
    assert (run.num_graphs, run.num_replays, run.num_eager) == (1, 6, 6)


def test_the_first_failure_is_an_error_with_its_line():
    model, opt, step = subject("none", torch.optim.AdamW)

    def failing(x, y):
        loss = step(x, y)
        if ALIVE:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return loss

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TreatmentRefused, match="keep the value on the device") as caught:
        graphed_step(failing, *batches(1, 6)[0], model=model, optimizer=opt)
    assert f"{__file__}:{failing.__code__.co_firstlineno + 3}" in str(caught.value)
    assert same(before, model.parameters())
    assert not opt.state
