"""Two runs compared with their noise: faster, slower, or no difference, and what became of each finding.

The rule. The median's standard error is that of the box plot's notch (McGill, Tukey and Larsen, Variations of Box
Plots, The American Statistician 32, 1978): 1.25 R / (1.35 sqrt(n)), R the interquartile range, n the steps. Where both
files hold every step, a moving-block bootstrap of the two medians takes its place (Kuensch, The Jackknife and the
Bootstrap for General Stationary Observations, Annals of Statistics 17, 1989): steps that follow each other are alike.
Of two reports of a trial it is the blocks with nothing taken out that are compared, n the blocks: hundreds of steps
over a minute or more, where the bare steps before it are ten.
To that comes what one and the same script differs by from process to process, which no file of one run can show:
`RUN_NOISE_RATIO` of the step a run, the standard deviation over twelve scripts that were run twice on one H200
(2.2 %). The interval is the 95 % one of after less before; where it holds zero there is no difference.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.script_note import ARGUMENTS
from perfdoctor.trial.compared_run import NO_GPU, ComparedRun, FindingRow
from perfdoctor.units import format_count, format_plural

RUN_NOISE_RATIO = 0.02
_NORMAL_95 = 1.96
_NOTCH = 1.25 / 1.35
_FEW_STEPS = 8
_NUM_RESAMPLES = 2000
_ALIKE = 0.6  # two lines this alike are one line that was edited
_OTHER_SIZE = 0.02


class Change(StrEnum):
    """What came of the step time."""

    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no difference"
    UNKNOWN = "not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A finding that both runs have; `moved` where its line or file is another."""

    before: FindingRow
    after: FindingRow

    @property
    def moved(self) -> bool:
        return self.before.line != self.after.line or PurePath(self.before.file).name != PurePath(self.after.file).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """After against before. The difference is after less before, in ns a step: negative is faster.

    `incomparable` says why times cannot be held against each other; '' where they can. Findings can all the same.
    """

    before: ComparedRun
    after: ComparedRun
    difference_ns: float
    low_ns: float
    high_ns: float
    rule: str
    gone: tuple[FindingRow, ...]
    new: tuple[FindingRow, ...]
    kept: tuple[Match, ...]
    warnings: tuple[str, ...]
    incomparable: str = ""

    @property
    def change(self) -> Change:
        if self.incomparable:
            return Change.UNKNOWN
        if self.low_ns <= 0 <= self.high_ns:
            return Change.NONE
        return Change.FASTER if self.difference_ns < 0 else Change.SLOWER

    @property
    def ratio(self) -> float:
        """The difference as a share of the step before."""
        return self.difference_ns / self.before.median_ns

    @property
    def predicted_ns(self) -> int | None:
        """What the findings that are gone were said to give back (replay), together; None where none was priced."""
        priced = [row.headroom_ns for row in self.gone if row.headroom_ns is not None]
        return sum(priced) if priced else None

    @property
    def counterfactual_ns(self) -> int | None:
        """The same as the trial measured it; None where one of them was not tried.

        Where all that were tried are gone it is what they gave back together, which a sum of each alone may miss.
        """
        if self.tried_together:
            return self.before.together_ns
        tried = [row.counterfactual_ns for row in self.gone if row.counterfactual_ns is not None]
        return sum(tried) if tried and len(tried) == len(self.gone) else None

    @property
    def tried_together(self) -> bool:
        """Whether what is gone is just what the trial before had tried, several findings, together too."""
        tried = [row for row in self.before.findings if row.counterfactual_ns is not None]
        return self.before.together_ns is not None and len(tried) > 1 and set(tried) == set(self.gone)

    def exceeds(self, percent: float) -> bool:
        """Whether the run after is slower by more than `percent`, and is slower beyond the noise."""
        return self.change is Change.SLOWER and 100 * self.ratio > percent


def compare(before: ComparedRun, after: ComparedRun, *, run_noise_ratio: float = RUN_NOISE_RATIO) -> Comparison:
    """Compare two runs; see the module's text for the rule."""
    if before.blocks is not None and after.blocks is not None:
        before, after = before.of_blocks(), after.of_blocks()
    difference = after.median_ns - before.median_ns
    low, high, rule = _step_interval(before, after)
    run = _NORMAL_95 * run_noise_ratio * math.hypot(before.median_ns, after.median_ns)
    kept = tuple(_matches(before.findings, after.findings))
    return Comparison(
        before=before,
        after=after,
        difference_ns=difference,
        low_ns=difference - math.hypot(difference - low, run),
        high_ns=difference + math.hypot(high - difference, run),
        rule=f"{rule}, and {100 * run_noise_ratio:g} % a run for what processes differ by",
        gone=_without(before.findings, [match.before for match in kept]),
        new=_without(after.findings, [match.after for match in kept]),
        kept=kept,
        warnings=tuple(_warnings(before, after)),
        incomparable=_incomparable(before, after),
    )


_ON_CPU = "where there is no GPU, two reports of `perfdoctor trial --format json` compare: it runs on the CPU itself"


def _incomparable(before: ComparedRun, after: ComparedRun) -> str:
    if before.emulated and after.emulated:
        return f"both ran on an emulated CUDA device, whose times are those of the CPU and no GPU's; {_ON_CPU}"
    names = [run.device or "a GPU that the file does not name" for run in (before, after)]
    if before.emulated or after.emulated:
        return f"{names[0]} before, {names[1]} after: an emulated device's times are those of the CPU; {_ON_CPU}"
    if NO_GPU in names and names[0] != names[1]:
        return f"{names[0]} before, {names[1]} after"
    return ""


def _without(rows: tuple[FindingRow, ...], taken: list[FindingRow]) -> tuple[FindingRow, ...]:
    left = {id(row) for row in taken}
    return tuple(row for row in rows if id(row) not in left)


def _step_interval(before: ComparedRun, after: ComparedRun) -> tuple[float, float, str]:
    if before.step_ns and after.step_ns:
        low, high = _bootstrapped(np.array(before.step_ns, float), np.array(after.step_ns, float))
        return low, high, "95 % by bootstrap of the steps in blocks"
    difference = after.median_ns - before.median_ns
    half = _NORMAL_95 * math.hypot(_standard_error(before), _standard_error(after))
    what = "steps" if before.num_blocks is None else "blocks"
    return difference - half, difference + half, f"95 % from medians, quartiles and numbers of {what}"


def _standard_error(run: ComparedRun) -> float:
    return _NOTCH * max(run.high_ns - run.low_ns, 0.0) / math.sqrt(run.num_timed)


def _bootstrapped(before: NDArray[np.float64], after: NDArray[np.float64]) -> tuple[float, float]:
    rng = np.random.default_rng(0)  # the same files give the same answer
    medians = [np.median(_resampled(times, rng), axis=1) for times in (before, after)]
    low, high = np.percentile(medians[1] - medians[0], (2.5, 97.5))
    difference = float(np.median(after) - np.median(before))
    return min(float(low), difference), max(float(high), difference)


def _resampled(times: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Resamples (rows) made of blocks of neighbouring steps, of the cube root of their number each."""
    length = max(1, round(len(times) ** (1 / 3)))
    starts = rng.integers(0, len(times) - length + 1, (_NUM_RESAMPLES, -(-len(times) // length)))
    picked = (starts[:, :, None] + np.arange(length)).reshape(_NUM_RESAMPLES, -1)[:, : len(times)]
    found: NDArray[np.float64] = times[picked]
    return found


def _matches(before: tuple[FindingRow, ...], after: tuple[FindingRow, ...]) -> Iterator[Match]:
    """Pairs of one finding, the likeliest first; each finding is used once."""
    pairs = [(score, i, j) for i, a in enumerate(before) for j, b in enumerate(after) if (score := _likeness(a, b)) > 0]
    used_before: set[int] = set()
    used_after: set[int] = set()
    for _, i, j in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2])):
        if i not in used_before and j not in used_after:
            used_before.add(i)
            used_after.add(j)
            yield Match(before=before[i], after=after[j])


def _likeness(a: FindingRow, b: FindingRow) -> float:
    """0: not the same finding. Otherwise the more alike the higher."""
    if a.code != b.code or bool(a.line) != bool(b.line):
        return 0.0
    if not a.line:
        return 1.0 if a.title == b.title or a.kind == b.kind else 0.0
    same_file = PurePath(a.file).name == PurePath(b.file).name
    same_function = a.function == b.function
    text = SequenceMatcher(None, "".join(a.text.split()), "".join(b.text.split())).ratio() if a.text and b.text else 0.0
    same_place = same_file and same_function and a.line == b.line
    if text < _ALIKE and not (same_place and not (a.text and b.text)):
        return 0.0
    if not same_file and not same_function:
        return 0.0
    near = 1 / (1 + abs(a.line - b.line))
    return 4 * text + 2 * (a.kind == b.kind) + same_file + same_function + near


_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")  # one without a dot may as well be a recording's name
_RECORDINGS = frozenset({".json", ".gz", ".sqlite", ".perfdoctor", ".zip", ".pt"})
_CONDITIONS = {
    "num_gpus": "number of GPUs", "driver": "driver", "cuda": "CUDA", "torch": "torch",
    "python": "Python", "world_size": "number of ranks", "launch_blocking": "CUDA_LAUNCH_BLOCKING",
    "anomaly_mode": "anomaly mode", "num_cpus": "CPUs of the process",
}  # fmt: skip


def _script(run: ComparedRun) -> str:
    """The file or the module that was run; '' where neither the source nor a note of the recording says it."""
    if run.script:
        *module, name = shlex.split(run.script.removesuffix(f" {ARGUMENTS}"))
        return name if module else PurePath(name).name
    source = run.source
    if source == run.path:
        return ""
    if source.endswith(".py"):
        return PurePath(source).name
    return source if _MODULE.fullmatch(source) and PurePath(source).suffix not in _RECORDINGS else ""


def _other_files(before: ComparedRun, after: ComparedRun) -> tuple[str, str] | None:
    """The files that findings of both runs stand in, where they have none in common; None where one has no file."""
    names = [sorted({PurePath(row.file).name for row in run.findings if row.file}) for run in (before, after)]
    if not all(names) or set(names[0]) & set(names[1]):
        return None
    first, second = (", ".join(each[:2]) + ", ..." * (len(each) > 2) for each in names)
    return first, second


def _warnings(before: ComparedRun, after: ComparedRun) -> Iterator[str]:
    scripts = [_script(run) for run in (before, after)]
    if scripts[0] != scripts[1] and all(scripts):
        yield f"the scripts are not of one name: {scripts[0]} before, {scripts[1]} after"
    elif not all(scripts) and (files := _other_files(before, after)):
        yield f"no file is named in both: {files[0]} before, {files[1]} after; are they of one script?"
    if before.optimizers and after.optimizers and before.optimizers != after.optimizers:
        names = ["; ".join(run.optimizers) for run in (before, after)]
        yield f"the optimizer is another: {names[0]} before, {names[1]} after"
    devices = (before.device, after.device)
    if NO_GPU in devices and devices[0] != devices[1]:
        yield "without a GPU no sync, copy or kernel is seen: what is gone or new below may only be unseen"
    elif all(devices) and devices[0] != devices[1]:
        yield f"GPU differs: {devices[0]} before, {devices[1]} after; not only the edit tells them apart"
    for key, name in _CONDITIONS.items():
        old, new = before.environment.get(key), after.environment.get(key)
        if old not in (None, "", 0) and new not in (None, "", 0) and old != new:
            yield f"{name} differs: {old} before, {new} after"
    old_size, new_size = before.samples_per_step, after.samples_per_step
    if old_size and new_size and abs(new_size - old_size) > _OTHER_SIZE * old_size:
        yield (
            f"a step is of {format_count(round(old_size))} samples before, of {format_count(round(new_size))} after: "
            "compare samples/s, not step times"
        )
    if before.micro_batches and after.micro_batches and before.micro_batches != after.micro_batches:
        counts = format_count(before.micro_batches), format_count(after.micro_batches)
        yield f"micro-batches a step differ: {counts[0]} before, {counts[1]} after"
    if before.basis != after.basis:
        yield f"the steps were not timed alike: {before.basis} before, {after.basis} after"
    for name, run in (("before", before), ("after", after)):
        if run.num_timed < _FEW_STEPS:
            what = format_plural(run.num_timed, "step" if run.num_blocks is None else "block")
            yield f"only {what} {name}: their spread is hardly known"
