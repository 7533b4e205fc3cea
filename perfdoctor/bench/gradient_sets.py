"""Sets of gradients shaped like those of known models, for the norm benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSet:
    """Parameters of these shapes, and the times that the norm of their gradients should take."""

    name: str
    shapes: Callable[[], Shapes]
    bfloat16: bool = False
    gpu_us: float | None = None
    """at most, on an H200"""
    fixed_us: float | None = None
    verified_us: float | None = None

    def parameters(self, device: str) -> list[nn.Parameter]:
        """Parameters with random gradients (twice the memory of the gradients)."""
        import torch
        from torch import nn

        dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        parameters = []
        for shape in self.shapes():
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            parameter.grad = torch.randn(shape, dtype=dtype, device=device)
            parameters.append(parameter)
        return parameters


def resnet50() -> Shapes:
    """161 tensors, 25.6 million elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for out, channels, size in ((width, width_in, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, channels, size, size), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, width_in, 1, 1), (4 * width,), (4 * width,)]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def transformer(hidden: int, layers: int, positions: int = 1024) -> Shapes:
    """A GPT-2 with tied embeddings: 12 tensors a layer."""
    shapes: Shapes = [(50257, hidden), (positions, hidden)]
    for _ in range(layers):
        shapes += [
            (hidden,), (hidden,), (hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,),
            (hidden,), (hidden,), (hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,),
        ]  # fmt: skip
    return [*shapes, (hidden,), (hidden,)]


GRADIENT_SETS = (
    GradientSet(name="1 x 1024 fp32", shapes=lambda: [(1024,)]),
    GradientSet(name="1000 x 1024 fp32", shapes=lambda: [(1024,)] * 1000, gpu_us=10, fixed_us=30, verified_us=100),
    GradientSet(name="4000 x 256 fp32", shapes=lambda: [(256,)] * 4000, gpu_us=18, fixed_us=40, verified_us=280),
    GradientSet(name="ResNet-50", shapes=resnet50, gpu_us=30, fixed_us=45, verified_us=70),
    GradientSet(name="GPT-2 124M fp32", shapes=lambda: transformer(768, 12), gpu_us=112, fixed_us=130, verified_us=150),
    GradientSet(
        name="1.3 B fp32",
        shapes=lambda: transformer(2048, 24, positions=2048),
        gpu_us=1170,
        fixed_us=1190,
        verified_us=1220,
    ),
    GradientSet(
        name="7 B bf16",
        shapes=lambda: transformer(4096, 32, positions=2048),
        bfloat16=True,
        gpu_us=3000,
        fixed_us=3020,
        verified_us=3050,
    ),
)

SMALL_SETS = GRADIENT_SETS[:2]
"""What a machine without a GPU gets through at once."""
