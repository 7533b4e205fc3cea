"""The roofline picture as SVG: what the machine allows, and where the measured kernels sit under it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from perfdoctor.bench.label_placement import CHARACTER_WIDTH, LINE_HEIGHT, Box, place_labels
from perfdoctor.bench.measurement import format_flops
from perfdoctor.bench.result import BenchResult, BenchRow, Conditions
from perfdoctor.bench.roofs import Roofs
from perfdoctor.errors import UsageError
from perfdoctor.units import format_bytes

WIDTH, HEIGHT = 960, 620
_FRAME = Box(96, 64, WIDTH - 28, HEIGHT - 64)
_SLOPE_BOXES = 80
_NAME_AT = 0.42  # of the slope: away from both ends, where points crowd
_COLOURS = ("#2f7fd1", "#e07b39", "#3fa7a0", "#b8577f")  # each readable on white and on near black

_STYLE = """
text{font:12px system-ui,sans-serif;fill:#1c1e21}.page{fill:#fff}.title{font-size:15px;font-weight:600}
.grid{stroke:#8d8d8d;stroke-opacity:.25}.axis{stroke:#6b6f75}.label{font-size:11px}.faint{fill:#62666c}
.leader{stroke:#8d8d8d;stroke-width:.8}.roof{fill:none;stroke-width:2.2}
@media (prefers-color-scheme:dark){text{fill:#e4e6e9}.page{fill:#15171a}.faint{fill:#a3a8af}}
""".replace("\n", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Powers of ten at the edges of both axes, and where a value lies between them, in pixels."""

    x_low: int
    x_high: int
    y_low: int
    y_high: int

    def x(self, flops_per_byte: float) -> float:
        part = (math.log10(flops_per_byte) - self.x_low) / (self.x_high - self.x_low)
        return _FRAME.left + part * (_FRAME.right - _FRAME.left)

    @property
    def decade_width(self) -> float:
        """Of the x axis, in pixels."""
        return (_FRAME.right - _FRAME.left) / (self.x_high - self.x_low)

    def y(self, flops_per_s: float) -> float:
        part = (math.log10(flops_per_s) - self.y_low) / (self.y_high - self.y_low)
        return _FRAME.bottom - part * (_FRAME.bottom - _FRAME.top)


def intensity(row: BenchRow) -> float:
    """Operations a byte."""
    found = row.measurement
    assert found.num_flops is not None
    assert found.bytes_moved is not None
    return found.num_flops / found.bytes_moved


def render_roofline(results: Sequence[BenchResult], roofs: Roofs, where: Conditions) -> str:
    """An SVG of its own, dark where the reader's system is.

    Raises:
        UsageError: no bandwidth or no matrix product was measured, so there is no roof.
    """
    bandwidth = roofs.bytes_per_s
    if bandwidth is None or not roofs.flops_per_s:
        raise UsageError("a roofline needs the verbs matmul and bandwidth: the roofs are measured there")
    rows = [row for result in results for row in result.rows if row.on_roofline]
    scales = fit_scales(rows, bandwidth, roofs.flops_per_s.values())
    colours = {dtype: _COLOURS[i % len(_COLOURS)] for i, dtype in enumerate(roofs.flops_per_s)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Roofline of {escape(where.device_name, quote=True)}"><style>{_STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(_FRAME.left, 26, f"Roofline of {where.device_name}", "title"),
        _text(_FRAME.left, 46, _conditions_line(where), "faint"),
        *_axes(scales),
        *_roof_lines(scales, bandwidth, roofs.flops_per_s, colours),
        *_points(scales, rows, colours, _roof_boxes(scales, bandwidth, roofs.flops_per_s)),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _conditions_line(where: Conditions) -> str:
    parts = [f"measured in one run, torch {where.torch}"]
    if where.driver and where.device == "cuda":
        parts.append(f"driver {where.driver}")
    return ", ".join(parts) + ("; small sizes" if where.small else "") + "; both axes logarithmic"


def fit_scales(rows: Sequence[BenchRow], bandwidth: float, peaks: Iterable[float]) -> Scales:
    """Whole decades around every point and every ridge (where the two roofs meet)."""
    tops = list(peaks)
    ridges = [peak / bandwidth for peak in tops]
    across = [intensity(row) for row in rows] + [0.9 * min(ridges), 4 * max(ridges)]
    up = [row.measurement.flops_per_s or 1.0 for row in rows] + [0.2 * min(tops), 1.5 * max(tops)]
    return Scales(
        x_low=math.floor(math.log10(min(across)) - 1e-9),
        x_high=math.ceil(math.log10(max(across)) + 1e-9),
        y_low=math.floor(math.log10(min(up)) - 1e-9),
        y_high=math.ceil(math.log10(max(up)) + 1e-9),
    )


def _axes(scales: Scales) -> list[str]:
    parts = []
    for power in range(scales.x_low, scales.x_high + 1):
        x = scales.x(10.0**power)
        parts.append(_line(x, _FRAME.top, x, _FRAME.bottom, "grid"))
        parts.append(_text(x, _FRAME.bottom + 20, f"{10.0**power:,g}" if power < 6 else f"1e{power}", "", "middle"))
    for power in range(scales.y_low, scales.y_high + 1):
        y = scales.y(10.0**power)
        parts.append(_line(_FRAME.left, y, _FRAME.right, y, "grid"))
        parts.append(_text(_FRAME.left - 8, y + 4, format_flops(10.0**power), "", "end"))
    parts.append(_line(_FRAME.left, _FRAME.bottom, _FRAME.right, _FRAME.bottom, "axis"))
    parts.append(_line(_FRAME.left, _FRAME.top, _FRAME.left, _FRAME.bottom, "axis"))
    middle = (_FRAME.left + _FRAME.right) / 2
    parts.append(_text(middle, HEIGHT - 18, "operations a byte of device memory (FLOP/B)", "", "middle"))
    return parts


def _roof_lines(scales: Scales, bandwidth: float, peaks: dict[str, float], colours: dict[str, str]) -> list[str]:
    """One slope for all, up to the highest ridge; a ceiling from its own ridge on for each dtype."""
    start = max(10.0**scales.x_low, 10.0**scales.y_low / bandwidth)
    highest = max(peaks.values())
    slope = [(start, start * bandwidth), (highest / bandwidth, highest)]
    parts = [_polyline(scales, slope, "#7a72d8")]
    x, y = scales.x(slope[0][0]), scales.y(slope[0][1])
    end_x, end_y = scales.x(slope[1][0]), scales.y(slope[1][1])
    angle = math.degrees(math.atan2(end_y - y, end_x - x))
    at_x, at_y = x + _NAME_AT * (end_x - x), y + _NAME_AT * (end_y - y)
    parts.append(
        f'<text text-anchor="middle" transform="translate({at_x:.1f} {at_y:.1f}) rotate({angle:.1f}) '
        f'translate(0 -8)">memory {format_bytes(bandwidth)}/s</text>'
    )
    for dtype, peak in peaks.items():
        parts.append(_polyline(scales, [(peak / bandwidth, peak), (10.0**scales.x_high, peak)], colours[dtype]))
        label = f"{dtype} {format_flops(peak)}"
        parts.append(_text(_FRAME.right, scales.y(peak) - 7, label, "", "end"))
    return parts


def _roof_boxes(scales: Scales, bandwidth: float, peaks: dict[str, float]) -> list[Box]:
    """What the roofs and their names cover: no point's label goes there."""
    boxes = []
    for dtype, peak in peaks.items():
        y, name = scales.y(peak), f"{dtype} {format_flops(peak)}"
        boxes.append(Box(scales.x(peak / bandwidth), y - 1, _FRAME.right, y + 1))
        boxes.append(Box(_FRAME.right - len(name) * CHARACTER_WIDTH * 1.1, y - 7 - LINE_HEIGHT, _FRAME.right, y - 4))
    start = scales.x(max(10.0**scales.x_low, 10.0**scales.y_low / bandwidth))
    end = scales.x(max(peaks.values()) / bandwidth)
    for i in range(_SLOPE_BOXES):
        x = start + (end - start) * (i + 0.5) / _SLOPE_BOXES
        y = scales.y(bandwidth * 10 ** (scales.x_low + (x - _FRAME.left) / scales.decade_width))
        boxes.append(Box(x - 4, y - 4, x + 4, y + 4))
        if abs((i + 0.5) / _SLOPE_BOXES - _NAME_AT) < 0.15:
            boxes.append(Box(x - 8, y - 26, x + 8, y))
    return boxes


def _points(scales: Scales, rows: Sequence[BenchRow], colours: dict[str, str], taken: Sequence[Box]) -> list[str]:
    spots = [(scales.x(intensity(row)), scales.y(row.measurement.flops_per_s or 1.0), _point_name(row)) for row in rows]
    parts = []
    for row, (x, y, name), box in zip(rows, spots, place_labels(spots, _FRAME, taken), strict=True):
        middle = (box.top + box.bottom) / 2
        near_x = min(max(x, box.left), box.right)
        if math.hypot(near_x - x, middle - y) > 18:
            parts.append(_line(x, y, near_x, min(max(y, box.top), box.bottom), "leader"))
        colour = colours.get(row.dtype or "float32", "#8d8d8d")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(box.left, box.bottom - 3, name, "label"))
    return parts


def _point_name(row: BenchRow) -> str:
    return row.measurement.name.removesuffix(f" {row.dtype}").removesuffix(" | GPU")


def _polyline(scales: Scales, values: Sequence[tuple[float, float]], colour: str) -> str:
    points = " ".join(f"{scales.x(x):.1f},{scales.y(y):.1f}" for x, y in values)
    return f'<polyline class="roof" stroke="{colour}" points="{points}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
