"""One step as a picture: what the host did, what each stream ran, where the device idled and why, and which lines made
the host wait.

    drawing = draw_step(capture)
    render_svg(drawing), render_png(drawing)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfdoctor.diagnose.attribution import SyncGroup
from perfdoctor.diagnose.review import Review
from perfdoctor.diagnose.verdict import review_of
from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Capture, WorkKind
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.kernel_names import KernelClass, kernel_class
from perfdoctor.record.sync_kinds import KINDS
from perfdoctor.record.timeline import SYNCS, StepSpans
from perfdoctor.report.drawing import INK, Box, Drawing, Label, Shape
from perfdoctor.report.style import (
    BANDWIDTH_COLOUR,
    COMMUNICATION_COLOUR,
    COPY_COLOUR,
    LAUNCH_COLOUR,
    MATRIX_COLOUR,
    UNEXPLAINED_COLOUR,
    WAIT_COLOUR,
    idle_colour,
)
from perfdoctor.units import format_ms, format_plural, format_share

WIDTH = 1280
_LEFT, _RIGHT, _TOP = 210, 24, 64
_ROW, _GAP = 26, 10
_MOST_STREAMS, _MOST_SITES, _MOST_LINES = 4, 5, 3
_PHASES = ("data", "forward", "backward", "optimizer")
_KERNELS = (
    ("matrix kernels", MATRIX_COLOUR),
    ("other kernels", BANDWIDTH_COLOUR),
    ("collectives", COMMUNICATION_COLOUR),
    ("copies", COPY_COLOUR),
)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From ns on the recording's clock to x."""

    start_ns: int
    end_ns: int

    def x(self, ns: float) -> float:
        share = (ns - self.start_ns) / (self.end_ns - self.start_ns)
        return _LEFT + min(max(share, 0.0), 1.0) * (WIDTH - _LEFT - _RIGHT)


def draw_step(capture: Capture, step: int | None = None) -> Drawing | None:
    """A picture of one step; None where the recording holds no device work.

    Args:
        capture: a recording with device work.
        step: the position among the judged steps; by default that of median length among those recorded whole.
    """
    review, _ = review_of(capture)
    steps = review.steps
    if not review.has_device or steps is None:
        return None
    chosen = _usual(steps, capture) if step is None else step
    start = min(int(steps.host_start_ns[chosen]), int(steps.window_start_ns[chosen]))
    end = max(int(steps.host_end_ns[chosen]), int(steps.window_end_ns[chosen]))
    window = (int(steps.window_start_ns[chosen]), int(steps.window_end_ns[chosen]))
    if min(end - start, window[1] - window[0]) <= 0:  # a recording of marks alone
        return None
    scale = _Scale(start, end)
    page = _Page(review, scale)
    page.ruler()
    page.host()
    page.streams()
    page.idle()
    page.syncs()
    page.legend()
    busy = intervals.total(intervals.clip(review.timeline.busy, *window))
    title = f"{_what(steps)}: {format_ms(window[1] - window[0])} on the GPU's timeline, "
    title += f"GPU busy {format_share(busy / (window[1] - window[0]))}"
    head = [Label(x=_RIGHT, y=30, text=title, size=16, bold=True)]
    return Drawing(width=WIDTH, height=round(page.y + 8), shapes=[*head, *page.shapes], summary=title)


class _Page:
    """Lanes one below the other. `y` is where the next begins."""

    def __init__(self, review: Review, scale: _Scale) -> None:
        self.review, self.scale = review, scale
        self.shapes: list[Shape] = []
        self.y = float(_TOP)
        self.idle_colours: dict[str, str] = {}

    def ruler(self) -> None:
        """Ticks in ms from the start of the picture."""
        scale = self.scale
        length = scale.end_ns - scale.start_ns
        tick = _nice(length / 8)
        for at in range(0, length + 1, tick):
            x = scale.x(scale.start_ns + at)
            if x < WIDTH - _RIGHT - 20:
                self.shapes.append(Label(x=x, y=_TOP - 10, text=_tick_text(at, tick), opacity=0.65, anchor="middle"))
            self.shapes.append(Box(x=x, y=_TOP - 4, width=1, height=4, opacity=0.4))

    def lane(self, name: str, height: float = _ROW, detail: str = "") -> float:
        """A new lane; returns its y."""
        y = self.y
        base = y + height / 2 + 4
        self.shapes.append(Label(x=_RIGHT, y=base, text=_cut(name, 26), bold=not detail))
        if detail:
            self.shapes.append(Label(x=_LEFT - 10, y=base, text=detail, opacity=0.65, anchor="end"))
        self.shapes.append(Box(x=_LEFT, y=y, width=WIDTH - _LEFT - _RIGHT, height=height, opacity=0.05))
        self.y += height + _GAP
        return y

    def bars(self, spans: Intervals, y: float, height: float, fill: str, title: str = "", opacity: float = 1.0) -> None:
        """Spans as boxes, those that share a pixel as one."""
        for left, right in self._pixels(spans):
            self.shapes.append(
                Box(x=left, y=y, width=right - left, height=height, fill=fill, opacity=opacity, title=title)
            )

    def _pixels(self, spans: Intervals) -> list[tuple[float, float]]:
        starts, ends = intervals.clip(spans, self.scale.start_ns, self.scale.end_ns)
        merged: list[tuple[float, float]] = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            left, right = round(2 * self.scale.x(start)) / 2, round(2 * self.scale.x(end)) / 2
            right = max(right, left + 0.5)
            if merged and left <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(right, merged[-1][1])
            else:
                merged.append((left, right))
        return merged

    def host(self) -> None:
        """What the host did: phases above, calls below."""
        capture, calls = self.review.capture, self.review.timeline.calls
        y = self.lane("host", 2 * _ROW)
        for name, spans in _phases(capture).items():
            self.bars(spans, y, _ROW - 4, INK, name, 0.16)
            for left, right in self._pixels(spans):
                if right - left > 8 * len(name):
                    self.shapes.append(Label(x=left + 5, y=y + 16, text=name))
        waits = np.isin(calls.kind, SYNCS)
        for group in self.review.sync_groups:  # copies that hold the host too
            waits[list(group.calls)] = True
        self.bars(_spans(calls, ~waits), y + _ROW, _ROW, LAUNCH_COLOUR, "launches and other CUDA calls", 0.9)
        self.bars(_spans(calls, waits), y + _ROW, _ROW, WAIT_COLOUR, "the host waits for the device")
        allocations = np.isin(calls.kind, (CallKind.MALLOC, CallKind.FREE))
        self.bars(_spans(calls, allocations), y + _ROW, _ROW, INK, "memory from the driver")

    def streams(self) -> None:
        """What each of the busiest streams ran."""
        work = self.review.timeline.work
        inside = (work.start_ns < self.scale.end_ns) & (work.end_ns > self.scale.start_ns)
        streams, counts = np.unique(work.stream[inside], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        kinds = _kernel_kinds(self.review.capture)[work.name] if len(work) else np.empty(0, np.int64)
        kinds = np.where(np.isin(work.kind, (WorkKind.MEMCPY, WorkKind.MEMSET)), 3, kinds)
        for stream in sorted(streams[order[:_MOST_STREAMS]].tolist()):
            y = self.lane(f"stream {stream}")
            for kind, (name, colour) in enumerate(_KERNELS):
                self.bars(_spans(work, inside & (work.stream == stream) & (kinds == kind)), y, _ROW, colour, name)
        if len(order) > _MOST_STREAMS:
            more = f"and {format_plural(len(order) - _MOST_STREAMS, 'more stream')}"
            self.shapes.append(Label(x=_LEFT, y=self.y + 2, text=more, opacity=0.65))
            self.y += 14

    def idle(self) -> None:
        """When the device ran nothing, by cause."""
        y = self.lane("GPU idle, by cause")
        claims = self.review.claims
        causes = dict(sorted(claims.by_code.items(), key=lambda item: -intervals.total(item[1])))
        for code in causes:
            colour = self.idle_colours[code] = idle_colour(code)
            self.bars(causes[code], y, _ROW, colour, f"idle: {code}", 0.9)
            self._name_widest(causes[code], y, code)
        self.bars(claims.left, y, _ROW, UNEXPLAINED_COLOUR, "idle: unexplained", 0.9)

    def _name_widest(self, spans: Intervals, y: float, text: str) -> None:
        pixels = self._pixels(spans)
        if not pixels:
            return
        left, right = max(pixels, key=lambda each: each[1] - each[0])
        if right - left > 7 * len(text) + 8:
            self.shapes.append(Label(x=(left + right) / 2, y=y + 17, text=text, fill="#ffffff", anchor="middle"))

    def syncs(self) -> None:
        """One lane for each line that made the host wait, longest waits first."""
        calls, lanes_end = self.review.timeline.calls, self.y
        groups = [(self._inside(group), group) for group in self.review.sync_groups]
        shown = [(rows, group) for rows, group in groups if len(rows)]
        shown.sort(key=lambda each: -int((calls.end_ns - calls.start_ns)[each[0]].sum()))
        for rows, group in shown[:_MOST_SITES]:
            spans = intervals.union(calls.start_ns[rows], np.maximum(calls.end_ns[rows], calls.start_ns[rows] + 1))
            waited = format_ms(intervals.total(spans))
            place = _place(group)
            number = int((~np.isin(rows, group.copies)).sum()) or len(rows)  # a copy and its sync are one wait
            y = self.lane(place, 18, f"{number} x")
            title = f"{place}: {_phrase(group)}, {format_plural(number, 'time')}, {waited}"
            self.bars(spans, y, 18, WAIT_COLOUR, title)
            self._led_down(spans, lanes_end)
            self._remark(spans, y, f"{_phrase(group)}, {waited}")
        if len(shown) > _MOST_SITES:
            more = f"and {format_plural(len(shown) - _MOST_SITES, 'more line')} where the host waits"
            self.shapes.append(Label(x=_LEFT, y=self.y + 4, text=more, opacity=0.65))
            self.y += 16

    def _led_down(self, spans: Intervals, end: float) -> None:
        """A line through the lanes above at each mark, where there are few enough to follow."""
        pixels = self._pixels(spans)
        if len(pixels) <= _MOST_LINES:
            for left, _ in pixels:
                self.shapes.append(Box(x=left, y=_TOP, width=1, height=end - _TOP, fill=WAIT_COLOUR, opacity=0.55))

    def _remark(self, spans: Intervals, y: float, text: str) -> None:
        """The words beside the marks: in the widest free place of the lane, if there is one."""
        pixels = self._pixels(spans)
        edges = [_LEFT, *(x for pair in pixels for x in pair), WIDTH - _RIGHT]
        gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
        left, right = max(gaps, key=lambda gap: gap[1] - gap[0])
        if right - left > 6.5 * len(text) + 16:
            self.shapes.append(Label(x=left + 8, y=y + 13, text=text, opacity=0.75))

    def _inside(self, group: SyncGroup) -> NDArray[np.int64]:
        calls = self.review.timeline.calls
        rows = np.array(group.calls, np.int64)
        return rows[(calls.start_ns[rows] < self.scale.end_ns) & (calls.end_ns[rows] > self.scale.start_ns)]

    def legend(self) -> None:
        """What the colours mean: only those in the picture."""
        idle = [(f"idle: {code}", colour) for code, colour in self.idle_colours.items()]
        rows = [*_KERNELS, ("CUDA calls", LAUNCH_COLOUR), ("host waits", WAIT_COLOUR), *idle]
        used = {shape.fill for shape in self.shapes if isinstance(shape, Box)}
        x, y = float(_LEFT), self.y + 14
        for name, colour in (*rows, ("idle: unexplained", UNEXPLAINED_COLOUR)):
            if colour not in used:
                continue
            width = 7.0 * len(name) + 34
            if x + width > WIDTH - _RIGHT:
                x, y = float(_LEFT), y + 20
            self.shapes.append(Box(x=x, y=y - 9, width=10, height=10, fill=colour))
            self.shapes.append(Label(x=x + 15, y=y, text=name, opacity=0.85))
            x += width
        self.y = y + 8


def _usual(steps: StepSpans, capture: Capture) -> int:
    """The step of median length among those that are whole: the device's window of the first begins with the first work
    that was recorded, and one on a short batch is no usual step."""
    lengths = steps.window_end_ns - steps.window_start_ns
    rows = np.arange(len(steps))
    partial = np.zeros(len(steps), bool)
    if steps.origin == "marks":
        partial = capture.steps.partial[steps.index] > 0
    whole = rows[~partial & (rows > 0)]
    rows = whole if len(whole) else rows
    return int(rows[np.argsort(lengths[rows], kind="stable")[len(rows) // 2]])


def _what(steps: StepSpans) -> str:
    if not steps.known:
        return "The whole recording, which marks no steps"
    noun = "turn" if steps.origin == "repetition" else "step"
    return f"One {noun} of {len(steps)}" if len(steps) > 1 else f"The {noun}"


def _spans(table: object, chosen: NDArray[np.bool_]) -> Intervals:
    starts, ends = table.start_ns[chosen], table.end_ns[chosen]  # type: ignore[attr-defined]
    return intervals.union(starts, ends)


def _phases(capture: Capture) -> dict[str, Intervals]:
    """The phases of a step that the recording names."""
    found: dict[str, Intervals] = {}
    for name in _PHASES:
        chosen = capture.matching(lambda text, wanted=name: text == wanted)
        spans = [_spans(table, chosen[table.name]) for table in (capture.pauses, capture.ranges) if len(table)]
        parts: Iterable[Intervals] = (span for span in spans if len(span[0]))
        for part in parts:
            found[name] = intervals.merge(found.get(name, intervals.EMPTY), part)
    return found


def _kernel_kinds(capture: Capture) -> NDArray[np.int64]:
    """For each string, as a kernel's name, its row of `_KERNELS`."""
    rows = {KernelClass.MATRIX: 0, KernelClass.COMMUNICATION: 2}
    return np.array([rows.get(kernel_class(text), 1) for text in capture.strings], np.int64)


def _place(group: SyncGroup) -> str:
    if group.place is None:
        return "line not recorded"
    frame = group.place.frame
    return f"{frame.file.replace(chr(92), '/').rpartition('/')[2]}:{frame.line}"


def _phrase(group: SyncGroup) -> str:
    return KINDS[group.kind].phrase if group.kind in KINDS else group.kind


def _nice(ns: float) -> int:
    """The next of 1, 2, 5 times a power of ten at or above `ns`."""
    power = 10 ** int(np.floor(np.log10(max(ns, 1))))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= ns))


def _tick_text(at_ns: int, tick_ns: int) -> str:
    decimals = 0 if tick_ns >= 1_000_000 else 1 if tick_ns >= 100_000 else 3
    return f"{at_ns / 1e6:.{decimals}f} ms"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[1 - length :]
