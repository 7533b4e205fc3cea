"""A diagnosis in TensorBoard: its figures as scalars, the report as text, one step's timeline as a picture.

    with SummaryWriter("runs/one") as writer:
        write_diagnosis(writer, session.diagnosis(), session.capture, step=global_step)

`perfdoctor/` stands before every tag. A figure that was not measured is not written: a hole in a curve, not a zero.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.errors import UsageError
from perfdoctor.record.capture import Capture, Ints
from perfdoctor.record.sync_kinds import HOST_SYNC
from perfdoctor.report import phrases
from perfdoctor.report.drawing import render_png
from perfdoctor.report.text import render_text
from perfdoctor.report.timeline_picture import draw_step
from perfdoctor.units import NS_PER_MS

# A curve of more points than this is drawn by TensorBoard from a sample anyway.
_MOST_POINTS = 10_000


def write_diagnosis(
    writer: Any, diagnosis: Diagnosis, capture: Capture | None = None, step: int = 0, *, prefix: str = "perfdoctor"
) -> None:
    """Write a report at `step` of a run.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its add_scalar, add_text and add_image.
        diagnosis: what is written.
        capture: the recording behind it; gives the wait for data and the picture. None leaves both out.
        step: the training step that the curves have at this point.
        prefix: the first part of every tag.

    Raises:
        UsageError: `writer`, `diagnosis` or `capture` is none, or Pillow is not installed.
    """
    _check_writer(writer)
    _check_recorded(diagnosis, capture)
    for name, value in scalars(diagnosis, capture).items():
        writer.add_scalar(f"{prefix}/{name}", value, step)
    writer.add_text(f"{prefix}/report", _markdown(diagnosis), step)
    picture = draw_step(capture) if capture is not None else None
    if picture is not None:
        writer.add_image(f"{prefix}/timeline", _pixels(render_png(picture)), step, dataformats="HWC")


def scalars(diagnosis: Diagnosis, capture: Capture | None = None) -> dict[str, float]:
    """The figures of a report by name: step_ms, busy_ratio, syncs_per_step, data_wait_ms, idle_ms/CODE. Only those
    that are known."""
    found: dict[str, float] = {}
    if diagnosis.step is not None and not phrases.is_window(diagnosis.step):
        found["step_ms"] = diagnosis.step.median_ns / NS_PER_MS
        judged = (*diagnosis.findings, *diagnosis.leave_alone)
        found["syncs_per_step"] = float(sum(each.count for each in judged if each.code == HOST_SYNC))
    busy = phrases.busy_ratio(diagnosis)
    if busy is not None:
        found["busy_ratio"] = busy
    data_ns = _data_ns(capture)
    if data_ns is not None:
        found["data_wait_ms"] = data_ns / NS_PER_MS
    accounting = diagnosis.accounting
    if accounting is not None:
        for code, idle_ns in accounting.idle_by_code.items():
            found[f"idle_ms/{code}"] = idle_ns / NS_PER_MS
        found["idle_ms/unexplained"] = accounting.unexplained_ns / NS_PER_MS
    return found


def _data_ns(capture: Capture | None) -> float | None:
    bare = capture.bare if capture is not None else None
    if bare is None or not bare.micro_batches.any():  # no loader was seen
        return None
    return float(bare.data_ns.mean())


def write_step_times(
    writer: Any,
    step_ns: Ints,
    first_step: int = 1,
    watched: NDArray[np.bool_] | None = None,
    *,
    prefix: str = "perfdoctor",
) -> None:
    """Write the bare step times of a long run, one point a step (the slowest of each stretch in very long ones).

    Args:
        writer: as for `write_diagnosis`.
        step_ns: (n,) ns of each step, as `LongSession.step_ns` gives it.
        first_step: the number of the first.
        watched: (n,) steps to leave out, because a recording slowed them.
        prefix: the first part of the tag, `PREFIX/bare_step_ms`.

    Raises:
        UsageError: `writer` is none, or `watched` is of other steps.
    """
    _check_writer(writer)
    step_ns = np.asarray(step_ns, np.int64)
    if watched is not None and len(watched) != len(step_ns):
        raise UsageError(f"watched has {len(watched)} entries for {len(step_ns)} steps: give those of one session")
    keep = np.ones(len(step_ns), bool) if watched is None else ~np.asarray(watched, bool)
    rows = np.flatnonzero(keep)
    stretch = max(-(-len(rows) // _MOST_POINTS), 1)
    for at in range(0, len(rows), stretch):
        part = rows[at : at + stretch]
        slowest = int(part[np.argmax(step_ns[part])])
        writer.add_scalar(f"{prefix}/bare_step_ms", float(step_ns[slowest]) / NS_PER_MS, first_step + slowest)


def _check_writer(writer: Any) -> None:
    missing = [name for name in ("add_scalar", "add_text", "add_image") if not callable(getattr(writer, name, None))]
    if missing:
        raise UsageError(
            f"{type(writer).__name__} is no SummaryWriter (it has no {', '.join(missing)}): give "
            "torch.utils.tensorboard.SummaryWriter(folder)"
        )


def _check_recorded(diagnosis: object, capture: object) -> None:
    if not isinstance(diagnosis, Diagnosis):
        raise UsageError(
            f"write_diagnosis() needs a diagnosis, got {type(diagnosis).__name__}: give session.diagnosis(), "
            "perfdoctor.analyze(...), or a callback's report, which is None before its first window is over"
        )
    if capture is not None and not isinstance(capture, Capture):
        raise UsageError(f"write_diagnosis(capture=...) needs a Capture, got {type(capture).__name__}: session.capture")


def _markdown(diagnosis: Diagnosis) -> str:
    # TensorBoard renders Markdown: indented by four blanks the page keeps its columns.
    return "".join(f"    {line}\n" for line in render_text(diagnosis).splitlines())


def _pixels(png: bytes) -> Any:
    """Height x width x 3, uint8: what add_image takes."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))
