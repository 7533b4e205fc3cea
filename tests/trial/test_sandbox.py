"""The sandbox: each way of writing, seen inside and gone outside; each way of deleting, seen inside and not done."""

from __future__ import annotations

import builtins
import io
import json
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from perfdoctor.errors import TrialRefused
from perfdoctor.trial.sandbox import Sandbox


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a file, a log and a folder in it; it is the working directory."""
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "log.txt").write_text("one\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def _open(path: Path) -> None:
    with open(path, "w") as file:
        file.write("text")


def _exclusive(path: Path) -> None:
    with open(path, "x") as file:
        file.write("text")


def _io_open(path: Path) -> None:
    with io.open(path, "wb") as file:  # noqa: UP020 - this spelling is what is tested
        file.write(b"text")


def _descriptor(path: Path) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(number, b"text")
    os.close(number)


def _file_io(path: Path) -> None:
    with io.FileIO(str(path), "w") as file:
        file.write(b"text")


def _json(path: Path) -> None:
    with path.open("w") as file:
        json.dump({}, file)


def _sqlite(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("create table t(a)")
    database.commit()
    database.close()


def _sqlite_uri(path: Path) -> None:
    database = sqlite3.connect(f"file:{path}?mode=rwc", uri=True)
    database.execute("create table t(a)")
    database.commit()
    database.close()


def _safetensors(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.ones(2)}, path)
    assert torch.equal(load_file(path)["a"], torch.ones(2))


def _torch_save(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path)
    assert torch.equal(torch.load(path)["a"], torch.ones(2))
    assert torch.equal(torch.load(str(path), mmap=True)["a"], torch.ones(2))


def _torch_save_old(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(torch.load(path)["a"], torch.ones(2))


def _memmap(path: Path) -> None:
    values = np.memmap(path, dtype=np.float32, mode="w+", shape=(4,))
    values[:] = 1
    values.flush()
    assert np.array_equal(np.memmap(path, dtype=np.float32, mode="r"), np.ones(4, np.float32))


def _logging(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.emit(logging.LogRecord("a", logging.INFO, "f", 1, "m", None, None))
    handler.close()


def _atomic(path: Path) -> None:
    """Written beside, then moved into place: how checkpoints are written."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(b"text")
    os.replace(file.name, path)


def _part(path: Path) -> None:
    path.with_suffix(".part").write_text("text")
    path.with_suffix(".part").rename(path)


def _copied(path: Path) -> None:
    shutil.copy("old.txt", path)
    assert path.read_text() == "old"


def _hard_link(path: Path) -> None:
    os.link("old.txt", path)
    assert path.read_text() == "old"


def _soft_link(path: Path) -> None:
    os.symlink("old.txt", path)
    assert path.read_text() == "old"
    assert path.is_symlink()


WAYS: dict[str, Callable[[Path], object]] = {
    "open": _open,
    "open x": _exclusive,
    "io.open": _io_open,
    "os.open": _descriptor,
    "FileIO": _file_io,
    "write_text": lambda path: path.write_text("text"),
    "touch": lambda path: path.touch(),
    "json": _json,
    "sqlite": _sqlite,
    "sqlite uri": _sqlite_uri,
    "safetensors": _safetensors,
    "torch.save": _torch_save,
    "torch.save old": _torch_save_old,
    "torch.export.save": lambda path: torch.export.save(
        torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),)), str(path)
    ),
    "np.save": lambda path: np.save(str(path), np.ones(2)),
    "tofile": lambda path: np.ones(2).tofile(path),
    "memmap": _memmap,
    "logging": _logging,
    "atomic": _atomic,
    "part then rename": _part,
    "shutil.copy": _copied,
    "hard link": _hard_link,
    "soft link": _soft_link,
}


@pytest.mark.filterwarnings("ignore")  # of torch.export and of files that are not closed
@pytest.mark.parametrize("way", list(WAYS))
def test_written_inside_gone_outside(home: Path, way: str) -> None:
    before = _tree(home)
    target = home / "new.npy" if way == "np.save" else home / "new.pt2"
    with Sandbox() as box:
        WAYS[way](target)
        assert target.exists()
        assert target.name in os.listdir(home)
        assert target in list(home.iterdir())
    assert str(target) in box.files
    assert _tree(home) == before
    assert not os.path.exists(box.scratch)
    assert not [line for line in box.escaped if str(home) in line]


def test_append_sees_what_was_there(home: Path) -> None:
    with Sandbox() as box:
        with open("log.txt", "a") as file:
            file.write("two\n")
        with open("old.txt", "r+") as file:
            file.write("N")
        assert Path("log.txt").read_text() == "one\ntwo\n"
        assert Path("old.txt").read_text() == "Nld"
    assert Path("log.txt").read_text() == "one\n"
    assert Path("old.txt").read_text() == "old"
    assert box.kept == (str(home / "log.txt"), str(home / "old.txt"))


REMOVALS: dict[str, Callable[[Path], object]] = {
    "remove": lambda home: os.remove(home / "old.txt"),
    "unlink": lambda home: (home / "old.txt").unlink(),
    "dir_fd": lambda home: _with_folder(home, lambda fd: os.unlink("old.txt", dir_fd=fd)),
    "rename": lambda home: os.rename("old.txt", "other.txt"),
    "replace over": lambda home: os.replace("old.txt", "log.txt"),
    "move": lambda home: shutil.move(home / "old.txt", home / "sub"),
    "move a folder": lambda home: (os.remove("old.txt"), shutil.move("sub", "renamed")),
}


def _with_folder(home: Path, act: Callable[[int], object]) -> None:
    number = os.open(home, os.O_RDONLY)
    try:
        act(number)
    finally:
        os.close(number)


@pytest.mark.parametrize("way", list(REMOVALS))
def test_removed_inside_kept_outside(home: Path, way: str) -> None:
    before = _tree(home)
    with Sandbox() as box:
        REMOVALS[way](home)
        assert not os.path.exists("old.txt")
        assert "old.txt" not in os.listdir()
        with pytest.raises(FileNotFoundError) as raised:
            Path("old.txt").read_text()
        assert raised.value.filename in ("old.txt", str(home / "old.txt"))
    assert _tree(home) == before
    assert str(home / "old.txt") in box.kept


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
    before = _tree(home)

    def inside() -> object:
        os.makedirs("runs/a/b/new/deep")
        os.chdir("runs/a/b")
        try:
            return _FROM_A_NEW_FOLDER[way]()
        except OSError as error:
            return type(error), error.errno, error.filename

    with Sandbox() as box:
        seen = inside()
    assert _tree(home) == before
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


def test_loggers_are_off_and_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("NEPTUNE_MODE", raising=False)
    with Sandbox() as box:
        assert os.environ["WANDB_MODE"] == "disabled"
        assert os.environ["MLFLOW_TRACKING_URI"].startswith(f"file://{box.scratch}")
    assert os.environ["WANDB_MODE"] == "online"
    assert "NEPTUNE_MODE" not in os.environ
    assert "WANDB_MODE=disabled" in box.switched_off


def test_one_at_a_time(home: Path) -> None:
    with Sandbox(), pytest.raises(TrialRefused, match="one trial at a time"), Sandbox():
        pass
    with Sandbox() as box:
        Path("a").write_text("a")
    assert box.files == (str(home / "a"),)


@pytest.fixture(autouse=True)
def _no_remains(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("temporary")  # of this test alone: other runs have their sandboxes in /tmp
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.glob("perfdoctor-sandbox-*"))
