"""What a treatment is, and the loop that it acts on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from perfdoctor.errors import UsageError
from perfdoctor.treat.compiled import module_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A training loop, as far as a door can see it: a field is None (or empty) where it cannot.

    `train_step(*batch) -> loss` runs one whole step: forward, backward, update, zero_grad. `loader` gives the batches.
    `model` may be what `compile_model` returned: the module that it compiles in place is taken.

    Raises:
        UsageError: `device`, `model` or `optimizers` is of another kind.
    """

    device: torch.device
    model: torch.nn.Module | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    loader: Iterable[Any] | None = None
    train_step: Callable[..., Any] | None = None
    sample_batch: tuple[Any, ...] | None = None  # what train_step takes, on the device
    # Of the time that samples take, what is computed, 0 to 1: the rest waits for files or a network. None: not seen.
    fetch_cpu_share: float | None = None
    autocast: bool = False  # parts of the model were called under torch.autocast

    def __post_init__(self) -> None:
        if not isinstance(self.device, torch.device):
            raise UsageError(f"Loop(device={self.device!r}): needs a torch.device, as torch.device('cuda')")
        model: Any = module_of(self.model)
        object.__setattr__(self, "model", model)
        if not isinstance(model, torch.nn.Module | None):
            raise UsageError(f"Loop(model=...) needs a torch.nn.Module, not {type(model).__name__}")
        optimizers: Any = self.optimizers
        if not isinstance(optimizers, tuple | list):
            raise UsageError(f"Loop(optimizers=...) needs a tuple of optimizers, not {type(optimizers).__name__}")
        for each in optimizers:
            if not hasattr(each, "param_groups"):
                raise UsageError(f"Loop(optimizers=...) holds {type(each).__name__}, which is no optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How near the losses of the treated loop stay: `rtol` 0.0 claims bitwise equality. `why` names the reason.

    `other_draws` says what in a loop may draw other random numbers under the treatment, so that its losses differ
    although nothing else changes. Empty where every draw stays.
    """

    rtol: float = 0.0
    atol: float = 0.0
    why: str = ""
    other_draws: str = ""

    @property
    def bitwise(self) -> bool:
        return self.rtol == 0.0 and self.atol == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """One change to a loop that can be tried and taken back.

    `refuses(loop)` gives the reason why it cannot be applied here, or None. `applied(loop)` applies it for the time of
    the `with` block and gives the loop to use inside: objects are changed in place where that can be undone, `loader`
    and `train_step` may be others. Everything is as before on every way out.
    """

    name: str
    cures: tuple[str, ...]  # finding codes
    numerics: Numerics
    refuses: Callable[[Loop], str | None] = field(repr=False)
    applied: Callable[[Loop], AbstractContextManager[Loop]] = field(repr=False)
    lines: tuple[str, ...] = ()  # what the user writes to keep it
    lines_of: Callable[[Loop], tuple[str, ...]] | None = field(default=None, repr=False)
    setting_of: Callable[[Loop], str] | None = field(default=None, repr=False)

    def lines_for(self, loop: Loop) -> tuple[str, ...]:
        """What the user writes to keep it in this loop, as it is without the treatment."""
        return self.lines if self.lines_of is None else self.lines_of(loop)

    def setting_for(self, loop: Loop) -> str:
        """What it sets in this loop, where that depends on the loop ('num_workers=4 (1 now)'); '' else."""
        return "" if self.setting_of is None else self.setting_of(loop)
