"""What a verb of `perfdoctor bench` found: measurements in rows, derived facts, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from perfdoctor.bench.measurement import Measurement

Fact = float | int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One measurement, what it was made on, and which roof it is under."""

    measurement: Measurement
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = ""
    on_roofline: bool = False
    """whether it is drawn: it needs both operations and bytes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The rows of one verb, in the order they are read."""

    verb: str
    about: str
    rows: tuple[BenchRow, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """derived figures by name, units in the name; None where the rows do not tell"""
    notes: tuple[str, ...] = ()
    """sentences: what stands in the rows, what was left out and why"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where it was measured."""

    device: str
    """"cuda" or "cpu\""""
    device_name: str
    driver: str
    torch: str
    cuda: str
    python: str
    num_cpus: float
    num_threads: int
    small: bool


def conditions(small: bool) -> Conditions:
    """Of this process, now; without a GPU the sizes are always small."""
    import torch

    from perfdoctor.watch.surroundings import read_environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
    here = read_environment(None, [], 0)
    return Conditions(
        device=device,
        device_name=here.gpu if device == "cuda" else "CPU",
        driver=here.driver,
        torch=here.torch,
        cuda=here.cuda,
        python=here.python,
        num_cpus=here.num_cpus or 1.0,
        num_threads=torch.get_num_threads(),
        small=small or device == "cpu",
    )


def conditions_line() -> str:
    """GPU, driver, versions and CPUs of this process: what stands above every table of `scripts/bench`."""
    here = conditions(False)
    gpu = f"{here.device_name}, driver {here.driver}, CUDA {here.cuda}" if here.device == "cuda" else "no GPU"
    return f"{gpu}, torch {here.torch}, triton {_triton()}, Python {here.python}, {here.num_cpus:g} CPUs"


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"
