"""What `graph_obstacles` finds, as values that print themselves, worst first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from perfdoctor.record.capture import Site

Severity = Literal["silent", "stops", "handled"]
_ORDER: tuple[Severity, ...] = ("silent", "stops", "handled")
_WORDS = {
    "silent": "silently wrong on replay",
    "stops": "stops graph capture",
    "handled": "perfdoctor.graphed_step takes care of it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One thing in a step that a CUDA graph does not take.

    `code`: capture-python-state, capture-baked-value, capture-dynamic-shape, capture-grad-rebound, capture-sync,
    capture-host-tensor, capture-optimizer, capture-other-thread. `severity`: "silent" (a graph would go on with the
    value of graph capture), "stops" (graph capture fails), "handled" (only a graph written by hand would suffer).
    """

    code: str
    site: Site
    text: str
    change: str
    severity: Severity

    def __str__(self) -> str:
        code = f"   {self.site.text}" if self.site.text else ""
        inside = f"\n   in {self.site.library}" if self.site.library is not None else ""
        return f"{self.site.frame}{code}{inside}\n   {self.code}: {self.text}\n   do: {self.change}"


@dataclass(frozen=True, slots=True)
class GraphObstacles:
    """What `graph_obstacles` found, worst first. `graphable`: nothing is left that graphed_step does not handle."""

    obstacles: tuple[Obstacle, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def ranked(cls, rows: Iterable[Obstacle], notes: tuple[str, ...] = ()) -> Self:
        """Worst first; within one severity in the order of the lines, one row a line and code."""
        unique = {(row.code, row.site.frame.file, row.site.frame.line, row.site.library): row for row in rows}
        return cls(tuple(sorted(unique.values(), key=_rank)), notes)

    @property
    def graphable(self) -> bool:
        return all(row.severity == "handled" for row in self.obstacles)

    def __iter__(self) -> Iterator[Obstacle]:
        return iter(self.obstacles)

    def __len__(self) -> int:
        return len(self.obstacles)

    def __str__(self) -> str:
        if not self.obstacles:
            return "\n".join(("Nothing found that a CUDA graph does not take.", *self.notes))
        parts = []
        for severity in _ORDER:
            rows = [row for row in self.obstacles if row.severity == severity]
            if rows:
                parts += ["", f"{len(rows)} {_WORDS[severity]}:", *(str(row) for row in rows)]
        return "\n".join((*parts[1:], *self.notes))


def _rank(row: Obstacle) -> tuple[int, str, int]:
    return _ORDER.index(row.severity), row.site.frame.file, row.site.frame.line
