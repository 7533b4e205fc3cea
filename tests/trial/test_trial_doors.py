"""The doors: `perfdoctor trial` on scripts with CPU-only suspects, and `session.trial()` in a loop."""

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch.utils.data import DataLoader, dataloader

import perfdoctor
from perfdoctor.report.json import schema

ROOT = Path(__file__).parents[2]
SLOW_LOADER = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.randn(8), i

model = torch.nn.Linear(8, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
open("notes.txt", "w").write("mine")
for epoch in range(int(sys.argv[1])):
    for x, i in DataLoader(Slow(), batch_size=4):
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.002)
print("the end")
"""
GARBAGE = """
import gc, torch
model = torch.nn.Linear(8, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
kept = [[[i] for i in range(100)] for _ in range(3000)]
gc.set_threshold(200, 2, 2)
while True:
    loss = model(torch.randn(4, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    rows = [[i] for i in range(1000)]
"""


def run_trial(
    folder: Path, source: str, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source)
    words = [sys.executable, "-m", "perfdoctor", "trial", "--seconds", "8", *options, "train.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def document_of(folder: Path, source: str, *arguments: str) -> dict[str, Any]:
    done = run_trial(folder, source, *arguments, options=("--format", "json", "-o", "out.json"))
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads((folder / "out.json").read_text())
    jsonschema.validate(document, schema())
    return document


def test_a_slow_loader_gives_back_what_it_sleeps(tmp_path: Path) -> None:
    document = document_of(tmp_path, SLOW_LOADER, "100000")
    arm = next(arm for arm in document["trial"]["arms"] if arm["code"] == "data-wait")
    assert arm["saving"]["low_ms"] > 4  # four samples of a millisecond each
    assert arm["saving"]["high_ms"] < document["trial"]["base"]["median_ms"]
    assert document["trial"]["complete"]
    assert [row["code"] for row in document["trial"]["order"]] == ["data-wait"]
    found = next(row for row in document["findings"] if row["code"] == "data-wait")
    assert found["measured_saving"] == arm["saving"]


def test_its_files_are_thrown_away_and_listed(tmp_path: Path) -> None:
    done = run_trial(tmp_path, SLOW_LOADER, "100000")
    assert done.returncode == 0
    assert "notes.txt" in done.stdout
    assert "gives back" in done.stdout
    assert not (tmp_path / "notes.txt").exists()


def test_a_script_that_ends_first_gets_what_was_measured(tmp_path: Path) -> None:
    done = run_trial(tmp_path, SLOW_LOADER, "7")  # 42 batches: watched, and no more... the loader is begun again
    assert done.returncode == 0, done.stderr
    assert "gives back" in done.stdout


def test_a_script_too_short_to_be_watched_is_an_error(tmp_path: Path) -> None:
    done = run_trial(tmp_path, SLOW_LOADER, "1")
    assert done.returncode == 2
    assert "ended before the trial began" in done.stderr


def test_garbage_collections_give_back_their_mean(tmp_path: Path) -> None:
    document = document_of(tmp_path, GARBAGE)
    arm = next(arm for arm in document["trial"]["arms"] if arm["code"] == "garbage-collection")
    assert arm["saving"]["low_ms"] > 0


def test_a_session_tries_its_own_loop_and_puts_everything_back() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    loader = [torch.randn(4, 8) for _ in range(10)]
    next_before, iter_before = dataloader._BaseDataLoaderIter.__next__, DataLoader.__iter__
    item_before = vars(torch.Tensor).get("item")
    at_start: list[Any] = []
    steps = 0
    with perfdoctor.watch(warmup=2, active=3) as session:
        trial = session.trial(steps=60, model=model)
        for _ in range(10**6):
            for batch in session.batches(loader):
                if trial.running and not at_start:
                    at_start.append(({k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()))
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
            if trial.over:
                break
    state, generator = at_start[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(torch.get_rng_state(), generator)
    assert dataloader._BaseDataLoaderIter.__next__ is next_before
    assert DataLoader.__iter__ is iter_before
    assert vars(torch.Tensor).get("item") is item_before
    assert gc.isenabled()
    assert "Trial of" in str(trial.report())
    assert session.diagnosis().step is not None


def test_a_trial_belongs_into_the_block() -> None:
    session = perfdoctor.watch()
    with pytest.raises(perfdoctor.SessionError, match="belongs at the start"):
        session.trial()
    with session:
        trial = session.trial()
        with pytest.raises(perfdoctor.SessionError, match="once"):
            session.trial()
    with pytest.raises(perfdoctor.SessionError, match="ended before the trial began"):
        trial.report()


RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100000):
    model(torch.randn(4, 8)).square().mean().backward()
    opt.step()
    opt.zero_grad()
"""


def test_two_ranks_are_refused_on_both_and_nobody_is_left_waiting(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "perfdoctor", "trial", "--seconds", "8", "train.py"]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        )
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert rank.returncode == 2
            assert b"runs on 2 ranks" in errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
