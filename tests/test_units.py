"""Numbers to text."""

from __future__ import annotations

import pytest

from perfdoctor import units

MS = 1_000_000


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ms"),
        (900, "<0.01 ms"),
        (-900, ">-0.01 ms"),
        (5_000, "0.01 ms"),
        (430_000, "0.43 ms"),
        (5.43 * MS, "5.4 ms"),
        (123.4 * MS, "123 ms"),
    ],
)
def test_format_ms(ns: float, text: str) -> None:
    assert units.format_ms(ns) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0, "0 %"), (0.0000002, "<0.1 %"), (0.004, "0.4 %"), (0.214, "21 %"), (1, "100 %")]
)
def test_format_share(ratio: float, text: str) -> None:
    assert units.format_share(ratio) == text


def test_parts_spreads_and_days() -> None:
    assert units.format_part(5.4 * MS, 25.2 * MS) == "5.4 of 25.2 ms"
    assert units.format_spread(4.9 * MS, 6 * MS) == "4.9 to 6.0 ms"
    assert units.format_of_day(0.2125) == "5.1 h of a 24 h run"
    assert units.format_of_day(0.01) == "14.4 min of a 24 h run"
    assert units.format_ratio_change(0.012) == "+1.2 %"
    assert units.format_ratio_change(-0.003) == "-0.3 %"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2, "parameter group", "2 parameter groups"),
        (0.1, "read", "0.1 reads"),
        (1.001, "sync", "1 sync"),
        (12, "batch", "12 batches"),
        (1, "loss", "1 loss"),
        (3, "loss", "3 losses"),
        (2, "copy", "2 copies"),
        (2, "day", "2 days"),
    ],
)
def test_a_count_and_its_noun_agree(number: float, noun: str, text: str) -> None:
    assert units.format_plural(number, noun) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [(12, "12 ns"), (1_500, "1.5 us"), (2.5e6, "2.5 ms"), (3e9, "3 s"), (600e9, "10 min"), (7200e9, "2.0 h")],
)
def test_format_duration(ns: float, text: str) -> None:
    assert units.format_duration(ns) == text


def test_bytes_rates_and_counts() -> None:
    assert units.format_bytes(147_000_000) == "147 MB"
    assert units.format_rate(39.7, "steps") == "39.7 steps/s"
    assert units.format_rate(1270.4, "samples") == "1,270 samples/s"
    assert [units.format_count(n) for n in (32, 0.1, 2.5)] == ["32", "0.1", "2.5"]


def test_json_milliseconds_keep_a_microsecond() -> None:
    assert units.ms(5_430_499) == 5.43


def test_how_many_times_as_fast() -> None:
    assert units.format_times(1.25) == "1.25x"
    assert units.format_times(float("inf")) == ">99x"
