"""Numbers on the emulated device equal those of a plain CPU run bit for bit, gradients and parameters included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfdoctor.emulate import emulate_cuda
from perfdoctor.emulate.tensor import CudaTensor, plain


def train(make_optimizer: Callable[[Any], Any], device: str) -> list[torch.Tensor]:
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)]
    model = nn.Sequential(*layers).to(device)
    optimizer = make_optimizer(model.parameters())
    seen = []
    for _ in range(4):
        loss = F.cross_entropy(model(torch.randn(6, 8, device=device)), torch.randint(0, 3, (6,), device=device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(loss.detach())
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


def with_gradients(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    out = model(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def convolutions(device: str) -> list[torch.Tensor]:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2),
        nn.Flatten(),
    ]
    model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    return with_gradients(model, torch.randn(2, 3, 16, 16, device=device).to(memory_format=torch.channels_last))


def transformer(device: str) -> list[torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    x = torch.randn(2, 5, 16, device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(5, device=device)
    out = model(x, mask=mask)
    out.sum().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


def attention(device: str) -> list[torch.Tensor]:
    q = torch.randn(2, 4, 8, 16, device=device, requires_grad=True)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    out.sum().backward()
    return [out.detach(), q.grad]


def recurrent(device: str) -> list[torch.Tensor]:
    seen = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model = kind(4, 5, 2, batch_first=True, bidirectional=True).to(device)
        lengths = torch.tensor([6, 3, 2])
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 6, 4, device=device), lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        out.square().sum().backward()
        seen += [out.detach(), *(parameter.grad for parameter in model.parameters())]
    return seen


def checkpointed(device: str) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=False).sum() + checkpoint(model, x, use_reentrant=True).sum()
    loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def assorted(device: str) -> list[torch.Tensor]:
    x = torch.randn(6, 6, device=device, requires_grad=True)
    hooked: list[torch.Tensor] = []
    x.register_hook(hooked.append)
    a = torch.einsum("ij,jk->ik", x, x)
    b = a[a > 0].sum() + a[:, [0, 2]].sum() + torch.linalg.inv(x + 10 * torch.eye(6, device=device)).sum()
    c = F.silu(a).sum() + F.mish(a).sum() + torch.topk(a, 2)[0].sum() + Sine.apply(x).sum()
    (b + c).backward()
    first = torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x)[0]
    y = x.detach()
    return [
        a.detach(), x.grad, *hooked, second, torch.vmap(lambda row: row.sin().sum())(y),
        torch.func.grad(lambda t: (t**2).sum())(y),
        torch.fft.fft(y).abs(), y.bfloat16() @ y.bfloat16(), torch.linalg.svdvals(y), torch.linalg.eigvalsh(y + y.T),
        torch.cdist(y, y),
    ]  # fmt: skip


def moved_and_copied(device: str) -> list[torch.Tensor]:
    embedding, tied = nn.Embedding(5, 4).to(device), nn.Linear(4, 5, bias=False).to(device)
    tied.weight = embedding.weight
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)).to(device)
    lazy = nn.LazyLinear(4).to(device)
    ones = torch.ones(2, 3, device=device)
    return [tied(embedding(torch.tensor([1, 2], device=device))).detach(), normed(ones).detach(), lazy(ones).detach()]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=True),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "Adadelta": torch.optim.Adadelta,
}


def padded(device: str) -> list[torch.Tensor]:
    x = torch.randn(5, 4, device=device, requires_grad=True)
    pad = nn.utils.rnn.pad_sequence
    seen = [pad([x[:2], x, x[:3]], padding_value=0.5), pad([x[:2], x], batch_first=True, padding_side="left")]
    torch.stack([out.square().sum() for out in seen]).sum().backward()
    return [*(out.detach() for out in seen), x.grad]


LOOPS = (convolutions, transformer, attention, recurrent, checkpointed, assorted, moved_and_copied, padded)


def assert_equal_bits(run: Callable[[str], list[torch.Tensor]]) -> None:
    torch.manual_seed(0)
    on_host = run("cpu")
    with emulate_cuda():
        torch.manual_seed(0)
        on_device = run("cuda")
    assert len(on_host) == len(on_device)
    for host, device in zip(on_host, on_device, strict=True):
        assert isinstance(device, CudaTensor)
        torch.testing.assert_close(plain(device), host, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with(name: str) -> None:
    assert_equal_bits(lambda device: train(OPTIMIZERS[name], device))


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop(loop: Callable[[str], list[torch.Tensor]]) -> None:
    assert_equal_bits(loop)


def test_capturable_adamw_equals_itself_on_the_host() -> None:
    def run(device: str, **options: bool) -> torch.Tensor:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(5, device=device))
        optimizer = torch.optim.AdamW([parameter], **options)
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach()

    host = run("cpu")
    with emulate_cuda():
        device = run("cuda", capturable=True)
    # Capturable computes the bias correction on tensors: the same formula in another order.
    torch.testing.assert_close(plain(device), host)
