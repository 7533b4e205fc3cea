"""Which ops make the host wait on a CUDA device, by op and by its arguments.

The list follows CUDA's kernels, not the CPU's own path: it was read from the CUDA sources of ATen and held against
73 calls counted on an H200. A rule gets the op's arguments and returns the kind of the crossing, or None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from perfdoctor.emulate import border
from perfdoctor.emulate.source import formats, indexes, indexes_with_tensor
from perfdoctor.emulate.storage_marks import is_pinned

Rule = Callable[[Any, Any], str | None]

# Outputs that live on the host on CUDA too.
HOST_OUTPUTS: dict[str, tuple[int, ...]] = {"aten::_pack_padded_sequence": (1,), "aten::_local_scalar_dense": (0,)}

# Not a kind: the op starts a copy to the host and does not wait for it.
START_COPY = "start-copy"
_MASK_TYPES = (torch.bool, torch.uint8)


def _always(kind: str) -> Rule:
    return lambda args, kwargs: kind


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _read(args: Any, kwargs: Any) -> str | None:
    frame = sys._getframe(1)
    if border.named(""):
        return border.named("")
    if indexes(frame):
        return "scalar_index"
    return "format_tensor" if formats(frame) else "item"


def _index(args: Any, kwargs: Any) -> str | None:
    source, indices = args[0], args[1]
    if not source.is_cuda:
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    return _index_kind(indices)


def _index_kind(indices: Any) -> str | None:
    given = [index for index in indices if index is not None]
    if any(index.dtype in _MASK_TYPES and index.is_cuda for index in given):
        return "boolean_mask"
    hosts = sum(not index.is_cuda and index.numel() > 0 for index in given)
    if not hosts:
        return None
    kind = "h2d_pageable" if indexes_with_tensor(sys._getframe(1)) else "h2d_blocking"
    for _ in range(hosts - 1):  # each index is a copy of its own; the last one is what the rule returns
        border.cross(kind)
    return kind


def _index_put(args: Any, kwargs: Any) -> str | None:
    target, indices, value = args[:3]
    if not target.is_cuda:
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    accumulate = _argument(args, kwargs, 3, "accumulate", False)
    masks = [index for index in indices if index is not None]
    single_mask = len(masks) == 1 and masks[0].dtype in _MASK_TYPES and masks[0].is_cuda
    on_host = not value.is_cuda and value.numel() == 1
    if single_mask and on_host and not accumulate:
        return None  # runs as masked_fill_
    kind = _index_kind(indices)
    return kind or ("h2d_blocking" if on_host else None)


def _copy(args: Any, kwargs: Any) -> str | None:
    target, source = args[0], args[1]
    non_blocking = bool(_argument(args, kwargs, 2, "non_blocking", False))
    if target.is_cuda == source.is_cuda or not has_elements(source) or border.in_backward(sys._getframe(1)):
        return None  # in C++ backwards the host side is a buffer that lives on the device there
    if target.is_cuda:
        return h2d_kind(source, non_blocking, fresh=source.dim() == 0)
    if not non_blocking:
        return "cpu"
    # The driver returns only when a copy into pageable memory is done.
    return START_COPY if is_pinned(target) else "cpu"


def has_elements(tensor: torch.Tensor) -> bool:
    """Whether a copy of `tensor` moves anything: ATen's copy returns before it comes to the stream where not."""
    return tensor.layout is not torch.strided or tensor.numel() > 0


def h2d_kind(source: torch.Tensor, non_blocking: bool, fresh: bool) -> str | None:
    """The kind of a copy from the host tensor `source`; `fresh` where the same expression made it."""
    if not has_elements(source):
        return None
    if is_pinned(source):
        return None if non_blocking else "h2d_blocking"
    return "h2d_blocking" if fresh else "h2d_pageable"


def _fill_value(args: Any, kwargs: Any) -> str | None:
    value = kwargs["value"] if "value" in kwargs else args[-1]
    return "item" if value.is_cuda else None  # the kernel takes the value as a number


def _normal(args: Any, kwargs: Any) -> str | None:
    std = _argument(args, kwargs, 1, "std")
    return "tensor_to_bool" if std.is_cuda and std.numel() else None  # that it is not negative


def _isin(args: Any, kwargs: Any) -> str | None:
    elements, tests = args[0].numel(), args[1].numel()
    sorts = tests >= 10.0 * elements**0.145  # ATen compares directly below that
    return "unique" if sorts and not _argument(args, kwargs, 2, "assume_unique", False) else None


def _equal(args: Any, kwargs: Any) -> str | None:
    left, right = args[0], args[1]
    same = left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()
    return None if same or left.shape != right.shape else border.named("tensor_to_bool")


def _repeat_interleave(args: Any, kwargs: Any) -> str | None:
    return "repeat_interleave" if kwargs.get("output_size") is None else None


def _histc(args: Any, kwargs: Any) -> str | None:
    low, high = _argument(args, kwargs, 2, "min", 0), _argument(args, kwargs, 3, "max", 0)
    return "other_sync" if low == high else None


def _pack(args: Any, kwargs: Any) -> str | None:
    if args[1].is_cuda:
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor")
    return None


def _rows(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten::{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_rows("_local_scalar_dense", _read),
    **_rows("nonzero nonzero_numpy", _always("nonzero")),
    **_rows("masked_select", _always("masked_select")),
    **_rows("_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive", _always("unique")),
    **_rows("bincount", _always("bincount")),
    **_rows("repeat_interleave.Tensor", _repeat_interleave),
    **_rows("index _unsafe_index", _index),
    **_rows("index_put index_put_ _index_put_impl_ _unsafe_index_put", _index_put),
    **_rows("copy_", _copy),
    **_rows("equal", _equal),
    **_rows("allclose", _always("tensor_to_bool")),
    **_rows("isin.Tensor_Tensor", _isin),
    **_rows("masked_fill.Tensor masked_fill_.Tensor index_fill.int_Tensor index_fill_.int_Tensor", _fill_value),
    **_rows("normal.Tensor_Tensor normal.float_Tensor", _normal),
    **_rows("_to_sparse _to_sparse_csr", _always("nonzero")),
    **_rows("_coalesce", _always("unique")),
    **_rows("histc", _histc),
    **_rows("_ctc_loss _ctc_loss_backward", _always("ctc_loss")),
    **_rows("_pack_padded_sequence", _pack),
    **_rows("_linalg_check_errors _linalg_eigh _linalg_svd linalg_pinv linalg_lstsq", _always("linalg_check")),
    **_rows("linalg_eig linalg_eigvals linalg_matrix_exp", _always("linalg_check")),
    **_rows("embedding_renorm_ _embedding_bag_dense_backward", _always("other_sync")),
}  # fmt: skip
