"""The sandbox in a process of its own: workers, loggers, TensorBoard, Lightning, and what gets around."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perfdoctor.trial.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
_HEAD = """
import json, os, sys
from pathlib import Path
import torch
from perfdoctor.trial.sandbox import Sandbox
"""
_TAIL = """
print("RESULT" + json.dumps({"files": box.files, "kept": box.kept, "escaped": box.escaped, "scratch": box.scratch}))
"""


def _run(code: str, folder: Path) -> dict[str, Any]:
    script = folder.parent / f"{folder.name}_script.py"
    script.write_text(_HEAD + code + _TAIL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    assert "RESULT" in done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rsplit("RESULT", 1)[1])
    assert not os.path.exists(found["scratch"])
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    return folder


def test_forked_workers_write_into_the_same_place(home: Path) -> None:
    found = _run(
        """
class Images(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        Path(f"cache_{i}").write_text(str(i))
        return torch.full((4,), i)
with Sandbox() as box:
    loader = torch.utils.data.DataLoader(Images(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    total = sum(int(batch.sum()) for batch in loader)
    assert total == 4 * 28, total
    assert sorted(Path().glob("cache_*")) == [Path(f"cache_{i}") for i in range(8)]
loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=2, multiprocessing_context="fork")
assert sum(int(b) for b in loader) == 28  # workers still work afterwards
""",
        home,
    )
    assert len(found["files"]) == 8
    assert [p.name for p in home.iterdir()] == ["old.txt"]


def test_spawned_processes_are_said(home: Path) -> None:
    found = _run(
        """
import multiprocessing
if __name__ == "__main__":
    with Sandbox() as box:
        process = multiprocessing.get_context("spawn").Process(target=print, args=("hello",), name="Helper")
        process.start()
        process.join()
else:
    raise SystemExit
""",
        home,
    )
    assert any("Helper was spawned" in line for line in found["escaped"])


def test_processes_that_are_spawned_by_the_dozen_are_one_note(home: Path) -> None:
    found = _run(
        """
import multiprocessing
if __name__ == "__main__":
    with Sandbox() as box:
        for name in (None, None, None, "Helper"):
            process = multiprocessing.get_context("spawn").Process(target=print, args=("hello",), name=name)
            process.start()
            process.join()
else:
    raise SystemExit
""",
        home,
    )
    spawned = [line for line in found["escaped"] if "spawned" in line]
    assert len(spawned) == 2, spawned
    assert spawned[0] == "processes SpawnProcess-N were spawned, not forked: what they write is not redirected"
    assert spawned[1].startswith("the process Helper was spawned")


def test_programs_are_said(home: Path) -> None:
    found = _run(
        """
import subprocess
with Sandbox() as box:
    subprocess.run(["touch", "made_by_touch"], check=True)
    os.system("true")
""",
        home,
    )
    assert any("program touch" in line for line in found["escaped"])
    assert any("program true" in line for line in found["escaped"])


def test_a_compiler_that_torch_starts_is_not_told(home: Path) -> None:
    source = "import subprocess\nsubprocess.run(['true'], check=True)"
    with Sandbox() as box:
        exec(compile(source, os.path.join(os.path.dirname(torch.__file__), "compiling.py"), "exec"), {})
    assert not box.escaped
    with Sandbox() as box:
        exec(compile(source, str(home / "train.py"), "exec"), {})
    assert box.escaped == ("the program true was started: what it writes is not redirected",)


def test_what_gets_around_is_said_or_refused(home: Path) -> None:
    found = _run(
        """
import _io, posix
with Sandbox() as box:
    _io.open("around.txt", "w").close()
    for act in (lambda: _io.open("old.txt", "w"), lambda: posix.remove("old.txt"), lambda: posix.truncate("old.txt", 0),
                lambda: posix.rename("old.txt", "new.txt")):
        try:
            act()
        except PermissionError as error:
            assert "trial" in str(error) and "old.txt" in str(error)
        else:
            raise SystemExit("was let through")
posix.rename("old.txt", "new.txt")  # inert after the block
""",
        home,
    )
    assert any("around.txt" in line for line in found["escaped"])
    assert (home / "new.txt").read_text() == "old"


def test_a_file_that_was_open_before_is_said(home: Path) -> None:
    found = _run(
        """
log = open("log.txt", "w", buffering=1)
with Sandbox() as box:
    log.write("line\\n")
""",
        home,
    )
    assert any("log.txt" in line and "open before" in line for line in found["escaped"])


def test_loggers_cannot_connect(home: Path) -> None:
    (home.parent / "wandb").mkdir()
    (home.parent / "wandb" / "__init__.py").write_text(
        "import socket\ndef connect(address):\n    with socket.create_connection(address): pass\n"
    )
    found = _run(
        """
import socket
server = socket.create_server(("127.0.0.1", 0))
address = server.getsockname()
import wandb
with Sandbox() as box:
    try:
        wandb.connect(address)
    except ConnectionRefusedError:
        pass
    else:
        raise SystemExit("was let through")
    socket.create_connection(address).close()  # a data set that streams may
wandb.connect(address)
""",
        home,
    )
    assert any("wandb tried to connect" in line for line in found["escaped"])


def test_tensorboard_writers_left_open_leave_nothing(home: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    (home / "runs").mkdir()
    found = _run(
        """
with Sandbox() as box:
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter("runs")
    writer.add_scalar("loss", 1.0, 1)
del writer
""",
        home,
    )
    assert any("events.out.tfevents" in path for path in found["files"])
    assert sorted(p.name for p in home.rglob("*")) == ["old.txt", "runs"]


def test_lightning_checkpoints_are_redirected(home: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    found = _run(
        """
import warnings, logging
warnings.simplefilter("ignore")
import pytorch_lightning as pl
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, _):
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
with Sandbox() as box:
    saver = pl.callbacks.ModelCheckpoint(dirpath="ckpt", every_n_train_steps=1, save_top_k=1, monitor="loss",
                                         save_last=True)
    trainer = pl.Trainer(max_steps=4, log_every_n_steps=1, logger=pl.loggers.CSVLogger("logs"), callbacks=[saver],
                         accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2))
    assert Path("ckpt/last.ckpt").exists() and torch.load("ckpt/last.ckpt", weights_only=False)["global_step"] == 4
""",
        home,
    )
    assert any(path.endswith("ckpt/last.ckpt") for path in found["files"])
    assert any(path.endswith("metrics.csv") for path in found["files"])
    assert [p.name for p in home.iterdir()] == ["old.txt"]


def test_compiled_code_runs_inside(home: Path) -> None:
    found = _run(
        """
with Sandbox() as box:
    run = torch.compile(lambda x: (x * 2).relu() + 1, backend="aot_eager")
    assert run(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
""",
        home,
    )
    assert found["files"] == []


def test_a_killed_worker_and_an_unwinding_fork_leave_the_scratch_folder(home: Path) -> None:
    found = _run(
        """
with Sandbox() as box:
    Path("mine.txt").write_text("mine")
    child = os.fork()
    if child == 0:
        raise SystemExit(0)  # unwinds through the block
    os.waitpid(child, 0)
    assert Path("mine.txt").read_text() == "mine"
""",
        home,
    )
    assert found["files"] == [str(home / "mine.txt")]


def test_the_log_of_whoever_started_us_is_no_escape(tmp_path: Path) -> None:
    """A runner above us, its output in a file; we write elsewhere, and have that file open beside our own streams."""
    code = (
        "import os, sys\n"
        "from perfdoctor.trial.sandbox import Sandbox\n"
        "kept = os.dup(1); os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
        "with Sandbox() as box:\n"
        "    os.write(kept, b'a line of the runner\\n')\n"
        "sys.exit(len(box.escaped))\n"
    )
    with (tmp_path / "log.txt").open("w") as log:
        command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}; code=$?; exit $code"
        done = subprocess.run(
            ["sh", "-c", command], stdout=log, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=False
        )
    assert done.returncode == 0
    assert (tmp_path / "log.txt").read_text() == "a line of the runner\n"
