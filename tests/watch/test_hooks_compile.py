"""torch.compile beside the hooks: no graph break and no recompilation, whichever comes first."""

import contextlib
import gc

import pytest
import torch

from perfdoctor.record.call_site import HitLog
from perfdoctor.watch.call_sites import CallSiteHooks
from perfdoctor.watch.garbage import CollectionHook
from perfdoctor.watch.steps import StepDetector


@pytest.fixture
def counter():
    # Imported here: torch._dynamo takes two seconds, and its warnings are not ours.
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield CompileCounter()
    torch._dynamo.reset()


def loss_of(x, y):
    moved = y.to("cpu", non_blocking=True)
    copied = torch.empty(8).copy_(x[0], non_blocking=True)
    return x.to(torch.float32).sum() + moved.sum() + copied.sum()


def run(compiled):
    for _ in range(3):
        compiled(torch.ones(4, 8), torch.ones(3))


@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_hooks_are_invisible_to_compiled_code(counter, compiled_first):
    from torch._dynamo.utils import counters

    compiled = torch.compile(loss_of, backend=counter)
    if compiled_first:
        run(compiled)
    hooks = CallSiteHooks(HitLog())
    detector = StepDetector(lambda: 0, lambda stamp: None)
    hooks.catch_warnings()
    hooks.patch_calls()
    detector.install()
    try:
        run(compiled)
    finally:
        hooks.remove()
        detector.remove()
    run(compiled)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_update_is_not_broken_by_the_step_hook(counter):
    from torch._dynamo.utils import counters

    def graph_breaks(install):
        torch._dynamo.reset()
        counters.clear()
        weight = torch.nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        detector = StepDetector(lambda: 0, lambda stamp: None)
        if install:
            detector.install()
        try:
            for _ in range(3):
                compiled()
        finally:
            detector.remove()
        return sum(counters["graph_break"].values()), weight.detach().clone()

    (plain, expected), (watched, weight) = graph_breaks(False), graph_breaks(True)
    assert watched == plain
    assert torch.equal(weight, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_of_a_compiled_step_with_its_backward_nothing_of_ours_is_compiled(counter, device):
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.utils import counters

    import perfdoctor

    def frames_and_weight(watched):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def train_step(x):
            layer(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled = torch.compile(train_step, backend="aot_eager")
        batches = torch.randn(12, 4, 8).to(device)
        gc.disable()  # its callbacks come anywhere, in compiled code as well
        try:
            with perfdoctor.watch() if watched else contextlib.nullcontext():
                for x in batches:
                    compiled(x)
        finally:
            gc.enable()
        return counters["frames"]["total"], layer.weight.detach().clone()

    frames_and_weight(False)  # the first run of a process compiles what torch runs once: 17 frames more on an H200
    (plain, expected), (frames, weight) = frames_and_weight(False), frames_and_weight(True)
    codes = [code for code in (seen() for seen in input_codes.seen) if code is not None]
    assert [code.co_name for code in codes if "/perfdoctor/watch/" in code.co_filename] == []
    assert frames <= plain + 2  # it differs by one between two plain runs; a compiled hook added ten
    assert torch.equal(weight, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_collection_inside_a_compiled_function_compiles_nothing_of_ours(counter):
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.utils import counters

    log, pauses = HitLog(), []
    hook = CollectionHook(log, pauses)

    def collecting(x):
        x = x + 1
        gc.collect()
        return x * 2

    def frames(install):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(collecting, backend="eager")
        gc.disable()
        if install:
            hook.install()
        try:
            for _ in range(3):
                compiled(torch.ones(2))
        finally:
            hook.remove()
            gc.enable()
        return counters["frames"]["total"]

    frames(install=False)  # the first run of a process compiles what torch runs once: three frames more
    plain, hooked = frames(install=False), frames(install=True)
    assert hooked <= plain + 2  # plain runs differ by one; 54 were compiled
    codes = [code for code in (seen() for seen in input_codes.seen) if code is not None]
    assert [code.co_name for code in codes if "/perfdoctor/watch/" in code.co_filename] == []
    assert [hit.kind for hit in log.hits] == ["python_gc"] * 3
    assert len(pauses) >= 3
