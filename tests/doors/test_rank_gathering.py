"""Recordings of several ranks brought together: by folder and by store, with ranks that are late, dead or left out."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfdoctor
from perfdoctor.doors.rank_gathering import (
    NOT_SELECTED,
    Exchange,
    FolderExchange,
    Gathering,
    RankGroup,
    StoreExchange,
    as_bytes,
    from_bytes,
    join_ranks,
)
from perfdoctor.errors import UsageError
from perfdoctor.record.capture import Capture, Environment, Steps

SCRIPT = Path(__file__).with_name("rank_script.py")
ROOT = Path(__file__).parents[2]


def recording(rank: int, num_steps: int = 3) -> Capture:
    rows = [(i * 1000, (i + 1) * 1000, i, 1, -1, 1, 0) for i in range(num_steps)]
    return Capture(source="session", steps=Steps.from_rows(rows), environment=Environment(rank=rank, world_size=3))


@pytest.fixture(params=["folder", "store"])
def exchange(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Exchange]:
    if request.param == "folder":
        yield FolderExchange(tmp_path / "ranks")
    else:
        yield StoreExchange(torch.distributed.HashStore())


def group(exchange: Exchange, rank: int, **given: Any) -> RankGroup:
    return RankGroup(**{"rank": rank, "world_size": 3, "exchange": exchange, "timeout_s": 0.3, **given})


def test_all_ranks_arrive(exchange: Exchange) -> None:
    for rank in (2, 1):
        group(exchange, rank).publish(recording(rank, num_steps=rank))
    gathered = group(exchange, 0).collect(recording(0))
    assert [capture.environment.rank for capture in gathered.captures] == [0, 1, 2]
    assert [len(capture.steps) for capture in gathered.captures] == [3, 1, 2]
    assert not gathered.missing


def test_a_large_recording_survives_the_pieces(exchange: Exchange) -> None:
    content = np.random.default_rng(0).bytes(3_500_000)
    exchange.put("large", content)
    assert exchange.take("large") == content
    exchange.put("none", b"")
    assert exchange.take("none") == b""
    assert exchange.take("never put") is None


def test_a_dead_rank_is_named_at_once(exchange: Exchange) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    exchange.put("process1", f"{socket.gethostname()} {process.pid}".encode())
    group(exchange, 2).publish(None, "out of memory")
    gathered = group(exchange, 0, timeout_s=600).collect(recording(0))  # a wait of ten minutes would be seen
    assert gathered.missing == {1: "its process ended without handing in a recording", 2: "out of memory"}
    assert len(gathered.captures) == 1


def test_what_a_rank_handed_in_before_it_died_counts(exchange: Exchange) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    exchange.put("process1", f"{socket.gethostname()} {process.pid}".encode())
    group(exchange, 1).publish(recording(1))
    gathered = group(exchange, 0, world_size=2).collect(recording(0))
    assert [capture.environment.rank for capture in gathered.captures] == [0, 1]


def test_a_rank_that_hangs_is_waited_for_until_the_timeout(exchange: Exchange) -> None:
    other = group(exchange, 1)
    other.announce()  # this process: alive
    ticks = iter(range(1000))
    gathered = group(exchange, 0, world_size=2, timeout_s=3, clock=lambda: float(next(ticks))).collect(recording(0))
    assert list(gathered.missing) == [1]
    assert "no recording came within 3 s" in gathered.missing[1]
    assert next(ticks) == 4  # 0 at the start, then looks at 1, 2 and 3 s


def test_a_rank_that_never_began_to_watch_is_not_waited_for(exchange: Exchange) -> None:
    ticks = iter(range(1000))
    gathered = group(exchange, 0, world_size=2, timeout_s=500, clock=lambda: float(next(ticks))).collect(recording(0))
    assert gathered.missing == {1: "it never began to watch"}
    assert next(ticks) < 10


def test_ranks_that_do_not_record_say_so(exchange: Exchange) -> None:
    group(exchange, 1, ranks=(2,)).publish(recording(1))
    group(exchange, 2, ranks=(2,)).publish(recording(2))
    gathered = group(exchange, 0, ranks=(2,)).collect(recording(0))
    assert [capture.environment.rank for capture in gathered.captures] == [2]
    assert gathered.missing == {0: NOT_SELECTED, 1: NOT_SELECTED}


def test_a_damaged_recording_is_named(exchange: Exchange) -> None:
    exchange.put("recording1", b"C" + as_bytes(recording(1))[:-40])
    gathered = group(exchange, 0, world_size=2).collect(recording(0))
    assert "could not be fetched" in gathered.missing[1]
    assert len(gathered.captures) == 1


def test_a_capture_is_the_same_after_the_journey() -> None:
    before = recording(1)
    after = from_bytes(as_bytes(before), 1)
    assert after.environment == before.environment
    assert (after.steps.end_ns == before.steps.end_ns).all()
    assert after.path == ""


def test_a_folder_leaves_nothing_half_written(tmp_path: Path) -> None:
    exchange = FolderExchange(tmp_path)
    exchange.put("recording1", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["recording1"]


def test_a_store_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    exchange = FolderExchange(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    other = group(exchange, 1)
    other.publish(recording(1))
    assert "could not reach rank 0" in other.problem


def test_a_recording_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering()
    exchange = FolderExchange(tmp_path)
    monkeypatch.setattr(gathering, "_group", group(exchange, 1))

    def broken() -> Capture:
        raise RuntimeError("CUDA error: device-side assert")

    gathering.hand_in(broken)
    gathered = group(exchange, 0, world_size=2).collect(recording(0))
    assert "device-side assert" in gathered.missing[1]


def test_a_process_on_its_own_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_ranks() is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_ranks() is None


@pytest.mark.parametrize("ranks", ["0", 3, [-1], [True], [0.5], ["0"]])
def test_what_are_no_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(UsageError, match="ranks="):
        perfdoctor.watch(ranks=ranks)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "60", True, None])
def test_a_wait_without_an_end_is_refused(seconds: Any) -> None:
    with pytest.raises(UsageError, match="timeout"):
        perfdoctor.watch(rank_timeout_s=seconds)


def test_a_rank_that_the_run_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="the ranks 0 to 1, no 2"), perfdoctor.watch(ranks=[0, 2]):
        pass
    with perfdoctor.watch(ranks=range(2)):  # the session before has let go
        pass


def test_ranks_whose_store_cannot_be_reached_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert join_ranks() is None


@pytest.mark.parametrize("every_n_steps", [None, 50])
def test_a_rank_that_does_not_record_is_left_alone(monkeypatch: pytest.MonkeyPatch, every_n_steps: int | None) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    before = (torch.save, torch.autograd.backward, list(gc.callbacks))
    with perfdoctor.watch(warmup=1, active=2, ranks=[1], every_n_steps=every_n_steps) as session:
        assert (torch.save, torch.autograd.backward, list(gc.callbacks)) == before
        for batch in session.batches([1, 2, 3]):
            assert batch
            session.step()
    assert len(session.capture.steps) == 0
    assert session.diagnosis().step is None


# ---- two real processes over gloo ----

_FOREIGN = ("TORCHELASTIC", "MASTER", "RANK")


def torchrun(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def test_a_script_on_two_ranks_gives_one_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--warmup", "2", "--active", "4", "--format", "json", "-o", str(report))
    done = torchrun("-m", "perfdoctor", "run", *options, str(SCRIPT), "slow")
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    assert not list(tmp_path.glob("*rank1*"))


def test_a_rank_that_dies_is_named_by_rank_0(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--warmup", "2", "--active", "8", "--format", "json", "-o", str(report))
    done = torchrun("-m", "perfdoctor", "run", *options, str(SCRIPT), "die")
    assert done.returncode != 0
    document = json.loads(report.read_text())
    assert any("rank 1: its process ended" in note["text"] for note in document["notes"])


def test_sessions_on_two_ranks_find_the_late_one(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = torchrun(str(SCRIPT), "slow", str(report))
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    notes = {row["rank"]: row["note"] for row in document["ranks"]}
    assert notes[1].startswith("late: holds the others up")
    assert notes[0].endswith("for rank 1")
    data = [finding for finding in document["findings"] if finding["code"] == "data-wait"]
    assert [finding["title"].endswith("only on rank 1") for finding in data] == [True]
    assert any(line.startswith("Clocks aligned on the ends of") for line in document["advice"])


def test_a_session_records_on_the_chosen_ranks_only(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = torchrun(str(SCRIPT), "slow", str(report), "1")
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    assert [row["rank"] for row in document["ranks"]] == [1]
    assert any(note["text"] == f"rank 0: {NOT_SELECTED}" for note in document["notes"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices for NCCL")
def test_two_gpus_over_nccl_share_one_clock(tmp_path: Path) -> None:
    script = tmp_path / "nccl.py"
    script.write_text(
        SCRIPT.read_text()
        .replace('init_process_group("gloo")', 'init_process_group("nccl"); torch.cuda.set_device(dist.get_rank())')
        .replace("torch.nn.Linear(16, 16)", "torch.nn.Linear(16, 16, device=f'cuda:{dist.get_rank()}')")
        .replace("model(batch)", "model(batch.to(f'cuda:{dist.get_rank()}', non_blocking=True))")
        .replace("profiled=True, ", "")
    )
    report = tmp_path / "report.json"
    done = torchrun(str(script), "slow", str(report))
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    notes = {row["rank"]: row["note"] for row in document["ranks"]}
    assert notes[1].startswith("late: holds the others up"), document["advice"]
    assert all(row["step_ms"] > 15 for row in document["ranks"])
