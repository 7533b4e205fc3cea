"""What the code did that made the host wait: from library frames, else from the exact expression being executed.

torch says only "called a synchronizing CUDA operation". The frame says more: which instruction was running, its
source columns, and the values of its names. Names are looked up, never evaluated: no property or call is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import BuiltinFunctionType, FrameType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

from perfdoctor.record.call_site import library_kind, user_frame
from perfdoctor.record.instruction import Instruction, call_name, current_instruction
from perfdoctor.record.owners import TORCH, USER, file_owner
from perfdoctor.watch.graph_kind import backward_kind
from perfdoctor.watch.peek import UNKNOWN, is_tensor, peek, peek_origin

_CALLS: dict[str, str] = {
    name: kind
    for kind, names in {
        "item": "item float int complex round range index trunc arange linspace full fill_ new_full randint "
        "tensor_split __float__ __int__ __index__ clamp clip",
        "tolist": "tolist",
        "cpu": "cpu",
        "numpy": "numpy __array__",
        "tensor_to_bool": "bool any all max min sorted sort filter is_nonzero equal allclose __bool__ __contains__",
        "nonzero": "nonzero argwhere nonzero_tuple",
        "masked_select": "masked_select masked_scatter masked_scatter_",
        "boolean_mask": "index_put index_put_ __getitem__ __setitem__ getitem setitem _unsafe_index index",
        "unique": "unique unique_consecutive _unique2 unique_dim",
        "one_hot": "one_hot",
        "bincount": "bincount histogram",
        "repeat_interleave": "repeat_interleave",
        "ctc_loss": "ctc_loss",
        "cuda_synchronize": "synchronize",
        "format_tensor": "str repr format join write writerow writerows",
        "print_tensor": "print",
        "save": "save dump dumps deepcopy",
        "empty_cache": "empty_cache",
        "linalg_check": "cholesky solve inv inverse lu lu_factor lu_solve eig eigh eigvals eigvalsh svd svdvals lstsq "
        "pinv matrix_rank matrix_norm cond solve_triangular cholesky_inverse ldl_factor tensorsolve tensorinv symeig",
    }.items()
    for name in names.split()
}
_FACTORIES = (
    "tensor as_tensor asarray zeros ones full arange linspace eye rand randn randint randperm empty Tensor FloatTensor "
    "LongTensor IntTensor BoolTensor scalar_tensor new_tensor new_zeros new_ones new_full"
)
_CREATIONS = frozenset(_FACTORIES.split())
_DEVICE_READERS = frozenset(("tensor", "as_tensor", "asarray", "new_tensor"))
# These fill on the device; what waits is a size given as a device scalar.
_FILLED = frozenset(("zeros", "ones", "eye", "rand", "randn", "randperm", "empty", "new_zeros", "new_ones"))
_HOST_INDICES = frozenset(("tolist", "list", "range", "tuple", "sorted", "numpy", "permutation", "sample", "choice"))
_COPIES = frozenset(("to", "cuda", "copy_", "type", "type_as", "_to_copy", "set_data", "pin_memory"))
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, WrapperDescriptorType)
_SCALAR_MODULES = frozenset(("math", "np", "numpy", "operator", "statistics"))
_TESTS = ("IF_TRUE", "IF_FALSE", "IF_TRUE_OR_POP", "IF_FALSE_OR_POP")
_MASK_CALLS = ("is", "logical_", "bool", "eq", "ne", "lt", "gt", "le", "ge", "bernoulli", "any", "all", "_mask")


def call_kind(frame: FrameType) -> str:
    """The kind (a name of sync_kinds.KINDS) of a sync whose innermost Python frame is `frame`."""
    if frame.f_code.co_name == "_engine_run_backward":
        return backward_kind(frame)
    kind = library_kind(frame) or _instruction_kind(frame)
    if kind is not None:
        return kind
    owner = file_owner(frame.f_code.co_filename)
    if owner == USER:
        return "other_sync"
    outer = user_frame(frame)
    if owner == TORCH and outer is not None:
        return _instruction_kind(outer) or "library_read"
    return "library_read"


def _instruction_kind(frame: FrameType) -> str | None:
    instruction = current_instruction(frame)
    kind = _opcode_kind(instruction)
    if kind is not None:
        return kind
    node = instruction.node
    if isinstance(node, ast.Subscript):
        return _subscript_kind(node, frame, "STORE" in instruction.opname)
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and isinstance(node.left, ast.Constant | ast.JoinedStr)
    ):
        return "format_tensor"
    return _call_kind(node, frame) if isinstance(node, ast.Call) else _CALLS.get(instruction.callee)


def _opcode_kind(instruction: Instruction) -> str | None:
    name = instruction.opname
    if ("JUMP" in name and name.endswith(_TESTS)) or name in ("UNARY_NOT", "TO_BOOL", "CONTAINS_OP", "COMPARE_OP"):
        return "tensor_to_bool"
    return "format_tensor" if name.startswith("FORMAT_") else None


def _call_kind(node: ast.Call, frame: FrameType) -> str | None:
    name = call_name(node.func)
    if name in _COPIES:
        return _copy_kind(name, node, frame)
    if name == "where" and len(node.args) + len(node.keywords) == 1:
        return "nonzero"
    if name in _CREATIONS and (name in _DEVICE_READERS or name not in _CALLS):
        return _creation_kind(name, node, frame)
    if name in _CALLS:
        return _CALLS[name]
    mapped = _mapped_name(node)
    if mapped in _CALLS:
        return _CALLS[mapped]
    function = peek(node.func, frame) if isinstance(node.func, ast.Name) else None
    alias = function.__name__ if isinstance(function, _FUNCTIONS) else ""  # anything else may answer by code of its own
    if alias in _CALLS:
        return _CALLS[alias]
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return "item" if node.func.value.id in _SCALAR_MODULES else None
    return None


def _creation_kind(name: str, node: ast.Call, frame: FrameType) -> str:
    if name in _FILLED or (name in _DEVICE_READERS and _device_values(node.args, frame)):
        return "item"
    source = peek(node.args[0], frame) if node.args and name in ("as_tensor", "asarray") else None
    return "h2d_pageable" if is_tensor(source) or hasattr(source, "__array__") else "h2d_blocking"


def _mapped_name(node: ast.Call) -> str:
    """'float' for `list(map(float, values))`: the reads happen while the outer call asks for values."""
    inner = node.args[0] if node.args else None
    if isinstance(inner, ast.Call) and call_name(inner.func) == "map" and inner.args:
        return call_name(inner.args[0])
    return ""


def _device_values(nodes: Iterable[ast.expr], frame: FrameType) -> bool:
    for node in nodes:
        elements = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        for element in elements:
            value = peek(element, frame)
            value = peek_origin(element, frame) if value is UNKNOWN else value
            for leaf in value if isinstance(value, list | tuple) else (value,):
                if is_tensor(leaf) and leaf.is_cuda:
                    return True
    return False


def _copy_kind(name: str, node: ast.Call, frame: FrameType) -> str | None:
    if not isinstance(node.func, ast.Attribute):
        return None
    receiver: ast.expr = node.func.value
    if name == "copy_":
        source = node.args[0] if node.args else receiver
        if _on_device(peek(receiver, frame)) is False or _on_device(peek(source, frame)) is True:
            return "cpu"
        return host_source_kind(source, frame)
    if name != "cuda" and _target_is_host(node, frame):
        return "cpu"
    if _on_device(peek(receiver, frame)) is True and name != "cuda":
        return "cpu"
    return host_source_kind(receiver, frame)


def _on_device(value: Any) -> bool | None:
    return bool(value.is_cuda) if is_tensor(value) else None


def _target_is_host(node: ast.Call, frame: FrameType) -> bool:
    keywords = [k.value for k in node.keywords if k.arg in ("device", "other")]
    for argument in (*node.args, *keywords):
        value = peek(argument, frame)
        if isinstance(argument, ast.Call) and call_name(argument.func) == "device" and argument.args:
            value = peek(argument.args[0], frame)
        if value is UNKNOWN or isinstance(value, bool | int):
            continue
        device = getattr(value, "device", value) if is_tensor(value) else value
        if str(device).startswith("cpu"):
            return True
    return False


def host_source_kind(source: ast.expr, frame: FrameType) -> str:
    """`h2d_blocking` for a host tensor made in the same expression (or a pinned one), `h2d_pageable` for a batch."""
    value = peek(source, frame)
    if is_tensor(value):
        return "h2d_blocking" if not value.is_cuda and value.is_pinned() else "h2d_pageable"
    node: ast.AST = source
    while isinstance(node, ast.Call):
        name = call_name(node.func)
        if name in _CREATIONS:
            return "h2d_blocking"
        if name == "pin_memory":
            return "h2d_blocking"
        if not isinstance(node.func, ast.Attribute):
            break
        node = node.func.value  # tensor(...).float().to(device): what was made is at the root of the chain
    return "h2d_pageable"


def _subscript_kind(node: ast.Subscript, frame: FrameType, stored: bool) -> str:
    container = peek(node.value, frame)
    if isinstance(container, list | tuple) or isinstance(node.value, ast.List | ast.Tuple):
        return "scalar_index"
    if stored and _on_device(container) is False:
        return "cpu"
    elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    kinds = [_index_kind(element, frame) for element in elements]
    for kind in ("boolean_mask", "scalar_index", "h2d_blocking", "h2d_pageable"):
        if kind in kinds:
            return kind
    if stored:
        return "h2d_blocking"  # a Python number written into one element travels to the device
    return "boolean_mask" if "unknown" in kinds else "other_sync"


def _index_kind(node: ast.expr, frame: FrameType) -> str:
    if isinstance(node, ast.Slice):
        bounds = [bound for bound in (node.lower, node.upper, node.step) if bound is not None]
        return "scalar_index" if any(_may_be_tensor(bound, frame) for bound in bounds) else ""
    value = peek(node, frame)
    if is_tensor(value):
        return _tensor_index_kind(value)
    if value is not UNKNOWN:
        return "h2d_blocking" if isinstance(value, list | range) or hasattr(value, "__array__") else ""
    origin = peek_origin(node, frame)
    if origin is not UNKNOWN and not _is_mask(node):
        return _derived_index_kind(node, origin, frame)
    if isinstance(node, ast.List | ast.ListComp) or (isinstance(node, ast.Call) and _makes_host_index(node)):
        return "h2d_blocking"
    return "boolean_mask" if _is_mask(node) else ("h2d_blocking" if _is_creation(node) else "unknown")


def _tensor_index_kind(index: Any) -> str:
    if str(index.dtype) in ("torch.bool", "torch.uint8"):
        return "boolean_mask"
    if not index.is_cuda:
        return "h2d_pageable"
    return "scalar_index" if index.ndim == 0 else ""


def _derived_index_kind(node: ast.expr, origin: Any, frame: FrameType) -> str:
    """The kind of an index that an expression takes from a tensor: `order[0]`, `order[:8]`, `order.flip(0)`."""
    one = isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice | ast.Tuple)
    if origin.is_cuda and one and origin.ndim == 1 and not is_tensor(peek(node.slice, frame)):  # type: ignore[attr-defined]
        return "scalar_index"
    # A device tensor of integers makes nobody wait: a method has made a mask of it.
    return _tensor_index_kind(origin) or ("unknown" if isinstance(node, ast.Call) else "")


def _makes_host_index(node: ast.Call) -> bool:
    return call_name(node.func) in _HOST_INDICES


def _may_be_tensor(node: ast.expr, frame: FrameType) -> bool:
    value = peek(node, frame)
    return is_tensor(value) or value is UNKNOWN


def _is_mask(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare | ast.BoolOp):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert | ast.Not)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
    return isinstance(node, ast.Call) and call_name(node.func).startswith(_MASK_CALLS)


def _is_creation(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and call_name(node.func) in _CREATIONS
