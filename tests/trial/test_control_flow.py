"""Which reads decide what a loop does next, in sources of every shape."""

import linecache
from collections.abc import Collection

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
