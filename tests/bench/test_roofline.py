"""The roofline: geometry by hand, labels that do not cover each other, an SVG that parses."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.bench.label_placement import Box, place_labels
from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.result import BenchResult, BenchRow, Conditions
from perfdoctor.bench.roofline import Scales, fit_scales, intensity, render_roofline
from perfdoctor.bench.roofs import Roofs, find_roofs, shares, vendor_peak
from perfdoctor.errors import UsageError

FRAME = Box(96, 64, 932, 556)


def row(name: str, ns: float, flops: float, num_bytes: float, dtype: str = "float32") -> BenchRow:
    found = Measurement(name=name, times_ns=(ns,) * 5, num_flops=flops, bytes_moved=num_bytes)
    return BenchRow(measurement=found, dtype=dtype, on_roofline=True)


def results() -> list[BenchResult]:
    """Memory at 1 TB/s, float32 at 10 TFLOP/s."""
    return [
        BenchResult(verb="matmul", about="", rows=(row("matmul 8 float32", 1e6, 1e10, 1e8),)),
        BenchResult(verb="bandwidth", about="", rows=(row("memory read", 1e6, 2.5e8, 1e9, ""),)),
    ]


def where(name: str = "NVIDIA H200") -> Conditions:
    return Conditions(
        device="cuda", device_name=name, driver="1", torch="2.11", cuda="13", python="3.12", num_cpus=1.0,
        num_threads=1, small=False,
    )  # fmt: skip


def test_roofs_are_the_best_measured() -> None:
    roofs = find_roofs(results(), "a GPU nobody knows")
    assert roofs.bytes_per_s == pytest.approx(1e12)
    assert roofs.flops_per_s == {"float32": pytest.approx(1e13)}
    assert roofs.vendor is None


def test_shares_are_of_the_roof_that_binds() -> None:
    roofs = find_roofs(results(), "NVIDIA H200")
    half = row("matmul 4 float32", 2e6, 1e10, 1e8)
    assert shares(half, "matmul", roofs) == (pytest.approx(0.5), pytest.approx(5e12 / 67e12))
    copy = row("memory copy", 2e6, 0.0, 1e9)
    assert shares(copy, "bandwidth", roofs) == (pytest.approx(0.5), pytest.approx(0.5e12 / 4.8e12))
    assert shares(row("H2D pinned", 1e6, 0.0, 1e7), "bandwidth", roofs) == (None, None)
    unknown = Roofs(bytes_per_s=None, flops_per_s={}, vendor=None)
    assert shares(half, "matmul", unknown) == (None, None)


def test_a_vendors_figure_has_a_source_and_a_name() -> None:
    peak = vendor_peak("NVIDIA H200")
    assert peak is not None
    assert "H200" in peak.source
    assert peak.bytes_per_s == 4.8e12
    assert vendor_peak("NVIDIA H200 NVL") is None  # another card with other figures


def test_intensity() -> None:
    assert intensity(row("x", 1.0, 6.0, 3.0)) == 2.0


def test_scales_are_logarithmic_and_hold_everything() -> None:
    scales = Scales(x_low=-1, x_high=3, y_low=9, y_high=13)
    assert scales.x(0.1) == pytest.approx(FRAME.left)
    assert scales.x(10.0) == pytest.approx((FRAME.left + FRAME.right) / 2)
    assert scales.y(1e9) == pytest.approx(FRAME.bottom)
    assert scales.y(1e12) == pytest.approx(FRAME.bottom - 0.75 * (FRAME.bottom - FRAME.top))
    fitted = fit_scales([row("x", 1e9, 3e9, 2e11)], 1e12, [1e13])  # 0.015 FLOP/B, 3 GFLOP/s; ridge at 10
    assert (fitted.x_low, fitted.x_high, fitted.y_low, fitted.y_high) == (-2, 2, 9, 14)


def test_the_picture_parses_and_shows_every_point_and_roof() -> None:
    svg = render_roofline(results(), find_roofs(results(), "GPU <1>"), where("GPU <1>"))
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 2
    texts = {element.text for element in root.iter(f"{space}text")}
    assert {"Roofline of GPU <1>", "memory 1 TB/s", "float32 10 TFLOP/s", "matmul 8", "memory read"} <= texts
    assert "prefers-color-scheme:dark" in svg


def test_the_ridge_of_the_drawn_roof_is_at_peak_over_bandwidth() -> None:
    roofs = find_roofs(results(), "x")
    scales = fit_scales([each for result in results() for each in result.rows], 1e12, [1e13])
    corner = f"{scales.x(10.0):.1f},{scales.y(1e13):.1f}"
    svg = render_roofline(results(), roofs, where("x"))
    lines = [element.get("points", "") for element in ElementTree.fromstring(svg).iter() if "polyline" in element.tag]
    slope, ceiling = lines
    assert slope.endswith(corner)
    assert ceiling.startswith(corner)


def test_without_a_roof_there_is_no_picture() -> None:
    with pytest.raises(UsageError, match="matmul and bandwidth"):
        render_roofline([], find_roofs([], "x"), where("x"))


@given(st.lists(st.tuples(st.floats(110, 900), st.floats(80, 540)), min_size=1, max_size=8))
def test_labels_cover_neither_each_other_nor_the_frame(spots: list[tuple[float, float]]) -> None:
    boxes = place_labels([(x, y, "matmul 16") for x, y in spots], FRAME)
    assert len(boxes) == len(spots)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(box.inside(FRAME) for box in boxes)
