"""The phases of a plain loop, as torch.profiler records their ranges; everything is as before afterwards."""

import copy
import functools
import io
import itertools
import pickle
import sys
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from perfdoctor.emulate import emulate_cuda
from perfdoctor.watch.module_ranges import module_ranges
from perfdoctor.watch.phase_annotations import PhaseAnnotations
from perfdoctor.watch.steps import StepDetector, now

PHASES = ("step", "data", "h2d", "forward", "backward", "optimizer", "zero_grad", "clip", "logging")


def train(steps, after_step, device="cpu", fails_at=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(2 * steps, 4)), batch_size=2)
    for number, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().sum()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        if number == fails_at:
            raise KeyboardInterrupt
        optimizer.step()
        after_step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def next_step(annotations):
    numbers = itertools.count(1)
    return lambda: annotations.open_step(next(numbers))


def names_of(profiler):
    rows = [(event.time_range.start, event.name) for event in profiler.events()]
    return [name for _, name in sorted(rows) if name.split(" ")[0] in PHASES]


def recorded(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    return names_of(profiler)


@pytest.fixture
def annotations(monkeypatch):
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:  # other tests have compiled things
        monkeypatch.setattr(dynamo, "counters", defaultdict(Counter))
    installed = PhaseAnnotations()
    yield installed
    installed.remove()


def test_phases_of_a_step_in_their_order(annotations):
    def watched():
        annotations.install()
        train(3, next_step(annotations))
        annotations.remove()

    names = recorded(watched)
    second = names[names.index("step 1") : names.index("step 2")]
    # The model is known from the first update on; its forward has a range from then on.
    assert second == ["step 1", "data", "zero_grad", "forward", "backward", "clip", "clip", "optimizer"]


def test_steps_end_with_the_updates(annotations):
    ended = next_step(annotations)
    detector = StepDetector(now, lambda stamp: ended())
    detector.install()
    try:
        names = recorded(lambda: (annotations.install(), train(3, lambda: None), annotations.remove()))
    finally:
        detector.remove()
    assert [name for name in names if name.startswith("step")][:3] == ["step 0", "step 1", "step 2"]


def test_copies_to_the_device(annotations):
    def watched():
        with emulate_cuda():
            annotations.install()
            train(2, next_step(annotations), device="cuda")
            annotations.remove()

    assert recorded(watched).count("h2d") >= 2


def test_numerics_and_everything_replaced_are_as_before(annotations):
    optimizer, tensor = torch.optim.Optimizer, torch.Tensor
    owned = lambda: (  # noqa: E731
        torch.autograd.backward, vars(optimizer)["zero_grad"], _BaseDataLoaderIter.__next__, vars(clip_grad).copy(),
        tensor.to, tensor.cuda, tensor.copy_,
    )  # fmt: skip
    before, plain = owned(), train(3, lambda: None)
    annotations.install()
    assert owned() != before
    watched = train(3, next_step(annotations))
    annotations.remove()
    assert owned() == before
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_a_loop_that_raises_leaves_nothing_open(annotations):
    annotations.install()
    with pytest.raises(KeyboardInterrupt):
        train(3, next_step(annotations), fails_at=1)
    annotations.remove()
    assert annotations._step is None
    assert annotations._update is None
    annotations.remove()  # again does no harm


def test_logging_of_tensorboard(annotations, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    def watched():
        annotations.install()
        with tensorboard.SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("loss", 1.0)
        annotations.remove()

    assert "logging" in recorded(watched)


def test_compiled_model_is_not_compiled_again(annotations):
    torch._dynamo.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)
    annotations.install()
    for _ in range(3):
        compiled(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    annotations.remove()
    compiled(torch.ones(2, 4))
    assert len(compilations) == 1
    torch._dynamo.reset()


def test_wrapped_functions_keep_their_name(annotations):
    annotations.install()
    assert torch.autograd.backward.__name__ == "backward"
    assert isinstance(torch.autograd.backward.__wrapped__, type(functools.wraps))


@pytest.mark.parametrize(
    "carry",
    [
        copy.deepcopy,
        pickle.dumps,
        torch.optim.swa_utils.AveragedModel,
        lambda model: torch.save(model, io.BytesIO()),
    ],
)
def test_a_loop_may_copy_and_save_its_model(annotations, carry):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    annotations.install()
    step()  # with the first update come the hooks on the model
    assert "forward" in recorded(step)
    carried = carry(model)
    if isinstance(carried, nn.Module):
        assert "forward" not in recorded(lambda: carried(torch.ones(2, 4)))
    annotations.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_saved_model_does_not_need_this_package(annotations):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    annotations.install()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model._forward_hooks
    saved = pickle.dumps(model)
    assert b"perfdoctor" not in saved
    assert torch.equal(pickle.loads(saved)(torch.ones(2, 4)), model(torch.ones(2, 4)))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_loop_may_script_its_model(annotations):
    before = torch.jit._recursive.create_script_module
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    annotations.install()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with module_ranges(model):
        hooks = [list(module._forward_hooks.values()) for module in model.modules()]
        scripted = torch.jit.script(model)
        assert [list(module._forward_hooks.values()) for module in model.modules()] == hooks
    assert any(hooks)
    assert torch.equal(scripted(torch.ones(2, 4)), model(torch.ones(2, 4)))
    annotations.remove()
    assert torch.jit._recursive.create_script_module is before
