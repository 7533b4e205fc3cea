"""Gradients that a replayed graph would overwrite get memory of their own; all others are left where they are."""

import pytest
import torch
from torch import nn

import perfdoctor
from perfdoctor.treat.staying_gradients import StayingGradients, storages_of_graphs


def parameters_with(*gradients):
    parameters = [nn.Parameter(torch.zeros(3)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_only_what_lies_in_the_graphs_memory_is_moved_and_keeps_its_values():
    pool, own = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    first, second, third = parameters_with(pool, own, None)
    gradients = StayingGradients([first, second, third], lambda device: frozenset([address(pool)]))
    assert gradients.keep() == 1
    assert first.grad is not pool
    assert second.grad is own
    assert third.grad is None
    pool.fill_(9.0)  # the next replay
    assert first.grad.tolist() == [1.0, 2.0, 3.0]


def test_a_view_into_the_graphs_memory_is_moved_too():
    pool = torch.arange(6.0)
    (parameter,) = parameters_with(pool[3:])
    assert StayingGradients([parameter], lambda device: frozenset([address(pool)])).keep() == 1
    pool.zero_()
    assert parameter.grad.tolist() == [3.0, 4.0, 5.0]


def test_a_gradient_that_stays_is_moved_once_and_a_new_one_again():
    pool = torch.ones(3)
    (parameter,) = parameters_with(pool)
    gradients = StayingGradients([parameter], lambda device: frozenset([address(pool)]))
    assert [gradients.keep(), gradients.keep()] == [1, 0]
    kept = parameter.grad
    parameter.grad += 1
    assert gradients.keep() == 0
    assert parameter.grad is kept
    parameter.grad = None
    assert gradients.keep() == 0
    parameter.grad = pool
    assert gradients.keep() == 1


def test_where_torch_does_not_tell_every_new_gradient_is_moved():
    (parameter,) = parameters_with(torch.ones(3))
    before = parameter.grad
    assert StayingGradients([parameter], lambda device: None).keep() == 1
    assert parameter.grad is not before
    assert torch.equal(parameter.grad, before)


def test_sparse_and_empty_gradients_are_left():
    sparse = torch.eye(3).to_sparse()
    table, nothing = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(0))
    table.grad, nothing.grad = sparse, torch.zeros(0)
    assert StayingGradients([table, nothing], lambda device: None).keep() == 0
    assert table.grad is sparse


def train(compiled, order):
    """Weights after six updates of three passes each, and how the gradients go between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(18, 32, 64, device="cuda")
    if compiled:
        perfdoctor.compile_model(model, mode="reduce-overhead")
    for index, x in enumerate(batches):
        loss = model(x).square().mean() / 3
        if order == "cleared behind the forward pass" and index % 3 == 0:
            optimizer.zero_grad()
        loss.backward()
        if index % 3 == 2:
            optimizer.step()
            if order != "cleared behind the forward pass":
                optimizer.zero_grad(set_to_none=order == "cleared")
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["cleared", "zeroed", "cleared behind the forward pass"])
@pytest.mark.filterwarnings("ignore")
def test_accumulated_gradients_are_right_with_graphs(order):
    torch._dynamo.reset()
    for got, expected in zip(train(True, order), train(False, order), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_the_graphs_own_gradients_are_recognised():
    torch._dynamo.reset()
    model = nn.Linear(64, 64).cuda()
    perfdoctor.compile_model(model, mode="reduce-overhead")
    x = torch.randn(8, 64, device="cuda")
    for _ in range(4):  # eager, warm-up, recorded, replayed
        model.zero_grad()
        model(x).square().mean().backward()
    storages = storages_of_graphs(torch.device("cuda", 0))
    assert storages is not None, "this version of torch keeps them elsewhere: every gradient is moved, which is slower"
    assert {address(p.grad) for p in model.parameters()} <= storages
    assert address(x) not in storages


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_two_models_that_replay_graphs_keep_their_gradients():
    torch._dynamo.reset()

    def sums(compiled):
        torch.manual_seed(0)
        first, second = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
        if compiled:
            perfdoctor.compile_model(first, mode="reduce-overhead")
            perfdoctor.compile_model(second, mode="reduce-overhead")
        for x in torch.randn(6, 8, 64, device="cuda"):
            first(x).square().mean().backward()
            second(x).square().mean().backward()
        return [p.grad.clone() for p in (*first.parameters(), *second.parameters())]

    for got, expected in zip(sums(True), sums(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
