"""The cost of compiling: the steps that make up for it, and a real run on tiny loops."""

import pytest

from perfdoctor.bench.compiled import CompileCost, main
from perfdoctor.bench.measurement import Measurement


def cost(eager_ms: float, compiled_ms: float) -> CompileCost:
    times = [Measurement(name="", times_ns=(each * 1e6,)) for each in (eager_ms, compiled_ms)]
    return CompileCost(loop="a", mode="b", first_call_s=1.0, compile_s=9.0, eager=times[0], compiled=times[1])


def test_nine_seconds_are_back_after_three_thousand_steps_that_save_three_ms():
    assert cost(5.0, 2.0).steps_to_break_even == pytest.approx(3000)
    assert "3,000 steps" in str(cost(5.0, 2.0))


def test_a_compiled_step_that_is_slower_never_makes_up_for_it():
    assert cost(2.0, 5.0).steps_to_break_even is None
    assert "never" in str(cost(2.0, 5.0))


@pytest.mark.filterwarnings("ignore")
def test_a_real_loop_is_compiled_and_timed(capsys):
    assert main(["--loops", "conv_resident", "--modes", "default", "--rounds", "1", "--steps", "1"]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:2] == ["conv_resident", "default"]
    assert all(float(number) > 0 for number in row[2:6])


def test_an_unknown_loop_is_named(capsys):
    assert main(["--loops", "nothing"]) == 2
    assert "unknown loops: nothing; there are read_then_prepare" in capsys.readouterr().err
