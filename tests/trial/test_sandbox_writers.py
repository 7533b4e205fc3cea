"""Writers that open files from C, and those of the standard library: led into the sandbox, or said by name."""

from __future__ import annotations

import ctypes
import gzip
import json
import logging.handlers
import mmap
import os
import shelve
import shutil
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from written_files import database, tree

from perfdoctor.trial.sandbox import Sandbox
from perfdoctor.trial.sandbox_survey import Survey


def scripted(path: str) -> None:
    torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1)).save(path)
    assert torch.jit.load(path)(torch.ones(2, 1)).shape == (2, 1)


def scripted_by_torch(path: str) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1)), path)
    assert torch.jit.load(path)(torch.ones(2, 1)).shape == (2, 1)


def trace(path: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(2) + 1
    profile.export_chrome_trace(path)
    assert json.loads(Path(path).read_text())["traceEvents"]


def trace_observer(path: str) -> None:
    observer = torch.profiler.ExecutionTraceObserver().register_callback(path)
    observer.start()
    torch.ones(2) + 1
    observer.stop()
    observer.unregister_callback()


def mapped(path: str) -> None:
    torch.UntypedStorage.from_file(path, True, 16)[0] = 1
    assert torch.from_file(path, True, 16, dtype=torch.uint8)[0] == 1


def checkpoint(path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(2)}, checkpoint_id=path)
    found = {"a": torch.zeros(2)}
    dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["a"], torch.ones(2))


def package(path: str) -> None:
    with torch.package.PackageExporter(path) as exporter:
        exporter.save_pickle("a", "b", 1)


def numpy_text(path: str) -> None:
    np.savetxt(path, np.ones(2))
    assert np.loadtxt(path).tolist() == [1.0, 1.0]


def numpy_archive(path: str) -> None:
    with open(path, "wb") as file:
        np.savez_compressed(file, a=np.ones(2))
    with np.load(path) as found:
        assert found["a"].tolist() == [1.0, 1.0]


def hdf5(path: str) -> None:
    h5py: Any = pytest.importorskip("h5py", reason="h5py, the writer of HDF5 files, is not installed")
    with h5py.File(path, "w") as file:
        file["a"] = [1, 2]
    with h5py.File(path, "a") as file:
        file["b"] = [3]
    with h5py.File(path, "r") as file:
        assert sorted(file) == ["a", "b"]
    with pytest.raises(FileExistsError):
        h5py.File(path, "x")
    with pytest.raises(FileNotFoundError):
        h5py.File(f"{path}.none", "r+")


def shelf(path: str) -> None:
    with shelve.open(path) as found:
        found["a"] = 1
    with shelve.open(path) as found:
        assert found["a"] == 1


def archive(path: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", "b")
    assert zipfile.ZipFile(path).namelist() == ["a"]


def tar(path: str) -> None:
    with tarfile.open(path, "w:gz") as file:
        file.add("old.txt")


def rotated(path: str) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=10, backupCount=2)
    for _ in range(5):
        handler.emit(logging.LogRecord("a", logging.INFO, "f", 1, "more than ten", None, None))
    handler.close()
    assert Path(f"{path}.2").exists()


def memory_map(path: str) -> None:
    with open(path, "wb+") as file:
        file.truncate(10)
        with mmap.mmap(file.fileno(), 10) as view:
            view[:2] = b"ab"
    with open("old.txt", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:1] = b"X"
    assert Path("old.txt").read_text() == "Xld"


def copied_tree(path: str) -> None:
    shutil.copytree("sub", path)
    assert (Path(path) / "a.txt").read_text() == "a"


def packed(path: str) -> None:
    with gzip.open(path, "wb") as file:
        file.write(b"a")


def renamed_out(path: str) -> None:
    os.renames("sub/a.txt", "other/b.txt")
    assert Path("other/b.txt").read_text() == "a"
    assert not Path("sub").exists()
    os.rename("other/b.txt", path)


def events(path: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(path)
    writer.add_scalar("loss", 1.0, 1)
    writer.close()
    assert len(os.listdir(path)) == 1


WAYS: tuple[Callable[[str], None], ...] = (
    scripted, scripted_by_torch, trace, trace_observer, mapped, checkpoint, package, numpy_text, numpy_archive, hdf5,
    database, shelf, archive, tar, rotated, memory_map, copied_tree, packed, renamed_out, events,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # TorchScript's, torch.package's
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_writer_works_inside_and_leaves_nothing(home: Path, way: Callable[[str], None]) -> None:
    before = tree(home)
    with Sandbox() as box:
        way(str(home / "new"))
        assert list(home.glob("new*"))
    assert tree(home) == before
    assert [path for path in box.files if path.startswith(str(home / "new"))]
    assert not [line for line in box.escaped if str(home) in line]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", [scripted, trace, database, numpy_text], ids=lambda way: way.__name__)
def test_a_file_of_the_users_is_not_overwritten(home: Path, way: Callable[[str], None]) -> None:
    target = home / "mine"
    if way is database:
        connection = sqlite3.connect(target)
        connection.execute("create table older(a)")
        connection.commit()
        connection.close()
    else:
        target.write_bytes(b"mine")
    before = tree(home)
    with Sandbox() as box:
        way(str(target))
    assert tree(home) == before
    assert box.kept == (str(target),)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_writers_are_the_real_ones_again(home: Path) -> None:
    owners = (torch._C.ScriptModule, torch._C.ScriptFunction, torch._C._autograd._ProfilerResult)
    names = [vars(owner).get("save") for owner in owners]
    connect, table = sqlite3.connect, dict(np.lib._datasource._file_openers._file_openers)
    with Sandbox():
        assert sqlite3.connect is not connect
    assert [vars(owner).get("save") for owner in owners] == names
    assert sqlite3.connect is connect
    assert np.lib._datasource._file_openers._file_openers == {**np.lib._datasource._file_openers._file_openers, **table}
    scripted(str(home / "real.pt"))
    assert (home / "real.pt").stat().st_size > 0


def test_the_environment_is_as_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "before")
    monkeypatch.setenv("TAKEN", "before")
    before = dict(os.environ)
    with Sandbox():
        os.environ["THERE"] = "other"
        os.environ["MADE"] = "1"
        del os.environ["TAKEN"]
    assert dict(os.environ) == before


def _by_c(path: Path, flags: int) -> None:
    system = ctypes.CDLL(None)
    number = system.open(os.fsencode(path), flags, 0o644)
    assert number >= 0
    assert system.write(number, b"by C", 4) == 4
    system.close(number)


def test_what_c_code_does_in_the_users_folder_is_said_by_name(home: Path) -> None:
    with Sandbox() as box:
        _by_c(home / "made.bin", os.O_WRONLY | os.O_CREAT)
        _by_c(home / "old.txt", os.O_WRONLY | os.O_TRUNC)
        assert ctypes.CDLL(None).unlink(os.fsencode(home / "sub" / "a.txt")) == 0
        Path("quiet.txt").write_text("led elsewhere")
    (said,) = [line for line in box.escaped if str(home) in line]  # a log of pytest's own output may have grown
    names = said.partition(":")[0].split(", ")
    assert names == [str(home / "made.bin"), str(home / "old.txt"), str(home / "sub" / "a.txt")]
    assert "were changed by something that the sandbox does not see" in said


def test_a_folder_where_much_changes_gives_one_note(home: Path) -> None:
    with Sandbox() as box:
        for number in range(8):
            _by_c(home / f"{number}.bin", os.O_WRONLY | os.O_CREAT)
    (said,) = [line for line in box.escaped if str(home) in line]  # a log of pytest's own output may have grown
    assert said.startswith(", ".join(str(home / f"{number}.bin") for number in range(5)) + " and 3 more: were changed")


def test_a_database_attached_by_sql_is_said_by_name(home: Path) -> None:
    with Sandbox() as box:
        connection = sqlite3.connect(":memory:")
        connection.execute("attach database 'side.db' as side")
        connection.execute("create table side.t(a)")
        connection.commit()
        connection.close()
    assert any("side.db" in line for line in box.escaped)


def test_a_survey_passes_over_what_may_change_and_says_where_it_gave_up(home: Path) -> None:
    (home / "__pycache__").mkdir()
    survey = Survey(str(home), lambda path: path.endswith("through"))
    for name in ("__pycache__/x.pyc", "through", "new"):
        (home / name).write_text("1")
    assert survey.complete
    assert survey.changes() == [str(home / "new")]
    os.remove(home / "new")
    assert survey.changes() == []
