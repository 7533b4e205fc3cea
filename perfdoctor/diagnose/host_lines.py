"""Which line the host was at, from the stack samples of the full recording beside the light one."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np

from perfdoctor.diagnose.tensor_loop import TensorLoop, find_tensor_loops
from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Capture, Frame, Ints, Site
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.timeline import Timeline
from perfdoctor.units import format_share

MIN_SAMPLES = 3
MIN_SHARE = 0.3


class HostLines:
    """Lines of the user's by time. Without samples every answer is None or empty."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture if len(capture.samples) or capture.full is None else capture.full

    @property
    def known(self) -> bool:
        return len(self.capture.samples) > 0

    @cached_property
    def timeline(self) -> Timeline:
        """Of the recording that holds the samples."""
        return Timeline(self.capture)

    @cached_property
    def loops(self) -> tuple[TensorLoop, ...]:
        return find_tensor_loops(self.timeline)

    def of_loop(self, motif: tuple[str, ...]) -> Site | None:
        """The line of the loops over tensors with this motif."""
        if not self.known:
            return None
        calls = self.timeline.calls
        same = [loop for loop in self.loops if loop.motif == motif]
        starts = np.array([calls.start_ns[loop.first_call] for loop in same], np.int64)
        ends = np.array([calls.end_ns[loop.last_call] for loop in same], np.int64)
        return self.within(intervals.union(starts, ends))

    def after(self, site: Site) -> Site | None:
        """The line that fills the time between a caught call at `site` and the next launch."""
        if not self.known or site not in self.capture.sites:
            return None
        hits = self.capture.hits
        ends = np.sort(hits.end_ns[hits.site == self.capture.sites.index(site)])
        calls = self.timeline.calls
        launches = calls.start_ns[(calls.kind == CallKind.LAUNCH) | (calls.kind == CallKind.GRAPH_LAUNCH)]
        following = np.searchsorted(launches, ends)
        known = following < len(launches)
        return self.within(intervals.union(ends[known], launches[following[known]]))

    def within(self, spans: Intervals) -> Site | None:
        """The site with the most samples inside `spans`, where it has a clear share of them."""
        rows = self._inside(spans)
        if len(rows) < MIN_SAMPLES:
            return None
        frames = Counter(self.capture.sites[site].frame for site in self.capture.samples.site[rows].tolist())
        frame, count = frames.most_common(1)[0]
        if count < MIN_SHARE * len(rows) or frame.owner != "user":
            return None
        return next(s for s in self.capture.sites if s.frame == frame)

    def busiest(self) -> str:
        """'model.py:24 31 %, train.py:40 12 %': where the host's time went; '' without samples."""
        return ", ".join(f"{_short(frame)} {format_share(share)}" for frame, share in list(self.shares().items())[:3])

    def shares(self) -> dict[Frame, float]:
        """The share of the host's time in each line of the user's, largest first; empty without samples."""
        rows = self.capture.samples.site.tolist()
        frames: Counter[Frame] = Counter(self.capture.sites[site].frame for site in rows)
        return {frame: count / len(rows) for frame, count in frames.most_common() if frame.owner == "user"}

    def _inside(self, spans: Intervals) -> Ints:
        times = self.capture.samples.time_ns
        if not len(spans[0]) or not len(times):
            return np.empty(0, np.int64)
        place = np.searchsorted(spans[0], times, side="right") - 1
        inside: Ints = np.flatnonzero((place >= 0) & (times < spans[1][np.maximum(place, 0)]))
        return inside


def _short(frame: Frame) -> str:
    name = frame.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{frame.line}"
