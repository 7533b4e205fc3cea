"""A few batches of one loader, handed out over and over, each time as the loader gave them.

A loop may pop from its batch, move it to the device in place, write into its tensors, or make one require a gradient.
So each time the containers are new ones, whatever their types, and the tensors are new ones over the same memory: a
replayed batch costs some microseconds, whatever its size. Only where memory was seen to be written into, its values are
copied each time (a copy hides what is measured: on one core 100 MB took 45 ms).
"""

from __future__ import annotations

import io
import pickle
from collections import UserDict
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_ENOUGH_BYTES = 1 << 30  # of tensors: fewer batches are kept then
_MOST_PICKLED = 1 << 18  # bytes of containers: a larger batch of such is handed out as it is
_LONG = 1024
_PLAIN = (dict, list, tuple, set, str, bytes, int, float, bool, type(None))
_SHARED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.nn.Module, Dataset, torch.Generator)


class ReplayedBatches:
    """The batches of one loader. `turn`: which of them was handed out last."""

    def __init__(self, most: int) -> None:
        self.kept: list[KeptBatch] = []
        self.turn = 0
        self._most = most
        self._position = 0

    @property
    def full(self) -> bool:
        """Whether no more are kept: there are `most`, or a part of as many that is large."""
        number = len(self.kept)
        large = sum(each.num_bytes for each in self.kept) > _ENOUGH_BYTES
        return number >= self._most or (large and self._most % number == 0)

    def restart(self) -> None:
        """The next is the first."""
        self._position = 0

    def keep(self, batch: Any) -> None:
        """Before the loop gets it."""
        self.kept.append(KeptBatch(batch))

    def take(self, batch: Any, *, again: bool = False) -> Any:
        """The next one, or the last once more; `batch`, which is kept, where there is none yet."""
        at = max(self._position - again, 0)
        self._position = at + 1
        if at >= len(self.kept) and not self.full:
            self.turn = len(self.kept)
            self.keep(batch)
            return batch
        self.turn = at % len(self.kept)
        return self.kept[self.turn].again()


class KeptBatch:
    """One batch: its containers as a pickle, from which its tensors and arrays are left out."""

    def __init__(self, batch: Any) -> None:
        self._batch: Any = None
        self._containers = _Containers()
        try:
            self._containers.dump(batch)
        except Exception:  # it is large, contains itself, or its classes do not let themselves be copied
            self._batch = batch
        self._parts = [_part(each) for each in self._containers.left_out]

    @property
    def num_bytes(self) -> int:
        return sum(part.values.nbytes for part in self._parts if isinstance(part, _Memory))

    def again(self) -> Any:
        """The batch as it was, in containers of its own."""
        if self._batch is not None:
            return self._batch
        parts = [part.again() if isinstance(part, _Memory) else part for part in self._parts]
        return _Filled(self._containers.written, parts).load()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those in it, as the loader gave them."""
        return (part.values for part in self._parts if isinstance(part, _Memory) and torch.is_tensor(part.values))


class _Memory:
    """A tensor or array of the loader's, and a copy of its values."""

    def __init__(self, given: Any) -> None:
        self.values = _copied(given)
        self._given = _alias(given)
        self._version = _version_of(given)
        self._written: bool | None = None  # None: not looked at

    def again(self) -> Any:
        if not self._written:
            self._written = self._version != _version_of(self._given) or (self._written is None and self._differs())
            self._given = None if self._written else self._given
        return _copied(self.values) if self._written else _alias(self._given)

    def _differs(self) -> bool:
        """Looked at once: what is written through numpy or `.data` counts as no new version of the tensor."""
        if isinstance(self.values, np.ndarray):
            return not np.array_equal(self._given, self.values)
        return self.values.device.type == "cpu" and not torch.equal(self._given, self.values)


def _part(left_out: Any) -> Any:
    return _Memory(left_out) if _is_memory(left_out) else left_out


def _is_memory(thing: Any) -> bool:
    """Whether its values can be copied: a plain tensor (or a subclass of it) or array."""
    if isinstance(thing, np.ndarray):
        return not thing.dtype.hasobject
    return isinstance(thing, torch.Tensor) and thing.layout is torch.strided and not (thing.is_nested or thing.grad_fn)


def _version_of(thing: Any) -> int:
    return int(thing._version) if isinstance(thing, torch.Tensor) and not thing.is_inference() else 0


def _alias(thing: Any) -> Any:
    """Over the same memory; with a tensor's version, but with a shape and a gradient of its own."""
    if type(thing) is np.ndarray:
        return thing.view()
    return thing.detach().requires_grad_(thing.requires_grad) if type(thing) is torch.Tensor else thing


def _copied(thing: Any) -> Any:
    if isinstance(thing, np.ndarray):
        return thing.copy()
    with torch.no_grad():
        twin = thing.detach().clone()
        if thing.device.type == "cpu" and torch.cuda.is_initialized() and thing.is_pinned():  # type: ignore[no-untyped-call]
            twin = twin.pin_memory()
    return twin.requires_grad_(thing.requires_grad)


class _Containers(pickle.Pickler):
    """Writes a batch; what is no container is left out, and stands in `left_out`."""

    def __init__(self) -> None:
        self.left_out: list[Any] = []
        self._file = _Limited()
        self._places: dict[int, int] = {}
        super().__init__(self._file, protocol=5)

    @property
    def written(self) -> bytes:
        return self._file.getvalue()

    def persistent_id(self, thing: Any) -> int | None:
        if not _is_left_out(thing):
            return None
        if id(thing) not in self._places:
            self._places[id(thing)] = len(self.left_out)
            self.left_out.append(thing)
        return self._places[id(thing)]

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, UserDict):
            return NotImplemented
        return _new, (type(thing),), vars(thing), None, None, _put  # transformers' own way leaves attributes out


def _new(kind: type) -> Any:
    return object.__new__(kind)


def _put(twin: Any, attributes: dict[str, Any]) -> None:
    vars(twin).update(attributes)


def _is_left_out(thing: Any) -> bool:
    if type(thing) in _PLAIN:
        return isinstance(thing, str | bytes) and len(thing) > _LONG
    if isinstance(thing, (torch.Tensor, np.ndarray, *_SHARED)) or type(thing) is object:
        return True
    try:
        thing.__reduce_ex__(5)
    except Exception:  # a lock, a generator, an open file
        return True
    return False


class _Limited(io.BytesIO):
    def write(self, written: Any) -> int:
        if self.tell() + len(written) > _MOST_PICKLED:
            raise OverflowError
        return super().write(written)


class _Filled(pickle.Unpickler):
    """Reads a batch, with `parts` for what was left out."""

    def __init__(self, written: bytes, parts: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(written))
        self._parts = parts

    def persistent_load(self, place: int) -> Any:
        return self._parts[place]
