"""A logger's call at one line: not made at all while on. Where Python sees none, its reads alone are answered."""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutral_read import NeutralRead
from perfdoctor.trial.neutral_skip import NeutralSkip
from perfdoctor.trial.neutraliser import Mode

# Where a logger writes, by module: a class of it (the module itself: '') and the beginnings of the names of its calls.
_LOGGERS = (
    ("torch.utils.tensorboard", "SummaryWriter", ("add_",)),
    ("tensorboardX", "SummaryWriter", ("add_",)),
    ("wandb", "", ("log",)),
    ("wandb.sdk.wandb_run", "Run", ("log",)),
    ("mlflow", "", ("log_",)),
    ("comet_ml", "Experiment", ("log_",)),
    ("pytorch_lightning", "LightningModule", ("log",)),
    ("lightning.pytorch", "LightningModule", ("log",)),
)


class NeutralLogger(NeutralSkip):
    """Skips the call; what its arguments compute is still computed, and read where the line itself reads."""

    def __init__(self, place: Place, caller: Place | None = None) -> None:
        super().__init__(place, logger_calls())
        self.modes = (Mode(name="gone", text="the logger is not called"),)
        self._reads = NeutralRead(place, caller)

    def install(self, hooks: CallHooks) -> None:
        super().install(hooks)
        self._reads.install(hooks)

    def switch(self, mode: str) -> None:
        super().switch(mode)
        self._reads.switch(mode)

    def stepped(self) -> None:
        super().stepped()
        self._reads.observing = self.observing
        self._reads.stepped()

    def settle(self, edge: int) -> None:
        super().settle(edge)
        self._reads.settle(edge)

    def refusal(self) -> str:
        if self.num_calls and not self._reads.num_calls:
            return ""
        return self._reads.refusal()


def logger_calls() -> tuple[tuple[Any, str], ...]:
    """Every call of the loggers that are loaded which writes something."""
    rows: list[tuple[Any, str]] = []
    for module, kind, beginnings in _LOGGERS:
        owner = sys.modules.get(module)
        owner = getattr(owner, kind, None) if kind else owner
        if owner is not None:
            names = [name for name in dir(owner) if name.startswith(beginnings) and name != "logger"]
            rows += [(owner, name) for name in names if callable(vars(owner).get(name))]
    return tuple(rows)
