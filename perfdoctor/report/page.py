"""A Diagnosis that can show itself: in a terminal, in a file, in a notebook."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Self

from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.record.capture import Capture
from perfdoctor.report.drawing import render_svg
from perfdoctor.report.fitting import fitting
from perfdoctor.report.html import render_html
from perfdoctor.report.json import render_json
from perfdoctor.report.text import WIDTH, render_text
from perfdoctor.report.timeline_picture import draw_step
from perfdoctor.treat.cures import treatments_for


class Report(Diagnosis):
    """What `analyze` and `Session.diagnosis` hand out: every field of a Diagnosis, and ways to show it.

    `print(report)` is coloured when standard output is a terminal (and NO_COLOR is not set), plain elsewhere; a
    notebook shows `_repr_html_`. The HTML page holds a picture of one step where the recording is at hand.
    """

    __slots__ = ("_recording", "_script")

    _recording: Capture | None  # no fields: two reports are equal, and copied, without them
    _script: str

    @classmethod
    def of(cls, diagnosis: Diagnosis, recordings: Sequence[Capture] = (), *, script: str = "") -> Self:
        """The same diagnosis as a Report, each finding with the names of the treatments that cure it and fit the loop.

        `recordings`: what was judged, one for each rank; gives the HTML page its picture, drawn only when asked for.
        `script`: what was run, as it is typed behind `perfdoctor trial` (`-m package.train --steps 9`, quoted).
        """
        rows = {f.name: getattr(diagnosis, f.name) for f in fields(diagnosis)}
        for name in ("findings", "leave_alone"):
            rows[name] = tuple(
                replace(found, treatments=fitting(treatments_for(found.code, found.kind), diagnosis))
                for found in rows[name]
            )
        report = cls(**rows)
        own = (each for each in recordings if each.environment is diagnosis.environment)  # that of the page's rank
        return report._with(next(own, None), script)

    def with_advice(self, *remarks: str) -> Self:
        """The same report with these remarks before its own."""
        report = replace(self, advice=(*remarks, *self.advice))
        return report._with(getattr(self, "_recording", None), self._command)

    def _with(self, recording: Capture | None, script: str) -> Self:
        object.__setattr__(self, "_recording", recording)
        object.__setattr__(self, "_script", script)
        return self

    @property
    def _command(self) -> str:
        """The script as it is typed; '' for a copy, which has none."""
        return str(getattr(self, "_script", ""))

    def __str__(self) -> str:
        """The page of text for standard output, without its last newline."""
        colour = is_colourful()
        width = shutil.get_terminal_size((WIDTH, 0)).columns if colour else WIDTH
        return render_text(self, width=width, colour=colour, root=os.getcwd(), script=self._command).rstrip("\n")

    def to_text(self) -> str:
        """The page as plain text, wherever it goes."""
        return render_text(self, root=os.getcwd(), script=self._command)

    def to_json(self) -> str:
        """The report as JSON; `perfdoctor/report/schema.json` is its schema."""
        return render_json(self)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        return render_html(self, root=os.getcwd(), timeline=self._timeline(), script=self._command)

    def _repr_html_(self) -> str:
        return render_html(self, root=os.getcwd(), fragment=True, timeline=self._timeline(), script=self._command)

    def _timeline(self) -> str:
        """One step as SVG; '' without a recording, or where it does not say when the device was busy."""
        recording: Capture | None = getattr(self, "_recording", None)
        picture = draw_step(recording) if recording is not None and self.accounting is not None else None
        return "" if picture is None else render_svg(picture)


def is_colourful() -> bool:
    """Whether standard output is a terminal whose user did not ask for plain text (no-color.org)."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
