"""A trial's outcome as text and as JSON: the diagnosis, and what was measured without each suspect."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any, Self

from perfdoctor.diagnose.finding import Finding, Saving
from perfdoctor.report import phrases
from perfdoctor.report.json import as_document, saving_document, site_document
from perfdoctor.report.lines import Line, plain, wrapped
from perfdoctor.report.text import WIDTH, render_text
from perfdoctor.trial.outcome import ArmResult, TrialOutcome
from perfdoctor.units import format_ms, format_share, format_spread, ms

_INDENT = 3


class TrialReport(TrialOutcome):
    """What a trial hands out: every field of a TrialOutcome, and ways to show it."""

    __slots__ = ()

    @classmethod
    def of(cls, outcome: TrialOutcome) -> Self:
        """The same outcome as a report."""
        return cls(**{f.name: getattr(outcome, f.name) for f in fields(outcome)})

    def __str__(self) -> str:
        return self.to_text().rstrip("\n")

    def to_text(self) -> str:
        """What was measured, then the page of the diagnosis."""
        return render_trial(self, root=os.getcwd())

    def to_json(self) -> str:
        """The diagnosis as JSON, with the key `trial`."""
        return render_trial_json(self)


def render_trial(outcome: TrialOutcome, *, width: int = WIDTH, root: str = "") -> str:
    """The trial's own page, then that of the diagnosis."""
    lines = [*_head(outcome, width), (), *_arms(outcome, width, root), *_after(outcome, width, root), ()]
    return plain(lines) + "\n" + render_text(outcome.diagnosis, width=width, root=root)


def render_trial_json(outcome: TrialOutcome) -> str:
    """Indented JSON, ending in a newline; `schema.json` describes it."""
    document = as_document(outcome.diagnosis)
    document["trial"] = trial_document(outcome)
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def trial_document(outcome: TrialOutcome) -> dict[str, Any]:
    """The trial as plain dicts and lists."""
    return {
        "base": {
            "median_ms": ms(outcome.base_ns),
            "low_ms": ms(outcome.base_low_ns),
            "high_ms": ms(outcome.base_high_ns),
        },
        "arms": [_arm_document(arm) for arm in outcome.arms],
        "refused": [{**_place(row.finding), "why": row.why} for row in outcome.refused],
        "order": [_place(finding) for finding in outcome.order],
        "num_steps": outcome.num_steps,
        "block_steps": outcome.counted,
        "rounds": outcome.rounds,
        "left_out": outcome.left_out,
        "complete": outcome.complete,
        "notes": list(outcome.notes),
    }


def saving_text(saving: Saving, base_ns: int) -> str:
    """'gives back 13.9 ms (13.5 to 14.2 ms), 23 % of the step', or 'no difference (-0.2 to 0.1 ms)'."""
    spread = format_spread(saving.low_ns, saving.high_ns)
    if not saving.significant:
        return f"no difference ({spread})"
    share = f", {format_share(abs(saving.median_ns) / base_ns)} of the step" if base_ns else ""
    if saving.median_ns < 0:
        return f"costs {format_ms(-saving.median_ns)} more without it ({spread}){share}"
    return f"gives back {format_ms(saving.median_ns)} ({spread}){share}"


def _head(outcome: TrialOutcome, width: int) -> list[Line]:
    base = f"{format_ms(outcome.base_ns)} a step with nothing taken out" if outcome.base_ns else "no block was measured"
    text = (
        f"Trial of {outcome.diagnosis.source}: {base}; {outcome.num_steps} steps, {outcome.rounds} rounds of blocks of "
        f"{outcome.counted} steps, 95 % intervals"
    )
    return wrapped(text, width, style="strong")


def _arms(outcome: TrialOutcome, width: int, root: str) -> list[Line]:
    rows: list[Line] = []
    for arm in outcome.arms:
        rows += wrapped(_title(arm.finding, root), width, style="place")
        bound = "" if arm.prediction else " (no prediction of a fix: a bound)"
        rows += wrapped(f"{arm.text}{bound}: {saving_text(arm.saving, outcome.base_ns)}", width, indent=_INDENT)
        rows += _predicted(arm, width)
    for refused in outcome.refused:
        rows += wrapped(_title(refused.finding, root), width, style="place")
        rows += wrapped(f"not tried: {refused.why}", width, indent=_INDENT)
    return rows


def _predicted(arm: ArmResult, width: int) -> list[Line]:
    if arm.finding is None or arm.finding.headroom is None or not arm.prediction:
        return []
    return wrapped(
        f"replay had predicted {format_ms(arm.finding.headroom.mid_ns)}", width, indent=_INDENT, style="faint"
    )


def _after(outcome: TrialOutcome, width: int, root: str) -> list[Line]:
    rows: list[Line] = []
    if outcome.order:
        rows.append(())
        rows += wrapped("Fix in this order", width, style="strong")
        for number, finding in enumerate(outcome.order, 1):
            rows += wrapped(f"{number}. {_title(finding, root)}", width, indent=_INDENT)
    notes = list(outcome.notes)
    if outcome.left_out:
        notes.append(f"{outcome.left_out} more findings were not tried (--suspects raises the number)")
    if notes:
        rows.append(())
    for note in notes:
        rows += wrapped(note, width, label="Note", indent=6)
    return rows


def _title(finding: Finding | None, root: str) -> str:
    if finding is None:
        return "all suspects together"
    return f"{phrases.where(finding, root)}  {finding.code}: {finding.title}"


def _arm_document(arm: ArmResult) -> dict[str, Any]:
    return {
        **(_place(arm.finding) if arm.finding is not None else {"code": None, "site": None}),
        "mode": arm.mode,
        "text": arm.text,
        "prediction": arm.prediction,
        "saving": saving_document(arm.saving),
        "num_pairs": arm.num_pairs,
    }


def _place(finding: Finding) -> dict[str, Any]:
    return {"code": finding.code, "site": None if finding.site is None else site_document(finding.site)}
