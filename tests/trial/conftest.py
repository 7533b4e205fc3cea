"""What the tests of the trial share: the emulated device, a loop that is looked at, and a user's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perfdoctor
from perfdoctor.trial.live_loop import LiveLoop


@pytest.fixture
def device() -> Iterator[Any]:
    """The emulated device, on for the time of the test."""
    with perfdoctor.emulate_cuda() as emulated:
        yield emulated


@pytest.fixture
def live() -> Iterator[LiveLoop]:
    """A loop that is looked at for the time of the test."""
    seen = LiveLoop()
    seen.install()
    yield seen
    seen.remove()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a file, a log and a folder in it; it is the working directory."""
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "log.txt").write_text("one\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_sandbox_remains(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("temporary")  # of this test alone: other runs have their sandboxes in /tmp
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.glob("perfdoctor-sandbox-*"))
