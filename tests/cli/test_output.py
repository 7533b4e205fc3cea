"""The gate, and the file that is written whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from perfdoctor.cli.output import judge_gate, write_whole
from perfdoctor.cli.progress import progress
from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Headroom, Severity, StepTime

MS = 1_000_000


def loop(*headrooms_ms: float | None, step_ms: int | None = 20) -> Diagnosis:
    """A diagnosis whose findings would give back so much; None is withheld."""
    rooms = [None if h is None else Headroom(low_ns=0, mid_ns=round(h * MS), high_ns=20 * MS) for h in headrooms_ms]
    findings = tuple(
        Finding(
            code="host-sync", severity=Severity.COST, title="reads", headroom=room, withheld="" if room else "no GPU"
        )
        for room in rooms
    )
    step = None
    if step_ms is not None:
        step = StepTime(median_ns=step_ms * MS, low_ns=step_ms * MS, high_ns=step_ms * MS, num_steps=5, basis="steps")
    return Diagnosis(source="x", step=step, accounting=None, binding=Binding.UNKNOWN, findings=findings, leave_alone=())


@pytest.mark.parametrize(
    ("diagnosis", "percent", "code"),
    [
        (loop(1.0), 5, 0),  # 5 % is not more than 5 %
        (loop(1.1), 5, 1),
        (loop(0.2, 1.1), 5, 1),
        (loop(), 5, 0),
        (loop(None), 5, 2),  # nothing measured: no pass
        (loop(None, 0.2), 5, 0),
        (loop(None, 2.0), 5, 1),
        (loop(step_ms=None), 5, 2),
        (loop(0.1), 0, 1),
    ],
)
def test_gate(diagnosis: Diagnosis, percent: float, code: int) -> None:
    got, messages = judge_gate(diagnosis, percent)
    assert got == code
    assert bool(messages) == (code != 0)


def test_gate_names_every_finding_that_is_over() -> None:
    _, messages = judge_gate(loop(2.0, 3.0, 0.1), 5)
    assert [("10 %" in m, "15 %" in m) for m in messages] == [(True, False), (False, True)]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / ("r" * 253)  # with ".part" behind it longer than a name may be
    target.write_text("old")
    with pytest.raises(OSError, match="it cannot be written there") as caught:
        write_whole(str(target), "new")
    assert caught.value.filename == str(target)
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(target, "old")]


def test_a_file_name_that_is_no_utf8_can_stand_in_the_report(tmp_path: Path) -> None:
    write_whole(str(tmp_path / "report.txt"), "trace \udcff.json")
    assert (tmp_path / "report.txt").read_text("utf-8") == "trace ?.json"


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    write_whole(str(tmp_path / "link"), "report")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "report"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(str(pipe), "report")
        assert os.read(reader, 100) == b"report"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_progress_speaks_only_when_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", patience_s=3600):
        pass
    assert capsys.readouterr() == ("", "")


def test_progress_speaks_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", patience_s=0):
        for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer)]:
            timer.join()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("perfdoctor: reading ...\nperfdoctor: reading: ")


def test_progress_leaves_no_timer_behind_an_exception() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="boom"), progress("reading", patience_s=3600):
        raise ValueError("boom")
    assert threading.active_count() == before
