"""`perfdoctor env`: GPU, driver and versions, and a short try of each tool that a kernel author needs.

Every try is a process of its own with a time limit and throw-away caches, so that nothing is left behind and nothing
that was cached makes a broken tool look sound. Environment variables are passed on and never printed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from perfdoctor.cli.causes import explain
from perfdoctor.cli.output import Outcome, Parser, check_output
from perfdoctor.cli.progress import progress
from perfdoctor.report.json import SCHEMA_VERSION
from perfdoctor.version import VERSION

TIME_LIMIT_S = 180.0
_NOTHING_TO_TRY = 77
_TRIES = Path(__file__).parent / "tries"
_PACKAGES = ("numpy", "nvtx", "triton", "pytorch-lightning", "lightning", "transformers", "tensorboard")


class State(StrEnum):
    """`absent` is a thing that is not there and need not be; `failed` one that is there and does not work."""

    OK = "ok"
    ABSENT = "absent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: what was looked at, how it stands, and what to do where it does not work."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def execute(argv: Sequence[str]) -> Outcome:
    """Look at the machine. Exit code 0 also where something does not work: that is the answer, not an error."""
    parser = Parser(
        prog="perfdoctor env", allow_abbrev=False, description="GPU, driver, versions, and what works here."
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("-o", "--output", metavar="FILE", default="")
    parser.add_argument("--quick", action="store_true", help="versions only, without trying the tools")
    options = parser.parse_args(argv)
    check_output(options.output)
    with progress("trying the tools"):
        rows = look_around(quick=options.quick)
    text = _json(rows) if options.format == "json" else _table(rows)
    return Outcome(text=text, path=options.output)


def look_around(*, quick: bool) -> list[Row]:
    """Every row of the table, in its order."""
    checks: list[Callable[[], Row]] = [
        _python,
        _gpu,
        lambda: _tried("torch", "torch_build"),
        _nvcc,
        _ninja,
        _compiler,
        _nsys,
    ]
    if not quick:
        checks += [
            lambda: _tried("Triton launch", "triton_launch"),
            lambda: _tried("torch.compile", "compile"),
            lambda: _tried("CUDA extension", "extension"),
            lambda: _tried("NVTX in nsys", "nvtx_range"),
        ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [*pool.map(lambda check: check(), checks), _packages()]


def _python() -> Row:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return Row(name="Python", state=State.OK, detail=f"{detail}; perfdoctor {VERSION}")


def _gpu() -> Row:
    query = ("--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")
    found = _first_lines("nvidia-smi", *query)
    if found is None:
        remedy = "for live runs on a GPU install NVIDIA's driver; `analyze` needs none"
        return Row(name="GPU", state=State.ABSENT, detail="no nvidia-smi on PATH", remedy=remedy)
    code, text = found
    if code != 0:
        return Row(
            name="GPU",
            state=State.FAILED,
            detail=text or "nvidia-smi failed",
            remedy="reinstall the driver, or reboot after its update",
        )
    rows = text.splitlines()
    name, driver, memory, capability = (part.strip() for part in (rows[0] + ", , , ").split(",")[:4])
    return Row(
        name="GPU",
        state=State.OK,
        detail=f"{len(rows)} x {name}, {memory}, driver {driver}, compute capability {capability}",
    )


def _nvcc() -> Row:
    found = _first_lines("nvcc", "--version")
    remedy = "to build CUDA extensions install the CUDA toolkit of torch's CUDA version"
    if found is None:
        return Row(name="nvcc", state=State.ABSENT, detail="not on PATH", remedy=remedy)
    release = re.search(r"release ([\d.]+)", found[1])
    if found[0] != 0 or release is None:
        return Row(
            name="nvcc",
            state=State.FAILED,
            detail=found[1].splitlines()[-1] if found[1] else "no answer",
            remedy=remedy,
        )
    return Row(name="nvcc", state=State.OK, detail=f"CUDA {release[1]} ({shutil.which('nvcc')})")


def _ninja() -> Row:
    return _versioned("ninja", ("ninja",), "to build extensions: pip install ninja")


def _compiler() -> Row:
    names = ("cl",) if os.name == "nt" else ("c++", "g++", "clang++")
    return _versioned(
        "host compiler", names, "torch.compile on a CPU and extensions need one: install g++ (build-essential)"
    )


def _nsys() -> Row:
    return _versioned("nsys", ("nsys",), "for timelines of the whole system install NVIDIA Nsight Systems")


def _versioned(name: str, programs: Sequence[str], remedy: str) -> Row:
    for program in programs:
        found = _first_lines(program, "--version")
        if found is not None:
            code, text = found
            state = State.OK if code == 0 or program == "cl" else State.FAILED
            return Row(name=name, state=state, detail=(text.splitlines() or ["no answer"])[0])
    return Row(name=name, state=State.ABSENT, detail=f"no {' or '.join(programs)} on PATH", remedy=remedy)


def _packages() -> Row:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Row(name="packages", state=State.OK, detail=", ".join(found))


def _tried(name: str, script: str) -> Row:
    with tempfile.TemporaryDirectory(prefix="perfdoctor-env-", ignore_cleanup_errors=True) as folder:
        command = (sys.executable, "-P", str(_TRIES / f"{script}.py"))
        code, output, errors = _call(command, _throw_away_caches(folder))
    if code == 0:
        return Row(name=name, state=State.OK, detail=output)
    if code == _NOTHING_TO_TRY:
        return Row(name=name, state=State.ABSENT, detail=output)
    if code is None:
        return Row(name=name, state=State.FAILED, detail=f"no answer within {TIME_LIMIT_S:.0f} s")
    cause, remedy = explain(errors)
    absent = cause.endswith("is not installed")
    return Row(name=name, state=State.ABSENT if absent else State.FAILED, detail=cause, remedy=remedy)


def _throw_away_caches(folder: str) -> dict[str, str]:
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return kept | {cache: os.path.join(folder, cache.lower()) for cache in caches}


def _first_lines(program: str, *arguments: str) -> tuple[int, str] | None:
    """Exit code and output of a program; None where it is not there."""
    path = shutil.which(program)
    if path is None:
        return None
    code, output, errors = _call((path, *arguments), dict(os.environ))
    return (1 if code is None else code), output or errors


def _call(command: Sequence[str], environment: dict[str, str]) -> tuple[int | None, str, str]:
    """Exit code (None when it ran out of time), standard output and standard error."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, "", ""
    except OSError as error:
        return 1, "", str(error)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        remedy = f"; {row.remedy}" if row.remedy else ""
        lines.append(f"{row.state.value:<8}{row.name:<16}{row.detail}{remedy}")
    return "\n".join(lines) + "\n"


def _json(rows: Sequence[Row]) -> str:
    document = {"schema_version": SCHEMA_VERSION, "perfdoctor": VERSION, "rows": [asdict(row) for row in rows]}
    return json.dumps(document, indent=2) + "\n"
