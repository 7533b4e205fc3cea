"""Which treatment cures which finding: by names alone, so that a recording is read without torch."""

from __future__ import annotations

# Treatment -> codes of the findings that it cures, the treatment to try first on top.
CURES: dict[str, tuple[str, ...]] = {
    "prefetch": ("pageable-copy", "blocking-copy", "data-wait"),
    "persistent_workers": ("worker-respawn", "data-wait"),
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

# These give the loop another loader, or its loader other settings.
OF_THE_LOADER = frozenset({"prefetch", "dataloader_workers", "pin_memory", "persistent_workers"})

# A mask or a data-dependent size is needed in every step: reading every Nth leaves it as it is.
_ONLY_FOR = {
    "log_every_n": frozenset(
        ("item", "cpu", "tolist", "numpy", "format_tensor", "print_tensor", "logging", "torchmetrics", "norm_loop")
    )
}


def treatments_for(code: str, kind: str = "") -> tuple[str, ...]:
    """Names of the treatments that cure findings of this code, and kind where known; the one to try first in front."""
    names = (name for name, codes in CURES.items() if code in codes)
    return tuple(name for name in names if not kind or kind in _ONLY_FOR.get(name, (kind,)))
