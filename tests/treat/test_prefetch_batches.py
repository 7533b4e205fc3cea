"""Kinds of batches: every container comes back as its own class, with its tensors on the device."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from perfdoctor.errors import UsageError
from perfdoctor.treat.batch_tree import take_apart
from perfdoctor.treat.prefetch import DevicePrefetcher

pytestmark = pytest.mark.usefixtures("emulated")


def through(batch: Any) -> Any:
    """The batch as it comes out, between two others."""
    return list(DevicePrefetcher([(), batch, ()], "cuda"))[1]


def is_one_on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.cpu().tolist() == [1.0]


class Pair(NamedTuple):
    image: torch.Tensor
    label: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    name: str
    half: Any = dataclasses.field(init=False, default=0)


@dataclasses.dataclass
class Counted:
    made = 0
    image: torch.Tensor
    nested: list[Any]

    def __post_init__(self) -> None:
        Counted.made += 1


class Tagged(dict[str, Any]):
    tag = ""


class Moved:
    """Has a `.to` of its own that does more than move."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.where = x, ""

    def to(self, device: Any) -> Moved:
        twin = Moved(self.x.to(device))
        twin.where = str(device)
        return twin


def test_built_in_containers() -> None:
    one = torch.ones(1)
    out = through({"a": [one, (one, "s", None)], "b": {"c": one, 3: 4}, "d": collections.deque([one, 1], maxlen=5)})
    assert is_one_on_device(out["a"][0])
    assert is_one_on_device(out["a"][1][0])
    assert out["a"][1][1:] == ("s", None)
    assert is_one_on_device(out["b"]["c"])
    assert out["b"][3] == 4
    assert type(out["d"]) is collections.deque
    assert out["d"].maxlen == 5
    assert is_one_on_device(out["d"][0])


def test_named_tuples_and_dataclasses_keep_their_class_and_run_no_constructor() -> None:
    pair = through(Pair(torch.ones(1), {"x": 3}))
    assert type(pair) is Pair
    assert is_one_on_device(pair.image)
    assert pair.label == {"x": 3}
    source = Frozen(torch.ones(1), "n")
    object.__setattr__(source, "half", 7)
    frozen = through(source)
    assert type(frozen) is Frozen
    assert is_one_on_device(frozen.image)
    assert (frozen.name, frozen.half) == ("n", 7)
    assert source.image.device.type == "cpu"
    batch = Counted(torch.ones(1), [torch.ones(1), 2])
    counted = through(batch)
    assert Counted.made == 1
    assert is_one_on_device(counted.nested[0])
    assert not batch.nested[0].is_cuda


def test_mappings_keep_their_class_order_and_attributes() -> None:
    tagged = Tagged(b=torch.ones(1), a=2)
    tagged.tag = "kept"
    out = through(tagged)
    assert type(out) is Tagged
    assert out.tag == "kept"
    assert list(out) == ["b", "a"]
    assert is_one_on_device(out["b"])
    grouped: Any = collections.defaultdict(list, x=[torch.ones(1)])
    assert through(grouped)["missing"] == []
    user = collections.UserDict(x=torch.ones(1))
    assert type(through(user)) is collections.UserDict
    assert not user["x"].is_cuda
    proxy = through(types.MappingProxyType({"x": torch.ones(1), "y": 1}))
    assert type(proxy) is types.MappingProxyType
    assert is_one_on_device(proxy["x"])


def test_a_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(1), "text": ["a"]})
    out = through(encoding)
    assert type(out) is transformers.BatchEncoding
    assert is_one_on_device(out["input_ids"])
    assert is_one_on_device(out.input_ids)
    assert out["text"] == ["a"]
    assert not encoding["input_ids"].is_cuda


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    out = through(packed)
    assert type(out) is PackedSequence
    assert out.data.is_cuda
    assert out.sorted_indices.is_cuda
    assert not out.batch_sizes.is_cuda
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(out)
    assert lengths.tolist() == [2, 3]
    assert padded.cpu().sum() == 5


def test_an_object_with_to_is_moved_by_it() -> None:
    out = through([Moved(torch.ones(1)), "x"])
    assert type(out[0]) is Moved
    assert out[0].where == "cuda:0"
    assert is_one_on_device(out[0].x)


def test_odd_tensors_are_moved_by_their_own_to() -> None:
    class Image(torch.Tensor):
        pass

    weight = torch.ones(1, requires_grad=True)
    image = torch.ones(1).as_subclass(Image)
    skeleton, tensors = take_apart([weight, image, torch.eye(2).to_sparse()], torch.device("cuda", 0))
    assert not tensors
    moved = skeleton.filled([], torch.device("cuda", 0))
    (moved[0] * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0]
    assert moved[1].is_cuda
    assert moved[2].is_cuda


def test_what_needs_no_move_is_the_very_object() -> None:
    here = torch.ones(1, device="cuda")
    things: list[Any] = [
        here,
        [here, 1],
        {"x": here},
        "text",
        3,
        None,
        {1, 2},
        object(),
        torch.Size([2]),
        int,
        range(3),
    ]
    out = list(DevicePrefetcher(things, "cuda"))
    assert all(a is b for a, b in zip(out, things, strict=True))


def test_one_tensor_twice_in_a_batch() -> None:
    one = torch.ones(1)
    a, b = through((one, one))
    a.add_(1)
    assert is_one_on_device(b)


class Checked(dict[str, Any]):
    """Takes tensors and texts only."""

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, (str, torch.Tensor)):
            raise TypeError(f"{key} is a {type(value).__name__}")
        super().__setitem__(key, value)


class CheckedList(list[Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"item {key} is a {type(value).__name__}")
        super().__setitem__(key, value)


class Attributed(dict[str, Any]):
    """Its items are attributes too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Couple(tuple[Any, ...]):
    tag = ""

    def __new__(cls, first: Any, second: Any) -> Couple:
        return super().__new__(cls, (first, second))


class Single(dict[str, Any]):
    def __copy__(self) -> Single:
        raise RuntimeError("there is one of it")


def test_containers_that_check_what_is_put_in() -> None:
    out = through({"deep": [Checked(x=torch.ones(1), name="n")]})["deep"][0]
    assert type(out) is Checked
    assert is_one_on_device(out["x"])
    assert out["name"] == "n"
    items = through(CheckedList([torch.ones(1), torch.ones(1)]))
    assert type(items) is CheckedList
    assert all(is_one_on_device(item) for item in items)


def test_items_that_are_attributes_too() -> None:
    batch = Attributed(x=torch.ones(1))
    out = through(batch)
    assert is_one_on_device(out["x"])
    assert out.x is out["x"]
    assert not batch.x.is_cuda


def test_tuples_with_a_constructor_of_their_own() -> None:
    couple = Couple(torch.ones(1), "b")
    couple.tag = "kept"
    out = through(couple)
    assert (type(out), out.tag, out[1]) == (Couple, "kept", "b")
    assert is_one_on_device(out[0])
    most = through(torch.ones(1, 1).max(dim=0))
    assert type(most) is torch.return_types.max
    assert is_one_on_device(most.values)


def test_batches_that_cannot_be_taken_apart_are_named() -> None:
    with pytest.raises(UsageError, match="Single that cannot be copied"):
        through(Single(x=torch.ones(1)))
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    with pytest.raises(UsageError, match="contains itself"):
        through(endless)


@dataclasses.dataclass(frozen=True)
class HandMade:
    __slots__ = ("image", "name", "unset")
    image: torch.Tensor
    name: str


class Named(HandMade):
    """Has a `__dict__` beside its parent's slots."""


@pytest.mark.parametrize("kind", [HandMade, Named])
def test_a_frozen_dataclass_with_slots_by_hand(kind: Any) -> None:
    given = kind(torch.ones(1), "a")
    if kind is Named:
        vars(given)["note"] = 7
    got = through(given)
    assert type(got) is kind
    assert is_one_on_device(got.image)
    assert (got.name, hasattr(got, "unset"), getattr(got, "note", 7)) == ("a", False, 7)
    assert not given.image.is_cuda


class Letter:
    def to(self) -> str:
        return "an address"


def test_an_object_whose_to_takes_no_device_is_named() -> None:
    with pytest.raises(UsageError, match=r"Letter whose \.to\(device\) fails .*yield its tensors in a dict"):
        through({"mail": Letter(), "image": torch.ones(1)})


def test_a_flag_that_is_no_flag() -> None:
    with pytest.raises(UsageError, match="stable_addresses='no'"):
        DevicePrefetcher([], "cuda", stable_addresses="no")  # type: ignore[arg-type]
