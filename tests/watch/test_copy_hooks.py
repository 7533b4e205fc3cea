"""Copies that torch reports nowhere, with a stand-in device: `is_cuda` is what the hooks go by."""

import ctypes
import functools

import pytest
import torch

from perfdoctor.record.call_site import HitLog
from perfdoctor.watch.call_sites import CallSiteHooks
from perfdoctor.watch.copy_hooks import CopyHooks
from perfdoctor.watch.patches import Patches

METHODS = ("to", "cuda", "copy_", "item", "tolist", "numpy", "__float__", "__bool__", "__array__")


class Device(torch.Tensor):
    is_cuda = property(lambda self: True)


@pytest.fixture
def hooked():
    log, patches = HitLog(), Patches()
    hooks = CopyHooks(log)
    before = {name: vars(torch.Tensor).get(name) for name in METHODS}
    query = torch.cuda.Event.query
    hooks.install(patches)
    hooks.log = log
    yield hooks
    patches.undo()
    hooks.forget()
    assert {name: vars(torch.Tensor).get(name) for name in METHODS} == before
    assert torch.cuda.Event.query is query


def kinds(hooks):
    return [hit.kind for hit in hooks.log.hits]


def test_a_silent_copy_from_pageable_memory(hooked):
    device, host = torch.zeros(4).as_subclass(Device), torch.ones(4)
    device.copy_(host, non_blocking=True)
    device.copy_(host, True)
    assert kinds(hooked) == ["h2d_pageable"] * 2
    assert torch.equal(device.as_subclass(torch.Tensor), host)


def test_copies_that_wait_or_stay_are_not_ours(hooked):
    device, host = torch.zeros(4).as_subclass(Device), torch.ones(4)
    device.copy_(host)
    host.clone().copy_(host, non_blocking=True)
    host.to(torch.float64, non_blocking=True)
    host.to("cpu", torch.float32, True, copy=True)
    assert kinds(hooked) == []


def test_reading_before_the_copy_has_arrived(hooked):
    device = torch.ones(1).as_subclass(Device)
    host = torch.zeros(1)
    host.copy_(device, non_blocking=True)
    assert float(host) == 1.0
    assert float(host) == 1.0
    assert kinds(hooked) == ["d2h_race"]  # once for each copy
    host.copy_(device, non_blocking=True)
    assert host[0].item() == 1.0  # through a view
    assert kinds(hooked) == ["d2h_race"] * 2


def test_reading_after_a_wait_or_something_else(hooked):
    device, other = torch.ones(1).as_subclass(Device), torch.zeros(1)
    host = torch.zeros(1)
    host.copy_(device, non_blocking=True)
    assert other.item() == 0.0
    assert bool(other == 0)
    hooked.arrived()
    assert host.tolist() == [1.0]
    assert kinds(hooked) == []


def test_a_dropped_copy_is_forgotten(hooked):
    device = torch.ones(1).as_subclass(Device)
    host = torch.zeros(1)
    host.copy_(device, non_blocking=True)
    del host
    assert hooked.pending == {}


def test_overrides_of_a_subclass_find_the_method_in_their_table(hooked):
    original = torch.Tensor.to.__wrapped__

    class Quantised(torch.Tensor):
        overrides = {original: lambda *args, **kwargs: "overridden"}  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in cls.overrides:
                return cls.overrides[func](*args, **(kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.zeros(2).as_subclass(Quantised)
    assert tensor.to("cpu") == "overridden"
    assert tensor.to("cpu", non_blocking=True) == "overridden"
    assert torch.Tensor.to == original


def test_a_sync_inside_a_replaced_method_is_the_callers(monkeypatch, tmp_path):
    class Batch(torch.Tensor):
        _as_parameter_ = 0  # lets ctypes take it as an argument

    # `to` as torch's own is: C code without a frame, that warns at the end.
    warn = ctypes.pythonapi.PyErr_WarnEx
    to = functools.partial(warn, ctypes.py_object(UserWarning), b"called a synchronizing CUDA operation", 1)
    to.__name__ = to.__qualname__ = "to"
    monkeypatch.setattr(torch.Tensor, "to", to, raising=False)
    log = HitLog()
    hooks = CallSiteHooks(log)
    hooks.catch_warnings()
    hooks.patch_calls()
    file = tmp_path / "line.py"
    file.write_text("y = batch.to(0)\n")
    try:
        exec(compile(file.read_text(), str(file), "exec"), {"batch": torch.zeros(2).as_subclass(Batch)})
    finally:
        hooks.remove()
    assert [hit.kind for hit in log.hits] == ["h2d_pageable"]
    (site,) = log.sites.sites
    assert (site.frame.file, site.frame.line, site.library) == (str(file), 1, None)
