"""Small training loops of our own, each with one cost, on which treatments are measured.

Each is a `Loop` with live objects, as a user's script has them: `for batch in loop.loader: loop.train_step(*batch)`,
and `block_ns` times a block of such steps.
`tiny=True` shrinks everything to run on a CPU in milliseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from perfdoctor.treat.treatment import Loop

Batch = tuple[torch.Tensor, torch.Tensor]
_MANY = 4096  # batches in an epoch: no block of steps reaches its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the language models and image models; `prep_ms` is host work of a script's own."""

    vocab: int
    dim: int
    depth: int
    length: int
    batch: int
    image: int
    images: int
    channels: int
    prep_ms: float


FULL = Sizes(vocab=4096, dim=256, depth=4, length=128, batch=16, image=224, images=64, channels=32, prep_ms=6.0)
# About 15 ms a step in float32 on an H200: the device is the slower side.
LARGE = Sizes(vocab=8192, dim=768, depth=3, length=256, batch=16, image=224, images=64, channels=64, prep_ms=10.0)
TINY = Sizes(vocab=32, dim=16, depth=1, length=8, batch=2, image=16, images=4, channels=4, prep_ms=0.1)


class Layer(nn.Module):
    """Causal attention and a feed-forward part, both with a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project, self.merge = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        wide: torch.Tensor = self.narrow(F.gelu(self.widen(self.after(x))))
        return x + wide


class LanguageModel(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocab)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.dim)
        self.place = nn.Parameter(0.02 * torch.randn(sizes.length, sizes.dim))
        self.layers = nn.ModuleList(Layer(sizes.dim, max(1, sizes.dim // 64)) for _ in range(sizes.depth))
        self.norm, self.head = nn.LayerNorm(sizes.dim), nn.Linear(sizes.dim, sizes.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def conv_net(channels: int) -> nn.Sequential:
    """Images (batch, 3, height, width) to ten logits."""

    def block(inside: int, outside: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outside), nn.ReLU()]

    widths = [3, channels, 2 * channels, 2 * channels, 4 * channels, 4 * channels]
    layers = [m for i in range(5) for m in block(widths[i], widths[i + 1], 2 if i % 2 == 0 else 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class Resident:
    """A loader whose batches lie on the device already."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        for index in range(_MANY):
            yield self.batches[index % len(self.batches)]

    def __len__(self) -> int:
        return _MANY


class ImageBatches(Dataset[Batch]):
    """Whole batches of images in pageable memory; `work_ms` of host work each."""

    def __init__(self, sizes: Sizes, work_ms: float = 0.0) -> None:
        self.work_ms = work_ms
        self.images = [torch.rand(sizes.images, 3, sizes.image, sizes.image) for _ in range(4)]
        self.labels = [torch.randint(0, 10, (sizes.images,)) for _ in range(4)]

    def __len__(self) -> int:
        return _MANY

    def __getitem__(self, index: int) -> Batch:
        busy(self.work_ms)
        return self.images[index % 4], self.labels[index % 4]


def busy(ms: float) -> None:
    """Host work, as of a tokenizer or an augmentation."""
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass


def _tokens(sizes: Sizes, device: torch.device) -> Resident:
    rows = [torch.randint(0, sizes.vocab, (sizes.batch, sizes.length + 1), device=device) for _ in range(4)]
    return Resident([(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows])


def _language_loop(
    device: torch.device,
    sizes: Sizes,
    optimizer: dict[str, Any],
    before_update: Callable[[nn.Module], object] = lambda _: None,
    after: Callable[[torch.Tensor], object] = lambda _: None,
    none: bool = True,
) -> Loop:
    model = LanguageModel(sizes).to(device)
    update = torch.optim.AdamW(model.parameters(), lr=3e-4, **optimizer)

    def train_step(tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        before_update(model)
        update.step()
        update.zero_grad(set_to_none=none)
        after(loss)
        return loss.detach()

    loader = _tokens(sizes, device)
    return Loop(
        device=device, model=model, optimizers=(update,), loader=loader, train_step=train_step,
        sample_batch=loader.batches[0],
    )  # fmt: skip


def _image_loop(device: torch.device, sizes: Sizes, loader: Any) -> Loop:
    model = conv_net(sizes.channels).to(device)
    update = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        update.step()
        update.zero_grad()
        return loss.detach()

    first = tuple(each.to(device) for each in next(iter(loader)))
    return Loop(
        device=device, model=model, optimizers=(update,), loader=loader, train_step=train_step, sample_batch=first
    )


def _read(loss: torch.Tensor) -> float:
    return loss.item()


def _norms(model: nn.Module) -> float:
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.norm().item() ** 2
    return math.sqrt(total)


def _clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read_then_prepare(device: torch.device, tiny: bool) -> Loop:
    """A read, then host work, under a model that keeps the device busy."""
    sizes = TINY if tiny else LARGE

    def after(loss: torch.Tensor) -> None:
        _read(loss)
        busy(sizes.prep_ms)

    return _language_loop(device, sizes, {}, after=after)


def read_host_bound(device: torch.device, tiny: bool) -> Loop:
    """A read in a loop whose host is the slower side."""
    sizes = TINY if tiny else FULL

    def after(loss: torch.Tensor) -> None:
        busy(sizes.prep_ms)
        _read(loss)

    return _language_loop(device, sizes, {}, after=after)


def read_device_bound(device: torch.device, tiny: bool) -> Loop:
    """A read in a loop whose device is the slower side."""
    return _language_loop(device, TINY if tiny else LARGE, {}, after=_read)


def norm_loop(device: torch.device, tiny: bool) -> Loop:
    """A norm and a read for each parameter."""
    return _language_loop(device, TINY if tiny else FULL, {}, before_update=_norms)


def single_tensor(device: torch.device, tiny: bool) -> Loop:
    """An optimizer that takes the parameters one by one, torch's clip, gradients zeroed: nothing but launches."""
    return _language_loop(device, TINY if tiny else FULL, {"foreach": False}, before_update=_clip, none=False)


def pageable_images(device: torch.device, tiny: bool) -> Loop:
    """Images copied from pageable memory."""
    sizes = TINY if tiny else FULL
    return _image_loop(device, sizes, DataLoader(ImageBatches(sizes), batch_size=None))


def conv_resident(device: torch.device, tiny: bool) -> Loop:
    """A convolutional net on images that lie on the device."""
    sizes = TINY if tiny else LARGE
    data = ImageBatches(sizes)
    pairs = [(images.to(device), labels.to(device)) for images, labels in zip(data.images, data.labels, strict=True)]
    return _image_loop(device, sizes, Resident(pairs))


def slow_loader(device: torch.device, tiny: bool) -> Loop:
    """Batches that take the loader longer than the step."""
    sizes = TINY if tiny else FULL
    return _image_loop(device, sizes, DataLoader(ImageBatches(sizes, 3 * sizes.prep_ms), batch_size=None))


LOOPS: dict[str, Callable[[torch.device, bool], Loop]] = {
    build.__name__: build
    for build in (
        read_then_prepare, read_host_bound, read_device_bound, norm_loop, single_tensor, pageable_images,
        conv_resident, slow_loader,
    )
}  # fmt: skip

# The findings that each loop shows, or would: a treatment that cures one of them is measured there.
SHOWS: dict[str, tuple[str, ...]] = {
    "read_then_prepare": ("host-sync",),
    "read_host_bound": ("host-sync", "launch-bound", "garbage-collection"),
    "read_device_bound": ("host-sync", "no-tensor-cores", "fusion"),
    "norm_loop": ("host-sync", "garbage-collection"),
    "single_tensor": ("launch-bound", "small-kernels", "fusion"),
    "pageable_images": ("pageable-copy", "data-wait"),
    "conv_resident": ("no-tensor-cores", "fusion", "launch-bound"),
    "slow_loader": ("data-wait",),
}


def block_ns(loop: Loop, *, steps: int, warmup: int) -> float:
    """Mean time of a step, behind `warmup` that do not count."""
    assert loop.train_step is not None
    batches = iter(loop.loader or ())
    for _ in range(warmup):
        loop.train_step(*next(batches))
    _settle(loop.device)
    start = time.perf_counter_ns()
    for _ in range(steps):
        loop.train_step(*next(batches))
    _settle(loop.device)
    return (time.perf_counter_ns() - start) / steps


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def comma_separated(text: str) -> list[str]:
    """The type of an option that takes names: 'a,b' is ['a', 'b']."""
    return [name for name in text.split(",") if name]
