"""The treatments that PerfDoctorCallback puts into a Trainer for the time of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from perfdoctor.doors.lightning_data import Prefetch
from perfdoctor.doors.lightning_logging import DeferredLogging
from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.kernels.grad_stats import clip_grad_norm_
from perfdoctor.treat.nonfinite import NonFiniteWatch
from perfdoctor.watch.patches import Patches

PREFETCH, LOGGING, CLIP, NAN_WATCH = NAMES = ("prefetch", "deferred-logging", "clip", "nan-watch")


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once.

    Raises:
        UsageError: there is no such treatment in a Trainer.
    """
    if isinstance(names, str):
        names = (names,)
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in NAMES:
            raise UsageError(f"treatments: there is no {name!r} in a Trainer; there are: {', '.join(NAMES)}")
    return chosen


class Treatments:
    """Those of one fit. `undo` takes back what `apply` has done, however far it came."""

    def __init__(self, names: tuple[str, ...], trainer: Any, module: Any) -> None:
        self._names = names
        self._trainer = trainer
        self._module = module
        self._undone = ExitStack()
        self._prefetch: Prefetch | None = None
        self._logging: DeferredLogging | None = None
        self._watch: NonFiniteWatch | None = None
        self._step = -1

    def apply(self) -> None:
        """Begin, at the start of training.

        Raises:
            TreatmentRefused: one of them would be wrong on this fit.
        """
        if NAN_WATCH in self._names:
            self._watch = NonFiniteWatch(self._module, scaler=self._scaler())
            self._watch.__enter__()
            self._step = self._trainer.global_step
        if self._trainer.strategy.root_device.type != "cuda":
            return
        if CLIP in self._names:
            self._undone.callback(_use_our_clip(self._trainer.precision_plugin))
        if LOGGING in self._names:
            self._logging = DeferredLogging(self._trainer)
            self._undone.callback(self._logging.undo)
            self._logging.apply()
        if PREFETCH in self._names:
            self._prefetch = Prefetch(self._trainer, self._module)
            self._undone.callback(self._prefetch.undo)
            self._prefetch.apply()

    def undo(self, exception: BaseException | None) -> None:
        """End them all; `exception` is what the fit ended with.

        Raises:
            NonFiniteError: the last steps had gone bad, and the fit ended as if all was well.
        """
        watch, self._watch = self._watch, None
        try:
            self._undone.close()
        finally:
            if watch is not None:
                watch.__exit__(None if exception is None else type(exception), exception, None)

    def epoch_starts(self) -> None:
        """The fit loop may have made new loaders."""
        if self._prefetch is not None:
            self._prefetch.apply_to_new()

    def epoch_ends(self) -> None:
        """The lines of the steps go to the loggers before that of the epoch."""
        if self._logging is not None:
            self._logging.flush()

    def has_loss(self, loss: Any) -> None:
        """The loss that is about to go backward, scaled where there is a GradScaler."""
        if self._watch is not None and isinstance(loss, Tensor) and self._scaler() is None:
            self._watch.check(loss)

    def batch_ends(self, outputs: Any) -> None:
        """A batch is over; with the last of a step, the step."""
        if self._watch is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._scaler() is not None and isinstance(loss, Tensor):
            self._watch.check(loss)
        if self._trainer.global_step != self._step:
            self._step = self._trainer.global_step
            self._watch.step()

    def _scaler(self) -> Any:
        return getattr(self._trainer.precision_plugin, "scaler", None)


def _use_our_clip(plugin: Any) -> Callable[[], None]:
    """Clip through our kernel wherever `configure_gradient_clipping` ends up; returns what takes it back."""
    owner = next(kind for kind in type(plugin).__mro__ if "clip_grad_by_norm" in vars(kind))
    if owner.__name__ != "Precision" or not owner.__module__.endswith("plugins.precision.precision"):
        raise TreatmentRefused(f"clip: {type(plugin).__name__} clips gradients in its own way: leave clip out")
    patches = Patches()

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        clip_grad_norm_(plugin.main_params(optimizer), clip_val)

    patches.replace(plugin, "clip_grad_by_norm", clip_grad_by_norm)
    return patches.undo
