"""Numbers to text. No other module formats a duration, a size or a share.

Inside perfdoctor times are integer nanoseconds; people read milliseconds.
"""

from __future__ import annotations

NS_PER_MS = 1_000_000


def ms(ns: float) -> float:
    """Nanoseconds as milliseconds, rounded to a microsecond: for JSON."""
    return round(ns / NS_PER_MS, 3)


def format_ms(ns: float) -> str:
    """`format_ms(5_430_000)` is '5.4 ms'. Two decimals below 1 ms, one above; what would round to 0 is '<0.01 ms'."""
    value = ns / NS_PER_MS
    if abs(value) < 0.005:
        return "<0.01 ms" if value > 0 else ">-0.01 ms" if value < 0 else "0 ms"
    if abs(value) >= 100:
        return f"{value:.0f} ms"
    if abs(value) >= 1:
        return f"{value:.1f} ms"
    return f"{value:.2f} ms"


def format_duration(ns: float) -> str:
    """A duration in the unit that a person would choose, from nanoseconds to days: '5.1 h'."""
    steps = ((1e3, 1.0, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms"), (90e9, 1e9, "s"), (5400e9, 60e9, "min"))
    for limit, unit, name in steps:
        if abs(ns) < limit:
            return f"{ns / unit:.3g} {name}"
    return f"{ns / 3600e9:.1f} h"


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units, as bandwidths are given: '147 MB'."""
    for limit, unit, name in ((1e3, 1.0, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB")):
        if abs(num_bytes) < limit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes / 1e12:.3g} TB"


def format_share(ratio: float) -> str:
    """A share of one as percent: '21 %', '0.4 %', '<0.1 %', '>99 %': only all of it is '100 %'."""
    percent = 100 * ratio
    if 0 < abs(percent) < 0.1:
        return "<0.1 %"
    if 99.5 <= percent < 100:
        return ">99 %"
    return f"{percent:.0f} %" if abs(percent) >= 1 or percent == 0 else f"{percent:.1g} %"


def format_rate(per_second: float, what: str) -> str:
    """`format_rate(39.7, 'steps')` is '39.7 steps/s'."""
    text = f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.3g}"
    return f"{text} {what}/s"


def format_count(number: float) -> str:
    """A count that may be a mean: '32', '0.1', '2.5'."""
    return f"{number:.0f}" if abs(number - round(number)) < 0.005 else f"{number:.2g}"


def format_plural(number: float, noun: str) -> str:
    """A count in words: `format_plural(1, 'step')` is '1 step', `format_plural(3, 'batch')` is '3 batches'.

    `noun` in the singular, its last word the one that changes. A mean ('0.1 reads') is plural.
    """
    text = format_count(number)
    return f"{text} {noun if text == '1' else _plural_of(noun)}"


def _plural_of(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def format_part(part_ns: float, whole_ns: float) -> str:
    """`format_part(5_400_000, 25_200_000)` is '5.4 of 25.2 ms'."""
    return f"{format_ms(part_ns).removesuffix(' ms')} of {format_ms(whole_ns)}"


def format_spread(low_ns: float, high_ns: float) -> str:
    """`format_spread(4_900_000, 6_000_000)` is '4.9 to 6.0 ms'."""
    return f"{format_ms(low_ns).removesuffix(' ms')} to {format_ms(high_ns)}"


def format_of_day(ratio: float) -> str:
    """A share of the step as time out of a day's run: '5.1 h of a 24 h run'."""
    return f"{format_duration(ratio * 24 * 3600e9)} of a 24 h run"


def format_ratio_change(ratio: float) -> str:
    """A relative change with its sign: '+1.2 %', '-0.3 %'."""
    return f"{100 * ratio:+.1f} %"


def format_times(ratio: float) -> str:
    """`format_times(1.25)` is '1.25x'; a saving that reaches the whole step has no upper end."""
    return f"{ratio:.2f}x" if ratio < 100 else ">99x"
