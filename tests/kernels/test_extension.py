"""Compiling on first use: a process that was killed at it holds nobody up, and nothing half built is loaded."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perfdoctor.kernels import extension, walker

ROOT = Path(__file__).parents[2]
SOURCE = """
#include <Python.h>
#define NAME_OF(name) #name
#define TEXT_OF(name) NAME_OF(name)
static PyModuleDef little = {PyModuleDef_HEAD_INIT, TEXT_OF(TORCH_EXTENSION_NAME), nullptr, -1, nullptr};
#define INIT_OF(name) PyInit_##name
#define INIT(name) INIT_OF(name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
    PyObject* module = PyModule_Create(&little);
    PyModule_AddIntConstant(module, "answer", 42);
    return module;
}
"""
LOADING = """
import sys
from pathlib import Path
from perfdoctor.kernels import extension
extension._SOURCES = Path(sys.argv[1])
print(extension.load_extension("little", ["little.cpp"]).answer)
"""
FORKING = """
import os, threading, time
def fork():
    while not os.path.exists(sys.argv[1] + "/runs"):
        time.sleep(0.05)
    if os.fork() == 0:
        time.sleep(600)
threading.Thread(target=fork).start()
"""


class Compilation:
    """A small C++ file, a cache of its own, and a compiler that can stand still and notes each of its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        (folder / "little.cpp").write_text(SOURCE)
        compiler = folder / "compiler"
        compiler.write_text(
            f'#!/bin/sh\ncase "$*" in *little.cpp*) echo $$ >> "{folder}/runs" ;; esac\n'
            f'while [ -e "{folder}/slow" ] && [ -e "{folder}/runs" ]; do sleep 0.05; done\nexec c++ "$@"\n'
        )
        compiler.chmod(0o755)
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(self.cache), "CXX": str(compiler),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    @property
    def num_runs(self) -> int:
        runs = self.folder / "runs"
        return len(runs.read_text().split()) if runs.exists() else 0

    def start(self, source: str = LOADING) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", source, str(self.folder)], env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def load(self) -> str:
        out, error = self.start().communicate(timeout=100)
        assert "Error" not in error
        return out

    def kill_in_the_midst(self) -> None:
        (self.folder / "slow").touch()
        process = self.start()
        while not self.num_runs:
            assert process.poll() is None
            time.sleep(0.05)
        compiler = int((self.folder / "runs").read_text())
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        os.killpg(os.getpgid(compiler), signal.SIGKILL)  # ninja gives it a group of its own
        (self.folder / "slow").unlink()

    def built(self) -> list[Path]:
        return list(self.cache.rglob("*.so"))


@pytest.fixture
def compilation(tmp_path: Path) -> Compilation:
    return Compilation(tmp_path)


def test_it_is_compiled_once_and_its_folder_is_gone(compilation: Compilation) -> None:
    assert [compilation.load() for _ in range(2)] == ["42\n", "42\n"]
    assert compilation.num_runs == 1
    assert sorted(path.name for path in compilation.built()[0].parent.iterdir()) == ["little.so", "lock"]


def test_one_that_was_killed_holds_nobody_up(compilation: Compilation) -> None:
    compilation.kill_in_the_midst()
    assert list(compilation.cache.rglob("build-*/lock"))  # torch's own: what waits for it waits for ever
    assert compilation.load() == "42\n"


def test_what_a_killed_one_left_goes_when_it_is_old(compilation: Compilation) -> None:
    compilation.kill_in_the_midst()
    (left,) = compilation.cache.rglob("build-*")
    os.utime(left, (0, 0))
    assert compilation.load() == "42\n"
    assert not left.exists()


def test_two_at_once_compile_once(compilation: Compilation) -> None:
    both = [compilation.start() for _ in range(2)]
    assert [process.communicate(timeout=100)[0] for process in both] == ["42\n", "42\n"]
    assert compilation.num_runs == 1


def test_a_process_forked_meanwhile_does_not_keep_the_lock(compilation: Compilation) -> None:
    """A DataLoader's worker lives on; whoever waits finds what was built."""
    (compilation.folder / "slow").touch()
    first = compilation.start(LOADING.replace("print(", FORKING + "print("))
    while not compilation.num_runs:
        time.sleep(0.05)
    second = compilation.start()
    time.sleep(0.5)  # it waits for the lock, most likely; if not yet, it finds the module at once
    (compilation.folder / "slow").unlink()
    try:
        assert second.communicate(timeout=60)[0] == "42\n"
        assert compilation.num_runs == 1
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()


def test_one_that_cannot_be_loaded_is_built_anew(compilation: Compilation) -> None:
    compilation.load()
    (built,) = compilation.built()
    built.write_bytes(b"of another machine")
    assert compilation.load() == "42\n"
    assert compilation.num_runs == 2


def test_a_change_of_the_source_is_another_module(compilation: Compilation) -> None:
    compilation.load()
    source = compilation.folder / "little.cpp"
    source.write_text(source.read_text().replace("42", "43"))
    assert compilation.load() == "43\n"


def test_what_does_not_compile_leaves_nothing_built(compilation: Compilation) -> None:
    (compilation.folder / "little.cpp").write_text("no C++")
    _, error = compilation.start().communicate(timeout=100)
    assert "Error building extension 'little'" in error
    assert compilation.built() == []
    assert list(compilation.cache.rglob("build-*")) == []


def test_another_that_compiles_for_ever_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(extension, "_LONGEST_WAIT_S", 0.3)
    folder = tmp_path / "perfdoctor" / f"perfdoctor_walker-{extension._fingerprint(['walker.cpp'], ())}"
    folder.mkdir(parents=True)
    walker.compiled_walker.cache_clear()
    try:
        with (folder / "lock").open("w") as lock, caplog.at_level("INFO", "perfdoctor"):
            fcntl.flock(lock, fcntl.LOCK_EX)
            found: Any = walker.compiled_walker()
    finally:
        walker.compiled_walker.cache_clear()
    assert found is None  # Python walks
    assert "another process has been compiling for" in caplog.text
