"""What is called in place of a method of one object, for as long as it is set on that object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class StandIn:
    """`model.forward = StandIn(model.forward, instead)` calls `instead(the method, *args, **kwargs)`.

    A copy of the object (an average of the weights, a checkpoint of the whole model) gets the method itself, bound to
    the copy: a plain function set on an object is copied as it is, and would go on calling the first object.
    """

    def __init__(self, method: Callable[..., Any], instead: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._method = method
        self._instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(self._method, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._method,)  # copies and pickles of a method are bound to the copy of its object


def _itself(method: Any) -> Any:
    return method
