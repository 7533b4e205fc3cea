"""The line that says how far a run is: rewritten on a terminal, seldom elsewhere, never in the way."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator

import pytest

from perfdoctor.report.progress import ProgressLine


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[io.TextIOWrapper, int]]:
    """A terminal of 40 columns to write to, and the end at which a person would read."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    with open(writer, "w", encoding="utf-8") as stream:
        yield stream, reader
    os.close(reader)


def _read_all(reader: int) -> bytes:
    """What comes to a terminal whose other end is closed: in as many pieces as the kernel makes of it."""
    read = b""
    try:
        while piece := os.read(reader, 4096):
            read += piece
    except OSError:  # Linux: nobody is left to write
        pass
    return read


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = ProgressLine(stream, now=clock)
    for step in range(200):  # an eighth of a second each
        progress.show(lambda step=step: f"step {step}")
        clock.now += 0.125
    progress.close()
    assert stream.getvalue().splitlines() == ["perfdoctor: 10 s, step 80", "perfdoctor: 20 s, step 160"]


def test_a_terminal_has_one_line_that_is_rewritten_and_taken_away(terminal: tuple[io.TextIOWrapper, int]) -> None:
    stream, reader = terminal
    clock = Clock()
    progress = ProgressLine(stream, now=clock)
    for step in range(3):
        clock.now += 1.0
        progress.show(lambda step=step: f"step {step}" + " of many" * 9)
    progress.close()
    progress.close()
    stream.close()
    written = _read_all(reader).decode()
    assert "\n" not in written
    first, second, third, end = written.split("\r\x1b[K")[1:]
    assert first.startswith("perfdoctor: 1 s, step 0")
    assert second.startswith("perfdoctor: 2 s, step 1")
    assert max(map(len, (first, second, third))) < 40  # it would wrap
    assert end == ""


def test_what_it_would_say_is_not_put_together_in_vain() -> None:
    clock, asked = Clock(), []
    progress = ProgressLine(io.StringIO(), now=clock)
    for _ in range(1000):
        progress.show(lambda: asked.append(1) or "text")  # type: ignore[func-returns-value]
        clock.now += 0.02
    assert len(asked) == 1


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    clock = Clock()
    with open(os.dup(writer), "w", encoding="utf-8", buffering=1) as stream:
        progress = ProgressLine(stream, now=clock)
        for _ in range(3):
            clock.now += 10
            progress.show(lambda: "text")
        progress.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is left in it can be flushed
    os.close(writer)
    closed = io.StringIO()
    closed.close()
    ProgressLine(closed, now=clock).show(lambda: "text")
