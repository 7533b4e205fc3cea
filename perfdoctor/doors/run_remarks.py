"""A long run in sentences: its bare steps, and what those that stand out cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.capture import Ints
from perfdoctor.units import format_ms, format_plural, format_share
from perfdoctor.watch.outliers import Outlier, summarise


def run_remarks(step_ns: Ints, watched: NDArray[np.bool_], outliers: tuple[Outlier, ...]) -> tuple[str, ...]:
    """Remarks for the report. `step_ns`, `watched`: shape (n,), the duration of each step and whether it was recorded.
    None where every step was."""
    bare = step_ns[~watched] if len(step_ns) else step_ns
    if not len(bare):
        return ()
    steps = format_plural(len(bare), "unwatched step")
    lines = [f"Over the whole run: {steps}, median {format_ms(int(np.median(bare)))}."]
    if outliers:
        lost = sum(each.excess_ns for each in outliers)
        bills = ", ".join(f"{cause} {format_ms(ns)} in {number}" for cause, number, ns in summarise(outliers))
        stand = "stands" if len(outliers) == 1 else "stand"
        lines.append(
            f"{len(outliers)} of them {stand} out and cost {format_ms(lost)} beyond the median, "
            f"{format_share(lost / int(bare.sum()))} of the time: {bills}."
        )
    return tuple(lines)
