"""Lines to paste, by the kind of call or the code of a finding. The sentence comes from `sync_kinds` or the check."""

from __future__ import annotations

from perfdoctor.diagnose.finding import Advice
from perfdoctor.record.sync_kinds import KINDS

_READ = (
    "total += loss.detach()            # a device tensor; nothing waits",
    "if step % 50 == 0:",
    "    print(total.item() / 50); total.zero_()",
)
_LINES: dict[str, tuple[str, ...]] = {
    "item": _READ,
    "format_tensor": _READ,
    "print_tensor": _READ,
    "tensor_to_bool": ("if step % 50 == 0 and loss > limit:",),
    "boolean_mask": ("loss = (per_row_loss * keep).sum() / keep.sum().clamp(min=1)",),
    "masked_select": ("kept = torch.where(mask, x, torch.zeros_like(x))",),
    "one_hot": ("target = F.one_hot(y, num_classes=NUM_CLASSES)",),
    "repeat_interleave": ("x = torch.repeat_interleave(seed, reps, dim=0, output_size=KNOWN_TOTAL)",),
    "unique": ("counts = torch.bincount(y, minlength=NUM_CLASSES)   # fixed size",),
    "cpu": (
        "host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)   # once",
        "host.copy_(x, non_blocking=True); copied.record()",
        "copied.synchronize()   # later, when the value is needed",
    ),
    "grad_scaler": ("with torch.autocast('cuda', torch.bfloat16):   # no GradScaler needed",),
    "clip_grad_norm": ("torch.nn.utils.clip_grad_norm_(params, max_norm)   # error_if_nonfinite=False",),
    "h2d_pageable": (
        "loader = DataLoader(..., pin_memory=True)",
        "x = x.to(device, non_blocking=True)",
    ),
    "h2d_blocking": (
        "self.register_buffer('weight', torch.tensor([...]))   # once, moved by model.to(device)",
        "scale = torch.full((), 0.07, device=x.device)         # or filled on the device",
        "x = x.to(device, non_blocking=True)                   # a batch in pinned memory",
    ),
    "launch-bound": ("model = torch.compile(model, mode='reduce-overhead')",),
    "optimizer-loop": ("optimizer = torch.optim.AdamW(model.parameters(), lr=..., fused=True)  # or yours",),
    "hand-loop": ("torch._foreach_add_(params, updates, alpha=-lr)",),
    "norm-loop": ("norm = torch.nn.utils.get_total_norm([p.grad for p in params])   # one device tensor",),
    "scale-loop": ("torch._foreach_mul_([p.grad for p in params], scale)",),
    "ema-loop": ("torch._foreach_lerp_(ema_params, list(model.parameters()), 1 - decay)",),
    "garbage-collection": ("gc.collect(); gc.freeze()   # once, after warm-up",),
    "gc-threshold": ("gc.set_threshold(50_000, 20, 100)   # 700 or 2000, 10, 10 is Python's own",),
    "gc-collect": ("if step % 1000 == 0:", "    gc.collect()"),
    "worker-respawn": ("loader = DataLoader(..., persistent_workers=True)",),
    "anomaly-mode": ("torch.autograd.set_detect_anomaly(False)",),
    "no-tensor-cores": ("torch.set_float32_matmul_precision('high')",),
    "fusion": ("model = torch.compile(model)",),
}


# More seldom gain: torch's own advice is a few, and the training process wants a CPU for itself.
_MOST_WORKERS = 8


def workers_for(num_cpus: float, now: int = 0) -> int:
    """How many DataLoader workers to try beside the loop on so many CPUs: twice those of `now`, as far as CPUs go.

    0 where a worker would only take turns with the loop.
    """
    return max(min(max(_MOST_WORKERS, 2 * now), int(num_cpus) - 1), 0)


def loader_lines(num_cpus: float | None, now: int = 0) -> tuple[str, ...]:
    """The loader with workers, as many as the recorded machine has CPUs for; None: its CPUs were not recorded."""
    if num_cpus is None:
        return (
            "num_workers = min(8, len(os.sched_getaffinity(0)) - 1)   # CPUs were not recorded: one stays for the loop",
            "loader = DataLoader(..., num_workers=num_workers, persistent_workers=True, pin_memory=True)",
        )
    workers = workers_for(num_cpus, now)
    return (f"loader = DataLoader(..., num_workers={workers}, persistent_workers=True, pin_memory=True)",)


def advice_for_kind(kind: str) -> Advice:
    """The advice for one kind of sync or copy."""
    return Advice(text=KINDS[kind].advice, lines=_LINES.get(kind, ())) if kind in KINDS else Advice(text="")


def advice(text: str, key: str) -> Advice:
    """A sentence with the lines of a code."""
    return Advice(text=text, lines=_LINES.get(key, ()))
