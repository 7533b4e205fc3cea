"""Which treatment cures which finding: by names alone, so that a recording is read without torch."""

from __future__ import annotations

# Treatment -> codes of the findings that it cures, the treatment to try first on top.
CURES: dict[str, tuple[str, ...]] = {
    "prefetch": ("pageable-copy", "blocking-copy", "data-wait"),
    "persistent_workers": ("worker-respawn",),
    "dataloader_workers": ("data-wait",),
    "pin_memory": ("pageable-copy",),
    "log_every_n": ("host-sync",),
    "gc_frozen": ("garbage-collection",),
    "graphed_step": ("launch-bound",),
    "fused_optimizer": ("small-kernels", "launch-bound"),
    "our_clip": ("small-kernels", "launch-bound"),
    "set_to_none": ("small-kernels", "launch-bound"),
    "compile": ("fusion", "small-kernels", "launch-bound"),
    "compile_reduce_overhead": ("launch-bound", "small-kernels", "fusion"),
    "compile_max_autotune": ("fusion",),
    "bf16_autocast": ("no-tensor-cores",),
    "tf32": ("no-tensor-cores",),
    "channels_last": ("no-tensor-cores",),
    "cudnn_benchmark": (),
}


def treatments_for(code: str) -> tuple[str, ...]:
    """Names of the treatments that cure findings of this code, the one to try first in front."""
    return tuple(name for name, codes in CURES.items() if code in codes)
