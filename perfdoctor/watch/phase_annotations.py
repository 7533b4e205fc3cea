"""NVTX ranges of a loop that annotates nothing itself: step, data, h2d, forward, backward, optimizer, ...

For a timeline in Nsight Systems. The names are those that the readers take for a step and for its phases.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from perfdoctor.watch.annotate import Overlapping, annotate
from perfdoctor.watch.module_hooks import ModuleHook, keep_from_scripting
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

_compiling = torch.compiler.is_compiling

# (module, class or '', function): looked up only where the module is loaded.
_LOGGING = (
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalars"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_histogram"),
    ("pytorch_lightning.core.module", "LightningModule", "log"),
    ("lightning.pytorch.core.module", "LightningModule", "log"),
    ("wandb", "", "log"),
    ("mlflow", "", "log_metrics"),
)
# The two halves of clip_grad_norm_, by the names that it looks up itself: whoever imported it gets the range too.
_CLIPPING = ("_get_total_norm", "_clip_grads_with_norm_", "clip_grads_with_norm_", "get_total_norm", "clip_grad_value_")


class PhaseAnnotations:
    """Ranges round the phases of every step while installed. Whoever knows where steps end opens and closes theirs.

    A few calls a step, under 1 us each when nobody listens. Hooks on modules would make torch.compile compile again:
    where it has compiled anything, or a module is compiled, there are no forward ranges.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._handles: list[Any] = []
        self._step: Overlapping | None = None
        self.number = 0  # of the step
        self._update: Overlapping | None = None
        self._local = threading.local()
        self._hooked = False

    def install(self) -> None:
        """Begin: the first step's range opens here."""
        patches = self._patches
        patches.replace(torch.autograd, "backward", _ranged("backward", torch.autograd.backward, outermost=True))
        patches.replace(torch.optim.Optimizer, "zero_grad", _ranged("zero_grad", torch.optim.Optimizer.zero_grad))
        loaders: Any = dataloader._BaseDataLoaderIter
        patches.replace(loaders, "__next__", _ranged("data", loaders.__next__))
        for name in _CLIPPING:
            if hasattr(clip_grad, name):
                patches.replace(clip_grad, name, _ranged("clip", getattr(clip_grad, name)))
        tensor: Any = torch.Tensor
        for name, replacement in (("to", self._to), ("cuda", self._to), ("copy_", self._copy_into)):
            patches.replace(tensor, name, TensorMethod(getattr(tensor, name), replacement))
        keep_from_scripting(patches)
        self._watch_logging()
        self._handles += [
            register_optimizer_step_pre_hook(self._update_began),
            register_optimizer_step_post_hook(self._update_ended),
        ]
        self.open_step(0)

    def remove(self) -> None:
        """End every range and take everything back."""
        self._patches.undo()
        while self._handles:
            self._handles.pop().remove()
        for opened in (self._update, self._step):
            if opened is not None:
                opened.end()
        self._update = self._step = None
        self._hooked = False

    def close_step(self) -> None:
        """A step has ended."""
        if self._step is not None:
            self._step.end()
            self._step = None

    def open_step(self, number: int) -> None:
        """The step `number` begins."""
        self.close_step()
        self.number = number
        self._step = Overlapping(f"step {number}")
        self._step.begin()
        self._watch_logging()

    def _update_began(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            return
        if not self._hooked:
            self._hook_models(optimizer)
        if self._update is not None:  # the update before raised
            self._update.end()
        self._update = Overlapping("optimizer")
        self._update.begin()

    def _update_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._update is not None and not _compiling():
            self._update.end()
            self._update = None

    def _hook_models(self, optimizer: Any) -> None:
        """Ranges for the forward of the models whose parameters are being updated."""
        self._hooked = True
        if _has_compiled():
            return
        for module in _outermost_modules(optimizer):
            self._handles.append(module.register_forward_pre_hook(ModuleHook(self._entered)))
            self._handles.append(module.register_forward_hook(ModuleHook(self._left), always_call=True))

    def _entered(self, module: nn.Module, args: Any) -> None:
        if _compiling():
            return
        ranges: list[annotate | None] = self._local.__dict__.setdefault("ranges", [])
        ranges.append(None if ranges else Overlapping("forward"))
        if ranges[-1] is not None:
            ranges[-1].__enter__()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        ranges: list[annotate | None] = self._local.__dict__.get("ranges", [])
        if ranges and not _compiling():
            entered = ranges.pop()
            if entered is not None:
                entered.__exit__(None, None, None)

    def _to(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiling() or tensor.is_cuda or not (original.__name__ == "cuda" or _names_cuda(args, kwargs)):
            return original(tensor, *args, **kwargs)
        with annotate("h2d"):
            return original(tensor, *args, **kwargs)

    def _copy_into(self, original: Any, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiling() or not target.is_cuda or getattr(source, "is_cuda", True):
            return original(target, source, *args, **kwargs)
        with annotate("h2d"):
            return original(target, source, *args, **kwargs)

    def _watch_logging(self) -> None:
        """The loggers that are loaded by now."""
        for module_name, kind, name in _LOGGING:
            owner: Any = sys.modules.get(module_name)
            owner = getattr(owner, kind, None) if kind else owner
            original = getattr(owner, name, None)
            if original is not None and not hasattr(original, "_perfdoctor_range"):
                self._patches.replace(owner, name, _ranged("logging", original))


def _ranged(name: str, original: Callable[..., Any], *, outermost: bool = False) -> Callable[..., Any]:
    """`original` in a range. `outermost`: not again inside itself (reentrant checkpointing calls backward so)."""
    local = threading.local()

    @functools.wraps(original)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        if _compiling() or (outermost and getattr(local, "inside", False)):
            return original(*args, **kwargs)
        local.inside = True
        try:
            with annotate(name):
                return original(*args, **kwargs)
        finally:
            local.inside = False

    ranged._perfdoctor_range = name  # type: ignore[attr-defined]
    return ranged


def _names_cuda(args: Any, kwargs: Any) -> bool:
    for value in (*args[:2], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, str | torch.device):
            return str(value).startswith("cuda")
        if isinstance(value, torch.Tensor):
            return value.is_cuda
        if isinstance(value, int) and not isinstance(value, bool):
            return True
    return False


def _has_compiled() -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def _outermost_modules(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The modules that hold the optimizer's parameters and lie in no other, each with its children.

    The children too: LightningModule and its kind are never called themselves.
    """
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # By type: isinstance asks lazy proxies for their class, which may warn or load a library.
    modules: list[nn.Module] = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [
        module
        for module in modules
        if id(module) not in inner and any(id(parameter) in parameters for parameter in module.parameters())
    ]
    return [part for root in roots for part in (root, *root.children()) if not isinstance(part, torch.jit.ScriptModule)]
