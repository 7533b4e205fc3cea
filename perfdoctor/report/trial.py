"""A trial's outcome as text and as JSON: the diagnosis, and what was measured without each suspect."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from typing import Any, Self

from perfdoctor.diagnose.finding import Finding, Saving
from perfdoctor.diagnose.hit_counts import EMULATED
from perfdoctor.record.note_codes import WITHOUT_CUDA
from perfdoctor.report import phrases
from perfdoctor.report.fitting import fitting
from perfdoctor.report.json import as_document, saving_document, site_document
from perfdoctor.report.lines import Line, command_lines, plain, wrapped
from perfdoctor.report.text import WIDTH, render_text
from perfdoctor.treat.cures import treatments_for
from perfdoctor.trial.estimate import FEWEST_PAIRS, LARGE_CLAIM
from perfdoctor.trial.outcome import JOINT, ArmResult, TrialOutcome
from perfdoctor.units import format_ms, format_plural, format_share, format_spread, ms

_INDENT = 3
_OTHER_STEP = 0.2  # of the step: a reader would ask which is true
_BOUNDS = frozenset({"data-wait"})  # codes whose arms are bounds, whatever they are called


class TrialReport(TrialOutcome):
    """What a trial hands out: every field of a TrialOutcome, and ways to show it."""

    __slots__ = ("_emulated", "_script")

    _script: str  # no fields: two outcomes are equal without them
    _emulated: str

    @classmethod
    def of(cls, outcome: TrialOutcome, *, script: str = "", emulated: str = "") -> Self:
        """The same outcome as a report.

        `script`: what was run, as it is typed behind `perfdoctor trial`. `emulated`: for want of a GPU it ran on the
        CPU, where nothing waits for one; the command that tries it on an emulated device.
        """
        report = cls(**{f.name: getattr(outcome, f.name) for f in fields(outcome)})
        object.__setattr__(report, "_script", script)
        object.__setattr__(report, "_emulated", emulated)
        return report

    def __str__(self) -> str:
        return self.to_text().rstrip("\n")

    def to_text(self) -> str:
        """What was measured, then the page of the diagnosis."""
        script, emulated = getattr(self, "_script", ""), getattr(self, "_emulated", "")  # a copy has none
        return render_trial(self, root=os.getcwd(), script=script, emulated=emulated)

    def to_json(self) -> str:
        """The diagnosis as JSON, with the key `trial`."""
        return render_trial_json(self)


def render_trial(
    outcome: TrialOutcome, *, width: int = WIDTH, root: str = "", script: str = "", emulated: str = ""
) -> str:
    """The trial's own page, that of the diagnosis, and at the end what to change in which order."""
    lines = [*_head(outcome, width), (), *_arms(outcome, width, root), *_refused(outcome, width, root)]
    lines += _notes(outcome, width)
    lines = [line for before, line in zip([(), *lines], lines, strict=False) if line or before]  # no two blank lines
    page = plain(lines).rstrip("\n") + "\n\n" + render_text(outcome.diagnosis, width=width, root=root)
    return page.rstrip("\n") + "\n\n" + plain(_order(outcome, width, root, script) + _unseen(outcome, width, emulated))


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
        "arms": [_arm_document(arm, outcome) for arm in outcome.arms],
        "refused": [{**_place(row.finding), "why": row.why} for row in outcome.refused],
        "order": [_place(finding) for finding in outcome.order],
        "num_steps": outcome.num_steps,
        "block_steps": outcome.counted,
        "rounds": outcome.rounds,
        "left_out": outcome.left_out,
        "complete": outcome.complete,
        "failure": outcome.failure or None,
        "notes": list(outcome.notes),
    }


def saving_text(saving: Saving, base_ns: int, num_pairs: int | None = None) -> str:
    """'gives back 13.9 ms (13.5 to 14.2 ms), 23 % of the step', or 'no difference (less than 1 % of the step)'."""
    spread = format_spread(saving.low_ns, saving.high_ns)
    if num_pairs is not None and num_pairs < FEWEST_PAIRS:
        return f"not decided: only {format_plural(num_pairs, 'pair')} of blocks, {FEWEST_PAIRS} are needed"
    if not saving.significant:
        most = max(abs(saving.low_ns), abs(saving.high_ns))
        return f"no difference (less than {format_share(most / base_ns)} of the step)" if base_ns else "no difference"
    share = f", {format_share(abs(saving.median_ns) / base_ns)} of the step" if base_ns else ""
    if saving.median_ns < 0:
        return f"costs {format_ms(-saving.median_ns)} more without it ({spread}){share}"
    return f"gives back {format_ms(saving.median_ns)} ({spread}){share}"


def is_bound(arm: ArmResult, outcome: TrialOutcome) -> bool:
    """Whether no fix may reach what was measured: it stands for what there is to gain at most.

    A loader on trial hands out batches that are there already; workers still have to make them.
    """
    if arm.finding is None:
        return any(each.finding in _joined(arm, outcome) and is_bound(each, outcome) for each in _predictions(outcome))
    return not arm.prediction or arm.finding.code in _BOUNDS


def _predictions(outcome: TrialOutcome) -> list[ArmResult]:
    return [arm for arm in outcome.arms if arm.finding is not None and arm.prediction]


def _joined(arm: ArmResult, outcome: TrialOutcome) -> list[Finding | None]:
    """The findings of an arm that stands for several: all that were tried, or those that give most back."""
    found = sorted(_predictions(outcome), key=lambda each: -each.saving.median_ns)
    size = int(arm.mode.removeprefix(JOINT)) if arm.mode.startswith(JOINT) else len(found)
    return [each.finding for each in found[:size]]


def found_text(arm: ArmResult, outcome: TrialOutcome, *, counted: bool = True) -> str:
    """What an arm gave: 'gives back 13.9 ms ...', or 'a bound: at most 13.9 ms ...; no prediction of a fix'."""
    text = saving_text(arm.saving, outcome.base_ns, arm.num_pairs if counted else None)
    if not is_bound(arm, outcome) or text.startswith("not decided"):
        return text
    return f"a bound: {text.replace('gives back', 'at most', 1)}; no prediction of a fix"


def _head(outcome: TrialOutcome, width: int) -> list[Line]:
    if not outcome.base_ns:
        steps = format_plural(outcome.num_steps, "step")
        text = f"Trial of {outcome.diagnosis.source}: nothing was measured; {steps} after the watched ones"
        return wrapped(text, width, style="strong")
    base = f"{format_ms(outcome.base_ns)} a step with nothing taken out{_unlike(outcome)}"
    text = (
        f"Trial of {outcome.diagnosis.source}: {base}; {format_plural(outcome.num_steps, 'step')}, "
        f"{format_plural(outcome.rounds, 'round')} of blocks of {format_plural(outcome.counted, 'step')}, "
        "95 % intervals"
    )
    return wrapped(text, width, style="strong")


def _unlike(outcome: TrialOutcome) -> str:
    """That a trial tells means: where a few steps take most of the time, the median step of the report is another."""
    step = outcome.diagnosis.step
    if step is None or not step.median_ns or abs(outcome.base_ns / step.median_ns - 1) < _OTHER_STEP:
        return ""
    return f" (mean of a block; the median step of the report below took {format_ms(step.median_ns)})"


def _arms(outcome: TrialOutcome, width: int, root: str) -> list[Line]:
    """The arms, what gives most back first; bounds under the arm of their finding."""
    rows: list[Line] = []
    for arm in sorted((arm for arm in outcome.arms if _leads(arm, outcome)), key=_rank):
        rows += wrapped(_title(arm.finding, root) if arm.finding is not None else arm.text, width, style="place")
        for each in (arm, *_bounds(arm, outcome)):
            what = f"{each.text}: " if each.finding is not None else ""
            rows += wrapped(f"{what}{found_text(each, outcome)}", width, indent=_INDENT)
        rows += _predicted(arm, width)
    return rows


def _leads(arm: ArmResult, outcome: TrialOutcome) -> bool:
    """Whether an arm has a paragraph of its own: a prediction, or a bound whose finding has none."""
    return arm.prediction or arm.finding is None or outcome.result_of(arm.finding) is None


def _bounds(arm: ArmResult, outcome: TrialOutcome) -> list[ArmResult]:
    if arm.finding is None or not arm.prediction:
        return []
    return [each for each in outcome.arms if each.finding == arm.finding and not each.prediction]


def _rank(arm: ArmResult) -> tuple[bool, bool, int]:
    return (not arm.saving.significant, arm.finding is None, -arm.saving.median_ns)


def _refused(outcome: TrialOutcome, width: int, root: str) -> list[Line]:
    rows: list[Line] = [(), *wrapped("Not tried", width, style="strong")] if outcome.refused else []
    for refused in outcome.refused:
        rows += wrapped(f"{_title(refused.finding, root)}: {refused.why}", width, indent=_INDENT)
    return rows


def _predicted(arm: ArmResult, width: int) -> list[Line]:
    if arm.finding is None or arm.finding.headroom is None or not arm.prediction:
        return []
    return wrapped(
        f"replay had predicted {format_ms(arm.finding.headroom.mid_ns)}", width, indent=_INDENT, style="faint"
    )


def _notes(outcome: TrialOutcome, width: int) -> list[Line]:
    rows: list[Line] = []
    notes = [*_emulated(outcome), *outcome.notes]
    if outcome.left_out:
        were = "was" if outcome.left_out == 1 else "were"
        more = format_plural(outcome.left_out, "more finding")
        notes.append(f"{more} {were} not tried (--suspects raises the number)")
    if notes:
        rows.append(())
    for note in notes:
        rows += wrapped(note, width, label="Note", indent=6)
    return rows


def _emulated(outcome: TrialOutcome) -> list[str]:
    """That the times above are no GPU's: before the other notes, not only on the page of the diagnosis below."""
    return [phrases.note(note) for note in outcome.diagnosis.notes if note.code == EMULATED]


def _order(outcome: TrialOutcome, width: int, root: str, script: str) -> list[Line]:
    """The end of the report: what to fix first, and the lines that do it."""
    if not outcome.order:
        return wrapped(_nothing(outcome), width, style="strong")
    rows = wrapped("Fix in this order", width, style="strong")
    for number, finding in enumerate(outcome.order, 1):
        bounds = (arm for arm in outcome.arms if arm.finding == finding)
        result = outcome.result_of(finding) or next(bounds, None)
        gain = f"  {found_text(result, outcome, counted=False)}" if result is not None else ""
        rows += wrapped(f"{number}. {phrases.where(finding, root)}{gain}", width)
        if finding.site is not None and finding.site.text:
            rows.append(((" " * _INDENT + finding.site.text.strip(), "faint"),))
        total = next((arm for arm in outcome.arms if arm.mode == f"{JOINT} {number}"), None)
        if total is not None:
            found = found_text(total, outcome, counted=False)
            rows += wrapped(f"with those above: {found}", width, indent=_INDENT)
        if finding.advice is not None:
            rows += wrapped(finding.advice.text, width, indent=_INDENT)
            rows += [((" " * (_INDENT + 2) + line, ""),) for line in finding.advice.lines]
        if result is not None and is_bound(result, outcome):
            rows += _measure(finding, outcome, width, script)
    if outcome.together is not None:
        rows += wrapped(f"All together: {found_text(outcome.together, outcome)}.", width)
    return rows


def _unseen(outcome: TrialOutcome, width: int, emulated: str) -> list[Line]:
    """That a loop on the CPU says nothing of what waits for a GPU, and what does."""
    if not emulated or not any(note.code == WITHOUT_CUDA for note in outcome.diagnosis.notes):
        return []
    text = "This was the CPU, where no line waits for a GPU. An emulated one shows which lines would:"
    return [(), *wrapped(text, width), *command_lines(emulated, width, indent=_INDENT)]


def _measure(finding: Finding, outcome: TrialOutcome, width: int, script: str) -> list[Line]:
    """How to learn what a fix gives, where the trial has a bound only."""
    names = fitting(treatments_for(finding.code, finding.kind), outcome.diagnosis)
    offered = replace(finding, treatments=names)
    _, command = phrases.trial_command(offered, replace(outcome.diagnosis, notes=()), script)
    if not command:
        return wrapped("what a fix gives: make the change, run perfdoctor again, and compare", width, indent=_INDENT)
    return [
        *wrapped("this measures what a fix gives, which may be nothing:", width, indent=_INDENT),
        *command_lines(command, width, indent=_INDENT + 2),
    ]


def _nothing(outcome: TrialOutcome) -> str:
    if not (outcome.arms or outcome.refused or outcome.diagnosis.findings or outcome.diagnosis.leave_alone):
        return "Nothing to try: the report names no line of this loop (what it could not judge stands above)."
    if outcome.failure and max((arm.num_pairs for arm in outcome.arms), default=0) < FEWEST_PAIRS:
        return f"Nothing was decided: the script failed ({outcome.failure})."
    if not outcome.arms or not outcome.base_ns:
        return "Nothing could be tried."
    if max(arm.num_pairs for arm in outcome.arms) < FEWEST_PAIRS:
        if outcome.complete:
            return "Not decided: the time sufficed for too few blocks. Give it more --seconds."
        return "Not decided: the script ended, or the time was spent, after too few blocks. Let it run longer."
    together = outcome.together
    if together is not None and together.saving.significant and together.saving.median_ns > 0:
        found = found_text(together, outcome, counted=False)
        return f"No line alone gives anything back for sure; all together: {found}. Give it more --seconds."
    most = max(max(abs(arm.saving.low_ns), abs(arm.saving.high_ns)) for arm in outcome.arms)
    if most > LARGE_CLAIM * outcome.base_ns:
        hidden = format_share(most / outcome.base_ns)
        return f"Nothing gives anything back for sure, but the noise may hide {hidden}: give it more --seconds."
    return "Nothing that was tried gives anything back: leave these lines alone."


def _title(finding: Finding, root: str) -> str:
    return f"{phrases.where(finding, root)}  {finding.code}: {finding.title}"


def _arm_document(arm: ArmResult, outcome: TrialOutcome) -> dict[str, Any]:
    return {
        **(_place(arm.finding) if arm.finding is not None else {"code": None, "site": None}),
        "mode": arm.mode,
        "text": arm.text,
        "prediction": not is_bound(arm, outcome),
        "saving": saving_document(arm.saving),
        "num_pairs": arm.num_pairs,
    }


def _place(finding: Finding) -> dict[str, Any]:
    return {"code": finding.code, "site": None if finding.site is None else site_document(finding.site)}
