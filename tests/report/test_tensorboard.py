"""What TensorBoard's own reader finds in the event files, and the picture of a step."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("tensorboard", reason="needs tensorboard")

from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from perfdoctor import load_capture
from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.errors import UsageError
from perfdoctor.record.capture import Bare, Capture
from perfdoctor.record.timeline import Timeline
from perfdoctor.report.drawing import Box, Drawing, Label, render_png, render_svg
from perfdoctor.report.tensorboard import scalars, write_diagnosis, write_step_times
from perfdoctor.report.timeline_picture import draw_step

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_loop.perfdoctor"


@pytest.fixture(scope="module")
def capture() -> Capture:
    return load_capture(EXAMPLE)


@pytest.fixture(scope="module")
def judged(capture: Capture) -> Diagnosis:
    return diagnose(capture)


@contextmanager
def writing(folder: Path) -> Iterator[SummaryWriter]:
    with SummaryWriter(str(folder)) as writer:
        yield writer


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def test_scalars_come_back(tmp_path: Path, capture: Capture, judged: Diagnosis) -> None:
    with writing(tmp_path) as writer:
        write_diagnosis(writer, judged, capture, step=400)
        write_diagnosis(writer, judged, capture, step=800)
    events = read(tmp_path)
    assert [event.step for event in events.Scalars("perfdoctor/step_ms")] == [400, 800]

    def value(tag: str) -> float:
        return float(events.Scalars(f"perfdoctor/{tag}")[0].value)

    assert capture.bare is not None
    assert value("step_ms") == pytest.approx(float(np.median(capture.bare.step_ns)) / 1e6, rel=1e-5)
    assert value("data_wait_ms") == pytest.approx(capture.bare.data_ns.mean() / 1e6, rel=1e-5)
    accounting = judged.accounting
    assert accounting is not None
    assert value("busy_ratio") == pytest.approx(accounting.busy_ns / accounting.window_ns, rel=1e-5)
    idle = [tag for tag in events.Tags()["scalars"] if tag.startswith("perfdoctor/idle_ms/")]
    total = sum(events.Scalars(tag)[0].value for tag in idle)
    assert total == pytest.approx((accounting.window_ns - accounting.busy_ns) / 1e6, rel=1e-4)


def test_syncs_a_step_are_those_of_the_recording(capture: Capture, judged: Diagnosis) -> None:
    # The example: 149 norms, one loss, two and one boolean masks, in every step.
    assert scalars(judged, capture)["syncs_per_step"] == 149 + 1 + 2 + 1


def test_the_report_comes_back_as_text(tmp_path: Path, judged: Diagnosis) -> None:
    with writing(tmp_path) as writer:
        write_diagnosis(writer, judged)
    tensor = read(tmp_path).Tensors("perfdoctor/report/text_summary")[0].tensor_proto
    text = tensor.string_val[0].decode()
    assert "examples/slow_loop.py:90" in text
    assert all(line.startswith("    ") for line in text.splitlines())  # Markdown keeps the columns of code


def test_the_picture_comes_back(tmp_path: Path, capture: Capture, judged: Diagnosis) -> None:
    with writing(tmp_path) as writer:
        write_diagnosis(writer, judged, capture, step=7)
    event = read(tmp_path).Images("perfdoctor/timeline")[0]
    image = Image.open(io.BytesIO(event.encoded_image_string))
    assert (event.width, event.height) == image.size
    assert event.step == 7
    assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 20  # not an empty card


def test_what_was_not_measured_is_not_written(tmp_path: Path) -> None:
    nothing = diagnose(Capture(source="test"))
    assert scalars(nothing) == {}
    with writing(tmp_path) as writer:
        write_diagnosis(writer, nothing, Capture(source="test"))
    assert read(tmp_path).Tags()["scalars"] == []
    assert read(tmp_path).Tags()["images"] == []


def test_a_loop_whose_loader_nobody_saw_has_no_data_wait(capture: Capture, judged: Diagnosis) -> None:
    assert capture.bare is not None
    unseen = Bare(**{name: getattr(capture.bare, name) for name in ("step_ns", "data_ns", "samples")},
                  micro_batches=np.zeros_like(capture.bare.micro_batches))  # fmt: skip
    assert "data_wait_ms" not in scalars(judged, replace(capture, bare=unseen))


def test_step_times_of_a_long_run_come_back(tmp_path: Path) -> None:
    lengths = np.array([10, 11, 50, 12], np.int64) * 1_000_000
    watched = np.array([False, True, False, False])
    with writing(tmp_path) as writer:
        write_step_times(writer, lengths, first_step=1, watched=watched)
    points = [(event.step, round(event.value, 3)) for event in read(tmp_path).Scalars("perfdoctor/bare_step_ms")]
    assert points == [(1, 10.0), (3, 50.0), (4, 12.0)]


def test_a_very_long_run_keeps_its_slowest_steps(tmp_path: Path) -> None:
    lengths = np.full(25_000, 1_000_000, np.int64)
    lengths[[7_001, 24_998]] = 90_000_000
    with writing(tmp_path) as writer:
        write_step_times(writer, lengths, first_step=0)
    events = read(tmp_path).Scalars("perfdoctor/bare_step_ms")
    assert len(events) <= 10_000
    assert [event.step for event in events if event.value > 50] == [7_001, 24_998]


def test_flags_of_other_steps_are_refused(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, pytest.raises(UsageError, match="3 entries for 4 steps"):
        write_step_times(writer, np.ones(4, np.int64), watched=np.zeros(3, bool))


def test_another_prefix(tmp_path: Path, judged: Diagnosis) -> None:
    with writing(tmp_path) as writer:
        write_diagnosis(writer, judged, prefix="rank3")
    assert "rank3/step_ms" in read(tmp_path).Tags()["scalars"]


@pytest.mark.parametrize("writer", [None, "runs/one", object()])
def test_what_is_no_writer_is_refused(writer: Any, judged: Diagnosis) -> None:
    with pytest.raises(UsageError, match=r"SummaryWriter\(folder\)"):
        write_diagnosis(writer, judged)


# ---- the picture ----


def drawn(capture: Capture) -> Drawing:
    drawing = draw_step(capture)
    assert drawing is not None
    return drawing


def test_the_picture_names_the_guilty_lines(capture: Capture) -> None:
    texts = [shape.text for shape in drawn(capture).shapes if isinstance(shape, Label)]
    for place, count in (("slow_loop.py:90", "149 x"), ("slow_loop.py:104", "2 x"), ("slow_loop.py:111", "1 x")):
        assert count == texts[texts.index(place) + 1]
    assert {"host", "stream 7", "GPU idle, by cause", "backward"} <= set(texts)


def test_idle_time_in_the_picture_has_the_width_of_the_idle_time(capture: Capture) -> None:
    drawing = drawn(capture)
    idle = [box for box in drawing.shapes if isinstance(box, Box) and box.title.startswith("idle: data-wait")]
    widest = max(box.width for box in idle)
    ticks = [label for label in drawing.shapes if isinstance(label, Label) and label.text.endswith(" ms")]
    tick = {label.text: label.x for label in ticks if label.anchor == "middle"}
    pixels_a_ms = (tick["10 ms"] - tick["0 ms"]) / 10
    pauses = capture.pauses
    waits = (pauses.end_ns - pauses.start_ns)[[capture.text(int(name)) == "data" for name in pauses.name]] / 1e6
    # It is one of the waits for data that the host's clock saw, to half a pixel at both edges.
    assert np.abs(waits - widest / pixels_a_ms).min() < 1 / pixels_a_ms


def test_everything_lies_inside_the_picture(capture: Capture) -> None:
    drawing = drawn(capture)
    for shape in drawing.shapes:
        assert 0 <= shape.x <= drawing.width
        assert 0 <= shape.y <= drawing.height
        if isinstance(shape, Box):
            assert shape.x + shape.width <= drawing.width + 1
            assert shape.y + shape.height <= drawing.height


def test_each_step_can_be_drawn(capture: Capture) -> None:
    pictures = [draw_step(capture, step) for step in range(4)]
    assert len({picture.summary for picture in pictures if picture is not None}) == 4


def test_the_drawn_step_is_a_whole_one(capture: Capture) -> None:
    """Neither the first, whose device window begins with what happened to be recorded, nor one on a short batch."""
    columns = capture.steps.columns()
    inside = [draw_step(capture, step) for step in range(4)]
    for kept in (1, 2, 3):
        columns["partial"] = np.ones(len(capture.steps), np.int64)
        judged = Timeline(capture).steps
        assert judged is not None
        columns["partial"][judged.index[[0, kept]]] = 0
        chosen = draw_step(replace(capture, steps=type(capture.steps)(**columns)))
        assert chosen is not None
        assert chosen.summary == inside[kept].summary  # type: ignore[union-attr]


def test_a_recording_without_marks_is_drawn_as_a_whole(capture: Capture) -> None:
    few = capture.work.take(np.arange(40))  # too short to repeat itself
    calls = capture.calls.take(np.isin(capture.calls.correlation, few.correlation))
    empty = {name: Capture.TABLES[name].empty() for name in ("steps", "hits", "pauses", "ranges", "stream_syncs")}
    drawing = drawn(replace(capture, work=few, calls=calls, full=None, bare=None, **empty))
    assert drawing.summary.startswith("The whole recording, which marks no steps: ")


def test_a_recording_without_device_work_has_no_picture() -> None:
    assert draw_step(Capture(source="test")) is None


def test_svg_is_well_formed_and_takes_the_pages_ink() -> None:
    shapes = [Box(x=1, y=2, width=3, height=4, fill="#ff0000", title="a < b & c"), Label(x=5, y=6, text="x < y")]
    root = ElementTree.fromstring(render_svg(Drawing(width=40, height=20, shapes=shapes, summary='a "b"')))
    assert root.get("fill") == "currentColor"
    rect, text = list(root)
    assert rect.get("fill") == "#ff0000"
    assert rect[0].text == "a < b & c"
    assert text.text == "x < y"
    assert text.get("fill") is None  # inherited: light on a dark page


def test_png_has_the_boxes_where_they_belong() -> None:
    shapes = [Box(x=2, y=1, width=3, height=2, fill="#ff0000")]
    image = Image.open(io.BytesIO(render_png(Drawing(width=10, height=5, shapes=shapes, summary=""), scale=2)))
    pixels = np.asarray(image.convert("RGB"))
    red = (pixels == (255, 0, 0)).all(axis=2)
    rows, columns = np.nonzero(red)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (2, 5, 4, 9)
    assert image.size == (20, 10)
    assert tuple(pixels[0, 0]) > (240, 240, 240)  # a card of its own: readable on a dark page


@pytest.mark.parametrize("diagnosis", [None, "text", 3])
def test_what_is_no_diagnosis_is_refused(tmp_path: Path, diagnosis: Any) -> None:
    with writing(tmp_path) as writer, pytest.raises(UsageError, match="needs a diagnosis"):
        write_diagnosis(writer, diagnosis)


def test_what_is_no_capture_is_refused(tmp_path: Path, judged: Diagnosis) -> None:
    with writing(tmp_path) as writer, pytest.raises(UsageError, match="needs a Capture, got str"):
        write_diagnosis(writer, judged, "loop.perfdoctor")  # type: ignore[arg-type]


def test_step_times_may_come_as_lists(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        write_step_times(writer, [3_000_000, 1_000_000, 2_000_000], watched=[True, False, False])  # type: ignore[arg-type]
    found = read(tmp_path).Scalars("perfdoctor/bare_step_ms")
    assert [(event.step, event.value) for event in found] == [(2, 1.0), (3, 2.0)]
