"""Where a step goes, as rows that add up to the step's window: the table of the text and the bar of the page."""

from __future__ import annotations

from dataclasses import dataclass

from perfdoctor.diagnose.finding import Accounting


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One part of the window. `busy` is True where the device ran."""

    name: str
    time_ns: int
    busy: bool


def shares(accounting: Accounting) -> tuple[Share, ...]:
    """The parts of the window, busy ones first; their times add up to `window_ns` exactly. Empty parts are left out.

    Kernels that are neither matrix nor bandwidth-bound (too short to tell, or of unknown kind) are `other kernels`.
    """
    named = (
        ("matrix kernels", accounting.matrix_ns),
        ("bandwidth-bound kernels", accounting.bandwidth_ns),
        ("copies alone", accounting.copy_ns),
        ("communication alone", accounting.communication_ns),
    )
    rows = [Share(name=name, time_ns=ns, busy=True) for name, ns in named]
    rows.append(Share(name="other kernels", time_ns=accounting.busy_ns - sum(ns for _, ns in named), busy=True))
    idle = sorted(accounting.idle_by_code.items(), key=lambda item: -item[1])
    rows += [Share(name=f"idle: {code}", time_ns=ns, busy=False) for code, ns in idle]
    rows.append(Share(name="idle: unexplained", time_ns=accounting.unexplained_ns, busy=False))
    return tuple(row for row in rows if row.time_ns)
