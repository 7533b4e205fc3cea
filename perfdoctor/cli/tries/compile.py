"""torch.compile one small function with the default backend and compare with eager."""

import sys

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.linspace(-2, 2, 4096, device=device)


def curve(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.sigmoid(x) + 1


if not torch.allclose(torch.compile(curve)(x), curve(x), atol=1e-5):
    sys.exit("the compiled function gives other numbers than eager")
print(f"compiled for {device}, result right")
