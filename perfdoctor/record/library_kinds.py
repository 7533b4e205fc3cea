"""The kind of sync that library frames on the stack imply.

A user who calls `clip_grad_norm_` wrote no `.item()`: what counts is the outermost thing the library was asked to do,
as far as its frames tell. Rules go from the innermost frame outwards and stop at the user's first frame.
"""

from __future__ import annotations

from types import CodeType, FrameType

from perfdoctor.record.instruction import called_name
from perfdoctor.record.owners import PERFDOCTOR, USER, file_owner, is_generated, package_path

_LOADING = (
    "load", "_load", "_legacy_load", "persistent_load", "load_tensor", "restore_location", "default_restore_location",
    "_deserialize",
)  # fmt: skip
# (path prefix, functions or () for all, kind). First match wins.
_RULES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("torch/_tensor.py", ("__format__",), "format_tensor"),
    ("torch/_tensor.py", ("__contains__",), "tensor_to_bool"),
    ("torch/_tensor.py", ("__array__",), "numpy"),
    ("torch/_tensor.py", ("__reduce_ex__", "_reduce_ex_internal"), "save"),
    ("torch/_tensor_str.py", (), "print_tensor"),
    (
        "torch/functional.py",
        ("_unique_impl", "_unique_consecutive_impl", "_return_output", "_return_inverse"),
        "unique",
    ),
    ("torch/functional.py", ("_return_counts", "_consecutive_return_output", "unique", "unique_consecutive"), "unique"),
    ("torch/nn/functional.py", ("ctc_loss",), "ctc_loss"),
    ("torch/nn/utils/clip_grad.py", (), "clip_grad_norm"),
    ("torch/amp/grad_scaler.py", (), "grad_scaler"),
    ("torch/cuda/amp/grad_scaler.py", (), "grad_scaler"),
    ("torch/distributions/", ("sample",), "library_read"),  # torch.normal checks its std; validate_args is no cure
    ("torch/distributions/", (), "distribution_check"),
    ("torch/optim/lr_scheduler.py", (), "item"),  # ReduceLROnPlateau turns the metric it is given into a number
    ("torch/optim/swa_utils.py", ("update_parameters",), "h2d_pageable"),  # its own counter goes to the device
    ("torch/optim/", (), "optimizer_internal"),
    ("torch/serialization.py", _LOADING, "h2d_pageable"),
    ("torch/serialization.py", (), "save"),
    ("torch/distributed/checkpoint/", (), "save"),
    ("torch/cuda/streams.py", ("synchronize",), "cuda_synchronize"),
    ("torch/cuda/__init__.py", ("synchronize",), "cuda_synchronize"),
    ("torch/cuda/memory.py", ("empty_cache",), "empty_cache"),
    ("torchmetrics/", (), "torchmetrics"),
    ("transformers/trainer.py", ("log", "_maybe_log_save_evaluate"), "logging"),
    ("accelerate/optimizer.py", (), "optimizer_internal"),
)
_LIGHTNING_LOGGING = ("logger_connector", "/loggers/", "/callbacks/progress", "utilities/metrics")
# Of core/module.py only these: `LightningModule.backward` is there too, and syncs for other reasons.
_LIGHTNING_REDUCTIONS = frozenset(("_sync_ddp", "_sync_ddp_if_available"))
_LIGHTNING_LOG = frozenset(("log", "log_dict", "_log_dict_through_fabric", "__to_tensor"))


# What a torch function was asked to do. A library that asked it for that (torchmetrics: unique labels) is the cause.
_OF_FUNCTIONS = frozenset((None, "print_tensor", "format_tensor", "tensor_to_bool", "numpy", "unique", "ctc_loss"))


def library_kind(frame: FrameType | None) -> str | None:
    """The kind that the frames from `frame` (innermost) out to the user's first imply; None if none does."""
    logged = False
    kind: str | None = None
    while frame is not None:
        code = frame.f_code
        owner = file_owner(code.co_filename)
        if owner == USER and not _is_generated_method(code):
            break
        logged = logged or owner == "logger"
        if owner not in (PERFDOCTOR, USER) and kind in _OF_FUNCTIONS:
            kind = _rule(code) or kind
        frame = frame.f_back
    if kind == "print_tensor" and (frame is None or called_name(frame) != "print"):
        kind = "format_tensor"
    if logged and kind in (None, "format_tensor", "print_tensor"):
        return "logging"
    return kind


def barrier_kind(frame: FrameType | None) -> str:
    """Whose barrier it is: that of Lightning's reduction of a logged value, or whoever's."""
    while frame is not None and file_owner(frame.f_code.co_filename) != USER:
        if frame.f_code.co_name in _LIGHTNING_REDUCTIONS:
            return "sync_dist"
        frame = frame.f_back
    return "barrier"


def _is_generated_method(code: CodeType) -> bool:
    """The `__repr__` of a dataclass: who printed the object is one frame further out."""
    return code.co_name.startswith("__") and is_generated(code.co_filename)


def _rule(code: CodeType) -> str | None:
    path = package_path(code.co_filename)
    for prefix, functions, kind in _RULES:
        if path.startswith(prefix) and (not functions or code.co_name in functions):
            return kind
    if file_owner(code.co_filename) != "lightning":
        return None
    logs = path.endswith("/core/module.py") and code.co_name in _LIGHTNING_LOG
    return "logging" if logs or any(part in path for part in _LIGHTNING_LOGGING) else None
