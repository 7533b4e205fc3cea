"""`perfdoctor bench [VERB...]`: what this machine can do, measured here; without a verb all of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from perfdoctor.bench.bench_report import render_bench_json, render_bench_text
from perfdoctor.bench.result import BenchResult, conditions
from perfdoctor.bench.roofline import render_roofline
from perfdoctor.bench.roofs import find_roofs
from perfdoctor.cli.output import Outcome, Parser, check_output, write_whole
from perfdoctor.cli.progress import progress
from perfdoctor.errors import UsageError


class _Work(Protocol):
    def __call__(self, device: str, *, small: bool) -> BenchResult: ...


VERBS = ("matmul", "mlp", "bandwidth", "launch", "norm")


def execute(argv: Sequence[str]) -> Outcome:
    """Run the verbs, in the order of `VERBS`, and render what they found.

    Raises:
        UsageError: an unknown verb, wrong options, or sizes that do not fit the free memory.
        OSError: the picture cannot be written.
    """
    options = _parser().parse_args(argv)
    chosen = _checked(options.verbs)
    check_output(options.output)
    check_output(options.picture, "--picture")
    if options.picture and options.output and os.path.realpath(options.picture) == os.path.realpath(options.output):
        raise UsageError(f"-o and --picture are both {options.output}; name two files")
    if options.dims is not None and "matmul" not in chosen:
        raise UsageError(f"--dims is for matmul, and only {', '.join(chosen)} is to run")
    if options.picture and not {"matmul", "bandwidth"} <= set(chosen):
        raise UsageError("--picture: the roofs come from matmul and bandwidth; run both, or all without naming one")
    where = conditions(options.small)
    results = []
    for verb in VERBS:
        if verb in chosen:
            with progress(f"bench {verb}"):
                results.append(_run(verb, options, where.device))
    messages: tuple[str, ...] = ()
    if options.picture:
        picture = render_roofline(results, find_roofs(results, where.device_name), where)
        write_whole(options.picture, picture)
        messages = (f"wrote {options.picture}",)
    render = render_bench_json if options.format == "json" else render_bench_text
    return Outcome(text=render(results, where), path=options.output, messages=messages)


def _checked(verbs: Sequence[str]) -> tuple[str, ...]:
    for verb in verbs:
        if verb not in VERBS:
            raise UsageError(f"bench: no benchmark {verb!r}; there are {', '.join(VERBS)}, and all of them without one")
    return tuple(verbs) or VERBS


def _run(verb: str, options: argparse.Namespace, device: str) -> BenchResult:
    """One benchmark; a machine without a GPU gets the small sizes."""
    import torch

    from perfdoctor.bench.bandwidth import run_bandwidth
    from perfdoctor.bench.launch import run_launch
    from perfdoctor.bench.matmul import run_matmul
    from perfdoctor.bench.mlp import run_mlp
    from perfdoctor.bench.norm import run_norm

    small = options.small or device == "cpu"
    matmul: _Work = partial(run_matmul, dims=options.dims)
    works: dict[str, _Work] = {
        "matmul": matmul, "mlp": run_mlp, "bandwidth": run_bandwidth, "launch": run_launch, "norm": run_norm,
    }  # fmt: skip
    try:
        return works[verb](device, small=small)
    except torch.OutOfMemoryError as error:  # what was free at the start is taken by somebody else
        raise UsageError(f"bench {verb}: the GPU ran out of memory; free some (nvidia-smi), or try --small") from error


def _parser() -> Parser:
    parser = Parser(prog="perfdoctor bench", allow_abbrev=False, description=__doc__)
    parser.add_argument("verbs", metavar="VERB", nargs="*", help=f"of {', '.join(VERBS)} (all)")
    parser.add_argument("--dims", type=_dims, metavar="N,N", help="the sides of matmul's matrices (1024 to 16384)")
    parser.add_argument("--small", action="store_true", help="small sizes: a few seconds (always so without a GPU)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the figures (text)")
    parser.add_argument("-o", "--output", metavar="FILE", default="", help="write them there, whole or not at all")
    parser.add_argument("--picture", metavar="FILE", default="", help="also draw the roofline there, as SVG")
    return parser


def _dims(text: str) -> list[int]:
    try:
        dims = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, as 1024,2048") from error
    if min(dims) < 1:
        raise argparse.ArgumentTypeError(f"{min(dims)} is no side of a matrix; the smallest is 1")
    return dims
