"""`perfdoctor compare` on real reports and captures: text, JSON, the gate, bad input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfdoctor
from perfdoctor.cli.compare import execute
from perfdoctor.errors import BrokenTraceError, CaptureError, NotATraceError, UnsupportedTraceError, UsageError
from perfdoctor.record.capture import Bare, Note
from perfdoctor.record.script_note import script_note

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def report(trace: Path, tmp_path: Path) -> Callable[..., str]:
    """The report on the small recording (10 ms a step), with changes, as a file."""
    document = perfdoctor.analyze(trace).to_json()

    def write(name: str, *changes: Change) -> str:
        changed = json.loads(document)
        for change in changes:
            change(changed)
        (tmp_path / name).write_text(json.dumps(changed))
        return str(tmp_path / name)

    return write


def _step(**values: Any) -> Change:
    return lambda document: document["verdict"]["step"].update(values)


def test_the_same_report_twice_is_no_difference(report: Callable[..., str]) -> None:
    path = report("a.json")
    outcome = execute([path, path, "--gate", "0"])
    assert outcome.text.startswith("No difference: 10.0 ms -> 10.0 ms a step")
    assert outcome.exit_code == 0


def test_slower_beyond_the_gate_is_exit_code_1(report: Callable[..., str]) -> None:
    slow = report("slow.json", _step(median_ms=13.0, low_ms=12.9, high_ms=13.1, num_steps=50))
    outcome = execute([report("a.json"), slow, "--gate", "10"])
    assert outcome.exit_code == 1
    assert "Slower by 3.0 ms (+30" in outcome.text
    assert "over 10 %" in outcome.messages[0]
    assert execute([report("a.json"), slow, "--gate", "40"]).exit_code == 0
    assert execute([slow, report("a.json"), "--gate", "0"]).exit_code == 0


def test_json_gives_prediction_beside_result(report: Callable[..., str]) -> None:
    before = report("a.json")
    priced = [f for f in json.loads(Path(before).read_text())["findings"] if f["headroom"]]
    after = report(
        "b.json",
        _step(median_ms=6.0, low_ms=5.9, high_ms=6.1, num_steps=50),
        lambda d: d["findings"].clear(),
        lambda d: d["leave_alone"].clear(),
    )
    found = json.loads(execute([before, after, "--format", "json"]).text)
    assert found["change"] == "faster"
    assert found["difference_ms"] == pytest.approx(-4.0, abs=0.05)
    assert found["low_ms"] < found["difference_ms"] < found["high_ms"] < 0
    assert {row["code"] for row in found["findings"]["gone"]} >= {row["code"] for row in priced}
    said = sum(row["headroom"]["mid_ms"] for row in priced)
    assert found["prediction"]["predicted_ms"] == pytest.approx(said, abs=0.01)
    assert found["prediction"]["measured_ms"] == -found["difference_ms"]
    assert found["findings"]["new"] == []


def test_a_counterfactual_of_a_trial_is_read(report: Callable[..., str]) -> None:
    def tried(document: dict[str, Any]) -> None:
        for row in document["findings"]:
            row["measured_saving"] = {"mid_ms": 4.5, "low_ms": 4.0, "high_ms": 5.0}
        document["leave_alone"].clear()
        del document["findings"][1:]

    after = report("b.json", lambda d: (d["findings"].clear(), d["leave_alone"].clear()))
    outcome = execute([report("a.json", tried), after])
    assert "counterfactual 4.5 ms" in outcome.text


def test_captures_and_traces_are_read(trace: Path, tmp_path: Path) -> None:
    capture = perfdoctor.load_capture(trace)
    paths = []
    for name, step_ms in (("a", 10.0), ("b", 12.0)):
        steps = (np.random.default_rng(1).normal(step_ms, 0.1, 40) * 1e6).astype(np.int64)
        ones = np.ones(40, np.int64)
        bare = Bare(step_ns=steps, data_ns=0 * ones, samples=-ones, micro_batches=ones)
        replace(capture, bare=bare).save(tmp_path / name)
        paths.append(str(tmp_path / name))
    found = json.loads(execute([*paths, "--format", "json"]).text)
    assert found["change"] == "slower"
    assert found["difference_ms"] == pytest.approx(2.0, abs=0.1)
    assert "bootstrap" in found["rule"]
    assert execute([str(trace), str(trace)]).text.startswith("No difference")


def test_one_slow_step_is_no_other_batch_size(trace: Path, tmp_path: Path) -> None:
    """The rate is of the mean step, which one checkpoint doubles; the median stays: together they tell no size."""
    ones = np.ones(20, np.int64)
    paths = []
    for name, last_ms, size in (("a", 10, 8), ("b", 210, 8), ("c", 10, 16)):
        steps = np.full(20, 10, np.int64) * 1_000_000
        steps[-1] = last_ms * 1_000_000
        bare = Bare(step_ns=steps, data_ns=0 * ones, samples=size * ones, micro_batches=ones)
        replace(perfdoctor.load_capture(trace), bare=bare).save(tmp_path / name)
        (tmp_path / f"{name}.json").write_text(perfdoctor.analyze(tmp_path / name).to_json())
        paths += [str(tmp_path / f"{name}.json")]
    assert "samples before" not in execute([paths[0], paths[1]]).text
    assert "of 8 samples before, of 16 after" in " ".join(execute([paths[0], paths[2]]).text.split())


def test_github_commands_are_one_line_each(report: Callable[..., str]) -> None:
    slow = report("slow.json", _step(median_ms=13.0, low_ms=12.9, high_ms=13.1, num_steps=50))
    lines = execute([report("a.json"), slow, "--format", "github"]).text.splitlines()
    assert lines[0].startswith("::warning title=perfdoctor compare::Slower by 3.0 ms (+30")
    assert all(line.startswith("::") for line in lines)
    assert "%25" in lines[0]


def _device(gpu: str, *codes: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        document["environment"]["gpu"] = gpu
        document["notes"] = [{"code": code, "text": "a note", "count": 1} for code in codes]

    return change


EMULATED, NO_GPU = _device("", "emulated-device"), _device("", "no-gpu")


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (EMULATED, EMULATED, "both ran on an emulated CUDA device"),
        (EMULATED, _device("NVIDIA H200"), "an emulated device before, NVIDIA H200 after: an emulated device's times"),
        (_device(""), EMULATED, "a GPU that the file does not name before, an emulated device after"),
        (NO_GPU, EMULATED, "no GPU before, an emulated device after"),
        (NO_GPU, _device("NVIDIA H200"), "no GPU before, NVIDIA H200 after"),
    ],
)
def test_times_of_no_device_are_not_compared(
    report: Callable[..., str], before: Change, after: Change, why: str
) -> None:
    fast = _step(median_ms=6.0, low_ms=5.9, high_ms=6.1, num_steps=50)
    paths = [report("a.json", before), report("b.json", after, fast, lambda d: d["findings"].clear())]
    outcome = execute([*paths, "--gate", "5"])
    text = " ".join(outcome.text.split())
    assert text.startswith(f"Step times cannot be compared: {why}")
    assert "gone" in text
    assert "prediction" not in text
    assert "Interval" not in text
    assert outcome.exit_code == 2  # a gate that cannot judge does not pass
    assert "could not judge" in outcome.messages[0]
    found = json.loads(execute([*paths, "--format", "json"]).text)
    assert found["change"] == "not comparable"
    assert why in found["incomparable"]
    assert (found["difference_ms"], found["ratio"], found["prediction"]) == (None, None, None)
    assert execute([*paths, "--format", "github"]).text.startswith("::warning")
    assert execute(paths).exit_code == 0
    assert ("may only be unseen" in text) == ("no GPU" in why and "and no GPU" not in why)


def test_two_runs_without_a_gpu_are_compared(report: Callable[..., str]) -> None:
    slow = report("b.json", NO_GPU, _step(median_ms=13.0, low_ms=12.9, high_ms=13.1, num_steps=50))
    assert execute([report("a.json", NO_GPU), slow, "--gate", "5"]).exit_code == 1


def test_other_gpus_and_other_scripts_are_said(report: Callable[..., str]) -> None:
    before = report("a.json", _device("NVIDIA A100"), lambda d: d.update(source="runs/train.py"))
    after = report("b.json", _device("NVIDIA H200"), lambda d: d.update(source="/x/other.py"))
    text = " ".join(execute([before, after]).text.split())
    assert "GPU differs: NVIDIA A100 before, NVIDIA H200 after" in text
    assert "train.py before, other.py after" in text
    same = report("c.json", _device("NVIDIA A100"), lambda d: d.update(source="elsewhere/train.py"))
    text = execute([before, same]).text
    assert "differs" not in text
    assert "of one name" not in text


def test_what_was_tried_together_is_the_prediction_where_all_of_it_is_gone(report: Callable[..., str]) -> None:
    def tried(document: dict[str, Any]) -> None:
        for row in (rows := document["findings"] + document["leave_alone"]):
            row["measured_saving"] = {"mid_ms": 3.0, "low_ms": 2.9, "high_ms": 3.1}
        assert len(rows) > 1
        arms = [{"mode": "gone", "saving": {"mid_ms": 3.0}}, {"mode": "all", "saving": {"mid_ms": 3.9}}]
        document["trial"] = {"arms": arms}  # what it measured of the loop as it is was left out: the bare steps count

    gone = (lambda d: d["findings"].clear(), lambda d: d["leave_alone"].clear())
    fast = _step(median_ms=6.0, low_ms=5.9, high_ms=6.1, num_steps=50)
    paths = [report("a.json", tried), report("b.json", fast, *gone)]
    found = json.loads(execute([*paths, "--format", "json"]).text)["prediction"]
    assert found["counterfactual_ms"] == 3.9
    assert found["error_ratio"] == pytest.approx(-0.01, abs=0.001)  # 3.9 of the 4 ms that came, of a step of 10
    text = " ".join(execute(paths).text.split())
    assert "counterfactual together 3.9 ms; measured" in text
    left = report("c.json", fast, lambda d: d["findings"].pop(0), gone[1])
    found = json.loads(execute([paths[0], left, "--format", "json"]).text)["prediction"]
    assert found["counterfactual_ms"] == 3.0 * (len(json.loads(Path(paths[0]).read_text())["leave_alone"]) + 1)


def _tried(median_ms: float, spread_ms: float = 0.2, pairs: tuple[int, ...] = (20, 19)) -> Change:
    base = {"median_ms": median_ms, "low_ms": median_ms - spread_ms / 2, "high_ms": median_ms + spread_ms / 2}
    arms = [{"mode": "gone", "saving": None, "num_pairs": number} for number in pairs]
    return lambda document: document.update(trial={"base": base, "arms": arms, "block_steps": 8})


def test_two_trials_are_compared_by_what_they_measured(report: Callable[..., str]) -> None:
    """The bare steps say 10 ms in both; 40 blocks each say 10 and 11."""
    before, after = report("a.json", _tried(10)), report("b.json", _tried(11))
    found = json.loads(execute([before, after, "--format", "json", "--run-noise", "0", "--gate", "5"]).text)
    assert found["change"] == "slower"
    assert found["before"]["median_ms"] == 10
    assert (found["after"]["median_ms"], found["after"]["num_blocks"], found["after"]["num_steps"]) == (11, 40, 320)
    # 1.25 * 0.2 / (1.35 * sqrt(40)) = 0.02928 ms each; 1.96 * sqrt(2) of it is 0.0812.
    assert found["low_ms"] == pytest.approx(1 - 0.0812, abs=1e-3)
    assert "numbers of blocks" in found["rule"]
    assert execute([before, after, "--gate", "5"]).exit_code == 1
    assert execute([before, after, "--gate", "11"]).exit_code == 0
    noisy = report("c.json", _tried(11, spread_ms=9))
    assert execute([before, noisy, "--gate", "5"]).text.startswith("No difference: 10.0 ms -> 11.0 ms")
    text = " ".join(execute([before, after]).text.split())
    assert "11.0 ms (10.9 to 11.1 ms), 40 blocks, 320 steps (in the trial, with nothing taken out)" in text


def test_a_trial_is_held_against_a_run_by_the_bare_steps_of_both(report: Callable[..., str]) -> None:
    few = report("few.json", _tried(11, pairs=(4,)))  # five blocks tell no spread
    nothing = report("none.json", _tried(0, spread_ms=0, pairs=()))
    for after in (few, nothing, report("run.json")):
        found = json.loads(execute([report("a.json", _tried(14)), after, "--format", "json"]).text)
        assert (found["change"], found["before"]["num_blocks"]) == ("no difference", None)
        assert found["before"]["median_ms"] == pytest.approx(10, abs=0.05)


def test_one_report_twice_and_two_in_the_other_order_are_said(report: Callable[..., str]) -> None:
    before = report("a.json")
    copy = report("copy.json")
    for after in (before, copy):
        outcome = execute([before, after, "--gate", "0"])
        assert "BEFORE and AFTER are the same report" in outcome.text
        assert outcome.exit_code == 0
    slow = report("slow.json", _step(median_ms=13.0, low_ms=12.9, high_ms=13.1, num_steps=50))
    os.utime(slow, (1_000, 1_000))
    assert "swapped" not in execute([slow, before]).text  # an edit that helped
    os.utime(before, (2_000, 2_000))
    assert "swapped" in execute([before, slow]).text
    os.utime(slow, (3_000, 3_000))
    assert "swapped" not in execute([before, slow]).text


def test_a_bound_is_no_prediction_that_the_edit_is_held_to(report: Callable[..., str]) -> None:
    def waits(document: dict[str, Any]) -> None:
        document["findings"] = document["findings"][:1]
        document["findings"][0].update(code="data-wait", site=None, headroom=None)
        document["findings"][0]["measured_saving"] = {"mid_ms": 4.5, "low_ms": 4.0, "high_ms": 5.0}
        document["leave_alone"].clear()

    after = report("b.json", lambda d: (d["findings"].clear(), d["leave_alone"].clear()))
    assert "counterfactual at most 4.5 ms; measured" in execute([report("a.json", waits), after]).text


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("train.py", "package.train", True),
        ("package.train", "package.eval", True),
        ("package.train", "package.train", False),
        ("session", "train.py", False),
        ("before.json", "after.json", False),
        ("before", "after", False),
        ("a", "package.train", False),
        ("runs/a/loop.perfdoctor", "train.py", False),
    ],
)
def test_two_scripts_are_told_apart_and_two_recordings_are_not(
    report: Callable[..., str], before: str, after: str, said: bool
) -> None:
    paths = [report(name, lambda d, s=source: d.update(source=s)) for name, source in (("a", before), ("b", after))]
    assert ("not of one name" in execute(paths).text) == said


def test_other_answers_of_perfdoctor_are_no_reports(report: Callable[..., str], tmp_path: Path) -> None:
    good = report("a.json")
    (tmp_path / "answer.json").write_text(execute([good, good, "--format", "json"]).text)
    (tmp_path / "treated.json").write_text(json.dumps({"schema_version": 1, "kind": "treatments", "verdicts": []}))
    with pytest.raises(NotATraceError, match=r"treated.json: the report of `perfdoctor trial --treat`"):
        execute([good, str(tmp_path / "treated.json")])
    with pytest.raises(NotATraceError, match=r"answer.json: the answer of an earlier"):
        execute([str(tmp_path / "answer.json"), good])


BAD: dict[str, tuple[Change, type[Exception], str]] = {
    "another version": (lambda d: d.update(schema_version=9), UnsupportedTraceError, "schema 9"),
    "a version as text": (lambda d: d.update(schema_version="1"), UnsupportedTraceError, "schema '1'"),
    "no verdict": (lambda d: d.pop("verdict"), NotATraceError, "no report"),
    "no step": (lambda d: d["verdict"].update(step=None), UsageError, "no step was timed"),
    "a window": (_step(num_steps=0), UsageError, "no step was timed"),
    "zero": (_step(median_ms=0), UsageError, "0 ms"),
    "text for a number": (_step(median_ms="fast"), BrokenTraceError, "mistypes"),
    "no number": (_step(low_ms=float("nan")), BrokenTraceError, "NaN is no number"),
    "beyond all time": (_step(high_ms=1e300), UsageError, "1e.300 ms"),
    "text for a rate": (lambda d: d["verdict"].update(samples_per_s="x"), BrokenTraceError, "mistypes"),
    "text for a count": (lambda d: d["verdict"].update(micro_batches="x"), BrokenTraceError, "mistypes"),
    "notes of another form": (lambda d: d.update(notes=[1]), BrokenTraceError, "mistypes"),
    "half a step": (_step(num_steps=2.5), BrokenTraceError, "2.5 is no whole number"),
    "a truth for a number": (_step(num_steps=True), BrokenTraceError, "True is no whole number"),
    "quartiles in the wrong order": (_step(low_ms=12.0), BrokenTraceError, "quartiles 12 and"),
    "a trial whose blocks are of another form": (
        lambda d: d.update(trial={"base": {"median_ms": 1, "low_ms": 1, "high_ms": 1}, "arms": [{"num_pairs": "x"}]}),
        BrokenTraceError,
        "mistypes",
    ),
    "a trial of another form": (lambda d: d.update(trial={"arms": [{}]}), BrokenTraceError, "mistypes"),
    "a finding beyond all time": (
        lambda d: d["findings"][0].update(headroom={"low_ms": 0, "mid_ms": 1e308, "high_ms": 0}),
        BrokenTraceError,
        "mistypes",
    ),
    "no findings": (lambda d: d.pop("findings"), BrokenTraceError, "findings"),
    "findings of another form": (lambda d: d.update(findings=["x"]), BrokenTraceError, "lacks or mistypes"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_reports_are_said_by_name(report: Callable[..., str], case: str) -> None:
    change, kind, text = BAD[case]
    with pytest.raises(kind, match=text) as raised:
        execute([report("a.json"), report("bad.json", change)])
    assert "bad.json" in str(raised.value)


def test_other_bad_files(report: Callable[..., str], tmp_path: Path, trace: Path) -> None:
    good = report("a.json")
    (tmp_path / "half.json").write_text(Path(good).read_text()[:900])
    (tmp_path / "empty").write_text("")
    (tmp_path / "list.json").write_text("[1]")
    pages = {"page.txt": perfdoctor.analyze(trace).to_text(), "page.html": perfdoctor.analyze(trace).to_html()}
    for name, page in {**pages, "trial.txt": "Trial of train.py: 10.0 ms a step with nothing taken out"}.items():
        (tmp_path / name).write_text(page)
        with pytest.raises(NotATraceError, match=f"{name}: a report as a page. Write it as JSON"):
            execute([good, str(tmp_path / name)])
    with pytest.raises(BrokenTraceError, match="damaged perfdoctor report"):
        execute([good, str(tmp_path / "half.json")])
    for name in ("empty", "list.json", "none", ""):
        with pytest.raises(CaptureError):
            execute([str(tmp_path / name), good])
    for options in (["--gate", "-1"], ["--gate", "nan"], ["--run-noise", "x"], ["--format", "html"]):
        with pytest.raises(UsageError):
            execute([good, good, *options])
    with pytest.raises(UsageError):
        execute([good])


def _recording(trace: Path, path: Path, *notes: Note) -> str:
    ones = np.ones(20, np.int64)
    bare = Bare(step_ns=10_000_000 * ones, data_ns=0 * ones, samples=-ones, micro_batches=ones)
    replace(perfdoctor.load_capture(trace), bare=bare, notes=notes).save(path)
    return str(path)


def _of(target: str, **given: bool) -> Note:
    return script_note(target, **{"module": False, "arguments": False, **given})


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (_of("train.py"), _of("other.py"), "train.py before, other.py after"),
        (_of("a b.py"), _of("pkg.train", module=True, arguments=True), "a b.py before, pkg.train after"),
        (_of("train.py"), _of("new/train.py", arguments=True), ""),
    ],
)
def test_recordings_of_two_scripts_are_told_apart(
    trace: Path, tmp_path: Path, before: Note, after: Note, said: str
) -> None:
    paths = [_recording(trace, tmp_path / "a", before), _recording(trace, tmp_path / "b", after)]
    documents = []
    for path in paths:
        (tmp_path / f"{path}.json").write_text(perfdoctor.analyze(path).to_json())
        documents.append(f"{path}.json")
    for pair in (paths, documents, [paths[0], documents[1]]):
        text = " ".join(execute(pair).text.split())
        assert (f"not of one name: {said}" in text) if said else ("of one name" not in text)


def test_reports_that_name_no_file_in_common_and_other_optimizers_are_said(report: Callable[..., str]) -> None:
    def moved(file: str) -> Change:
        def change(document: dict[str, Any]) -> None:
            for row in document["findings"] + document["leave_alone"]:
                site = {"file": f"/home/x/{file}", "line": 7, "function": "f", "text": "y"}
                row["site"] = {**(row["site"] or {}), **site}

        return change

    def stepped(text: str) -> Change:
        return lambda document: document["notes"].append({"code": "optimizer", "text": text, "count": 1})

    small, big = "SGD: 1 parameter group, 2 tensors, fused=None", "SGD: 1 parameter group, 41 tensors, fused=None"
    before = report("a.json", moved("a.py"), stepped(small))
    text = " ".join(execute([before, report("b.json", moved("b.py"), stepped(big))]).text.split())
    assert "no file is named in both: a.py before, b.py after" in text
    assert "optimizer is another: SGD: 1 parameter group, 2 tensors before, SGD: 1 parameter group, 41 tensors" in text
    fused = small.replace("fused=None", "fused=True")
    text = execute([before, report("c.json", moved("a.py"), stepped(fused))]).text
    assert "is another" not in text
    assert "no file" not in text
    nothing_left = report("d.json", lambda d: (d["findings"].clear(), d["leave_alone"].clear()))
    assert "no file" not in execute([before, nothing_left]).text
