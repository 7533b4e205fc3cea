"""Unmodified scripts under the door: what they see, how they end, what is recorded."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from perfdoctor.doors.script import ScriptOptions, run_script
from perfdoctor.errors import UsageError

LOOP = """
import sys
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
def train(steps):
    for step in range(steps):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SHORT = ScriptOptions(warmup=1, active=2)


@pytest.fixture
def script(tmp_path):
    def write(body, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LOOP + textwrap.dedent(body))
        return str(path)

    return write


def test_a_script_is_stopped_when_enough_was_seen(script, capsys):
    run = run_script(script("try:\n    train(10_000)\n    print('end')\nfinally:\n    print('finally')\n"), (), SHORT)
    assert (run.exit_code, run.stopped) == (0, True)
    assert capsys.readouterr().out == "finally\n"
    assert len(run.capture.steps) == 2
    assert run.capture.bare.step_ns.shape == (2,)


def test_an_except_for_errors_does_not_catch_the_stop(script, capsys):
    body = """
    for _ in range(3):
        try:
            train(50)
        except Exception:
            print("caught")
    """
    run = run_script(script(body), (), SHORT)
    assert run.stopped
    assert capsys.readouterr().out == ""


def test_keep_going_runs_to_the_end(script, capsys):
    options = ScriptOptions(warmup=1, active=2, keep_going=True)
    run = run_script(script("train(100)\nprint('end', float(weight.detach()[0]) < -8)\n"), (), options)
    assert (run.exit_code, run.stopped) == (0, False)
    assert capsys.readouterr().out == "end True\n"
    assert len(run.capture.steps) == 2


def test_the_script_sees_what_python_shows_it(script, capsys, tmp_path):
    path = script("import neighbour\nprint(__name__, sys.argv[1:], __file__, sys.path[0], neighbour.VALUE)\n")
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    before = (sys.argv, list(sys.path), sys.modules["__main__"])
    run_script(path, ["--lr", "0.1"], SHORT)
    assert capsys.readouterr().out == f"__main__ ['--lr', '0.1'] {path} {tmp_path} 5\n"
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("train(6); sys.exit(7)", 7, ""),
        ("train(6); sys.exit()", 0, ""),
        ("train(6); sys.exit('no data')", 1, "no data\n"),
        ("train(6); raise SystemExit(None)", 0, ""),
        ("train(6); raise ValueError('bad batch')", 1, "ValueError: bad batch\n"),
        ("train(6); raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
    ],
)
def test_the_scripts_own_way_out(script, capsys, body, code, error):
    run = run_script(script(body), (), ScriptOptions(warmup=1, active=5))
    assert run.exit_code == code
    assert not run.stopped
    printed = capsys.readouterr().err
    assert printed.endswith(error)
    assert "perfdoctor" not in printed.replace(str(Path.cwd()), "")
    assert any(note.code == "stopped-early" for note in run.capture.notes)
    assert len(run.capture.bare.step_ns) >= 1


def test_a_traceback_names_the_scripts_lines_only(script, capsys):
    run_script(script("def fail():\n    raise LookupError('here')\nfail()\n"), (), SHORT)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "train.py" in lines[1]
    assert lines[-1] == "LookupError: here"
    assert not any("script.py" in line for line in lines)


def test_a_module_is_run_as_with_m(tmp_path, capsys, monkeypatch):
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "values.py").write_text("NAME = 'values'\n")
    (package / "__main__.py").write_text(
        LOOP + "from .values import NAME\nprint(__name__, NAME, sys.argv[1:], __package__)\ntrain(500)\n"
    )
    (package / "single.py").write_text("print(__name__, __spec__.name)\n")
    monkeypatch.chdir(tmp_path)
    run = run_script("tool", ["a"], ScriptOptions(module=True, warmup=1, active=2))
    assert run.stopped
    run_script("tool.single", [], ScriptOptions(module=True))
    assert capsys.readouterr().out == "__main__ values ['a'] tool\n__main__ tool.single\n"
    for name in ("tool", "tool.values", "tool.__main__", "tool.single"):
        sys.modules.pop(name, None)


def test_what_cannot_be_run_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match=r"cannot read the script missing\.py"):
        run_script("missing.py")
    with pytest.raises(UsageError, match="does not compile"):
        run_script("broken.py")
    with pytest.raises(UsageError, match="is a folder"):
        run_script(".")
    with pytest.raises(UsageError, match="no module named absent_module"):
        run_script("absent_module", [], ScriptOptions(module=True))


def test_loaders_are_seen_without_a_change_to_the_script(script):
    body = """
    from torch.utils.data import DataLoader, TensorDataset
    loader = DataLoader(TensorDataset(torch.zeros(14, 2)), batch_size=4)
    for epoch in range(10):
        for (batch,) in loader:
            (weight * batch).sum().backward()
            optimizer.step()
    """
    capture = run_script(script(body), (), ScriptOptions(warmup=1, active=4)).capture
    assert capture.bare.samples.tolist() == [2, 4, 4, 4]  # after three steps of warm-up
    assert (capture.bare.data_ns > 0).all()
    assert [capture.text(name) for name in capture.pauses.name].count("data") == 4
    # Epochs are of 4, 4, 4 and 2 samples; step 7 settles.
    assert capture.steps.samples.tolist() == [4, 4, 4, 2]
    assert capture.steps.partial.tolist() == [0, 0, 0, 1]
    assert capture.environment.num_workers == 0


def test_threads_and_worker_processes_of_a_script(script):
    body = """
    from torch.utils.data import DataLoader, TensorDataset
    if __name__ == "__main__":
        data = TensorDataset(torch.zeros(64, 2))
        for _ in range(4):
            for (batch,) in DataLoader(data, 4, num_workers=1, multiprocessing_context="fork"):
                (weight * batch).sum().backward()
                optimizer.step()
    """
    run = run_script(script(body), (), ScriptOptions(warmup=1, active=4))
    assert run.stopped
    assert run.capture.environment.num_workers == 1


def test_atexit_functions_run_and_the_exit_code_is_the_commands(script, tmp_path):
    path = script("import atexit\natexit.register(lambda: print('atexit', len(sys.argv)))\ntrain(500)\n")
    program = (
        "import sys\nfrom perfdoctor.doors.script import run_script, ScriptOptions\n"
        "run = run_script(sys.argv[1], ['x'], ScriptOptions(warmup=1, active=2))\nprint('stopped', run.stopped)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", program, path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout == "stopped True\natexit 2\n"


def test_sites_end_at_the_script(script):
    body = """
    import gc
    def collect():
        gc.collect()
    for _ in range(20):
        train(1)
        collect()
    """
    capture = run_script(script(body), (), ScriptOptions(warmup=1, active=3)).capture
    site = capture.sites[int(capture.hits.site[0])]
    assert (site.frame.function, site.caller.function) == ("collect", "<module>")
    assert site.caller.file == site.frame.file
    assert all(place.frame.file.endswith("train.py") for place in capture.sites)
