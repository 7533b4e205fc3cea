"""Why a step could not be captured: the line, what it did, and the change to make."""

from __future__ import annotations

import linecache
import re
import traceback
from types import FrameType

import torch

from perfdoctor.errors import TreatmentRefused
from perfdoctor.record.call_site import SiteTable
from perfdoctor.record.capture import Site

# What torch and CUDA say, first match first: (pattern, what happened, the change).
_MESSAGES = (
    (
        r"capturable is False|capturable=False",
        "the optimizer keeps its counters on the host",
        "build it with capturable=True, or give it to graphed_step(optimizer=...)",
    ),
    (
        r"dependency created on uncaptured work|StreamCaptureIsolation",
        "it needs work of another stream that is not part of the graph (often the autograd graph of an earlier step, "
        "kept alive by its loss)",
        "keep loss.detach() instead of loss, and let no other stream's work into the step",
    ),
    (
        r"legacy stream|StreamCaptureImplicit",
        "it launched on the default stream, outside the graph's stream",
        "leave torch.cuda.stream(...) and set_stream(...) out of the step",
    ),
    (
        r"Offset increment outside graph capture|generator.*captur|philox|RNG state during graph",
        "it draws from, seeds or reads a random generator in a way that no graph can repeat",
        "seed before the step; pass a generator of your own so that graphed_step can see it (argument or attribute)",
    ),
    (
        r"Cannot copy between CPU and CUDA tensors during CUDA graph capture|pageable",
        "it copies between host and device",
        "build the tensor on the device, once, or pass it as part of the batch",
    ),
    (
        r"previous error during capture|StreamCaptureInvalidated|StreamCaptureUnmatched|StreamCaptureUnjoined",
        "an earlier call in the step, or another thread, did what is not allowed during graph capture",
        "perfdoctor.graph_obstacles(train_step, *batch) lists the lines",
    ),
    (
        r"operation not permitted when stream is capturing|StreamCaptureUnsupported|"
        r"synchroniz\w+.*captur|captur\w+.*synchroniz|not permitted|while capturing",
        "it waits for the device, or copies from pageable memory",
        "keep the value on the device (return the tensor, branch with torch.where); read it after the step",
    ),
)


def failure(error: BaseException, what: str) -> TreatmentRefused:
    """The error to raise for `error`, which came out of running or capturing the step; frees what its frames hold."""
    where = _line_of(error)
    if isinstance(error, torch.OutOfMemoryError):
        text = _out_of_memory(what)
    else:
        happened, change = explained(str(error))
        text = f"{what}: {happened}\n  do: {change}" if happened else f"{what}: {type(error).__name__}: {error}"
    refused = TreatmentRefused(f"{where}{text}")
    # The frames' locals hold tensors of the graph's memory pool: they would outlive it.
    traceback.clear_frames(error.__traceback__)
    refused.__cause__ = error
    return refused


def explained(message: str) -> tuple[str, str]:
    """What a message of torch or CUDA means during graph capture, and the change; ('', '') where it is not known."""
    for pattern, happened, change in _MESSAGES:
        if re.search(pattern, message, re.IGNORECASE | re.DOTALL):
            return happened, change
    return "", ""


def site_of(error: BaseException) -> Site | None:
    """The user's line that an error came from, with the library line below it."""
    innermost: FrameType | None = None
    tb = error.__traceback__
    frames = []
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    if not frames:
        return None
    innermost = frames[-1].tb_frame
    sites = SiteTable()
    return sites.sites[sites.at(innermost)]


def _line_of(error: BaseException) -> str:
    site = site_of(error)
    if site is None:
        return ""
    inside = f" (in {site.library})" if site.library is not None else ""
    code = site.text or linecache.getline(site.frame.file, site.frame.line).strip()
    return f"{site.frame}{inside}: {code}\n  "


def _out_of_memory(what: str) -> str:
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    return (
        f"{what}: out of device memory ({held / 1e9:.2f} GB held by torch, {free / 1e9:.2f} of {total / 1e9:.2f} GB "
        "free). A graph keeps its activations and one copy of its inputs for as long as it lives.\n"
        "  do: a smaller batch, fewer graphs (max_graphs=), or activation checkpointing"
    )
