"""Findings that hide behind each other: two reads in one step, of which removing either gives nothing.

Every finding is priced alone; then all together; and each as the last one removed. A cause that gives nothing alone and
much after the others is kept among the findings, with what it gives in company as its upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

from perfdoctor.diagnose.finding import Finding, Severity
from perfdoctor.diagnose.replay import NOTHING
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.units import format_ms, format_share

# Their edits stand for whole-program changes that contain the others: they are not added up.
_GENERAL = ("launch-bound", "small-kernels", "fusion", "no-tensor-cores", "exposed-communication")
_MAX_TOGETHER = 12
_CLEAR_SHARE = 0.05
_ORDER = {Severity.ERROR: 0, Severity.COST: 1, Severity.INFO: 2, Severity.MINOR: 3}


def with_joint_headroom(review: Review, priced: Sequence[Priced]) -> tuple[list[Finding], list[str]]:
    """The findings ranked by what comes back, and remarks on what they give together."""
    together = [each for each in priced if each.edits is not None and each.finding.code not in _GENERAL]
    together = sorted(together, key=_gain, reverse=True)[:_MAX_TOGETHER]
    findings = {id(each): each.finding for each in priced}
    remarks: list[str] = []
    if review.replayable and len(together) > 1:
        everything = review.pricing.joint_ns(reduce(or_, (each.edits or NOTHING for each in together), NOTHING))
        for each in together:
            others = (o.edits or NOTHING for o in together if o is not each)
            last = everything - review.pricing.joint_ns(reduce(or_, others, NOTHING))
            findings[id(each)] = _in_company(review, each.finding, last)
        remarks += _remark(review, together, everything)
    ranked = sorted(
        findings.values(), key=lambda f: (_tier(review, f), -_sure(f), -_most(f), -(f.host_blocked_ns or 0), -f.count)
    )
    return ranked, remarks


def _tier(review: Review, finding: Finding) -> int:
    """Errors; then lines to change that give back over 5 %; then what a change to the whole program gives at most.

    The bound of a general cure is no promise, and contains what the lines above it give.
    """
    line = finding.code not in _GENERAL and _sure(finding) >= _CLEAR_SHARE * review.pricing.reference_ns
    return 2 * _ORDER[finding.severity] + (0 if line else 1)


def _gain(each: Priced) -> int:
    return _sure(each.finding)


def _sure(finding: Finding) -> int:
    return finding.headroom.mid_ns if finding.headroom is not None else -1


def _most(finding: Finding) -> int:
    return finding.headroom.high_ns if finding.headroom is not None else 0


def _in_company(review: Review, finding: Finding, last_ns: int) -> Finding:
    """A finding with what it gives once all the others are gone."""
    headroom = finding.headroom
    if headroom is None or last_ns <= headroom.high_ns:
        return finding
    worth = last_ns >= 0.01 * review.pricing.reference_ns
    hidden = finding.severity == Severity.MINOR and worth
    note = f"{format_ms(last_ns)} come back once the findings beside it are gone too"
    return replace(
        finding,
        headroom=replace(headroom, high_ns=last_ns),
        severity=Severity.COST if hidden else finding.severity,
        afterwards=f"{finding.afterwards}; {note}" if finding.afterwards else note,
    )


def _remark(review: Review, together: Sequence[Priced], everything: int) -> list[str]:
    alone = sum(max(_gain(each), 0) for each in together)
    step = review.pricing.reference_ns
    if not step or everything - alone < 0.01 * step:
        return []
    return [
        f"Together the findings give back {format_ms(everything)} ({format_share(everything / step)} of the step), "
        f"more than one by one ({format_ms(alone)}): they hide behind each other."
    ]
