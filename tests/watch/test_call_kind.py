"""Kinds from the expression that is executed. A stand-in for a device tensor asks at the moment torch would warn."""

import ast
import sys

import numpy as np
import pytest
import torch

from perfdoctor.watch.call_kind import call_kind
from perfdoctor.watch.peek import UNKNOWN, peek


class Device(torch.Tensor):
    """A tensor that says it is on the device, and asks for the kind wherever reading it would wait."""

    is_cuda = property(lambda self: True)
    kinds: list[str] = []  # noqa: RUF012

    def _ask(self, *args, **kwargs):
        Device.kinds.append(call_kind(sys._getframe(1)))
        return self

    def _host(self, value):
        Device.kinds.append(call_kind(sys._getframe(2)))
        return value

    item = tolist = cpu = to = nonzero = masked_select = unique = repeat_interleave = bincount = _ask
    __getitem__ = copy_ = any_call = _ask

    def __setitem__(self, index, value):
        Device.kinds.append(call_kind(sys._getframe(1)))

    def __bool__(self):
        return self._host(True)

    def __float__(self):
        return self._host(1.0)

    def __int__(self):
        return self._host(1)

    def __index__(self):
        return self._host(1)

    def __gt__(self, other):
        return self


class Host:
    """A factory module and host tensors whose copies ask for the kind."""

    class Tensor(torch.Tensor):
        def to(self, *args, **kwargs):
            Device.kinds.append(call_kind(sys._getframe(1)))
            return self

        cuda = to

        def float(self):
            return self

    @staticmethod
    def tensor(*args, device=None):
        if device is not None:
            Device.kinds.append(call_kind(sys._getframe(1)))
        return torch.zeros(2).as_subclass(Host.Tensor)

    as_tensor = from_numpy = stack = zeros = tensor

    @staticmethod
    def where(*args):
        Device.kinds.append(call_kind(sys._getframe(1)))
        return args

    one_hot = ctc_loss = where


def kinds(code, tmp_path, **extra):
    file = tmp_path / "line.py"
    file.write_text(code + "\n")
    names = {
        "t": torch.zeros(()).as_subclass(Device),
        "x": torch.zeros(4).as_subclass(Device),
        "mask": torch.zeros(4, dtype=torch.bool).as_subclass(Device),
        "at": torch.zeros((), dtype=torch.long).as_subclass(Device),
        "host": torch.zeros(4),
        "batch": torch.zeros(4).as_subclass(Host.Tensor),
        "items": {"x": torch.zeros(4).as_subclass(Host.Tensor)},
        "make": lambda: torch.zeros(4).as_subclass(Host.Tensor),
        "H": Host,
        "device": torch.device("cuda"),
        "cpu": torch.device("cpu"),
        "n": 2,
        "pair": (1, 2),
        "kept": [torch.zeros(()).as_subclass(Device)],
        "array": np.zeros(2),
        **extra,
    }
    Device.kinds.clear()
    exec(compile(code + "\n", str(file), "exec"), names)
    return list(Device.kinds)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("t.item()", "item"),
        ("y = 1 + float(t)", "item"),
        ("int(t)", "item"),
        ("range(t)", "item"),
        ("'%.2f' % t", "format_tensor"),
        ("x.tolist()", "tolist"),
        ("x.cpu()", "cpu"),
        ("x.to('cpu')", "cpu"),
        ("x.to(device=cpu)", "cpu"),
        ("x.to(torch.device('cpu'))", "cpu"),
        ("if t: pass", "tensor_to_bool"),
        ("while t: break", "tensor_to_bool"),
        ("y = t and 1", "tensor_to_bool"),
        ("y = not t", "tensor_to_bool"),
        ("y = 1 if t else 2", "tensor_to_bool"),
        ("assert t", "tensor_to_bool"),
        ("bool(t)", "tensor_to_bool"),
        ("max(t, t)", "tensor_to_bool"),
        ("x.nonzero()", "nonzero"),
        ("H.where(mask)", "nonzero"),
        ("x.masked_select(mask)", "masked_select"),
        ("x.unique()", "unique"),
        ("H.one_hot(x)", "one_hot"),
        ("x.bincount()", "bincount"),
        ("x.repeat_interleave(at)", "repeat_interleave"),
        ("x[mask]", "boolean_mask"),
        ("x[x > 1]", "boolean_mask"),
        ("x[~mask]", "boolean_mask"),
        ("x[:, mask]", "boolean_mask"),
        ("x[mask] = t", "boolean_mask"),
        ("x[at]", "scalar_index"),
        ("x[at:at]", "scalar_index"),
        ("x[[0, 1]]", "h2d_blocking"),
        ("x[array]", "h2d_blocking"),
        ("x[host.long()]", "h2d_pageable"),
        ("x[host[:2]]", "h2d_pageable"),
        ("x[x.byte()]", "boolean_mask"),
        ("x[mask.flatten()]", "boolean_mask"),
        ("x[make().bool()]", "boolean_mask"),
        ("x[host.tolist()]", "h2d_blocking"),
        ("x[range(n)]", "h2d_blocking"),
        ("x[list(range(n))]", "h2d_blocking"),
        ("[1, 2][at]", "scalar_index"),
        ("pair[at]", "scalar_index"),
        ("x[host]", "h2d_pageable"),
        ("x[0] = 1.0", "h2d_blocking"),
        ("x[n] = 1.0", "h2d_blocking"),
        ("H.tensor(1.0, device=device)", "h2d_blocking"),
        ("H.tensor([t, t], device=device)", "item"),
        ("H.tensor(kept[-2:], device=device)", "item"),
        ("H.tensor([t.detach(), t.mean()], device=device)", "item"),
        ("H.tensor([t.shape, n], device=device)", "h2d_blocking"),
        ("H.as_tensor(array, device=device)", "h2d_pageable"),
        ("H.as_tensor(host, device=device)", "h2d_pageable"),
        ("H.zeros(at, device=device)", "item"),
        ("list(map(float, kept))", "item"),
        ("read = float; read(t)", "item"),
        ("H.as_tensor(1.0).to(device)", "h2d_blocking"),
        ("H.tensor([1.0]).float().to(device)", "h2d_blocking"),
        ("batch.to(device)", "h2d_pageable"),
        ("batch.to('cuda')", "h2d_pageable"),
        ("batch.cuda()", "h2d_pageable"),
        ("items['x'].to(device)", "h2d_pageable"),
        ("make().to(device)", "h2d_pageable"),
        ("H.from_numpy(array).to(device)", "h2d_pageable"),
        ("H.stack([host]).to(device)", "h2d_pageable"),
        ("x.any_call()", "other_sync"),
    ],
)
def test_the_kind_of_an_expression(code, kind, tmp_path):
    code = code.replace("torch.device", "type(device)")
    assert kinds(code, tmp_path) == [kind]


def test_two_reads_on_one_line_are_two(tmp_path):
    assert kinds("y = [t.item(), x[mask]] if t else 0", tmp_path) == ["tensor_to_bool", "item", "boolean_mask"]


def test_a_read_without_source_falls_back_to_the_instruction(tmp_path):
    space = {"t": torch.zeros(()).as_subclass(Device)}
    Device.kinds.clear()
    exec("if t: pass", space)
    exec("t.item()", space)
    exec("y = max(1, float(t)) + len([t.tolist()])", space)
    assert Device.kinds == ["tensor_to_bool", "item", "item", "tolist"]


def test_names_are_looked_up_never_run(tmp_path):
    class Trap:
        @property
        def mask(self):
            raise AssertionError("a property was run")

    x = torch.zeros(4).as_subclass(Device)
    try:
        kinds("x[trap.mask]", tmp_path, trap=Trap(), x=x)
    except AssertionError:
        # The loop's own code runs the property before the index; asking for the kind must not run it again.
        assert Device.kinds == []


def test_the_graph_names_the_op_of_a_backward():
    from perfdoctor.watch.graph_kind import backward_kind

    def kind_of(loss):
        def _engine_run_backward(t_outputs):
            return backward_kind(sys._getframe())

        return _engine_run_backward((loss,))

    x = torch.randn(8, requires_grad=True)
    assert kind_of((x[x > 0] * 2).sum()) == "boolean_mask"
    assert kind_of(x.masked_select(x > 0).sum()) == "masked_select"
    assert kind_of((x * 2).sum()) == "other_sync"
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert kind_of((x * 2).sum()) == "anomaly_check"


class OwnCode:
    """An object whose own code must not run, or not be trusted, while the kind is found."""

    def __init__(self, x):
        self.x = x

    def __call__(self, *args):
        return bool(self.x)

    def __getattr__(self, name):
        return []  # also for __name__, which nothing can look up in a table

    def __index__(self):
        raise AssertionError("a key was asked for its number")


def test_no_code_of_an_objects_runs_for_its_name_or_its_number(tmp_path):
    own = OwnCode(torch.zeros(()).as_subclass(Device))
    assert kinds("own(n)", tmp_path, own=own)  # whatever it is called: a kind, and no TypeError
    file = tmp_path / "line.py"
    for code in ("float(kept[own])", "float(kept[own:])", "float(kept[n:own])"):
        frame = _frame_at(file, code, {"kept": [1.0], "own": own, "n": 0})
        tree = ast.parse(code).body[0].value
        assert peek(tree.args[0], frame) is UNKNOWN


def _frame_at(file, code, names):
    """A frame in which those names can be looked up."""
    names["_here"] = lambda: sys._getframe(1)
    file.write_text("frame = _here()\n")
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["frame"]
