"""A picture as a list of shapes, and two ways to show it: SVG text for pages, a PNG file for TensorBoard.

Lengths are in pixels of the picture, y downwards. Colours are '#rrggbb', or `INK` for that of the page's text.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from perfdoctor.errors import UsageError

INK = "ink"
FONT_PX = 12
# Of a PNG: a card of its own, so that it can be read on a white page and on a black one.
_CARD, _CARD_INK = (251, 251, 249), (38, 40, 44)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A filled rectangle. `opacity` from 0 to 1; `title` is shown by browsers under the mouse."""

    x: float
    y: float
    width: float
    height: float
    fill: str = INK
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A line of text whose baseline is at y. `anchor`: start, middle or end."""

    x: float
    y: float
    text: str
    fill: str = INK
    opacity: float = 1.0
    size: int = FONT_PX
    anchor: str = "start"
    bold: bool = False


Shape = Box | Label


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Shapes from back to front, and a sentence for those who cannot see it."""

    width: int
    height: int
    shapes: Sequence[Shape]
    summary: str


def render_svg(drawing: Drawing) -> str:
    """The drawing as an <svg> element that takes its ink from the page: dark pages get light text."""
    body = "".join(_box_svg(each) if isinstance(each, Box) else _label_svg(each) for each in drawing.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" width="100%" '
        f'style="height:auto;max-width:{drawing.width}px" role="img" aria-label="{escape(drawing.summary)}" '
        f'font-family="system-ui,sans-serif" font-size="{FONT_PX}" fill="currentColor">{body}</svg>'
    )


def _box_svg(box: Box) -> str:
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
        f"{_paint(box.fill, box.opacity)}>{title}</rect>"
    )


def _label_svg(label: Label) -> str:
    more = f' text-anchor="{label.anchor}"' if label.anchor != "start" else ""
    more += f' font-size="{label.size}"' if label.size != FONT_PX else ""
    more += ' font-weight="600"' if label.bold else ""
    paint = _paint(label.fill, label.opacity)
    return f'<text x="{label.x:.1f}" y="{label.y:.1f}"{more}{paint}>{escape(label.text)}</text>'


def _paint(fill: str, opacity: float) -> str:
    colour = "" if fill == INK else f' fill="{fill}"'
    return colour + (f' opacity="{opacity:g}"' if opacity != 1 else "")


def render_png(drawing: Drawing, scale: int = 2) -> bytes:
    """The drawing as a PNG file on a light card, `scale` times as large for sharp text.

    Raises:
        UsageError: Pillow, which comes with TensorBoard, is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise UsageError(f"a PNG needs Pillow ({error}): pip install 'perfdoctor[tensorboard]'") from error
    image = Image.new("RGB", (drawing.width * scale, drawing.height * scale), _CARD)
    brush = ImageDraw.Draw(image, "RGBA")
    for each in drawing.shapes:
        if isinstance(each, Box):
            _draw_box(brush, each, scale)
        else:
            _draw_label(brush, each, scale)
    file = io.BytesIO()
    # 256 colours are all of it: a picture of flat areas is a third as large with a palette.
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def _draw_box(brush: Any, box: Box, scale: int) -> None:
    left, top = round(box.x * scale), round(box.y * scale)
    right = max(round((box.x + box.width) * scale) - 1, left)
    bottom = max(round((box.y + box.height) * scale) - 1, top)
    brush.rectangle((left, top, right, bottom), fill=_rgba(box.fill, box.opacity))


def _draw_label(brush: Any, label: Label, scale: int) -> None:
    from PIL import ImageFont

    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
    font = ImageFont.load_default(label.size * scale)
    colour = _rgba(label.fill, label.opacity)
    where = (label.x * scale, label.y * scale)
    brush.text(where, label.text, font=font, fill=colour, anchor=anchor, stroke_width=0)
    if label.bold:  # the font that Pillow carries has one weight
        brush.text((where[0] + scale * 0.4, where[1]), label.text, font=font, fill=colour, anchor=anchor)


def _rgba(fill: str, opacity: float) -> tuple[int, int, int, int]:
    red, green, blue = _CARD_INK if fill == INK else (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue, round(255 * opacity)
