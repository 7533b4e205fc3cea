"""The sandbox in a loop: paths, folders, errors and modes are as without it, and all is put back afterwards."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from written_files import tree

from perfdoctor.errors import TrialRefused
from perfdoctor.trial.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("no_sandbox_remains")


def test_a_moved_folder_keeps_its_files(home: Path) -> None:
    with Sandbox():
        Path("sub/b.txt").write_text("b")
        os.rename("sub", "renamed")
        assert {p.name: p.read_text() for p in Path("renamed").iterdir()} == {"a.txt": "a", "b.txt": "b"}
        assert not Path("sub").exists()


def test_a_deleted_folder_comes_back_empty(home: Path) -> None:
    with Sandbox():
        shutil.rmtree("sub")
        assert not Path("sub/a.txt").exists()
        with pytest.raises(FileNotFoundError):
            Path("sub/b.txt").write_text("b")
        os.makedirs("sub/deeper")
        assert os.listdir("sub") == ["deeper"]
        Path("sub/a.txt").write_text("new")
        assert Path("sub/a.txt").read_text() == "new"
        assert [str(p) for p in Path("sub").rglob("*.txt")] == ["sub/a.txt"]
    assert Path("sub/a.txt").read_text() == "a"


def test_the_errors_are_those_of_the_real_functions(home: Path) -> None:
    with Sandbox():
        for error, act in (
            (FileExistsError, lambda: os.mkdir("sub")),
            (FileExistsError, lambda: os.open("old.txt", os.O_CREAT | os.O_EXCL)),
            (OSError, lambda: os.rmdir("sub")),
            (FileNotFoundError, lambda: os.remove("none")),
            (FileNotFoundError, lambda: os.rename("none", "other")),
            (FileNotFoundError, lambda: Path("none/file").write_text("x")),
            (FileNotFoundError, lambda: os.listdir("none")),
            (NotADirectoryError, lambda: os.listdir("old.txt")),
            (IsADirectoryError, lambda: Path("sub").write_text("x")),
            (IsADirectoryError, lambda: os.rename("old.txt", "sub")),
            (NotADirectoryError, lambda: os.rmdir("old.txt")),
        ):
            with pytest.raises(error):
                act()  # type: ignore[no-untyped-call]
    os.makedirs("sub", exist_ok=True)


def test_truncation_and_modes(home: Path) -> None:
    with Sandbox():
        os.truncate("old.txt", 1)
        os.chmod("log.txt", 0o600)
        assert os.path.getsize("old.txt") == 1
        assert os.stat("log.txt").st_mode & 0o777 == 0o600
    assert os.path.getsize("old.txt") == 3


def test_a_link_to_a_redirected_file_leads_to_the_copy(home: Path) -> None:
    os.symlink("old.txt", "link")
    with Sandbox():
        Path("link").write_text("new")
        assert Path("old.txt").read_text() == "new"
        assert Path("link").read_text() == "new"
    assert Path("old.txt").read_text() == "old"


def test_walk_and_glob_see_both(home: Path) -> None:
    with Sandbox():
        Path("sub/b.txt").write_text("b")
        os.remove("log.txt")
        assert {(Path(f).name, *sorted(names)) for f, _, names in os.walk(".")} == {
            ("", "old.txt"),
            ("sub", "a.txt", "b.txt"),
        }
        assert sorted(Path().glob("**/*.txt")) == [Path("old.txt"), Path("sub/a.txt"), Path("sub/b.txt")]
        with os.scandir("sub") as entries:
            found = {e.name: (e.is_file(), e.is_dir(), e.stat().st_size, Path(e).read_text()) for e in entries}
        assert found == {"a.txt": (True, False, 1, "a"), "b.txt": (True, False, 1, "b")}


def test_temporary_files_and_devices_work(home: Path) -> None:
    with Sandbox() as box:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "a").write_text("a")
        assert not Path(folder).exists()
        with tempfile.NamedTemporaryFile(dir=".") as file:
            file.write(b"1")
        with tempfile.TemporaryFile(dir=".") as file:
            file.write(b"1")
        with open(os.devnull, "w") as null:
            null.write("nothing")
    assert box.files == ()
    assert tempfile.gettempdir() != box.scratch


def test_changed_directory_comes_back(home: Path) -> None:
    with Sandbox():
        os.makedirs("runs/1")
        os.chdir("runs/1")
        Path("here.txt").write_text("x")
        assert Path("here.txt").read_text() == "x"
    assert Path.cwd() == home
    assert not Path("runs").exists()


NAMES = ("open", "stat", "lstat", "remove", "unlink", "rename", "replace", "mkdir", "rmdir", "listdir", "scandir")


class _Odd(BaseException):
    pass


def _append(path: Path) -> None:
    with open(path, "a") as file:
        file.write("x")


def _first_bytes(path: str) -> bytes:
    number = os.open(path, os.O_RDONLY)
    try:
        return os.read(number, 9)
    finally:
        os.close(number)


_FROM_A_NEW_FOLDER: dict[str, Callable[[], object]] = {
    "where it is": lambda: Path(os.getcwd()).parts[-3:-1] == Path.cwd().parts[-3:-1] and os.getcwdb().endswith(b"a/b"),
    "reads": lambda: Path("../../../old.txt").read_text(),
    "opens a descriptor": lambda: _first_bytes("../../../old.txt"),
    "reads by what it calls its folder": lambda: Path(os.getcwd(), "../../../log.txt").read_text(),
    "looks": lambda: (os.path.exists("../../../old.txt"), os.path.isdir("../../../sub"), os.path.exists("old.txt")),
    "measures": lambda: os.stat("../../../old.txt").st_size,
    "lists": lambda: sorted(os.listdir("../../..")),
    "lists its own": lambda: os.listdir(),
    "scans": lambda: sorted((each.name, each.is_dir()) for each in os.scandir("../../..")),
    "finds": lambda: sorted(str(path) for path in Path("../../..").glob("**/*.txt")),
    "resolves": lambda: Path("../../../sub").resolve().name,
    "appends": lambda: (_append(Path("../../../log.txt")), Path("../../../log.txt").read_text()),
    "writes": lambda: (Path("here.txt").write_text("h"), Path("../there.txt").write_text("t"), os.listdir("..")),
    "renames": lambda: (os.rename("../../../old.txt", "new.txt"), os.listdir(), os.path.exists("../../../old.txt")),
    "removes": lambda: (os.remove("../../../old.txt"), sorted(os.listdir("../../.."))),
    "removes a folder": lambda: (shutil.rmtree("../../../sub"), os.path.exists("../../../sub/a.txt")),
    "makes": lambda: (os.makedirs("../../../sub/deep"), sorted(os.listdir("../../../sub"))),
    "goes home": lambda: (os.chdir("../../.."), sorted(os.listdir()), Path("old.txt").read_text()),
    "reads through a new folder": lambda: Path("new/deep/../../../../../old.txt").read_text(),
    "reads through one that it stands in": lambda: Path("../../a/b/../../../old.txt").read_text(),
    "goes up, then on": lambda: (os.chdir(".."), os.chdir("../../sub"), os.listdir(), Path("a.txt").read_text()),
    "saves": lambda: (torch.save(torch.arange(3), "t.pt"), torch.load("../b/t.pt").tolist()),
    "saves an array": lambda: (np.save("../n.npy", np.arange(3)), np.load("../n.npy").tolist()),
    "fails": lambda: Path("../../../missing.txt").read_text(),
}


@pytest.mark.parametrize("way", _FROM_A_NEW_FOLDER)
def test_a_folder_that_the_run_made_and_went_to_lies_where_it_lay(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, way: str
) -> None:
    real = tmp_path_factory.mktemp("real")
    shutil.copytree(home, real, dirs_exist_ok=True)
    before = tree(home)

    def inside() -> object:
        os.makedirs("runs/a/b/new/deep")
        os.chdir("runs/a/b")
        try:
            return _FROM_A_NEW_FOLDER[way]()
        except OSError as error:
            return type(error), error.errno, error.filename

    with Sandbox() as box:
        seen = inside()
    assert tree(home) == before
    assert not box.escaped
    monkeypatch.chdir(real)
    assert seen == inside()  # what the system itself answers
    assert Path.cwd() != home


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit, _Odd])
def test_everything_is_as_before_on_every_way_out(home: Path, error: type[BaseException] | None) -> None:
    def state() -> list[object]:
        functions = [getattr(os, name) for name in NAMES]
        more = [builtins.open, io.open, io.FileIO, shutil.rmtree, sqlite3.connect, torch._C.PyTorchFileWriter]
        return [*functions, *more, tempfile.tempdir, dict(os.environ), Path.cwd()]

    tempfile.gettempdir()
    before = state()
    early = None
    try:
        with Sandbox() as box:
            from os import remove as early

            Path("new").write_text("x")
            if error is not None:
                raise error("planned")
    except (ValueError, KeyboardInterrupt, SystemExit, _Odd):
        pass
    assert all(now is then or now == then for now, then in zip(state(), before, strict=True))
    assert not os.path.exists(box.scratch)
    assert not Path("new").exists()
    early("old.txt")  # kept past the end: the real function again
    assert not Path("old.txt").exists()


def test_loggers_are_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("NEPTUNE_MODE", raising=False)
    with Sandbox() as box:
        assert os.environ["WANDB_MODE"] == "disabled"
        assert os.environ["MLFLOW_TRACKING_URI"].startswith(f"file://{box.scratch}")
    assert os.environ["WANDB_MODE"] == "online"
    assert "NEPTUNE_MODE" not in os.environ


def test_one_at_a_time(home: Path) -> None:
    with Sandbox(), pytest.raises(TrialRefused, match="one trial at a time"), Sandbox():
        pass
    with Sandbox() as box:
        Path("a").write_text("a")
    assert box.files == (str(home / "a"),)
