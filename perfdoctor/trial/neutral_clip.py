"""torch's clip_grad_norm_: ours in its place while on, for everybody who has imported the name before."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks
from perfdoctor.trial.neutraliser import Mode, Neutraliser
from perfdoctor.watch.patches import Patches

_INNER = "_get_total_norm"


class NeutralClip(Neutraliser):
    """Enters and leaves the treatment of that name. A part of a launch-bound loop, so no prediction of its whole."""

    modes = (Mode(name="clip", text="clip_grad_norm_ by perfdoctor's kernel", prediction=False),)

    def __init__(self, optimizers: Sequence[Any], otherwise: str) -> None:
        """`otherwise`: why the suspect is not tried where the loop does not clip."""
        super().__init__()
        self._optimizers = tuple(optimizers)
        self._otherwise = otherwise
        self._stack = ExitStack()
        self._patches = Patches()
        self._treatment: Any = None
        self._loop: Any = None

    def install(self, hooks: CallHooks) -> None:
        """Count the calls while observing: what torch's clip calls, whatever name the loop knows it by."""
        from torch.nn.utils import clip_grad

        original: Any = getattr(clip_grad, _INNER, None)
        if original is None:
            return

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            return original(*args, **kwargs)

        self._patches.replace(clip_grad, _INNER, counted)

    def refusal(self) -> str:
        from perfdoctor.treat.switches_optimizer import OPTIMIZER
        from perfdoctor.treat.treatment import Loop

        self._patches.undo()
        if not self.num_calls or not self._optimizers:
            return self._otherwise
        device = self._optimizers[0].param_groups[0]["params"][0].device
        self._loop = Loop(device=device, optimizers=self._optimizers)
        self._treatment = next(each for each in OPTIMIZER if each.name == "our_clip")
        return self._treatment.refuses(self._loop) or ""

    def switch(self, mode: str) -> None:
        super().switch(mode)
        self._stack.close()
        if mode:
            self._stack.enter_context(self._treatment.applied(self._loop))

    def remove(self) -> None:
        self._patches.undo()
        self._stack.close()
