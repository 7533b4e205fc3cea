"""graphed_step on a GPU where graph capture fails, threads pin memory or graphs are released."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from graphed_gpu_parts import batches, build, losses_of, network, stepper
from torch import nn

from perfdoctor.errors import TreatmentRefused
from perfdoctor.treat.graph_optimizers import make_capturable
from perfdoctor.treat.graphed_step import GraphLimitWarning, graphed_step

pytestmark = pytest.mark.gpu


def usable(before):
    """After a failure: eager dropout, allocation and a new graph work; nothing has changed."""
    model, opt, weights, random = before
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert torch.equal(random, torch.cuda.get_rng_state())
    nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5).sum().item()
    torch.cuda.set_rng_state(random)
    step = stepper(model, opt)
    given = batches(3)
    run = graphed_step(step, *given[0], model=model, optimizer=opt)
    losses = losses_of(run, given)
    assert losses.isfinite().all()
    assert run.num_replays == 3


def fresh():
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, opt, [p.detach().clone() for p in model.parameters()], torch.cuda.get_rng_state()


def test_a_wait_that_only_graph_capture_sees():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)

    def waiting(x, y):
        loss = step(x, y)
        torch.cuda.current_stream().synchronize()
        return loss

    with pytest.raises(TreatmentRefused) as caught:
        graphed_step(waiting, *batches(1)[0], model=model, optimizer=opt)
    assert f"{Path(__file__).name}:{waiting.__code__.co_firstlineno + 2}" in str(caught.value)
    assert opt.param_groups[0]["lr"] == 1e-2
    assert not opt.state
    usable(before)


def test_a_read_is_refused_with_its_line_before_any_graph_capture():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)

    def reading(x, y):
        return step(x, y).item()

    with pytest.raises(TreatmentRefused, match=r"item: reads a device value") as caught:
        graphed_step(reading, *batches(1)[0], model=model, optimizer=opt)
    assert f"{Path(__file__).name}:{reading.__code__.co_firstlineno + 1}" in str(caught.value)
    usable(before)


def test_an_error_during_graph_capture():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)

    def failing(x, y):
        loss = step(x, y)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("in the graph")
        return loss

    with pytest.raises(TreatmentRefused, match="in the graph"):
        graphed_step(failing, *batches(1)[0], model=model, optimizer=opt)
    usable(before)


def test_a_failure_leaves_the_graphs_before_it_right():
    """The default generator serves the first graph and the failed one: dropout must go on as in eager."""
    given, more = batches(20), batches(20, 12)
    runs = []
    for graphed in (False, True):
        model, opt, _, step = build(torch.optim.AdamW, {})
        torch.manual_seed(3)

        def picky(x, y, step=step):
            loss = step(x, y)
            if len(x) == 12 and torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            return loss

        run = graphed_step(picky, *given[0], model=model, optimizer=opt) if graphed else picky
        order = [row for pair in zip(given, more, strict=True) for row in pair]
        if graphed:
            with pytest.warns(GraphLimitWarning, match="runs eagerly"):
                runs.append(losses_of(run, order))
        else:
            runs.append(losses_of(run, order))
    assert torch.equal(*runs)
    assert run.num_graphs == 1


def test_out_of_memory_says_so_and_gives_the_memory_back():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)
    total = torch.cuda.get_device_properties(0).total_memory

    def greedy(x, y):
        loss = step(x, y)
        if torch.cuda.is_current_stream_capturing():
            held = torch.empty(2 * total, dtype=torch.uint8, device="cuda")
            loss = loss + held[0]
        return loss

    other = network()
    other_opt = torch.optim.AdamW(other.parameters())
    graphed_step(stepper(other, other_opt), *batches(1)[0], model=other, optimizer=other_opt)  # workspaces of cuBLAS
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with pytest.raises(TreatmentRefused, match="out of device memory") as caught:
        graphed_step(greedy, *batches(1)[0], model=model, optimizer=opt)
    assert f"{Path(__file__).name}:{greedy.__code__.co_firstlineno + 3}" in str(caught.value)
    del caught
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 32 * 2**20
    usable(before)


def test_a_thread_that_pins_memory_is_no_trouble():
    model, opt, _, step = build(torch.optim.AdamW, {})
    given = batches(3)
    stop = threading.Event()

    def pin():
        size = 1
        while not stop.is_set():
            torch.empty(size * 4096, pin_memory=True)
            size = size % 4096 + 1

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    try:
        for _ in range(5):
            run = graphed_step(step, *given[0], model=model, optimizer=opt)
            run(*given[1])
    finally:
        stop.set()
        thread.join()


def test_released_graphs_give_their_memory_back():
    model, opt, _, step = build(torch.optim.AdamW, {})
    given = batches(2)
    sizes = []
    for _ in range(4):
        run = graphed_step(step, *given[0], model=model, optimizer=opt)
        run(*given[1])
        run.release()
        make_capturable(opt)
        del run
        gc.collect()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] <= sizes[1] + 4 * 2**20
