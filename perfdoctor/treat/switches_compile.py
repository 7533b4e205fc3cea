"""Treatments that compile the model, in torch.compile's three usual modes."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perfdoctor.treat.compiled import compile_model, compile_obstacle
from perfdoctor.treat.cures import CURES
from perfdoctor.treat.switches_precision import NO_MODEL, needs_cuda
from perfdoctor.treat.treatment import Loop, Numerics, Treatment

_COMPILERS = ("g++", "c++", "clang++", "cl")


def _refuse_compile(loop: Loop, mode: str) -> str | None:
    if loop.model is None:
        return NO_MODEL
    if mode != "default":
        refusal = needs_cuda(loop, f"torch.compile(mode={mode!r})")
        if refusal:
            return refusal
    if loop.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile on CUDA needs triton: pip install triton"
    if loop.device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        return "torch.compile on the CPU needs a C++ compiler on PATH (g++)"
    return compile_obstacle(loop.model)


@contextmanager
def _compiled(loop: Loop, mode: str) -> Iterator[Loop]:
    """In place; breaks are allowed, as they only cost speed. The first steps compile: leave them out of a timing."""
    model: Any = loop.model
    with compile_model(model, fullgraph=False, mode=mode):
        yield loop


def _treatment(name: str, mode: str) -> Treatment:
    return Treatment(
        name=name,
        cures=CURES[name],
        numerics=Numerics(
            rtol=5e-3,
            why="fused kernels keep intermediate results in float32 and sum in another order: 1e-5 in float32, "
            "the rounding of bfloat16 (0.4 % each) under autocast",
        ),
        refuses=functools.partial(_refuse_compile, mode=mode),
        applied=functools.partial(_compiled, mode=mode),
        lines=(f"model = perfdoctor.compile_model(model, mode={mode!r})",),
    )


COMPILE = (
    _treatment("compile", "default"),
    _treatment("compile_reduce_overhead", "reduce-overhead"),
    _treatment("compile_max_autotune", "max-autotune"),
)
