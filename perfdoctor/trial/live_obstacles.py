"""Treatments that cannot be switched on and off in a running process, and why: they are tried in processes.

Most can (treatments_trial.py). What torch keeps for the life of a process is the exception.
"""

from __future__ import annotations

from perfdoctor.record import crossings
from perfdoctor.treat.treatment import Loop, Treatment
from perfdoctor.trial.verdict import Verdict

# torch looks a convolution up among its plans before it looks at cudnn.benchmark, and the flag is no part of the key
# (aten/src/ATen/native/cudnn/Conv_v8.cpp, run_single_conv): a shape that was seen once keeps its plan.
_PLANS = "cuDNN's choice for a shape is kept for the life of a process, whatever the flag says later"
_GRAPHS = "its CUDA graphs keep their memory and the addresses of the model's tensors for the life of a process"
_KEPT = {"cudnn_benchmark": _PLANS, "compile_reduce_overhead": _GRAPHS, "compile_max_autotune": _GRAPHS}

# The choice is made at the first forward pass: these are switched on before it, the others once the loop is known.
AT_FIRST_CALL = frozenset({"cudnn_benchmark"})


def kept_state(treatment: Treatment, loop: Loop) -> str | None:
    """Why a process that ran with this treatment is another one for good; None where blocks in one process will do."""
    if loop.device.type != "cuda" or crossings.is_emulated():
        return None
    return _KEPT.get(treatment.name)


def undecided(verdict: Verdict) -> str | None:
    """Why a verdict reached in one process is none yet, and processes from the same start may reach one; else None."""
    saving, parity = verdict.saving, verdict.parity
    if saving is not None and saving.certain and saving.mid_ns > 0 and parity.kept is None and parity.num_losses:
        return "in one process its losses cannot be compared: the loop goes on to other batches each time"
    if verdict.reason.startswith("failed: out of memory"):
        return "in one process it ran out of memory, of which the trial's own copy of the loop's state took some"
    return None
