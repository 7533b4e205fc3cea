"""`perfdoctor check` on scripts of its own, and the pytest marker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from perfdoctor.cli import main
from perfdoctor.report.json import schema

HEAD = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(4, 2).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    x = torch.randn(3, 4, device=device)
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
READS = HEAD + "    value = loss.item()\n"
SPARSE = HEAD + "    if step % 10 == 9: print(loss.item())\n"
RACES = HEAD + "    if step == 5: float(loss.detach().to('cpu', non_blocking=True))\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_clean_step_passes(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(HEAD)
    code, out, _ = check(capsys, "train.py")
    assert code == 0
    assert "0 syncs a step" in out


def test_a_read_on_every_step_fails_with_its_line(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(READS)
    code, out, _ = check(capsys, "train.py")
    assert code == 1
    assert "train.py:12  item, 1 a step" in out
    assert "value = loss.item()" in out
    assert check(capsys, "--budget", "1", "train.py")[0] == 0


def test_a_read_on_every_tenth_step_counts_as_a_tenth(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SPARSE)
    code, out, _ = check(capsys, "--steps", "10", "train.py")
    assert code == 0
    assert "now and then" in out
    assert "item, 0.1 a step" in out
    assert check(capsys, "--budget", "0.05", "train.py")[0] == 1


def test_a_race_fails_however_seldom(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(RACES)
    assert check(capsys, "train.py")[0] == 1


def test_the_script_is_stopped_and_its_output_goes_to_standard_error(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("import sys; print('args', sys.argv[1:])\n" + HEAD.replace("range(12)", "range(10**9)"))
    code, out, err = check(capsys, "--steps", "3", "--format", "json", "train.py", "--lr", "1")
    assert code == 0
    assert "args ['--lr', '1']" in err
    assert json.loads(out)["source"] == "train.py on the emulated CUDA device, 3 steps"


def test_json_is_the_reports_schema(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(READS)
    code, out, _ = check(capsys, "--format", "json", "train.py")
    document = json.loads(out)
    jsonschema.validate(document, schema())
    (found,) = document["findings"]
    assert (code, found["kind"], found["site"]["line"], found["count"]) == (1, "item", 12, 1.0)


def test_sarif_and_github_name_the_line(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(READS)
    code, out, _ = check(capsys, "--format", "sarif", "train.py")
    place = json.loads(out)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert (code, place["artifactLocation"]["uri"], place["region"]["startLine"]) == (1, "train.py", 12)
    _, out, _ = check(capsys, "--format", "github", "train.py")
    assert out.startswith("::error file=train.py,line=12,")


def test_only_new_sites_fail_against_a_baseline(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(READS)
    assert check(capsys, "--write-baseline", "known.json", "train.py")[0] == 0
    script.write_text("\n\n" + READS)
    code, out, _ = check(capsys, "--baseline", "known.json", "train.py")
    assert code == 0
    assert "train.py: 0 syncs a step not in the baseline, 0.5 allowed: within the budget (11 steps on the" in out
    num_known = len(json.loads(Path("known.json").read_text())["sites"])
    assert num_known == 2  # the read, and the model on its way to the device
    assert "2 sites of the baseline known.json left out" in out
    code, out, error = check(capsys, "--format", "github", "--baseline", "known.json", "train.py")
    assert (code, out) == (0, "")
    assert error.splitlines() == [
        "perfdoctor: within the budget: train.py: sites not in known.json make 0 syncs a step, "
        "0.5 allowed (11 steps on the emulated CUDA device); 2 sites of the baseline known.json left out"
    ]
    script.write_text(READS + "    flag = bool(loss > 1)\n")
    code, out, _ = check(capsys, "--baseline", "known.json", "train.py")
    assert code == 1
    assert "tensor_to_bool" in out
    assert "loss.item()" not in out


ON_CPU = HEAD.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"')
WITHOUT_OPTIMIZER = ON_CPU.replace("    opt.step()\n", "").replace("    opt.zero_grad()\n", "    model.zero_grad()\n")
NEVER_ON_IT = {
    "the script picks the CPU": ON_CPU,
    "nothing was moved": ON_CPU.replace(".to(device)", "").replace(", device=device", ""),
    "set-up on the device": "import torch\ntorch.ones(3, device='cuda').sum()\n" + ON_CPU,
    "without an optimizer": WITHOUT_OPTIMIZER,
    "two steps": ON_CPU.replace("range(12)", "range(2)"),
    "the device behind the loop": ON_CPU + "model.to('cuda')(torch.randn(3, 4, device='cuda')).sum()\n",
    "an optimizer of its own in each step": ON_CPU.replace("    opt.step()", "    torch.optim.SGD([x], 0.1).step()"),
}
# CPU parameters beside a device: nothing to complain of.
PARTLY_ON_IT = {
    "a table on the CPU": HEAD.replace(
        "x = torch", "table = torch.nn.Embedding(3, 4)(torch.tensor([0, 1]))\n    x = torch"
    ),
    "an update on the CPU": (
        HEAD.replace("model.parameters(), lr", "master, lr").replace("opt = ", "master = [torch.zeros(2)]\nopt = ")
        + "    master[0].grad = torch.ones(2)\n"
    ),
    "two steps": HEAD.replace("range(12)", "range(2)"),  # the end of both is known at the second update
    "without an optimizer": WITHOUT_OPTIMIZER.replace('device = "cpu"', 'device = "cuda"'),
}


@pytest.mark.parametrize("source", NEVER_ON_IT.values(), ids=NEVER_ON_IT)
def test_steps_that_leave_the_device_alone_cannot_pass(
    script: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    script.write_text(source)
    code, out, error = check(capsys, "train.py")
    assert (code, out) == (2, "")
    last = error.splitlines()[-1]
    assert last.startswith("perfdoctor: train.py: its steps leave the emulated CUDA device alone: they run on the CPU")


@pytest.mark.gpu
def test_on_a_real_device_such_steps_cannot_pass_either(tmp_path: Path) -> None:
    """In processes of their own: what this one has allocated on the GPU before would count."""
    sources = {"probe": "import torch\ntorch.ones(3, device='cuda').sum().item()\n" + ON_CPU, "cuda": HEAD}
    codes = {}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        command = [sys.executable, "-m", "perfdoctor", "check", "--device", "real", f"{name}.py"]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        codes[name] = done.returncode, "its steps leave the GPU alone" in done.stderr
    assert codes == {"probe": (2, True), "cuda": (0, False)}


@pytest.mark.parametrize("source", PARTLY_ON_IT.values(), ids=PARTLY_ON_IT)
def test_steps_that_use_the_device_in_part_are_checked(
    script: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    script.write_text(source)
    assert check(capsys, "train.py")[0] == 0


def test_an_option_of_ours_behind_the_script_is_said_to_be_the_scripts(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(READS)
    code, _, error = check(capsys, "--steps", "3", "train.py", "--budget", "2")
    assert code == 1  # 0.5 was held against it
    assert "perfdoctor check --steps 3 --budget 2 train.py\n" in error


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, ["train.py"], "train.py"),
        (HEAD, [], "no script"),
        ("raise ValueError('no data')\n", ["train.py"], "failed on the emulated CUDA device"),
        ("import sys; sys.exit(7)\n", ["train.py"], "exit code 7"),
        ("print('hello')\n", ["train.py"], "0 optimizer updates"),
        (HEAD, ["--budget", "-1", "train.py"], "0 or more"),
        (HEAD, ["--baseline", "none.json", "train.py"], "none.json"),
        (HEAD, ["--baseline", "train.py", "train.py"], "--write-baseline"),
        (HEAD, ["-o", "nowhere/report.txt", "train.py"], "nowhere"),
    ],
)
def test_what_cannot_run_is_exit_code_2_and_one_line(
    script: Path, capsys: pytest.CaptureFixture[str], text: str | None, arguments: list[str], message: str
) -> None:
    if text is not None:
        script.write_text(text)
    code, out, err = check(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


PYTEST_FILE = """
import pytest
import torch
from perfdoctor.watch.sync_guard import allow_sync

@pytest.fixture
def x():
    y = torch.ones(3).to("cuda")
    y.sum().item()  # set-up
    return y

@pytest.mark.sync_budget(0)
def test_clean(x):
    assert (x + 1).is_cuda

@pytest.mark.sync_budget(1)
def test_over(x):
    x.sum().item()
    x.max().item()

@pytest.mark.sync_budget(0)
def test_let_off(x):
    with allow_sync("the answer is wanted"):
        x.sum().item()

def test_unmarked():
    assert not torch.cuda.is_available()
"""


def test_the_marker_fails_a_test_over_its_budget_and_names_the_lines(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("test_unmarked below is for machines without a GPU")
    (tmp_path / "test_them.py").write_text(PYTEST_FILE)
    root = Path(__file__).resolve().parents[2]
    # By name alone: where the package is installed its entry point would register the plugin a second time.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "perfdoctor.doors.pytest_plugin", "-q", "test_them.py"],
        cwd=tmp_path, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert "2 syncs, 1 allowed" in done.stdout
    assert "test_them.py:18: item" in done.stdout
    assert "x.max().item()" in done.stdout
    assert "sum detached tensors" in done.stdout
