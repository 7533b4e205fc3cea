"""What a diagnosis is made of: findings, the verdict, and what could not be judged.

Times are nanoseconds a step unless a name says otherwise: parts that add up are means over the steps, whole-step times
are medians with their spread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from perfdoctor.record.capture import Environment, Note, Overhead, Site


class Severity(StrEnum):
    """`error`: results may be wrong. `cost`: time comes back. `minor`: under 1 % of the step. `info`: worth knowing."""

    ERROR = "error"
    COST = "cost"
    MINOR = "minor"
    INFO = "info"


class Binding(StrEnum):
    """What the loop waits for most of the time."""

    HOST_LAUNCHING = "host launching"
    HOST_DATA = "host waiting for data"
    HOST_SYNC = "host and device waiting for each other"
    MATRIX = "matrix kernels"
    BANDWIDTH = "bandwidth-bound kernels"
    COPIES = "copies"
    COMMUNICATION = "communication"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What a step would get back if the cause were gone, from replay: lowest, likeliest and highest, in ns."""

    low_ns: int
    mid_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do: a sentence, and lines to paste (may be empty)."""

    text: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a step got back in a trial, in ns: the middle of the paired differences and their 95 % interval.

    `significant` is False where the interval holds zero: no difference.
    """

    median_ns: int
    low_ns: int
    high_ns: int
    basis: str  # 'reads answered with the value of the step before, 10 pairs of 10 steps'

    @property
    def significant(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low_ns > 0 or self.high_ns < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One condition at one place, with the three numbers that are never merged."""

    code: str  # 'host-sync', 'pageable-copy', 'data-wait', 'launch-bound', ...
    severity: Severity
    title: str  # 'reads a device value', one short phrase
    kind: str = ""  # a name of record.sync_kinds.KINDS, or ''
    site: Site | None = None
    count: float = 0.0  # a step
    count_per_micro_batch: float | None = None  # where a step has several
    host_blocked_ns: int | None = None  # the host waited this long in it; None: not known
    gpu_idle_ns: int | None = None  # the device idled this long because of it
    headroom: Headroom | None = None  # what comes back; None: withheld, with `withheld` saying why
    withheld: str = ""
    afterwards: str = ""  # what the host did after the sync: its price
    basis: str = ""  # 'replay of the CUDA-only recording, 10 steps'
    advice: Advice | None = None
    part_of: str = ""  # code of the finding at the same line whose edit cures this one too
    treatments: tuple[str, ...] = ()  # names of treatments that cure it
    evidence: tuple[tuple[int, int], ...] = ()  # worst time ranges on the recording's clock, ns
    measured_saving: Saving | None = None  # after a trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A check that could not judge, and why."""

    check: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a step takes. `basis` says what was timed: 'bare steps by CUDA events', 'traced steps', ..."""

    median_ns: int
    low_ns: int  # first quartile
    high_ns: int  # third quartile
    num_steps: int
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Where a step's time on the device's timeline goes. All in ns a step, means over the steps; the parts add up:
    busy + sum(idle_by_code) + unexplained == window, exactly, before division by the number of steps."""

    window_ns: int
    busy_ns: int
    idle_by_code: dict[str, int] = field(default_factory=dict)
    unexplained_ns: int = 0
    matrix_ns: int = 0  # of busy: kernels bound by arithmetic
    bandwidth_ns: int = 0  # of busy: kernels bound by memory
    copy_ns: int = 0  # of busy: copies that overlap no kernel
    communication_ns: int = 0  # of busy: collectives that overlap no kernel
    run_ahead_ns: int = 0  # median time between a launch and the start of what it launched


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank of several, for the table. None: not known, because no step or no device work was recorded."""

    rank: int
    path: str
    step_ns: int | None
    busy_ratio: float | None
    exposed_communication_ns: int | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict on one recording (or one for each rank, `ranks`)."""

    source: str  # what was read or recorded, for the headline
    step: StepTime | None
    accounting: Accounting | None
    binding: Binding
    findings: tuple[Finding, ...]  # errors first, then by what comes back
    leave_alone: tuple[Finding, ...]  # under 1 % of the step
    skipped: tuple[Skipped, ...] = ()
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    samples_per_step: float | None = None
    micro_batches: float | None = None  # a step
    environment: Environment = field(default_factory=Environment)
    notes: tuple[Note, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    ranks: tuple[RankRow, ...] = ()
    advice: tuple[str, ...] = ()  # remarks on the whole loop
    ruled_out: frozenset[str] = (
        frozenset()
    )  # names of treatments that the loop has already, or that have no point in it
