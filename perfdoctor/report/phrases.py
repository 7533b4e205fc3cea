"""The sentences of a report, in one place, so that text, HTML and JSON say the same thing.

Everything here is pure: a Diagnosis or a part of it in, words out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from perfdoctor.diagnose.finding import Accounting, Binding, Diagnosis, Finding, RankRow, Saving, Severity, StepTime
from perfdoctor.diagnose.hit_counts import EMULATED
from perfdoctor.record.capture import Environment, Frame, Note, Overhead
from perfdoctor.record.note_codes import WITHOUT_CUDA
from perfdoctor.record.sync_kinds import ALLOCATOR, BLOCKING_COPY, HOST_SYNC, PAGEABLE_COPY, UNSYNCHRONISED_READ
from perfdoctor.report.fitting import NEED_A_FUNCTION, watches_itself
from perfdoctor.units import (
    format_bytes,
    format_count,
    format_ms,
    format_of_day,
    format_part,
    format_plural,
    format_rate,
    format_ratio_change,
    format_share,
    format_spread,
)

BUSY_CAVEAT = "busy is not efficient: it only says that something ran"
LEAVE_ALONE = "Leave alone: each would give back under 1 % of the time"
RARE = "Leave alone: each comes in less than half of the steps"

PLACEHOLDER = "SCRIPT.py"  # where the recording does not say which script it is of

_COUNTED_IN_TITLE = ("launch-bound", "small-kernels", "fusion")
_COUNTED_AS = {"gradient-loop": "loop"}  # what is counted is not the calls that the title speaks of
# Checks without which nothing can be said about what comes back.
UNPRICED = ("what would come back", "milliseconds on the device", "how busy the GPU was")
_SAME_STEP = 0.03  # a recorded step this close to the step above it is the same for a reader
_PLURAL = re.compile(r"\b(step|turn)s\b")

_BINDINGS = {
    Binding.HOST_LAUNCHING: "The host sets the pace: it cannot launch work as fast as the GPU finishes it",
    Binding.HOST_DATA: "The loop waits for data: the next batch is not ready when the step wants it",
    Binding.HOST_SYNC: "Host and GPU wait for each other: the host stops to read results, then the GPU runs dry",
    Binding.MATRIX: "The GPU sets the pace, mostly with matrix kernels",
    Binding.BANDWIDTH: "The GPU sets the pace, mostly moving memory",
    Binding.COPIES: "Copies between host and GPU set the pace",
    Binding.COMMUNICATION: "Communication between the ranks sets the pace",
    Binding.UNKNOWN: "What binds this loop could not be told",
}

_PHASES = {"sites": "call-site hooks", "light": "CUDA-only recording", "full": "full recording"}

# Findings that sit at a line of code; where the recording does not say which, the report must not say "everywhere".
_AT_A_LINE = frozenset(
    (HOST_SYNC, PAGEABLE_COPY, BLOCKING_COPY, UNSYNCHRONISED_READ, ALLOCATOR, "gradient-loop", "anomaly-mode")
)


def busy_ratio(diagnosis: Diagnosis) -> float | None:
    """Share of the step's window in which the device ran anything; None where it is not known."""
    accounting = diagnosis.accounting
    if accounting is None or accounting.window_ns <= 0:
        return None
    return accounting.busy_ns / accounting.window_ns


def rank_figures(row: RankRow) -> tuple[str, str, str]:
    """Step, GPU busy and exposed communication of a rank; '-' for what was not recorded."""
    return (
        "-" if row.step_ns is None else format_ms(row.step_ns),
        "-" if row.busy_ratio is None else format_share(row.busy_ratio),
        "-" if row.exposed_communication_ns is None else format_ms(row.exposed_communication_ns),
    )


def step_ratio(finding: Finding, step: StepTime | None) -> float | None:
    """What comes back as a share of the step; None where the time of either is not known."""
    if finding.headroom is None or step is None or step.median_ns <= 0:
        return None
    return finding.headroom.mid_ns / step.median_ns


def headline(diagnosis: Diagnosis) -> str:
    """What binds the loop, in one sentence."""
    if any(row.check == UNPRICED[2] for row in diagnosis.skipped):
        return "Kernels are missing from the recording: how busy the GPU was cannot be told."
    if diagnosis.accounting is None and any(finding.measured_saving for finding in diagnosis.findings):
        return "No GPU was recorded: the page says where the loop waits, the trial what that costs."
    if diagnosis.accounting is None and diagnosis.findings:
        return "No GPU was recorded: the report says where the loop waits, not how much each place costs."
    sentence = _BINDINGS[diagnosis.binding]
    ratio = busy_ratio(diagnosis)
    if ratio is None:
        return sentence + "."
    whole = "the recording" if is_window(diagnosis.step) else f"each {'recorded ' * _slowed(diagnosis)}step"
    return f"{sentence}. The GPU idles {format_share(1 - ratio)} of {whole}."


def _slowed(diagnosis: Diagnosis) -> bool:
    """Whether the recorded step, whose shares are told, is another than the bare one, whose time is."""
    step, accounting = diagnosis.step, diagnosis.accounting
    return step is not None and accounting is not None and "bare" in step.basis and _differs(accounting, step)


def _differs(accounting: Accounting, step: StepTime) -> bool:
    return bool(step.median_ns) and abs(accounting.window_ns / step.median_ns - 1) > _SAME_STEP


def promise(diagnosis: Diagnosis) -> str:
    """What the findings are worth, in one sentence. Never calls a loop healthy that was not timed."""
    for finding in diagnosis.findings:
        ratio = step_ratio(finding, diagnosis.step)
        if ratio is None or finding.headroom is None or diagnosis.step is None:
            continue
        saved = format_part(finding.headroom.mid_ns, diagnosis.step.median_ns)
        if is_window(diagnosis.step):
            return f"{finding.code} alone would give back {saved} of the whole recording, which marks no steps."
        return f"{finding.code} alone would give back {saved} a step: {format_of_day(ratio)}."
    if diagnosis.findings:
        return "" if diagnosis.accounting is None else "What each finding costs could not be measured."
    if any(note.code == WITHOUT_CUDA for note in diagnosis.notes):
        return "The loop ran on the CPU: what waits for a GPU could not be seen, and nothing says that it is healthy."
    if diagnosis.step is None:
        return "No step could be timed, so nothing here says that the loop is healthy."
    if {row.check for row in diagnosis.skipped} & set(UNPRICED):
        return "Nothing was found, but what would come back could not be judged: that does not say the loop is healthy."
    return "Nothing was found that would give back 1 % of the step or more."


def is_window(step: StepTime | None) -> bool:
    """Whether the whole recording stands for the step that it does not mark: no figure of it is one of a step."""
    return step is not None and step.num_steps == 0


def time_label(diagnosis: Diagnosis) -> str:
    """What the time beside it is the time of."""
    return "recording" if is_window(diagnosis.step) else "step"


def where_title(accounting: Accounting, step: StepTime | None) -> str:
    """The title over the parts of the window: whose time they are, and how that differs from the step above them."""
    window = f"{format_ms(accounting.window_ns)} on the GPU's timeline"
    if step is None or is_window(step):
        return f"Where the recording goes: {window}"
    differs = _differs(accounting, step)
    median = format_ms(step.median_ns)
    if "bare" not in step.basis:
        note = f", slowed by the recorder (median step {median})" if differs else ", slowed by the recorder"
        return f"Where a recorded step goes: {window}, mean{note}"
    if differs:
        slower = accounting.window_ns > step.median_ns
        note = "the recorder slowed its launches and calls" if slower else "recording changed it"
        return f"Where a recorded step goes: {window}, mean; {note}, the bare step takes {median}"
    return f"Where a step goes: {window}, mean"


def step_line(step: StepTime) -> str:
    """'25.2 ms (24.9 to 25.8 ms, 10 bare steps by CUDA events)'."""
    if is_window(step):
        return f"{format_ms(step.median_ns)} ({step.basis})"
    if step.num_steps == 1:
        # "steps" and "turns" stand first in every basis: one of them is singular.
        return f"{format_ms(step.median_ns)} (1 {_singular(step.basis)})"
    return f"{format_ms(step.median_ns)} ({format_spread(step.low_ns, step.high_ns)}, {step.num_steps} {step.basis})"


def _singular(basis: str) -> str:
    return _PLURAL.sub(r"\1", basis, count=1)


def rates(diagnosis: Diagnosis) -> str:
    """Throughput: '39.7 steps/s, 635 samples/s (mean step of 25.2 ms, 16 samples a step)'; '' where it is not known.

    Both rates rest on the mean step, which is not the median one that is shown as the step.
    """
    known = ((diagnosis.steps_per_s, "steps"), (diagnosis.samples_per_s, "samples"))
    text = ", ".join(format_rate(value, what) for value, what in known if value is not None)
    if not diagnosis.steps_per_s:
        return text
    basis = f"mean step of {format_ms(1e9 / diagnosis.steps_per_s)}"
    if diagnosis.samples_per_step:
        basis += f", {format_plural(diagnosis.samples_per_step, 'sample')} a step"
    return f"{text} ({basis})"


def cost(finding: Finding, step: StepTime | None) -> str:
    """What comes back: '5.4 of 25.2 ms a step (4.9 to 6.0 ms), 21 %, 5.1 h of a 24 h run', or why it is withheld."""
    if finding.headroom is None and finding.measured_saving is not None:
        return _measured(finding.code, finding.measured_saving)
    if finding.headroom is None:
        return f"withheld: {finding.withheld}" if finding.withheld else "not measured"
    room = finding.headroom
    spread = format_spread(room.low_ns, room.high_ns)
    ratio = step_ratio(finding, step)
    if ratio is None or step is None:
        return f"{format_ms(room.mid_ns)} a step ({spread})"
    if is_window(step):
        return f"{format_part(room.mid_ns, step.median_ns)} in all ({spread}), {format_share(ratio)}"
    return f"{format_part(room.mid_ns, step.median_ns)} a step ({spread}), {share_of_run(ratio)}"


def _measured(code: str, saving: Saving) -> str:
    """What a trial measured where nothing could be replayed: 'at most 4.7 ms a step (4.6 to 4.8 ms), in the trial'."""
    if not saving.significant:
        return "nothing for sure, in the trial"
    most = "at most " * (code == "data-wait")  # batches that are there already: workers still have to make them
    spread = format_spread(saving.low_ns, saving.high_ns)
    return f"{most}{format_ms(saving.median_ns)} a step ({spread}), in the trial"


def short_cost(finding: Finding, step: StepTime | None) -> str:
    """'1.1 of 25.2 ms, 4 %'; '' where it is not known."""
    ratio = step_ratio(finding, step)
    if finding.headroom is None or ratio is None or step is None:
        return "" if finding.headroom is None else format_ms(finding.headroom.mid_ns)
    return f"{format_part(finding.headroom.mid_ns, step.median_ns)}, {format_share(ratio)}"


def share_of_run(ratio: float) -> str:
    """'21 %, 5.1 h of a 24 h run'."""
    return f"{format_share(ratio)}, {format_of_day(ratio)}"


def waits(finding: Finding) -> str:
    """The two numbers that are no savings: 'host blocked 12.3 ms a step, GPU idle because of it 5.6 ms'."""
    known = (
        ("host blocked", finding.host_blocked_ns),
        ("GPU idle because of it", finding.gpu_idle_ns),
    )
    return ", ".join(f"{what} {format_ms(ns)}" for what, ns in known if ns is not None)


def afterwards_label(finding: Finding) -> str:
    """After a sync or a copy the host goes on: that is its price. Other findings have a remark there."""
    return "afterwards" if finding.code in (HOST_SYNC, PAGEABLE_COPY, BLOCKING_COPY) else "in detail"


def how_often(finding: Finding, step: StepTime | None = None, *, rare: bool = False) -> str:
    """'4 a step, 1 a micro-batch', '1 loop a step'; '4 in all' without steps; '' where it was not counted.

    `rare`: it is in few steps only, so that the number of one step is a mean: '3.2 a step on average'.
    """
    if not finding.count or finding.code in _COUNTED_IN_TITLE:
        return ""
    noun = _COUNTED_AS.get(finding.code, "")

    def counted(number: float) -> str:
        return format_plural(number, noun) if noun else format_count(number)

    if is_window(step):
        return f"{counted(finding.count)} in all"
    text = f"{counted(finding.count)} a step{' on average' * rare}"
    if finding.count_per_micro_batch is not None and not rare:
        text += f", {counted(finding.count_per_micro_batch)} a micro-batch"
    return text


def grouped(findings: Sequence[Finding]) -> list[tuple[Finding, tuple[Finding, ...]]]:
    """The findings in their order, each with those further down that the same edit of the same line cures.

    Those are parts of it (the reads of a loop over tensors), or have the same advice: one place to change, said once.
    """
    groups: list[tuple[Finding, list[Finding]]] = []
    for finding in findings:
        for leader, others in groups:
            if _same_edit(leader, finding):
                others.append(finding)
                break
        else:
            groups.append((finding, []))
    return [(leader, tuple(others)) for leader, others in groups]


def _same_edit(leader: Finding, finding: Finding) -> bool:
    if leader.site is None or finding.site is None or leader.site.frame != finding.site.frame:
        return False
    if finding.severity is Severity.ERROR:  # wrong results are said in full
        return False
    return finding.part_of == leader.code or (finding.advice is not None and finding.advice == leader.advice)


def beside(finding: Finding, step: StepTime | None = None) -> str:
    """A finding under the one that its line is changed for: 'host-sync: reads a device value, 149 a step; alone
    2.4 of 30.7 ms, 8 %'."""
    text = ", ".join(part for part in (what(finding), how_often(finding, step)) if part)
    alone = short_cost(finding, step)
    return f"{text}; alone {alone}" if alone else text


def place(frame: Frame, root: str = "") -> str:
    """`file:line` as short as it can be told apart: below `root` without it, in a library from the package on."""
    path = frame.file.replace("\\", "/")
    prefix = root.replace("\\", "/").rstrip("/") + "/"
    if root and path.startswith(prefix):
        path = path[len(prefix) :]
    for marker in ("/site-packages/", "/dist-packages/"):
        path = path.rpartition(marker)[2]
    return f"{path}:{frame.line}"


def where(finding: Finding, root: str = "") -> str:
    """The line to change, or 'the whole step' for a finding that has no single line."""
    if finding.site is None:
        return "line not recorded" if finding.code in _AT_A_LINE else "the whole step"
    text = place(finding.site.frame, root)
    return text if finding.site.exact else f"{text} (where {finding.site.frame.function} begins, not the call)"


def led_there(finding: Finding, root: str = "") -> str:
    """The lines around the place: the library line that made the call and the user line that led there."""
    site = finding.site
    if site is None:
        return ""
    parts = []
    if site.library is not None:
        parts.append(f"inside {site.library.owner}, {place(site.library, root)}")
    if site.caller is not None:
        parts.append(f"called from {place(site.caller, root)}")
    return "; ".join(parts)


def what(finding: Finding) -> str:
    """'host-sync: reads a device value'; errors say that results may be wrong."""
    mark = "ERROR, results may be wrong. " if finding.severity is Severity.ERROR else ""
    return f"{mark}{finding.code}: {finding.title}"


def machine(environment: Environment) -> str:
    """'NVIDIA H200, torch 2.11.0, CUDA 13.0, driver 580.1'; '' where the recording says nothing."""
    gpu = environment.gpu
    if environment.num_gpus > 1 and gpu:
        gpu = f"{environment.num_gpus} x {gpu}"
    parts = [gpu]
    for name, value in (("torch", environment.torch), ("CUDA", environment.cuda), ("driver", environment.driver)):
        parts.append(f"{name} {value}" if value else "")
    return ", ".join(part for part in parts if part)


def memory(environment: Environment) -> str:
    """'peak 31.2 GB of 141 GB'; '' where it was not recorded."""
    if environment.peak_memory_bytes is None:
        return ""
    text = f"peak {format_bytes(environment.peak_memory_bytes)}"
    return f"{text} of {format_bytes(environment.memory_bytes)}" if environment.memory_bytes else text


def leave_alone_title(diagnosis: Diagnosis) -> str:
    """The heading of what to leave alone. Where no GPU was recorded it holds only the rare: no price is claimed."""
    return RARE if is_rare(diagnosis) else LEAVE_ALONE


def is_rare(diagnosis: Diagnosis) -> bool:
    """Whether what is to be left alone is so because it comes in few steps, and not because of its price."""
    return diagnosis.accounting is None and not any(finding.headroom for finding in diagnosis.leave_alone)


def trial_command(finding: Finding, diagnosis: Diagnosis, script: str = "") -> tuple[str, str]:
    """The label ('try', 'try on a GPU') and the command that tries the finding's treatments; '' where none fits.

    `script`: what stands behind the options, as it is typed: `-m package.train --steps 9`, quoted for a shell.
    """
    names = [name for name in finding.treatments if name not in NEED_A_FUNCTION]
    if not names:
        return "", ""
    # Most of them want a real GPU, and a time on the emulated one would say nothing.
    label = "try on a GPU" if any(row.code == EMULATED for row in diagnosis.notes) else "try"
    return label, f"perfdoctor trial --treat={','.join(names)} {script or PLACEHOLDER}"


def overhead(phase: Overhead) -> str:
    """'call-site hooks +1.2 % (+0.4 % to +2.1 %)'; all below zero it is the noise of the steps, and is called so."""
    spread = f"{format_ratio_change(phase.low)} to {format_ratio_change(phase.high)}"
    noise = "; nothing gets faster by it: the steps without it were slowed by something else" if phase.high < 0 else ""
    return f"{_PHASES.get(phase.phase, phase.phase)} {format_ratio_change(phase.ratio)} ({spread}{noise})"


def notes(diagnosis: Diagnosis) -> list[str]:
    """The notes of the recording, and what the commands of the page stand for where a loop watched itself."""
    rows = [note(row) for row in diagnosis.notes]
    if watches_itself(diagnosis) and any(trial_command(finding, diagnosis)[1] for finding in diagnosis.findings):
        rows.append(
            f"{PLACEHOLDER} stands for the script without its own session (perfdoctor.watch, a callback): a loop is "
            "watched by one at a time"
        )
    return rows


def note(row: Note) -> str:
    """The text of a note, with its count where the text does not say it."""
    return f"{row.text} ({row.count} times)" if row.count > 1 and str(row.count) not in row.text else row.text
