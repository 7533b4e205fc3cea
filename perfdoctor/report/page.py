"""A Diagnosis that can show itself: in a terminal, in a file, in a notebook."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import fields, replace
from typing import Self

from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.report.html import render_html
from perfdoctor.report.json import render_json
from perfdoctor.report.text import WIDTH, render_text
from perfdoctor.treat.cures import treatments_for


class Report(Diagnosis):
    """What `analyze` and `Session.diagnosis` hand out: every field of a Diagnosis, and ways to show it.

    `print(report)` is coloured when standard output is a terminal (and NO_COLOR is not set), plain elsewhere; a
    notebook shows `_repr_html_`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> Self:
        """The same diagnosis as a Report, each finding with the names of the treatments that cure it."""
        rows = {f.name: getattr(diagnosis, f.name) for f in fields(diagnosis)}
        for name in ("findings", "leave_alone"):
            rows[name] = tuple(replace(found, treatments=treatments_for(found.code)) for found in rows[name])
        return cls(**rows)

    def __str__(self) -> str:
        """The page of text for standard output, without its last newline."""
        colour = is_colourful()
        width = shutil.get_terminal_size((WIDTH, 0)).columns if colour else WIDTH
        return render_text(self, width=width, colour=colour, root=os.getcwd()).rstrip("\n")

    def to_text(self) -> str:
        """The page as plain text, wherever it goes."""
        return render_text(self, root=os.getcwd())

    def to_json(self) -> str:
        """The report as JSON; `perfdoctor/report/schema.json` is its schema."""
        return render_json(self)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        return render_html(self, root=os.getcwd())

    def _repr_html_(self) -> str:
        return render_html(self, root=os.getcwd(), fragment=True)


def is_colourful() -> bool:
    """Whether standard output is a terminal whose user did not ask for plain text (no-color.org)."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
