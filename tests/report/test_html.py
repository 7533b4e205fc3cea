"""The HTML page: well-formed, self-contained, and safe with any source text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as tree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from perfdoctor.diagnose.finding import Binding, Diagnosis, RankRow
from perfdoctor.report.html import render_html

VOID = {"meta", "br"}


class Nesting(HTMLParser):
    """Complains about tags that are closed in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("fragment", [False, True])
def test_page_is_well_formed_and_self_contained(
    diagnosis: Diagnosis, rank_rows: tuple[RankRow, ...], fragment: bool
) -> None:
    page = render_html(replace(diagnosis, ranks=rank_rows), fragment=fragment)
    parser = Nesting()
    parser.feed(page)
    assert parser.open == []
    assert not parser.seen & {"script", "link", "img", "iframe"}
    assert "http" not in page
    assert "url(" not in page
    assert ("<html" in page) is not fragment


def test_page_holds_what_the_text_holds(diagnosis: Diagnosis) -> None:
    page = render_html(diagnosis, root="/home/ann/run")
    for part in ("train.py:84", "running_loss += loss.item()", "5.1 h of a 24 h run", "train.py:102", "1 more finding"):
        assert part in page


def test_picture_fills_the_bar_exactly(diagnosis: Diagnosis) -> None:
    svg = re.search(r"<svg.*?</svg>", render_html(diagnosis), re.DOTALL)
    assert svg is not None
    rects = tree.fromstring(svg[0]).findall("rect")
    widths = [float(rect.attrib["width"]) for rect in rects]
    assert sum(widths) == pytest.approx(1000)
    edges = [float(rect.attrib["x"]) for rect in rects]
    assert edges == pytest.approx([sum(widths[:i]) for i in range(len(widths))])


def test_source_text_cannot_break_out(diagnosis: Diagnosis) -> None:
    finding = diagnosis.findings[0]
    assert finding.site is not None
    evil = replace(finding, site=replace(finding.site, text='x = "</code><script>alert(1)</script>"'))
    page = render_html(replace(diagnosis, findings=(evil,), source="<b>&"))
    assert "<script" not in page
    assert "<b>&" not in page


def test_a_diagnosis_without_a_device_has_no_picture_and_no_figures() -> None:
    bare = Diagnosis(source="t", step=None, accounting=None, binding=Binding.UNKNOWN, findings=(), leave_alone=())
    page = render_html(bare)
    assert "<svg" not in page
    assert "nothing here says that the loop is healthy" in page
