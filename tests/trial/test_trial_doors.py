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
    assert "a bound: at most" in done.stdout
    assert not (tmp_path / "notes.txt").exists()


def test_a_script_that_ends_first_gets_what_was_measured(tmp_path: Path) -> None:
    done = run_trial(tmp_path, SLOW_LOADER, "7")  # 42 batches: watched, and no more... the loader is begun again
    assert done.returncode == 0, done.stderr
    assert "a bound: at most" in done.stdout


def test_a_script_too_short_to_be_watched_is_an_error(tmp_path: Path) -> None:
    done = run_trial(tmp_path, SLOW_LOADER, "1")
    assert done.returncode == 2
    assert "ended before the trial began" in done.stderr


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise KeyError('vocabulary')", 2, "failed (exit code 1) before the trial began"),
        ("sys.exit('no data')", 2, "failed (exit code 1) before the trial began"),
        ("sys.exit(3)", 2, "failed (exit code 3) before the trial began"),
        ("input()", 2, "failed (exit code 1) before the trial began"),
        ("sys.exit()", 2, "ended before the trial began"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_a_script_that_fails_first_is_not_called_too_short(tmp_path: Path, end: str, code: int, said: str) -> None:
    source = SLOW_LOADER.replace('print("the end")', end)
    done = subprocess.run(
        [sys.executable, "-m", "perfdoctor", "trial", "train.py", "1"],
        cwd=_script_in(tmp_path, source),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code
    assert said in done.stderr.splitlines()[-1]
    assert not done.stdout
    assert ("let it run longer" in done.stderr) == (end == "sys.exit()")


def test_a_script_that_fails_over_our_options_is_told_where_they_stand(tmp_path: Path) -> None:
    _script_in(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = subprocess.run(
        [sys.executable, "-m", "perfdoctor", "trial", "train.py", "--device", "emulated"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "failed (exit code 2) before the trial began" in last
    assert last.endswith("stands in front of it: perfdoctor trial --device emulated train.py")


def test_a_script_that_catches_everything_is_ended_at_the_second_time(tmp_path: Path) -> None:
    """What was measured is reported."""
    loop = SLOW_LOADER[SLOW_LOADER.index("for epoch") :]
    body = "".join(f"        {line}\n" for line in loop.strip().splitlines()[:-1])
    source = SLOW_LOADER.replace(
        loop,
        f"for attempt in range(10):\n    try:\n{body}    except:\n        print('caught', attempt)\nprint('the end')\n",
    )
    done = run_trial(tmp_path, source, "100000", options=("--seconds", "2"))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "caught" in line] == ["caught 0"]
    assert "the end" not in done.stdout.splitlines()
    assert "a bound: at most" in done.stdout


def _script_in(folder: Path, source: str) -> Path:
    (folder / "train.py").write_text(source)
    return folder


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


def test_several_ranks_are_known_when_the_trial_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with perfdoctor.watch() as session:
        trial = session.trial()
        assert trial.over
        assert not trial.measured
    with pytest.raises(perfdoctor.TrialRefused, match="runs on 4 ranks"):
        trial.report()


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


STREAM = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8)

model = torch.nn.Linear(8, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for x in DataLoader(Stream(), batch_size=4):
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
"""


def test_a_stream_is_said_to_have_advanced(tmp_path: Path) -> None:
    document = document_of(tmp_path, STREAM)
    notes = [note for note in document["trial"]["notes"] if "reads a stream" in note]
    assert len(notes) == 1, document["trial"]["notes"]
    taken = int(notes[0].partition(" took ")[2].partition(" ")[0])
    assert 4 <= taken <= document["trial"]["num_steps"] + 1


def test_a_data_set_that_is_indexed_is_no_stream(tmp_path: Path) -> None:
    document = document_of(tmp_path, SLOW_LOADER, "400")
    assert not [note for note in document["trial"]["notes"] if "stream" in note]


RANKS = """
import sys, torch, torch.distributed as dist
open("began", "w")
dist.init_process_group("gloo", INIT)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100000):
    model(torch.randn(4, 8)).square().mean().backward()
    opt.step()
    opt.zero_grad()
"""
OWN_RANKS = 'init_method="tcp://127.0.0.1:" + sys.argv[1], rank=int(sys.argv[2]), world_size=2'


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _refused_ranks(folder: Path, words: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """What each of the processes says; all of them end by themselves, refused."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "perfdoctor", "trial", "--seconds", "8", "train.py", *more],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for more, environment in zip(words, environments, strict=True)
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [2, 2], said
        return said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_two_ranks_that_a_launcher_started_are_refused_before_the_script_begins(tmp_path: Path) -> None:
    source = RANKS.replace('open("began", "w")', 'print("it began", file=sys.stderr)')
    (tmp_path / "train.py").write_text(source.replace(", INIT", ""))
    port = _free_port()
    environments = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(2)
    ]
    for errors in _refused_ranks(tmp_path, [[], []], environments):
        assert "runs on 2 ranks" in errors
        assert "without torchrun" in errors
        assert "it began" not in errors


def test_two_ranks_that_the_script_makes_itself_are_refused_on_both_and_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS.replace("INIT", OWN_RANKS))
    port = _free_port()
    for errors in _refused_ranks(tmp_path, [[port, "0"], [port, "1"]], [{}, {}]):
        assert "runs on 2 ranks" in errors
    assert os.listdir(tmp_path) == ["train.py"]


def test_one_rank_of_a_launcher_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_LOADER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    words = [sys.executable, "-m", "perfdoctor", "trial", "--seconds", "2", "train.py", "400"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Trial of" in done.stdout
