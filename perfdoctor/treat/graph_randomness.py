"""The host's random generators as places: a draw is a change like any other.

The emulated device draws its numbers from torch's host generators. Those draws are told from the step's own by the
frames that they come through: `is_device_draw`.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from perfdoctor.record.owners import package_path
from perfdoctor.treat.graph_python_state import Place, Reached


def random_places(reached: Reached) -> list[Place]:
    """Python's, numpy's and torch's host generators, and those that the step reaches."""
    places = [_place("random", lambda: hash(random.getstate()))]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        places.append(_place("numpy.random", lambda: hash(_numpy_state(numpy.random.get_state(legacy=False)))))
        for generator in reached.of_type(numpy.random.Generator):
            places.append(_place("a numpy Generator", _state_reader(generator)))
        for old in reached.of_type(numpy.random.RandomState):
            places.append(_place("a numpy RandomState", _legacy_reader(old)))
    for drawn in reached.of_type(random.Random):
        places.append(_place("a random.Random", _python_reader(drawn)))
    places.append(_torch_place("torch's host generator", torch.default_generator))
    for own in reached.of_type(torch._C.Generator):
        if own.device.type == "cpu":
            places.append(_torch_place("a torch.Generator of the host", own))
    return places


def is_torch_generator(place: Place) -> bool:
    """Whether the place is one of torch's host generators."""
    return place.owner == "random" and "torch" in place.name


@functools.lru_cache(maxsize=8192)
def draw_kind(code: CodeType) -> str:
    """For a function of the emulated device that may draw: "op", or "factory"; "state" where a state is put back."""
    path = package_path(code.co_filename).replace("\\", "/")
    if path.endswith("perfdoctor/emulate/dispatch.py") and code.co_name == "run":
        return "op"
    if path.endswith("perfdoctor/emulate/factories.py") and code.co_name in ("_made", "_made_like"):
        return "factory"
    return "state" if path.endswith(("torch/random.py", "perfdoctor/emulate/cuda_api.py")) else ""


def is_device_draw(frame: FrameType) -> bool:
    """Whether numbers that were drawn in this frame, which returns now, are the device's (or a state was put back)."""
    if draw_kind(frame.f_code) != "factory":
        return True
    return bool(frame.f_locals.get("on_device") or frame.f_locals.get("there"))


def _place(name: str, read: Callable[[], Any]) -> Place:
    return Place("random", name, read, lambda _: None)


def _torch_place(name: str, generator: torch.Generator) -> Place:
    state: Any = torch._C.Generator.get_state  # under the emulated device's own
    return _place(name, lambda: hash(state(generator).numpy().tobytes()))


def own_generators(reached: Reached) -> list[Any]:
    """The random generators that the step holds itself: torch's, numpy's and Python's."""
    found = [*reached.of_type(torch._C.Generator), *reached.of_type(random.Random)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found += [*reached.of_type(numpy.random.Generator), *reached.of_type(numpy.random.RandomState)]
    return found


def _legacy_reader(generator: Any) -> Callable[[], Any]:
    return lambda: hash(_numpy_state(generator.get_state(legacy=False)))


def _python_reader(generator: random.Random) -> Callable[[], Any]:
    return lambda: hash(generator.getstate())


def _state_reader(generator: Any) -> Callable[[], Any]:
    return lambda: hash(_numpy_state(generator.bit_generator.state))


def _numpy_state(state: Any) -> str:
    inner = state["state"]
    parts = {key: value.tobytes() if hasattr(value, "tobytes") else value for key, value in inner.items()}
    return repr((parts, *(state.get(name) for name in ("has_uint32", "uinteger", "buffer_pos"))))  # the last: Philox
