"""The sandbox: each way of writing, seen inside and gone outside; each way of deleting, seen inside and not done."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from written_files import database, tree

from perfdoctor.trial.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("no_sandbox_remains")


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


def _sqlite_uri(path: Path) -> None:
    database(f"file:{path}?mode=rwc", uri=True)


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
    "sqlite": database,
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
    before = tree(home)
    target = home / "new.npy" if way == "np.save" else home / "new.pt2"
    with Sandbox() as box:
        WAYS[way](target)
        assert target.exists()
        assert target.name in os.listdir(home)
        assert target in list(home.iterdir())
    assert str(target) in box.files
    assert tree(home) == before
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
    before = tree(home)
    with Sandbox() as box:
        REMOVALS[way](home)
        assert not os.path.exists("old.txt")
        assert "old.txt" not in os.listdir()
        with pytest.raises(FileNotFoundError) as raised:
            Path("old.txt").read_text()
        assert raised.value.filename in ("old.txt", str(home / "old.txt"))
    assert tree(home) == before
    assert str(home / "old.txt") in box.kept
