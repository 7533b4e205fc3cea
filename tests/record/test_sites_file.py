"""A session's part of a recording: written, read, and joined with what nsys recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.errors import BrokenTraceError, NotATraceError, UnsupportedTraceError
from perfdoctor.record.capture import (
    Bare,
    CallKind,
    Calls,
    Capture,
    Environment,
    Frame,
    Hits,
    Note,
    Phase,
    RangeKind,
    Ranges,
    Site,
    Steps,
    Work,
    WorkKind,
)
from perfdoctor.record.sites_file import Sites, join, join_beside, read_sites, write_sites

UNIX = 1_700_000_000_000_000_000
TID = 4242
GLOBAL_TID = (7 << 48) | (99 << 24) | TID
SITE = Site(frame=Frame(file="train.py", line=12, function="main"))


def session(start_ns: int = UNIX, num_steps: int = 4) -> Sites:
    """Steps 3, 4, ... of 1000 ns; a read in each that ends 600 ns into it; ranges end 5 ns after their steps."""
    at = [start_ns + 1000 * i for i in range(num_steps)]
    steps = [(t, t + 1000, 3 + i, 1, 8, True, False) for i, t in enumerate(at)]
    capture = Capture(
        source="session",
        strings=("item", "forward"),
        sites=(SITE,),
        steps=Steps.from_rows(steps),
        hits=Hits.from_rows([(t + 590, t + 600, TID, 0, 0, i, int(Phase.LIGHT)) for i, t in enumerate(at)]),
        ranges=Ranges.from_rows([(t + 10, t + 100, TID, 1, int(RangeKind.PHASE)) for t in at]),
        environment=Environment(torch="2.11", num_workers=0, rank=0),
        notes=(Note(code="optimizer", text="SGD"),),
        bare=Bare(
            step_ns=np.array([990, 1010]),
            data_ns=np.array([0, 1]),
            samples=np.array([8, 8]),
            micro_batches=np.array([1, 1]),
        ),
    )
    return Sites(capture=capture, marks={3 + i: t + 1005 for i, t in enumerate(at)}, exit_code=3)


def recording(shift_ns: int = 0, num_steps: int = 4, first: int = 3) -> Capture:
    """The same steps on a clock that is behind the session's by `shift_ns`: a launch, a kernel, a sync each."""
    at = [UNIX + 1000 * i - shift_ns for i in range(num_steps)]
    strings = ("", "cudaLaunchKernel", "gemm", "cudaStreamSynchronize", "h2d", "forward")
    names = tuple(f"step {first + i}" for i in range(num_steps))
    calls = [row for i, t in enumerate(at) for row in (
        (t + 20, t + 30, GLOBAL_TID, 1, int(CallKind.LAUNCH), 2 * i + 1),
        (t + 400, t + 600, GLOBAL_TID, 3, int(CallKind.SYNC_STREAM), 2 * i + 2),
    )]  # fmt: skip
    work = [(t + 50, t + 550, 0, 7, 2, int(WorkKind.KERNEL), 2 * i + 1, -1, 0, 0, 8) for i, t in enumerate(at)]
    ranges = [row for i, t in enumerate(at) for row in (
        (t, t + 1005, GLOBAL_TID, len(strings) + i, int(RangeKind.STEP)),
        (t + 5, t + 15, GLOBAL_TID, 4, int(RangeKind.PHASE)),
        (t + 11, t + 99, GLOBAL_TID, 5, int(RangeKind.PHASE)),
    )]  # fmt: skip
    return Capture(
        source="nsys",
        strings=strings + names,
        calls=Calls.from_rows(calls),
        work=Work.from_rows(work),
        ranges=Ranges.from_rows(ranges),
        steps=Steps.from_rows([(t, t + 1005, first + i, 0, -1, True, False) for i, t in enumerate(at)]),
        environment=Environment(gpu="NVIDIA H200", num_gpus=1),
        notes=(Note(code="no-steps", text="none"), Note(code="environment-variables", text="secrets")),
        path="run.sqlite",
    )


def test_written_and_read_back(tmp_path: Path) -> None:
    written = session()
    write_sites(written, tmp_path / "run.sites.json")
    back = read_sites(tmp_path / "run.sites.json")
    assert back.marks == written.marks
    assert back.exit_code == 3
    assert back.capture.sites == (SITE,)
    assert back.capture.steps.end_ns.tolist() == [UNIX + 1000 * i for i in (1, 2, 3, 4)]
    assert back.capture.environment == written.capture.environment
    assert back.capture.bare is not None
    assert back.capture.bare.step_ns.tolist() == [990, 1010]
    assert [path.name for path in tmp_path.iterdir()] == ["run.sites.json"]


def test_joined_to_the_nanosecond() -> None:
    # The recording counts from its own start: 12 345 ns on its clock are UNIX on the session's.
    joined = join(recording(shift_ns=UNIX - 12_345), session())
    assert joined.calls.start_ns.tolist()[:2] == [UNIX + 20, UNIX + 400]
    assert joined.calls.thread.tolist() == [TID] * 8
    assert joined.work.end_ns.tolist() == [UNIX + 1000 * i + 550 for i in range(4)]
    assert joined.steps.end_ns.tolist() == [UNIX + 1000 * i for i in (1, 2, 3, 4)]
    assert joined.hits.end_ns.tolist() == joined.calls.end_ns[1::2].tolist()
    assert [joined.text(int(kind)) for kind in joined.hits.kind] == ["item"] * 4
    assert joined.sites == (SITE,)
    assert joined.bare is not None
    assert joined.bare.step_ns.tolist() == [990, 1010]
    assert (joined.source, joined.path) == ("nsys", "run.sqlite")


def test_ranges_once_each() -> None:
    joined = join(recording(), session())
    named = [
        (joined.text(int(name)), int(start))
        for name, start in zip(joined.ranges.name, joined.ranges.start_ns, strict=True)
    ]
    # h2d is known to nsys only; forward to both, and the session's own is kept; steps are a table of their own.
    assert sorted(named) == sorted(
        [("forward", UNIX + 1000 * i + 10) for i in range(4)] + [("h2d", UNIX + 1000 * i + 5) for i in range(4)]
    )


def test_environment_of_both_and_notes() -> None:
    joined = join(recording(), session())
    environment = joined.environment
    assert (environment.gpu, environment.num_gpus, environment.torch) == ("NVIDIA H200", 1, "2.11")
    assert (environment.num_workers, environment.rank) == (0, 0)  # nought is an answer
    assert [note.code for note in joined.notes] == ["environment-variables", "optimizer"]


def test_a_window_of_the_steps_is_enough() -> None:
    only = recording(shift_ns=77, num_steps=2, first=3)
    joined = join(only, session())
    assert joined.work.start_ns.tolist() == [UNIX + 50, UNIX + 1050]
    assert len(joined.steps) == 4


def test_a_number_counted_twice_is_its_last() -> None:
    # Batches 3 and 4 were taken for steps at first; the count began again.
    early = recording(shift_ns=50_000, num_steps=2)
    late = recording()
    both = replace(
        late,
        steps=Steps(**{k: np.concatenate((v, late.steps.columns()[k])) for k, v in early.steps.columns().items()}),
    )
    assert join(both, session()).calls.start_ns[0] == UNIX + 20


@pytest.mark.parametrize(
    ("of_nsys", "of_session", "why"),
    [
        (recording(first=90), session(), "no step range"),
        (recording(), session(UNIX - 3600 * 10**9), "3600 s away"),
        (recording(), replace(session(), marks={3: UNIX, 4: UNIX + 10**8, 5: UNIX + 3 * 10**8, 6: 0}), "another run"),
    ],
)
def test_of_another_run(of_nsys: Capture, of_session: Sites, why: str) -> None:
    joined = join(of_nsys, of_session)
    assert joined.calls is of_nsys.calls
    assert joined.notes[-1].code == "not-joined"
    assert why in joined.notes[-1].text


@given(
    shift=st.integers(-50 * 10**9, 50 * 10**9),
    delays=st.lists(st.integers(0, 3000), min_size=3, max_size=12),
)
def test_the_shift_of_the_clocks_is_recovered(shift: int, delays: list[int]) -> None:
    """Marks come late by some delay each: the shift is right within the spread of the delays."""
    number = len(delays)
    exact = session(num_steps=number)
    late = replace(exact, marks={3 + i: exact.marks[3 + i] + delay for i, delay in enumerate(delays)})
    joined = join(recording(shift_ns=shift, num_steps=number), late)
    off = joined.calls.start_ns[0] - (UNIX + 20)
    assert min(delays) <= off <= max(delays)
    assert (np.diff(joined.work.start_ns) == 1000).all()


def test_only_beside(tmp_path: Path) -> None:
    alone = recording()
    assert join_beside(alone, tmp_path / "run.sqlite") is alone
    write_sites(session(), tmp_path / "run.sites.json")
    assert join_beside(alone, tmp_path / "run.sqlite").sites == (SITE,)
    assert join_beside(alone, tmp_path / "run.nsys-rep").sites == (SITE,)
    assert join_beside(alone, tmp_path / "other.sqlite") is alone


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", BrokenTraceError),
        ("[]", NotATraceError),
        ('{"traceEvents": []}', NotATraceError),
        ('{"sites_version": 99}', UnsupportedTraceError),
        ('{"sites_version": 1}', BrokenTraceError),
        ('{"sites_version": 1, "columns": [], "capture": 3, "marks": [], "exit_code": 0}', BrokenTraceError),
    ],
)
def test_some_other_file(tmp_path: Path, text: str, error: type[Exception]) -> None:
    path = tmp_path / "run.sites.json"
    path.write_text(text)
    with pytest.raises(error, match=r"run\.sites\.json"):
        read_sites(path)


def test_no_environment_variable_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    write_sites(session(), tmp_path / "run.sites.json")
    document = json.loads((tmp_path / "run.sites.json").read_text())
    assert set(document) == {"sites_version", "exit_code", "marks", "capture", "columns"}
    assert "hunter2" not in json.dumps(document)


@pytest.mark.parametrize("value", [2**70, 2**62, 10**6, -9, "a", None])
@pytest.mark.parametrize("name", ["hits.start_ns.npy", "hits.site.npy", "hits.kind.npy", "ranges.name.npy"])
def test_columns_that_name_nothing_are_damage(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "run.sites.json"
    write_sites(session(), path)
    document = json.loads(path.read_text())
    document["columns"][name][1] = value
    path.write_text(json.dumps(document))
    if name == "hits.start_ns.npy" and value in (10**6, -9):
        assert read_sites(path).capture.hits.start_ns[1] == value  # a time, if an odd one
    else:
        with pytest.raises(BrokenTraceError, match="damaged sites file"):
            read_sites(path)
