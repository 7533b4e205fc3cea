"""fast_loop.py trains as slow_loop.py does, on the CPU and on a device, and waits for nothing in a step."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfdoctor.doors.check import check_script
from perfdoctor.doors.script import as_main, execute_program, load_program
from perfdoctor.emulate import emulate_cuda

ROOT = Path(__file__).resolve().parents[2]
LAST = re.compile(r"(\d+) steps, mean loss ([\d.]+), mean gradient norm ([\d.]+)")
STEPS = 24
TOLERANCE = 0.01  # as fast_loop.py states


def _ends(text: str) -> tuple[int, float, float]:
    found = LAST.search(text)
    assert found is not None, text[-2000:]
    return int(found[1]), float(found[2]), float(found[3])


def _run_alone(name: str, size: str = "small") -> tuple[int, float, float]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}_loop.py"), "--steps", str(STEPS), "--size", size],
        capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return _ends(done.stdout)


def _run_emulated(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, float, float]:
    program = load_program(str(ROOT / "examples" / f"{name}_loop.py"), module=False)
    with emulate_cuda(), as_main(program, ("--steps", str(STEPS), "--size", "small")):
        assert execute_program(program) == (0, False)
    return _ends(capsys.readouterr().out)


def _assert_alike(slow: tuple[int, float, float], fast: tuple[int, float, float]) -> None:
    assert slow[0] == fast[0] == STEPS
    assert fast[1] == pytest.approx(slow[1], rel=TOLERANCE)
    assert fast[2] == pytest.approx(slow[2], rel=TOLERANCE)


def test_losses_are_alike_on_the_cpu() -> None:
    _assert_alike(_run_alone("slow"), _run_alone("fast"))


def test_losses_are_alike_on_the_emulated_device(capsys: pytest.CaptureFixture[str]) -> None:
    _assert_alike(_run_emulated("slow", capsys), _run_emulated("fast", capsys))


@pytest.mark.gpu
def test_losses_are_alike_on_a_gpu() -> None:
    _assert_alike(_run_alone("slow", "large"), _run_alone("fast", "large"))


def test_no_step_of_the_fast_loop_synchronises() -> None:
    """Of slow_loop, the same check finds the reads and the copy."""
    arguments = ("--steps", "40", "--size", "small")
    slow = check_script(str(ROOT / "examples" / "slow_loop.py"), arguments, max_steps=8)
    fast = check_script(str(ROOT / "examples" / "fast_loop.py"), arguments, max_steps=20)
    assert slow.syncs_per_step > 2
    assert fast.syncs_per_step == 0


def test_the_difference_stays_small_enough_to_show() -> None:
    slow, fast = ((ROOT / "examples" / f"{name}_loop.py").read_text().splitlines() for name in ("slow", "fast"))
    changed = [line for line in difflib.unified_diff(slow, fast, n=0) if line[:1] in "+-" and line[:3] not in "+++---"]
    assert 10 < len(changed) < 60
