"""The name of the script that goes with a recording: it can be typed, and gives away nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfdoctor.record.script_note import noted_script, script_note


@pytest.mark.parametrize(
    ("target", "typed"),
    [
        ("train.py", "train.py"),
        ("./runs/../train.py", "train.py"),
        ("my dir/train.py", "'my dir/train.py'"),
        ("../secret-project/train.py", "train.py"),
        ("/home/ann/secret-project/train.py", "train.py"),
    ],
)
def test_a_path_that_leads_out_of_the_folder_loses_its_folders(target: str, typed: str) -> None:
    assert noted_script([script_note(target, module=False, arguments=False)]) == typed


def test_a_path_below_the_folder_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    note = script_note(str(tmp_path / "examples" / "loop.py"), module=False, arguments=True)
    assert noted_script([note]) == "examples/loop.py ARGS..."
    assert note.text == "a recording of examples/loop.py ARGS..."


def test_a_module_and_none_at_all() -> None:
    assert noted_script([script_note("package.train", module=True, arguments=False)]) == "-m package.train"
    assert noted_script([]) == ""
