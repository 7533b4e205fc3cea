"""Which treatments of a finding can be in place at all in the loop that was recorded: only those are offered.

By names alone, as in treat/cures.py, so that a recording is read without torch. What a treatment looks at beyond a
recording (the dataset, the model) it says itself, when it is tried.
"""

from __future__ import annotations

from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.record.note_codes import WITHOUT_CUDA
from perfdoctor.treat.cures import OF_THE_LOADER

# Treatments that change one whole step, given as a function: no script on trial has one.
NEED_A_FUNCTION = frozenset({"graphed_step"})
_NEED_CUDA = frozenset(
    {
        "prefetch", "pin_memory", "log_every_n", "our_clip", "tf32", "cudnn_benchmark", "compile_reduce_overhead",
        "compile_max_autotune", "graphed_step",
    }
)  # fmt: skip
_MOST_WAITING = 8  # workers that are tried where they wait more than they compute
_MARKS_NOTHING = frozenset({"no-steps", "no-nvtx"})


def fitting(names: tuple[str, ...], diagnosis: Diagnosis) -> tuple[str, ...]:
    """The treatments of `names` that nothing recorded of the loop rules out, in their order."""
    out = _ruled_out(diagnosis)
    return tuple(name for name in names if name not in out)


def watches_itself(diagnosis: Diagnosis) -> bool:
    """Whether the recording is of a session in the loop's own code (perfdoctor.watch, a callback)."""
    return diagnosis.source == "session" or diagnosis.source.startswith("window at step")


def _ruled_out(diagnosis: Diagnosis) -> set[str]:
    environment = diagnosis.environment
    workers, cpus = environment.num_workers, environment.num_cpus
    out: set[str] = set()
    # A trace that marks no steps either may be of the device alone: a loader would not be marked.
    silent = cpus is None and any(note.code in _MARKS_NOTHING for note in diagnosis.notes)
    unmarked = not silent and any(row.check == "data-wait" for row in diagnosis.skipped)
    if workers is None and (unmarked or watches_itself(diagnosis)):  # no loader, or none of torch's
        out |= OF_THE_LOADER
    # How many workers fit where fetching waits (4 to 8, whatever the CPUs) a recording does not tell.
    if workers and workers >= _MOST_WAITING and cpus is not None and workers >= int(cpus) - 1:
        out.add("dataloader_workers")
    respawns = any(found.code == "worker-respawn" for found in (*diagnosis.findings, *diagnosis.leave_alone))
    if workers == 0 or (workers is None and not respawns):
        out.add("persistent_workers")
    if environment.pin_memory:
        out.add("pin_memory")
    if environment.fused_optimizer:
        out.add("fused_optimizer")
    if any(note.code == WITHOUT_CUDA for note in diagnosis.notes):
        out |= _NEED_CUDA
    return out | diagnosis.ruled_out
