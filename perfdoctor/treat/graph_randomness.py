"""The host's random generators as places: a draw is a change like any other."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from perfdoctor.treat.graph_python_state import Place, Reached


def random_places(reached: Reached, emulated: bool) -> list[Place]:
    """Python's, numpy's and torch's host generators, and those that the step reaches.

    torch's own is left out on the emulated device, which draws its device numbers from it.
    """
    places = [_place("random", lambda: hash(random.getstate()))]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        places.append(_place("numpy.random", lambda: hash(_numpy_state(numpy.random.get_state(legacy=False)))))
        for generator in reached.of_type(numpy.random.Generator):
            places.append(_place("a numpy Generator", _state_reader(generator)))
    for drawn in reached.of_type(random.Random):
        places.append(_place("a random.Random", _python_reader(drawn)))
    if not emulated:
        places.append(_place("torch's host generator", lambda: hash(torch.get_rng_state().numpy().tobytes())))
    return places


def _place(name: str, read: Callable[[], Any]) -> Place:
    return Place("random", name, read, lambda _: None)


def _python_reader(generator: random.Random) -> Callable[[], Any]:
    return lambda: hash(generator.getstate())


def _state_reader(generator: Any) -> Callable[[], Any]:
    return lambda: hash(_numpy_state(generator.bit_generator.state))


def _numpy_state(state: Any) -> str:
    inner = state["state"]
    parts = {key: value.tobytes() if hasattr(value, "tobytes") else value for key, value in inner.items()}
    return repr((parts, state.get("has_uint32"), state.get("uinteger")))
