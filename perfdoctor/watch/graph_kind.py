"""Which op of a backward pass made the host wait: warnings of autograd's threads come out at the `backward()` line."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

# Backward nodes whose own kernels read sizes or values on the host, first match first.
_NODES = (
    ("MaskedSelectBackward", "masked_select"),
    ("IndexBackward", "boolean_mask"),
    ("IndexPutBackward", "boolean_mask"),
    ("IndexPutImplBackward", "boolean_mask"),
    ("MaskedScatterBackward", "masked_select"),
    ("CtcLossBackward", "ctc_loss"),
    ("RepeatInterleaveBackward", "repeat_interleave"),
    ("UniqueBackward", "unique"),
    ("LinalgSolve", "linalg_check"),
    ("LinalgCholesky", "linalg_check"),
    ("LinalgInv", "linalg_check"),
    ("CopyBackwards", "cpu"),
    ("ToCopyBackward", "cpu"),
)
_MOST_NODES = 50_000


def backward_kind(frame: FrameType) -> str:
    """The likeliest kind of a sync inside `backward()`, from the names of the graph's nodes.

    `frame` is that of `torch.autograd.graph._engine_run_backward`, whose first argument holds the roots.
    """
    torch = sys.modules["torch"]
    if torch.is_anomaly_enabled():
        return "anomaly_check"
    names = _node_names(frame.f_locals.get("t_outputs") or ())
    for prefix, kind in _NODES:
        if any(name.startswith(prefix) for name in names):
            return kind
    return "other_sync"


def _node_names(roots: Any) -> set[str]:
    waiting = [getattr(root, "grad_fn", root) for root in roots]
    seen: set[Any] = set()
    names: set[str] = set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen or not hasattr(node, "next_functions"):
            continue
        seen.add(node)
        names.add(node.name())
        waiting += [following for following, _ in node.next_functions]
    return names
