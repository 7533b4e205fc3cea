"""The kinds of call that stall the host or cross the border between host and device, and what to do about each.

One table serves the live hooks, the emulated device and the diagnosis, so that a kind means the same everywhere.
A kind is what the user wrote (`item`, `boolean_mask`); a code is what the report files it under (`host-sync`).
Which calls sync was measured on an H200 with torch 2.11 (73 calls, counted by the profiler's CUDA calls).
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_SYNC = "host-sync"
PAGEABLE_COPY = "pageable-copy"
BLOCKING_COPY = "blocking-copy"
UNSYNCHRONISED_READ = "unsynchronised-read"
ALLOCATOR = "allocator"
GARBAGE_COLLECTION = "garbage-collection"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncKind:
    """One kind of call: its stable name, the finding code it belongs to, a phrase for it, and the cure in one line."""

    name: str
    code: str
    phrase: str
    advice: str


_KEEP = "sum detached tensors on the device and read the sum every N steps"

_SELDOM = "call it every N steps, or in a form that needs no device value on the host"

_ROWS = (
    ("item", HOST_SYNC, "reads a device value", _KEEP),
    ("tolist", HOST_SYNC, "reads a device tensor into a list", "go on with the tensor on the device, or make the list every N steps"),
    ("cpu", HOST_SYNC, "copies a device tensor to the host and waits", "stay on the device, or copy with non_blocking=True into pinned memory behind an event"),
    ("numpy", HOST_SYNC, "copies a device tensor to numpy and waits", "compute it with torch on the device"),
    ("tensor_to_bool", HOST_SYNC, "branches on a device value", "select with torch.where, or decide every N steps"),
    ("boolean_mask", HOST_SYNC, "indexes with a device mask, whose size the host must read", "use torch.where or multiply by the mask"),
    ("nonzero", HOST_SYNC, "asks for the indices of non-zero elements, whose number the host must read", "use three-argument torch.where, or a fixed-size topk"),
    ("masked_select", HOST_SYNC, "selects by a device mask, whose size the host must read", "use torch.where or multiply by the mask"),
    ("unique", HOST_SYNC, "asks for unique values, whose number the host must read", "count into a fixed-size tensor (bincount with minlength, scatter_add)"),
    ("one_hot", HOST_SYNC, "infers the number of classes from device data", "pass num_classes=, or compare with torch.arange"),
    ("bincount", HOST_SYNC, "sizes its output from device data", "scatter_add into a tensor of known size"),
    ("repeat_interleave", HOST_SYNC, "sizes its output from device data", "pass output_size="),
    ("scalar_index", HOST_SYNC, "uses device scalars as indices or slice bounds", "use host integers, or index_select / gather with device indices"),
    ("format_tensor", HOST_SYNC, "formats a device tensor into text", "log it every N steps"),
    ("print_tensor", HOST_SYNC, "prints a device tensor", "print it every N steps"),
    ("grad_scaler", HOST_SYNC, "GradScaler.step reads whether gradients overflowed", "use bfloat16 autocast, which needs no scaler, or a fused optimizer"),
    ("clip_grad_norm", HOST_SYNC, "checks the gradient norm on the host", "leave error_if_nonfinite=False; it clips the same and does not wait"),
    ("distribution_check", HOST_SYNC, "torch.distributions validates its arguments on the host", "pass validate_args=False"),
    ("ctc_loss", HOST_SYNC, "ctc_loss reads its lengths on the host", "give input_lengths and target_lengths as host tensors"),
    ("torchmetrics", HOST_SYNC, "a metric reads device values", "call metric.update() each step and metric.compute() at the end; validate_args=False"),
    ("logging", HOST_SYNC, "a logger turns a device value into a number", "log every N steps; without prog_bar=True"),
    ("save", HOST_SYNC, "saves device tensors", "save less often, or copy to pinned memory first"),
    ("linalg_check", HOST_SYNC, "checks a factorisation on the host", "use the _ex variant (torch.linalg.solve_ex, check_errors=False)"),
    ("optimizer_internal", HOST_SYNC, "the optimizer itself reads device values", "inherent in this optimizer"),
    ("anomaly_check", HOST_SYNC, "anomaly mode checks each gradient on the host", "switch anomaly detection off"),
    ("library_read", HOST_SYNC, "a library reads device values", _SELDOM),
    ("cuda_synchronize", HOST_SYNC, "waits for the device outright", "remove it, or time with CUDA events read later"),
    ("barrier", HOST_SYNC, "waits at a barrier until every rank is there", "remove it: a collective orders the ranks by itself"),
    ("sync_dist", HOST_SYNC, "self.log with sync_dist=True waits at a barrier until every rank is there", "reduce once an epoch (on_step=False, on_epoch=True), or log each rank's own value with sync_dist=False"),
    ("other_sync", HOST_SYNC, "waits for the device", _SELDOM),
    ("h2d_pageable", PAGEABLE_COPY, "copies from pageable host memory", "pin the source (DataLoader(pin_memory=True)) and copy with non_blocking=True"),
    ("h2d_blocking", BLOCKING_COPY, "copies what was built on the host, or a pinned tensor, and waits", "a constant: create it on the device, once; a pinned batch: copy it with non_blocking=True"),
    ("d2h_race", UNSYNCHRONISED_READ, "reads the target of an asynchronous copy before it has arrived", "wait on an event recorded after the copy before reading"),
    ("empty_cache", ALLOCATOR, "returns cached memory to the driver, which waits for the device", "remove the call"),
    ("cuda_malloc", ALLOCATOR, "asks the driver for memory in steady state", "keep shapes stable; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ("python_gc", GARBAGE_COLLECTION, "Python's garbage collector runs", "gc.freeze() after warm-up, or gc.disable() with gc.collect() at fixed steps"),
)  # fmt: skip

KINDS: dict[str, SyncKind] = {row[0]: SyncKind(name=row[0], code=row[1], phrase=row[2], advice=row[3]) for row in _ROWS}
