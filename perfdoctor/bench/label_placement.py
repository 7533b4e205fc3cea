"""Where labels go on a picture so that they cover neither each other nor a point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CHARACTER_WIDTH, LINE_HEIGHT = 6.4, 13.0  # of 11 px sans-serif, a little wide
_POINT_RADIUS = 5.0
_DISTANCES = (9.0, 20.0, 34.0, 50.0, 70.0, 95.0)
_DIRECTIONS = ((1, 0), (0, -1), (0, 1), (-1, 0), (0.7, -0.7), (-0.7, -0.7), (0.7, 0.7), (-0.7, 0.7))


@dataclass(frozen=True, slots=True)
class Box:
    """Left, top, right, bottom; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether they share more than an edge."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def inside(self, other: Box) -> bool:
        """Whether all of it is in the other."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom


def place_labels(points: Sequence[tuple[float, float, str]], frame: Box, taken: Sequence[Box] = ()) -> list[Box]:
    """One box a point (x, y, text), inside the frame and off what is taken where that can be, the nearest first."""
    dots = [Box(x - _POINT_RADIUS, y - _POINT_RADIUS, x + _POINT_RADIUS, y + _POINT_RADIUS) for x, y, _ in points]
    placed: list[Box] = []
    for x, y, text in points:
        tries = list(_places(x, y, len(text) * CHARACTER_WIDTH))
        free = (
            box
            for box in tries
            if box.inside(frame) and not any(box.overlaps(other) for other in (*taken, *dots, *placed))
        )
        placed.append(next(free, tries[0]))
    return placed


def _places(x: float, y: float, width: float) -> Iterator[Box]:
    for distance in _DISTANCES:
        for across, down in _DIRECTIONS:
            left = x + distance * across - (0 if across > 0 else width if across < 0 else width / 2)
            top = y + (distance + LINE_HEIGHT / 2) * down - LINE_HEIGHT / 2
            yield Box(left, top, left + width, top + LINE_HEIGHT)
