"""Which reads decide what a loop does next, in sources of every shape."""

import importlib
import linecache
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from perfdoctor.trial.control_flow import find_test, outcome_is_fixed


def deciding_line(source: str, *calls: str, line: int = 0) -> int:
    """The line that decides by what the line with `# read` (or the only line) reads; 0 for none."""
    found = _find(source, calls, line)
    return 0 if found is None else found.line


def _find(source: str, calls: Collection[str], line: int = 0):  # type: ignore[no-untyped-def]
    lines = [each + "\n" for each in source.strip("\n").split("\n")]
    at = line or next((i for i, each in enumerate(lines, 1) if "# read" in each), 1)
    linecache.cache["<tested>"] = (len(source), None, lines, "<tested>")
    return find_test("<tested>", at, None, calls)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("norm = sum(p.grad.norm().item() ** 2 for p in ps if p.grad is not None) ** 0.5", "item"),
        ("norms = [p.grad.norm().item() for p in ps if p.requires_grad and p.grad is not None]", "item"),
        ("norms = [float(p.grad.norm()) for p in ps if isinstance(p, T)]", "__float__"),
        ("if i % 10 == 0: print(loss.item())", "item"),
        ("if i % 10 == 0: print(f'{loss:.3f}')", "__format__"),
        ("if i % 10 == 0: print(bool(flag))", "__bool__"),
        ("if verbose: print(loss.item())", "item"),
        ("if step > 100: print(loss.item())", "item"),
        ("x = loss.item() if log else 0.0", "item"),
        ("while True: total += loss.item()", "item"),
        ("assert ok, f'{loss.item()}'", "item"),
        ("assert ok, loss.item()", "item"),
        ("total += losses[i].item()", "item"),
        ("total += losses[i, j].cpu()", "cpu"),
        ("means = {name: v.item() for name, v in rows if name in wanted}", "item"),
        ("print(f'{loss.item()} {best if better else worst}')", "item"),
        ("log(  # call\n    'loss',\n    loss.item(),  # read\n) if i > 3 else None", "item"),
        ("any_bad = bool(x.isnan().any()) if check is not None else False", "__bool__"),
        ("if len(queue): total += loss.item()", "item"),
        ("@register(loss.item())\ndef f(n):\n    if n > 3:\n        run()", "item"),
    ],
)
def test_a_test_beside_the_read_does_not_decide_by_it(source: str, call: str) -> None:
    assert deciding_line(source, call) == 0


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("if loss.item() > 9: stop()", "item"),
        ("if float(loss) > 9: stop()", "__float__"),
        ("if loss > 9: stop()", "__bool__"),
        ("if not torch.isfinite(loss): stop()", "__bool__"),
        ("if ready and loss > 9: stop()", "__bool__"),
        ("while loss.item() > 0.1: step()", "item"),
        ("while loss > 0.1: step()", "__bool__"),
        ("assert loss.isfinite().all()", "__bool__"),
        ("assert loss.item() < 9, 'diverged'", "item"),
        ("if (v := loss.item()) > 9: stop()", "item"),
        ("y = f(x) if loss.item() > 0 else g(x)", "item"),
        ("kept = [x for x in xs if x.norm().item() > 1]", "item"),
        ("kept = [v for v in (x.item() for x in xs) if v > 1]", "item"),
        ("kept = [x for x in xs if x.norm() > 1]", "__bool__"),
        ("if loss in seen: stop()", "__contains__"),
        ("if diverged(loss): stop()", "item"),  # a library reads inside
        ("x = xs[n]", "__index__"),
        ("x = xs[:n.item()]", "item"),
        ("for i in range(n): run(i)", "__index__"),
        ("for i in range(n.item()): run(i)", "item"),
        ("if f'{loss}' == 'nan': stop()", "__format__"),
        ("if (\n    a\n    and loss.item() > 3  # read\n):\n    stop()", "item"),
        ("if torch.equal(a, b): stop()", "equal"),
        ("match n.item():\n    case 1: stop()", "item"),
    ],
)
def test_a_test_that_holds_the_read_decides(source: str, call: str) -> None:
    assert deciding_line(source, call) > 0


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("v = loss.item()  # read\nif v > 3: stop()", 2),
        ("v = loss.item()  # read\nw = v * 2\nif w > 3: stop()", 3),
        ("v = loss.item()  # read\nif v < best: best = v", 0),
        ("v = loss.item()  # read\nif v > 3: print('high', v)", 0),
        ("v = loss.item()  # read\nif v < best: bad = 0\nelse: bad += 1\nif bad > 5: stop()", 4),
        ("for v in losses.tolist():  # read\n    if v > 3: stop()", 2),
        ("class A:\n    def f(self, loss):\n        self.v = loss.item()  # read\n    def g(self):\n"
         "        if self.v > 3: stop()", 5),
        ("def f():\n    bad = 0\n    def hook(loss):\n        nonlocal bad\n        bad = loss.item()  # read\n"
         "    if bad > 3: stop()", 6),
        ("def f(loss):\n    v = loss.item()  # read\n    return v\ndef g(v):\n    if v > 3: stop()", 0),
        ("v = loss.item()  # read\nx = xs[v]", 2),
    ],
)  # fmt: skip
def test_a_name_is_followed(source: str, line: int) -> None:
    assert deciding_line(source, "item") == line


def test_what_a_function_returns_is_followed_to_its_caller() -> None:
    from perfdoctor.trial.call_hooks import Place

    lines = ["def f(loss):\n", "    v = loss.item()\n", "    return v\n", "if f(x) > 3:\n", "    stop()\n"]
    linecache.cache["<called>"] = (1, None, lines, "<called>")
    found = find_test("<called>", 2, Place(file="<called>", first=4, last=4), {"item"})
    assert found is not None
    assert found.line == 4


def test_a_named_value_may_have_a_fixed_outcome() -> None:
    found = _find("if (v := loss.item()) > 9: stop()", {"item"})
    assert outcome_is_fixed(found, [1.0, 2.0])
    assert not outcome_is_fixed(found, [1.0, 10.0])


_STOPPER = """
class Stopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.stop = patience, 1e9, 0, False
    def __call__(self, value):
        self.judge(value)
    def judge(self, value):
        if value < self.best:
            self.best = value
            self.save()
        else:
            self.bad += 1
        self.stop = self.bad > self.patience
        self.seen = 1
    def note(self, value):
        self.last = value
    def rows(self, other, *, given=None):
        self.given = given
"""


@pytest.mark.parametrize(
    "loop",
    [
        # handed to an object whose class is in the file
        "stopper = Stopper(3)\nstopper(loss.item())  # read",
        "stopper = Stopper(3)\nvalue = loss.item()  # read\nstopper(value)",
        "stopper = Stopper(3)\nstopper.judge(value=float(loss.item()))  # read",
        "stopper = Stopper(3)\nstopper.note(loss.item())  # read\nif stopper.last > 3: halt()",
        "stopper = Stopper(3)\nstopper.rows(1, given=loss.item())  # read\nif stopper.given > 3: halt()",
        "class T:\n    def __init__(self):\n        self.stopper = Stopper(3)\n    def run(self):\n"
        "        v = loss.item()  # read\n        self.stopper(v)",
        # to a function
        "def check(v):\n    if v > 3: raise ValueError(v)\ncheck(loss.item())  # read",
        "def check(a, v=0):\n    return deeper(v)\ndef deeper(w):\n    if w > 3: halt()\n"
        "check(1, v=loss.item())  # read",
        "def check(*vs):\n    if vs[0] > 3: halt()\ncheck(1, loss.item())  # read",
        "def check(**vs):\n    if vs['loss'] > 3: halt()\ncheck(loss=loss.item())  # read",
        "class T:\n    def run(self):\n        self.check(loss.item())  # read\n    def check(self, v):\n"
        "        while v > 3: v = self.shrink(v)",
        "class T:\n    @staticmethod\n    def check(v):\n        if v > 3: halt()\n"
        "    def run(self):\n        self.check(loss.item())  # read",
        # through what a function returns
        "def measure(loss):\n    return {'loss': loss.item()}  # read\nmetrics = measure(x)\n"
        "if metrics['loss'] > 3: halt()",
        # through a container, an attribute
        "run = R()\ndef f():\n    run.last = loss.item()  # read\ndef g():\n    if run.last > 3: halt()",
        "def f():\n    run = R()\n    def step():\n        run.last = loss.item()  # read\n"
        "    while True:\n        step()\n        if run.last > 3: halt()",
        "kept = mask.nonzero().tolist()  # read\nif len(kept) > 3: halt()",
        "losses = []\nlosses.append(loss.item())  # read\nrows = losses[-5:]\nif rows[0] > 3: halt()",
        "losses = []\ndef note(loss):\n    global losses\n    losses.append(loss.item())  # read\n"
        "if losses[-1] > 3: halt()",
        "table = {}\ntable['a']['b'] = loss.item()  # read\nif table['a']['b'] > 3: halt()",
        "losses = []\nlosses.append(loss.item())  # read\nif losses[-1] > 3: halt()",
        "losses = []\nv = loss.item()  # read\nlosses.append(v)\nif sum(losses) / len(losses) > 3: halt()",
        "row = {}\nrow['loss'] = loss.item()  # read\nif row['loss'] > 3: halt()",
        "row = {}\nrow.update(loss=loss.item())  # read\nif row['loss'] > 3: halt()",
        "state.best = loss.item()  # read\nif state.best > 3: halt()",
        "weights = losses.tolist()  # read\norder = sorted(range(9), key=weights.__getitem__)\nx = x[order]",
    ],
)
def test_a_value_that_is_handed_on_is_followed(loop: str) -> None:
    assert deciding_line(_STOPPER + loop, "item", "tolist") > 0


@pytest.mark.parametrize(
    "loop",
    [
        "stopper = Stopper(3)\nstopper.note(loss.item())  # read\nif stopper.stop: halt()",
        "stopper = Stopper(3)\nstopper.rows(loss.item())  # read\nif stopper.given: halt()",
        "def show(v):\n    print(v)\nshow(loss.item())  # read\nif i > 3: halt()",
        "def show(v, i):\n    if i % 10 == 0: write(v)\nshow(loss.item(), i)  # read",
        "def check(v):\n    if v > 3: halt()\nshow(loss.item())  # read",
        "losses = []\nlosses.append(loss.item())  # read\nif len(losses) > 100: flush(losses)",
        "losses[i] = loss.item()  # read\nif i > 3: halt()",
        "def f(run):\n    run.losses.append(loss.item())  # read\ndef g(run):\n    if run.losses[-1] > 3: halt()",
        "def f():\n    run = R()\n    def step():\n        run.last = loss.item()  # read\n"
        "def g():\n    run = R()\n    if run.last > 3: halt()",
        "def run(x, extra):\n    if x > 3: halt()\n    if extra: extra(x)\nrun(x, lambda loss: loss.item())  # read",
        "losses[i] = loss.item()  # read\nif len(losses) > 3: halt()",
        "losses = []\nlosses.append(loss.item())  # read\nn = len(losses)\nif n > 3: halt()",
        "best = None\nv = loss.item()  # read\nbest = v\nif best is None: halt()",
        "state.loss = loss.item()  # read\nif state.epoch > 3: halt()",
        "class A:\n    def f(self):\n        self.loss = loss.item()  # read\n"
        "class B:\n    def g(self):\n        if self.loss == 'mse': halt()",
        "class A:\n    def f(self):\n        self.loss = loss.item()  # read\n        if self.step > 3: halt()",
        "wandb.log({'loss': loss.item()})  # read\nif wandb.run is None: halt()",
        "bar.set_postfix(loss=loss.item())  # read\nif bar.n > 3: halt()",
        "class Meter:\n    def update(self, v, n):\n        self.sum += v * n\n        self.count += n\n"
        "meter = Meter()\nmeter.update(loss.item(), 8)  # read\nif meter.count > 3: halt()",
        "def measure(loss):\n    return loss.item()  # read\nprint(measure(x))\nif i > 3: halt()",
    ],
)
def test_what_lies_beside_a_value_that_is_handed_on_does_not_decide_by_it(loop: str) -> None:
    assert deciding_line(_STOPPER + loop, "item", "tolist") == 0


def test_a_module_of_the_users_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stopping_rules.py").write_text(_STOPPER)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("stopping_rules")
    try:
        for source in (
            "from stopping_rules import Stopper as S\nstopper = S(3)\nstopper(loss.item())  # read",
            "import stopping_rules\nstopper = stopping_rules.Stopper(3)\nstopper(loss.item())  # read",
            "import stopping_rules as rules\nstopper = rules.Stopper(3)\nstopper.judge(loss.item())  # read",
        ):
            found = _find(source, {"item"})
            assert found is not None, source
            assert "value < self.best" in found.text
        quiet = "from stopping_rules import Stopper\nstopper = Stopper(3)\nstopper.note(loss.item())  # read"
        assert _find(quiet, {"item"}) is None
    finally:
        del sys.modules[module.__name__]


def test_a_check_that_is_handed_the_value_may_have_a_fixed_outcome() -> None:
    source = "def check(v):\n    if not math.isfinite(v):\n        raise ValueError(v)\ncheck(loss.item())  # read"
    found = _find(source, {"item"})
    assert outcome_is_fixed(found, [1.0, 2.0])
    assert not outcome_is_fixed(found, [1.0, float("nan")])


def test_a_library_is_looked_at_where_it_reads_and_no_further() -> None:
    lines = ["def show(v):\n", "    if v > 3: halt()\n", "show(loss.item())\n"]
    file = str(Path(linecache.__file__).parent / "site-packages" / "a_library" / "loops.py")
    linecache.cache[file] = (1, None, lines, file)
    assert find_test(file, 3, None, {"item"}) is None
    linecache.cache[file] = (1, None, ["v = loss.item()\n", "if v > 3: halt()\n"], file)
    assert find_test(file, 1, None, {"item"}) is not None
    del linecache.cache[file]
