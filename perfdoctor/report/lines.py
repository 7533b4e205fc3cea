"""Lines of styled text, laid out once: plain for files and pipes, coloured for terminals.

A line is a sequence of (text, style) spans; the style names are the keys of `STYLES`.
"""

from __future__ import annotations

import io
import shlex
import textwrap
from collections.abc import Iterable

Span = tuple[str, str]
Line = tuple[Span, ...]

STYLES = {
    "": "",
    "strong": "bold",
    "faint": "dim",
    "place": "bold cyan",
    "cost": "bold yellow",
    "code": "green",
    "error": "bold red",
    "busy": "green",
    "idle": "yellow",
}


def plain(lines: Iterable[Line]) -> str:
    """The lines without styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines) + "\n"


def coloured(lines: Iterable[Line], width: int) -> str:
    """The lines with the terminal's colour codes; the same characters at the same places as `plain`."""
    from rich.console import Console  # 60 ms to import: only where it is shown
    from rich.text import Text

    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=True, width=width, highlight=False, legacy_windows=False)
    for line in lines:
        text = Text.assemble(*((part, STYLES[style]) for part, style in line))
        console.print(text, soft_wrap=True)
    return buffer.getvalue()


def wrapped(text: str, width: int, *, label: str = "", indent: int = 0, style: str = "") -> list[Line]:
    """Prose in lines of at most `width`, the first one led by `label`, all of it `indent` columns in.

    Words longer than a line (paths) are not broken: they can be copied.
    """
    room = max(width - indent, 20)
    rows = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    lead = f"{label:<{indent}}"
    head: Line = ((lead, "faint"), (rows[0], style))
    return [head, *(((" " * indent, ""), (row, style)) for row in rows[1:])]


def command_lines(command: str, width: int, *, label: str = "", indent: int = 0) -> list[Line]:
    """A shell command in lines of at most `width` where its words allow it, each but the last ending in a backslash:
    it works when it is pasted. `command` is quoted already."""
    rows: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if rows and len(rows[-1]) + 1 + len(word) + 2 <= max(width - indent, 20):
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    broken = [f"{row} \\" for row in rows[:-1]] + rows[-1:]
    leads = (f"{label:<{indent}}", *[" " * indent] * len(broken))
    return [((lead, "faint"), (row, "code")) for lead, row in zip(leads, broken, strict=False)]


def cut(text: str, width: int) -> str:
    """The text in at most `width` columns, with an ellipsis where something was left out."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
