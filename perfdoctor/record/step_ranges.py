"""Which named ranges are steps, which are phases of a step, and the table of steps made from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.capture import RangeKind, Ranges, Steps

Ints = NDArray[np.int64]

_FOREVER = 1 << 62
PROFILER_STEP = "profilerstep"
_NUMBERED = re.compile(
    r"^\W*(?:(ProfilerStep)#|((?:global|train(?:ing)?)?[ _.-]?(?:step|iter(?:ation)?|batch))\s*[ _#:=.-]?\s*\(?)"
    r"(\d+)\)?\W*$",
    re.IGNORECASE,
)
_UNNUMBERED = re.compile(r"^\W*(?:(?:global|train(?:ing)?)[ _.-]?)?(?:step|iter(?:ation)?)\W*$", re.IGNORECASE)
_PHASE_WORDS = (
    "data", "data loading", "data load", "dataloader", "data wait", "load data", "next batch", "fetch", "collate",
    "h2d", "to device", "to gpu", "transfer", "copy", "host to device",
    "forward", "fwd", "forward pass", "loss", "backward", "bwd", "backward pass",
    "optimizer", "optim", "optimizer step", "optimizer.step", "zero grad", "zero_grad", "update",
    "clip", "clip grad", "clip grad norm", "grad norm", "scheduler", "eval", "evaluation", "validation", "validate",
    "checkpoint", "save", "log", "logging", "metrics", "all reduce",
)  # fmt: skip
_PHASE = re.compile(
    r"^\W*(?:" + "|".join(re.escape(word).replace(r"\ ", "[ _-]?") for word in _PHASE_WORDS) + r")\W*$", re.IGNORECASE
)
_PHASE_PREFIX = re.compile(r"^(?:Optimizer\.(?:step|zero_grad)#|enumerate\(DataLoader\))")
# What 2021 files keep among the operators and later ones among the annotations.
ANNOTATION = re.compile(r"^(?:ProfilerStep#\d+$|Optimizer\.\w+#|enumerate\(DataLoader\))")


def step_family(name: str) -> tuple[str, int]:
    """(family, number) of a step's name: ('profilerstep', 12), ('step', 3), ('step', -1) without number, ('', -1)."""
    match = _NUMBERED.match(name)
    if match:
        family = PROFILER_STEP if match[1] else match[2].lower()
        return family, int(match[3])
    return ("unnumbered", -1) if _UNNUMBERED.match(name) else ("", -1)


def range_kinds(strings: Sequence[str], name: Ints, thread: Ints) -> tuple[Ints, Ints]:
    """RangeKind and the step's own number (-1) of every range.

    Only one family of names on one thread are steps: the profiler's own where it marked them, else the commonest.
    """
    used = np.unique(name)
    families = {int(i): step_family(strings[i]) for i in used}
    votes = Counter((families[n][0], t) for n, t in zip(name.tolist(), thread.tolist(), strict=True) if families[n][0])
    kinds = np.array([int(RangeKind.PHASE if _is_phase(s) else RangeKind.USER) for s in strings] or [0], np.int64)[name]
    numbers = np.full(len(name), -1, np.int64)
    if not votes:
        return kinds, numbers
    chosen = max(votes, key=lambda key: (key[0] == PROFILER_STEP, key[0] != "unnumbered", votes[key], -key[1]))
    if chosen[0] == "unnumbered" and votes[chosen] < 2:
        return kinds, numbers
    lookup = np.full(len(strings), -2, np.int64)
    lookup[[i for i in families if families[i][0] == chosen[0]]] = [
        f[1] for f in families.values() if f[0] == chosen[0]
    ]
    is_step = (lookup[name] > -2) & (thread == chosen[1])
    kinds[is_step] = RangeKind.STEP
    numbers[is_step] = lookup[name][is_step]
    return kinds, numbers


def _is_phase(text: str) -> bool:
    return bool(_PHASE.match(text) or _PHASE_PREFIX.match(text))


def steps_of(ranges: Ranges, numbers: Ints, unfinished: NDArray[np.bool_] | None = None) -> Steps:
    """The steps in time order. `numbers` are the loop's own counts; `unfinished` marks ranges never closed.

    Of marks inside each other one is the step: the outer one of two, the inner ones of a group of several.
    """
    rows = np.flatnonzero(ranges.kind == RangeKind.STEP)
    rows = rows[np.lexsort((-ranges.end_ns[rows], ranges.start_ns[rows]))]
    open_ends = np.zeros(len(rows), bool) if unfinished is None else unfinished[rows]
    rows = rows[_one_deep(ranges.start_ns[rows], ranges.end_ns[rows], open_ends)]
    count = len(rows)
    zeros = np.zeros(count, np.int64)
    index = numbers[rows]
    return Steps(
        start_ns=ranges.start_ns[rows],
        end_ns=ranges.end_ns[rows],
        index=np.where(index < 0, np.arange(count), index),
        micro_batches=zeros,
        samples=np.full(count, -1, np.int64),
        complete=np.ones(count, np.int64) if unfinished is None else 1 - unfinished[rows].astype(np.int64),
        partial=zeros,
    )


def _one_deep(starts: Ints, ends: Ints, apart: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the marks, in order of start with outer ones first, stay so that none lies inside another.

    Marks of no length, and those `apart`, are left as they are.
    """
    judged = np.flatnonzero(~apart & (ends > starts)).tolist()
    parents: dict[int, int] = {}
    opened: list[int] = []
    for place in judged:
        while opened and ends[opened[-1]] < ends[place]:
            opened.pop()
        if opened:
            parents[place] = opened[-1]
        opened.append(place)
    innermost = np.zeros(len(starts), np.int64)  # marks inside that hold none themselves
    for place in reversed(parents):
        innermost[parents[place]] += max(int(innermost[place]), 1)
    kept = innermost < 2
    reach = -_FOREVER
    for place in judged:  # what starts later lies inside what was kept where it does not reach further
        if kept[place]:
            kept[place] = ends[place] > reach
            reach = max(reach, int(ends[place]))
    return kept
