"""One side of a comparison: what a report or a recording says of a run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.diagnose.hit_counts import EMULATED
from perfdoctor.errors import BrokenTraceError, NotATraceError, UnsupportedTraceError, UsageError
from perfdoctor.record.capture import Note
from perfdoctor.record.load import load_capture
from perfdoctor.record.note_codes import WITHOUT_CUDA
from perfdoctor.record.script_note import noted_script
from perfdoctor.trial.outcome import ALL
from perfdoctor.units import NS_PER_MS

_SCHEMA_VERSION = 1
_FEWEST_BLOCKS = 6
_OF_BLOCKS = "in the trial, with nothing taken out"
_HEAD_BYTES = 4096
_PAGES = (b"perfdoctor: ", b"Trial of ", b"Treatments of ")  # how reports of text begin
_LONGEST_MS = 1e12  # 30 years
NO_GPU = "no GPU"
_OPTIMIZER = "optimizer"  # code of the note on an optimizer of the loop
_TENSORS = re.compile(r"\w+: .*?\d+ tensors?\b")  # how it begins: 'AdamW: 1 parameter group, 41 tensors'


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """A finding, as far as a comparison needs it. Times in ns a step, None where not known."""

    code: str
    kind: str
    title: str
    file: str
    line: int  # 0: no place
    function: str
    text: str
    headroom_ns: int | None
    counterfactual_ns: int | None = None
    counterfactual_low_ns: int | None = None
    counterfactual_high_ns: int | None = None

    @property
    def place(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.line else "the whole loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """What a trial measured of the loop as it is: mean steps of blocks. Times in ns a step."""

    median_ns: float
    low_ns: float  # first quartile of the blocks
    high_ns: float
    num_blocks: int
    block_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run: its steps, its findings and its conditions.

    `num_blocks` is None where single steps were timed; else the median and the quartiles are those of the means of so
    many blocks, `num_steps` steps in all. `blocks`: those of a trial, beside the single steps.
    """

    path: str
    median_ns: float
    low_ns: float  # first quartile
    high_ns: float
    num_steps: int
    basis: str
    step_ns: tuple[int, ...] = ()  # each step, where the file has them
    samples_per_s: float | None = None
    samples_per_step: float | None = None
    micro_batches: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    findings: tuple[FindingRow, ...] = ()
    source: str = ""  # what was run or read
    script: str = ""  # what a saved recording is of, as it is typed
    optimizers: tuple[str, ...] = ()  # each with its number of tensors
    note_codes: frozenset[str] = frozenset()
    together_ns: int | None = None  # what all findings that were tried gave back together, in a trial
    blocks: BlockTimes | None = None
    num_blocks: int | None = None

    @property
    def num_timed(self) -> int:
        """How many times the median is of."""
        return self.num_steps if self.num_blocks is None else self.num_blocks

    def of_blocks(self) -> ComparedRun:
        """The same run by the blocks of its trial: many more steps than the bare ones, spread over minutes."""
        assert self.blocks is not None
        samples = self.samples_per_step
        return replace(
            self,
            samples_per_s=None if samples is None else 1e9 * samples / self.blocks.median_ns,
            median_ns=self.blocks.median_ns,
            low_ns=self.blocks.low_ns,
            high_ns=self.blocks.high_ns,
            num_blocks=self.blocks.num_blocks,
            num_steps=self.blocks.num_blocks * self.blocks.block_steps,
            basis=_OF_BLOCKS,
            step_ns=(),
        )

    @property
    def emulated(self) -> bool:
        """Whether its CUDA device was one in name only: its times are those of the CPU."""
        return EMULATED in self.note_codes

    @property
    def device(self) -> str:
        """The GPU, 'an emulated device', 'no GPU' where the recording says that there was none; '' where it is mute."""
        if self.emulated:
            return "an emulated device"
        return str(self.environment.get("gpu") or "") or (NO_GPU if WITHOUT_CUDA in self.note_codes else "")


def read_run(path: str | os.PathLike[str]) -> ComparedRun:
    """Read a report (JSON), a saved capture, or a trace.

    Raises:
        NotATraceError, BrokenTraceError, UnsupportedTraceError, CaptureError: the file cannot be used, with the reason.
        UsageError: it says nothing about the time of a step.
    """
    document = _read_report(Path(path))
    if document is not None:
        return _from_report(str(path), document)
    capture = load_capture(path)
    steps = () if capture.bare is None else tuple(int(ns) for ns in capture.bare.step_ns)
    return _from_diagnosis(str(path), diagnose(capture), steps)


def _read_report(path: Path) -> dict[str, Any] | None:
    """The report in the file; None where it is something else, which `load_capture` then tells."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if head.startswith(_PAGES) or (head.startswith(b"<!doctype html") and b"perfdoctor" in head):
                raise NotATraceError(
                    f"{path}: a report as a page. Write it as JSON (--format json), which can be compared."
                )
            if head.lstrip()[:1] != b"{" or b'"traceEvents"' in head:
                return None
            document = json.loads(head + file.read(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        if b'"schema_version"' in head and b'"perfdoctor"' in head:
            raise BrokenTraceError(f"{path}: a damaged perfdoctor report ({error}). Write it again.") from error
        return None
    except OSError:
        return None
    if "traceEvents" in document:
        return None
    if document.get("kind") == "treatments":
        raise NotATraceError(
            f"{path}: the report of `perfdoctor trial --treat`, which holds each treatment against the loop as it is "
            "already. Compare what `perfdoctor run --format json` writes before and after you changed the lines."
        )
    if "change" in document and "before" in document:
        raise NotATraceError(f"{path}: the answer of an earlier `perfdoctor compare`. Give it the two reports again.")
    if "verdict" not in document or "schema_version" not in document:
        raise NotATraceError(
            f"{path}: JSON, but no report of perfdoctor (it lacks verdict and schema_version). Expected what "
            "`perfdoctor run --format json` or `perfdoctor trial --format json` writes, a saved capture, or a trace."
        )
    if document["schema_version"] != _SCHEMA_VERSION:
        raise UnsupportedTraceError(
            f"{path}: report schema {document['schema_version']!r}; this perfdoctor reads {_SCHEMA_VERSION}. "
            "Use the perfdoctor that wrote it, or write both reports again."
        )
    return dict(document)


def _from_report(path: str, document: dict[str, Any]) -> ComparedRun:
    try:
        verdict, step = document["verdict"], document["verdict"]["step"]
        if step is None or _whole(step["num_steps"]) < 1:
            raise _without_steps(path)
        rows = (*document["findings"], *document["leave_alone"])
        low_ns, median_ns, high_ns = _quartiles(path, step)
        trial = document.get("trial") or {}
        return ComparedRun(
            path=path,
            median_ns=median_ns,
            low_ns=low_ns,
            high_ns=high_ns,
            num_steps=step["num_steps"],
            basis=str(step["basis"]),
            samples_per_s=_optional(verdict["samples_per_s"]),
            samples_per_step=_optional(verdict.get("samples_per_step")),  # files of before it was written lack it
            micro_batches=_optional(verdict["micro_batches"]),
            environment=dict(document["environment"]),
            findings=tuple(_row(row) for row in rows),
            source=str(document.get("source", "")),
            **_said_in([(str(note["code"]), str(note["text"])) for note in document.get("notes", ())]),
            together_ns=_together(trial),
            blocks=_blocks(path, trial),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BrokenTraceError(
            f"{path}: a report of perfdoctor that lacks or mistypes something ({type(error).__name__}: {error}). "
            "Write it again."
        ) from error


def _said_in(notes: list[tuple[str, str]]) -> dict[str, Any]:
    """What the notes of a recording, each a code and a text, say of the run: fields of a ComparedRun."""
    texts = [text for code, text in notes if code == _OPTIMIZER]
    return {
        "note_codes": frozenset(code for code, _ in notes),
        "script": noted_script(Note(code=code, text=text) for code, text in notes),
        "optimizers": tuple(found[0] for text in texts if (found := _TENSORS.match(text))),
    }


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _positive(path: str, value: Any) -> float:
    number = float(value)
    if not 0 < number < _LONGEST_MS:
        raise UsageError(f"{path}: a step of {value} ms cannot be compared")
    return number


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _quartiles(path: str, times: dict[str, Any]) -> tuple[float, float, float]:
    """The first quartile, the median and the third, in ns."""
    low, median, high = (_positive(path, times[name]) for name in ("low_ms", "median_ms", "high_ms"))
    if not low <= median <= high:
        raise ValueError(f"quartiles {low:g} and {high:g} ms of a median of {median:g} ms")
    return low * NS_PER_MS, median * NS_PER_MS, high * NS_PER_MS


def _blocks(path: str, trial: dict[str, Any]) -> BlockTimes | None:
    """The blocks of a trial with nothing taken out; None where it measured none, or too few to tell their spread."""
    base = trial.get("base")
    if not base or not base["median_ms"]:
        return None
    # Each block of an arm stands between two of them, which it shares with its neighbours.
    num_blocks = sum(_whole(arm["num_pairs"]) for arm in trial["arms"]) + 1
    if num_blocks < _FEWEST_BLOCKS:
        return None
    low, median, high = _quartiles(path, base)
    return BlockTimes(
        median_ns=median, low_ns=low, high_ns=high, num_blocks=num_blocks, block_steps=_whole(trial["block_steps"])
    )


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _without_steps(path: str) -> UsageError:
    return UsageError(f"{path}: no step was timed in it, so there is nothing to compare. Record steps first.")


def _row(row: dict[str, Any]) -> FindingRow:
    site = row["site"] or {}
    room = row["headroom"]
    tried = row.get("measured_saving") or {}  # only after a trial
    return FindingRow(
        code=str(row["code"]),
        kind=str(row["kind"]),
        title=str(row["title"]),
        file=str(site.get("file", "")),
        line=int(site.get("line", 0)),
        function=str(site.get("function", "")),
        text=str(site.get("text", "")),
        headroom_ns=None if room is None else _ns(room["mid_ms"]),
        counterfactual_ns=_ns(tried.get("mid_ms")),
        counterfactual_low_ns=_ns(tried.get("low_ms")),
        counterfactual_high_ns=_ns(tried.get("high_ms")),
    )


def _together(trial: dict[str, Any]) -> int | None:
    """What the arm of all suspects together gave back; None where there is none."""
    for arm in trial.get("arms", ()):
        if arm["mode"] == ALL and arm["saving"] is not None:
            return _ns(arm["saving"]["mid_ms"])
    return None


def _ns(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else round(milliseconds * NS_PER_MS)


def _from_diagnosis(path: str, diagnosis: Diagnosis, steps: tuple[int, ...]) -> ComparedRun:
    step = diagnosis.step
    if step is None or step.num_steps < 1:
        raise _without_steps(path)
    return ComparedRun(
        path=path,
        median_ns=_positive(path, step.median_ns / NS_PER_MS) * NS_PER_MS,
        low_ns=step.low_ns,
        high_ns=step.high_ns,
        num_steps=step.num_steps,
        basis=step.basis,
        step_ns=steps if len(steps) == step.num_steps else (),  # only where they are what the median is of
        samples_per_s=diagnosis.samples_per_s,
        samples_per_step=diagnosis.samples_per_step,
        micro_batches=diagnosis.micro_batches,
        environment=asdict(diagnosis.environment),
        source=diagnosis.source,
        **_said_in([(note.code, note.text) for note in diagnosis.notes]),
        findings=tuple(
            FindingRow(
                code=finding.code,
                kind=finding.kind,
                title=finding.title,
                file=finding.site.frame.file if finding.site else "",
                line=finding.site.frame.line if finding.site else 0,
                function=finding.site.frame.function if finding.site else "",
                text=finding.site.text if finding.site else "",
                headroom_ns=None if finding.headroom is None else finding.headroom.mid_ns,
            )
            for finding in (*diagnosis.findings, *diagnosis.leave_alone)
        ),
    )
