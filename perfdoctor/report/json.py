"""A Diagnosis as JSON: `schema.json` beside this file is its JSON Schema, `SCHEMA_VERSION` its version.

Times are milliseconds (`_ms`), per step where the name does not say otherwise; shares are ratios of one (`_ratio`);
what was not measured is null, never 0. The keys at the top:

    schema_version  1. It rises when a key changes its meaning or goes away; new keys may appear without.
    perfdoctor      the version that wrote the report
    source          what was read or recorded
    verdict         sentence, binding, step (median_ms, low_ms, high_ms, num_steps, basis; num_steps is 0 where no steps
                    are known and the whole recording stands for one), steps_per_s, samples_per_s, samples_per_step,
                    gpu_busy_ratio, micro_batches
    findings        by what would come back, errors first. Each: code, severity (error, cost, minor, info), title, kind,
                    site (file, line, function, owner, text, exact, library, caller) or null, count,
                    count_per_micro_batch, host_blocked_ms, gpu_idle_ms, headroom (low_ms, mid_ms, high_ms) or null with
                    the reason in `withheld`, headroom_ratio (of the step), hours_per_day, afterwards, basis,
                    part_of (code of the finding at the same line whose edit cures this one too; '' else),
                    advice (text, lines), treatments, evidence_ms ([start, end] on the recording's clock),
                    measured_saving (mid_ms, low_ms, high_ms: its 95 % interval, significant, basis) or null
    leave_alone     findings under 1 % of the step, in the same form
    skipped         checks that could not judge: check, why
    accounting      where a step goes: window_ms = busy_ms + idle_by_code_ms + unexplained_ms; null without a device
    environment     GPU, driver, versions and switches. Never an environment variable.
    notes           what a reader of the recording must know: code, text, count
    overheads       slow-down by watching: phase, ratio, low_ratio, high_ratio
    ranks           one row for each of several ranks: rank, path, step_ms, gpu_busy_ratio, exposed_communication_ms,
                    note
    advice          remarks on the whole loop
    trial           after `perfdoctor trial` only: base (median_ms, low_ms, high_ms: quartiles of the blocks), arms
                    (each: code, site or null for all together, mode, text, prediction, saving, num_pairs), refused
                    (code, site, why), order (code, site: fix them in this order), num_steps, block_steps, rounds,
                    left_out, complete, failure (what the script died of, or null), notes
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from perfdoctor.diagnose.finding import Accounting, Diagnosis, Finding, Saving, StepTime
from perfdoctor.record.capture import Frame, Overhead, Site
from perfdoctor.report import phrases
from perfdoctor.units import ms
from perfdoctor.version import VERSION

SCHEMA_VERSION = 1


def render_json(diagnosis: Diagnosis) -> str:
    """The report as indented JSON, ending in a newline."""
    return json.dumps(as_document(diagnosis), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) that every report follows."""
    loaded: dict[str, Any] = json.loads(files("perfdoctor.report").joinpath("schema.json").read_text("utf-8"))
    return loaded


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The report as plain dicts and lists."""
    step = diagnosis.step
    return {
        "schema_version": SCHEMA_VERSION,
        "perfdoctor": VERSION,
        "source": diagnosis.source,
        "verdict": _verdict(diagnosis),
        "findings": [_finding(finding, step) for finding in diagnosis.findings],
        "leave_alone": [_finding(finding, step) for finding in diagnosis.leave_alone],
        "skipped": [asdict(row) for row in diagnosis.skipped],
        "accounting": _accounting(diagnosis.accounting),
        "environment": asdict(diagnosis.environment),
        "notes": [asdict(row) for row in diagnosis.notes],
        "overheads": [_overhead(row) for row in diagnosis.overheads],
        "ranks": [
            {
                "rank": row.rank,
                "path": row.path,
                "step_ms": optional_ms(row.step_ns),
                "gpu_busy_ratio": None if row.busy_ratio is None else round(row.busy_ratio, 4),
                "exposed_communication_ms": optional_ms(row.exposed_communication_ns),
                "note": row.note,
            }
            for row in diagnosis.ranks
        ],
        "advice": list(diagnosis.advice),
    }


def step_document(step: StepTime | None) -> dict[str, Any] | None:
    """The time of a step: `median_ms`, `low_ms`, `high_ms`, `num_steps`, `basis`."""
    if step is None:
        return None
    return {
        "median_ms": ms(step.median_ns),
        "low_ms": ms(step.low_ns),
        "high_ms": ms(step.high_ns),
        "num_steps": step.num_steps,
        "basis": step.basis,
    }


def _verdict(diagnosis: Diagnosis) -> dict[str, Any]:
    ratio = phrases.busy_ratio(diagnosis)
    return {
        "sentence": phrases.headline(diagnosis),
        "binding": diagnosis.binding.value,
        "step": step_document(diagnosis.step),
        "steps_per_s": diagnosis.steps_per_s,
        "samples_per_s": diagnosis.samples_per_s,
        "samples_per_step": diagnosis.samples_per_step,
        "gpu_busy_ratio": None if ratio is None else round(ratio, 4),
        "micro_batches": diagnosis.micro_batches,
    }


def _finding(finding: Finding, step: StepTime | None) -> dict[str, Any]:
    room, ratio, advice = finding.headroom, phrases.step_ratio(finding, step), finding.advice
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "title": finding.title,
        "kind": finding.kind,
        "site": None if finding.site is None else site_document(finding.site),
        "count": finding.count,
        "count_per_micro_batch": finding.count_per_micro_batch,
        "host_blocked_ms": optional_ms(finding.host_blocked_ns),
        "gpu_idle_ms": optional_ms(finding.gpu_idle_ns),
        "headroom": None
        if room is None
        else {"low_ms": ms(room.low_ns), "mid_ms": ms(room.mid_ns), "high_ms": ms(room.high_ns)},
        "headroom_ratio": None if ratio is None else round(ratio, 4),
        "hours_per_day": None if ratio is None else round(24 * ratio, 2),
        "withheld": finding.withheld,
        "afterwards": finding.afterwards,
        "basis": finding.basis,
        "part_of": finding.part_of,
        "advice": None if advice is None else {"text": advice.text, "lines": list(advice.lines)},
        "treatments": list(finding.treatments),
        "evidence_ms": [[ms(start), ms(end)] for start, end in finding.evidence],
        "measured_saving": saving_document(finding.measured_saving),
    }


def saving_document(saving: Saving | None) -> dict[str, Any] | None:
    """What a trial measured, as plain values; None where there was none."""
    if saving is None:
        return None
    return {
        "mid_ms": ms(saving.median_ns),
        "low_ms": ms(saving.low_ns),
        "high_ms": ms(saving.high_ns),
        "significant": saving.significant,
        "basis": saving.basis,
    }


def site_document(site: Site) -> dict[str, Any]:
    """A site as plain values."""
    return {
        **_frame(site.frame),
        "owner": site.owner,
        "text": site.text,
        "exact": site.exact,
        "library": None if site.library is None else _frame(site.library),
        "caller": None if site.caller is None else _frame(site.caller),
    }


def _frame(frame: Frame) -> dict[str, Any]:
    return asdict(frame)


def _accounting(accounting: Accounting | None) -> dict[str, Any] | None:
    if accounting is None:
        return None
    return {
        "window_ms": ms(accounting.window_ns),
        "busy_ms": ms(accounting.busy_ns),
        "idle_by_code_ms": {code: ms(ns) for code, ns in accounting.idle_by_code.items()},
        "unexplained_ms": ms(accounting.unexplained_ns),
        "matrix_ms": ms(accounting.matrix_ns),
        "bandwidth_ms": ms(accounting.bandwidth_ns),
        "copy_ms": ms(accounting.copy_ns),
        "communication_ms": ms(accounting.communication_ns),
        "run_ahead_ms": ms(accounting.run_ahead_ns),
    }


def _overhead(row: Overhead) -> dict[str, Any]:
    return {"phase": row.phase, "ratio": row.ratio, "low_ratio": row.low, "high_ratio": row.high}


def optional_ms(ns: int | None) -> float | None:
    """In ms; null where not measured."""
    return None if ns is None else ms(ns)
