"""Losses and gradients watched for infinities and NaN, without a stall: `NonFiniteWatch`.

with perfdoctor.NonFiniteWatch(model) as watch:      # hooks on the optimizers: gradients checked before each update
    for batch in loader:
        loss = criterion(model(batch))
        loss.backward()
        watch.check(loss)
        optimizer.step()
        watch.step()                                 # raises NonFiniteError for a step that has gone bad

watch = perfdoctor.NonFiniteWatch(model)             # by hand, without hooks
...
    loss.backward()
    watch.check(loss)                                # the loss and all gradients
    optimizer.step()
    watch.step()
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from operator import is_, itemgetter
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perfdoctor.errors import NonFiniteError, UsageError
from perfdoctor.kernels import finite_launch, kernel_launch, launch_route
from perfdoctor.kernels.metrics_reference import RECORD
from perfdoctor.kernels.pointer_table import is_capturing
from perfdoctor.treat.compiled import module_of
from perfdoctor.treat.host_ring import HostRing
from perfdoctor.treat.metric_inputs import outside_transforms
from perfdoctor.treat.module_tree import ModuleTree
from perfdoctor.treat.nonfinite_hits import NAMES, NonFiniteHit, StepNote, advice, hit_of
from perfdoctor.treat.nonfinite_inputs import counts_of, loss_of, names_of, optimizers_of, value_at
from perfdoctor.treat.optimizer_hooks import OptimizerHooks, refuse_to_skip
from perfdoctor.watch.sync_guard import allow_sync

OnHit = str | Callable[[NonFiniteHit], object]
_MAX_CHECKS = 10_000  # of one step; each keeps the names of its gradients
_KEPT_HITS = 1000
_MAX_LAG = 10_000  # each has two events and memory of its own
_log = logging.getLogger("perfdoctor")


class NonFiniteWatch:
    """Checks the loss and the gradients on the device; the host looks at flags that have come to it by themselves.

    What differs from `if torch.isnan(loss): raise` in the loop: **the error comes late.** The host learns of a bad step
    at a `step()` call up to `max_lag` steps after it, and until then training goes on with what the bad step left
    behind. So the parameters are spoilt when the error comes (with on_hit="skip" they are not). The loss and every
    gradient are checked, an infinity as much as a NaN. The error names the first bad step and parameter.

    `on_hit`:
        "raise"     NonFiniteError at the next `step()` that sees the flag, for the first bad step.
        a function  called with a `NonFiniteHit` for each bad step, from `step()`; training goes on.
        "skip"      the rest of a bad step's updates is left out on the device, as GradScaler does it with fused
                    optimizers (`found_inf`): parameters and optimizer state stay bitwise as they were; learning-rate
                    schedules, batch norm statistics and the loop's own step count go on.
                    Each skip is logged as a warning and kept in `hits`. Works only inside `with watch:` and only with
                    optimizers made with fused=True; others are refused.

    `max_lag`: only when the flag of the step `max_lag` steps ago has not arrived does `step()` wait for it, on one
    event. These waits are counted in `num_waits`, and a sync guard lists them as allowed. 0 waits at every step.

    `scaler`: a GradScaler. Gradients that it finds infinite and whose step it skips by design are no alarm; a
    non-finite loss always is, so pass the loss before it is scaled. Checked by hand, gradients are an alarm only once
    the scale has fallen below 1, because there they are seen before the scaler decides.

    In a CUDA graph: use the watch for one step before the capture; checks inside it are captured, and `step()` is
    called outside, after each replay (a step is a call of `step()`). Keep the watch as long as the graph.

    Sparse gradients, shared parameters, parameters without a gradient and several optimizers are fine. A gradient that
    was cleared before the check is not seen. With an optimizer that takes a closure the gradients are checked after its
    step. In DDP each rank watches its own loss; gradients are the same on all. A rank that raises leaves the others in
    their next collective, as any error in one rank does. Nothing is watched inside regions that torch.compile traces.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer] | None = None,
        *,
        on_hit: OnHit = "raise",
        max_lag: int = 8,
        scaler: Any = None,
        kernel: str | None = None,
    ) -> None:
        """`optimizers`: whose updates are watched inside `with`; None means each that holds a parameter of the model.

        `kernel`: as for `grad_stats`.

        Raises UsageError for a model without parameters or another wrong value, TreatmentRefused for on_hit="skip" with
        an optimizer that cannot skip on the device.
        """
        self._model = module_of(model)
        self._take_names()
        self._optimizers = optimizers_of(optimizers)
        if on_hit not in ("raise", "skip") and (not callable(on_hit) or isinstance(on_hit, type)):
            raise UsageError(f"on_hit={on_hit!r}: expected 'raise', 'skip' or a function that takes a NonFiniteHit")
        if not isinstance(max_lag, int) or isinstance(max_lag, bool) or not 0 <= max_lag <= _MAX_LAG:
            raise UsageError(f"max_lag={max_lag!r}: expected a whole number of steps, 0 to {_MAX_LAG}")
        if scaler is not None and not (hasattr(scaler, "is_enabled") and hasattr(scaler, "get_scale")):
            raise UsageError(f"scaler is a {type(scaler).__name__}: expected a torch.amp.GradScaler")
        if on_hit == "skip":
            for optimizer in self._optimizers or ():
                refuse_to_skip(optimizer)
        kernel_launch.check_kernel(kernel, launch_route.KERNELS)
        self._on_hit = on_hit
        self._max_lag = max_lag
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._kernel = kernel
        self._hooks: OptimizerHooks | None = None
        self._of_optimizer: WeakKeyDictionary[Optimizer, list[tuple[str, Tensor]]] = WeakKeyDictionary()
        self._captured: list[NAMES] = []
        self._checks: list[NAMES] = []
        self._num_steps = 0
        self._record: Tensor | None = None
        self._hits: deque[NonFiniteHit] = deque(maxlen=_KEPT_HITS)
        self._pending: deque[NonFiniteHit] = deque()  # not acted on yet: what was called for one before may have raised
        self.num_waits = 0
        """how often `step()` waited because a flag was `max_lag` steps late"""

    @property
    def hits(self) -> tuple[NonFiniteHit, ...]:
        """The bad steps that the host knows of, the last thousand of them."""
        return tuple(self._hits)

    def check(self, loss: Tensor | float | None = None) -> None:
        """Checks the loss and, without hooks, all gradients that are there; call it between backward and update.

        Inside `with watch:` the hooks check the gradients and this checks the loss alone. A loss of several elements is
        checked in each. Never waits.

        Raises UsageError for a loss that is no number, or where the first check lies in a graph capture.
        """
        by_hand = self._hooks is None
        if loss is None and not by_hand:
            raise UsageError(
                "check() got no loss (does train_step return it?); inside `with watch:` it checks nothing else"
            )
        if by_hand and self._on_hit == "skip":
            raise UsageError("on_hit='skip' works through hooks on the optimizers: put the loop inside `with watch:`")
        if by_hand and not self._tree.is_current:
            self._take_names()
        pairs = self._pairs if by_hand else []
        excuse = self._scaler._get_scale_async() if self._scaler is not None and by_hand else None
        self._check(pairs, loss, excuse, is_scale=True)

    def step(self) -> None:
        """The step ends here. Looks at the flags that have arrived, and waits for one only at `max_lag`.

        Raises NonFiniteError (on_hit="raise"), or what the function raises; UsageError in a graph capture.
        """
        if self._record is not None and is_capturing(self._record.device):
            raise UsageError("NonFiniteWatch.step() in a graph capture: call it after each replay, outside")
        self._num_steps += 1
        if self._record is not None:
            self._send(self._num_steps)
            arrived = self._ring.take_arrived()
            if self._ring.num_in_flight > self._max_lag:
                self.num_waits += 1
                with allow_sync("NonFiniteWatch: a flag is max_lag steps late"):
                    arrived.append(self._ring.wait_oldest())
            self._act_on(arrived)

    def finish(self) -> None:
        """Waits for the flags of the last steps and acts on them; leaving the `with` block without an error does so.

        Checks since the last `step()` are among them, as those of the step that would have ended next.

        Raises as `step()` does.
        """
        if self._record is not None and is_capturing(self._record.device):
            raise UsageError(
                "NonFiniteWatch.finish() waits for the device, which a graph capture forbids: call it after"
            )
        if self._checks:
            self._send(self._num_steps + 1)
        arrived = []
        with allow_sync("NonFiniteWatch: the flags of the last steps"):
            while self._record is not None and self._ring.num_in_flight:
                arrived.append(self._ring.wait_oldest())
        self._act_on(arrived)

    def __getstate__(self) -> Any:
        raise UsageError(
            "NonFiniteWatch cannot be copied or pickled: it knows the parameters of one model by identity. Make a new "
            "one for the other model"
        )

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise UsageError("this NonFiniteWatch is entered already")
        self._hooks = OptimizerHooks(self._concerns, self._before_update, self._found_tensor, self._on_hit == "skip")
        self._hooks.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
        if kind is None:
            self.finish()

    def _take_names(self) -> None:
        """The model's parameters as they are now: others may have taken their place since."""
        self._names = names_of(self._model)
        self._tree = ModuleTree([self._model])
        self._pairs = [(name, parameter) for parameter, name in self._names.values()]

    def _concerns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's updates are watched."""
        if self._optimizers is not None:
            return any(optimizer is watched for watched in self._optimizers)
        if self._is_ours(optimizer):
            return True
        if self._tree.is_current:
            return False
        self._take_names()
        return self._is_ours(optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Whether it holds a parameter of the model."""
        return any(id(parameter) in self._names for group in optimizer.param_groups for parameter in group["params"])

    def _before_update(self, optimizer: Optimizer) -> None:
        """Checks the gradients of one optimizer."""
        found_inf = getattr(optimizer, "found_inf", None)  # a GradScaler sets it where the optimizer is fused
        self._check(self._pairs_of(optimizer), None, found_inf, is_scale=False)

    def _found_tensor(self) -> Tensor:
        """float32 []: 1.0 where this step has gone bad; its address stays."""
        assert self._record is not None
        return self._found

    def _pairs_of(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """The optimizer's parameters by name, kept as one list because that is what grad_stats finds fastest."""
        kept = self._of_optimizer.get(optimizer)
        now = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # By identity, all of them: groups grow, and parameters are exchanged in place. 0.03 us each.
        if kept is not None and len(kept) == len(now) and all(map(is_, map(itemgetter(1), kept), now)):
            return kept
        if not self._tree.is_current:
            self._take_names()
        pairs = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                known = self._names.get(id(parameter))
                name = known[1] if known else f"{type(optimizer).__name__}: group {number}, parameter {index}"
                pairs.append((name, parameter))
        self._of_optimizer[optimizer] = pairs
        return pairs

    def _check(self, pairs: list[tuple[str, Tensor]], loss: Any, excuse: Tensor | None, is_scale: bool) -> None:
        if self._record is not None and len(self._checks) < _MAX_CHECKS:
            number = len(self._captured) + len(self._checks)
            names = self._launches.repeat(pairs, loss, excuse, is_scale, number)
            if names is not None:
                self._checks.append(names)
                return
        with torch.no_grad(), outside_transforms():
            self._check_anew(pairs, loss_of(loss), excuse, is_scale)

    def _check_anew(
        self, pairs: list[tuple[str, Tensor]], value: Tensor | float | None, excuse: Tensor | None, is_scale: bool
    ) -> None:
        device = self._place(pairs, value)
        if len(self._checks) >= _MAX_CHECKS:
            raise UsageError(f"{_MAX_CHECKS} checks without a step(): call watch.step() at the end of every step")
        found = self._launches.find(pairs) if pairs else None
        names, counts = counts_of(pairs, self._kernel) if pairs and found is None else ((), None)
        here = None if value is None else value_at(device, value)
        if excuse is not None:
            excuse = value_at(device, excuse)
        capturing = is_capturing(device)
        number = len(self._captured) + (0 if capturing else len(self._checks))
        if found is not None:
            names = found.names
            self._launches.run(found, pairs, here, excuse, is_scale, number)
        else:
            there = value_at(device, counts) if counts is not None and names else None
            self._launches.note(there, here, excuse, is_scale, number)
        (self._captured if capturing else self._checks).append(names)

    def _place(self, pairs: list[tuple[str, Tensor]], value: Tensor | float | None) -> torch.device:
        """Memory for the record, on the device where the first check runs; gives that device.

        It moves once: from the CPU, where the model was, to the device where it is now.
        """
        device = self._device_of(pairs, value)
        if device.type == "meta":
            raise UsageError("NonFiniteWatch: the model is on the meta device, where no value is: move it first")
        if self._record is not None and (self._record.device == device or self._record.device.type != "cpu"):
            return self._record.device
        if is_capturing(device):
            raise UsageError(
                "NonFiniteWatch: the first check lies in a graph capture, where its memory would belong to the graph: "
                "run one watched step before the capture"
            )
        if self._record is not None:
            self.finish()
        with torch.inference_mode(False):
            self._record = torch.zeros(RECORD, dtype=torch.int64, device=device)
            self._found = torch.zeros((), dtype=torch.float32, device=device)
            self._ring = HostRing(self._record, self._max_lag + 1)
            self._launches = finite_launch.Checks(self._record, self._found, self._kernel)
        return device

    def _device_of(self, pairs: list[tuple[str, Tensor]], value: Tensor | float | None) -> torch.device:
        """That of the first gradient, else of the loss, else of the model."""
        for _, parameter in pairs:
            if parameter.grad is not None:
                return parameter.grad.device
        return value.device if isinstance(value, Tensor) else self._pairs[0][1].device

    def _send(self, step: int) -> None:
        """Starts the copy of a step's record, and clears it."""
        slot = self._ring.next_slot
        assert slot is not None  # step() leaves at most max_lag of max_lag + 1 in flight
        self._launches.take(self._ring.sources[slot])
        self._ring.send(slot, (step, (*self._captured, *self._checks)))
        self._checks.clear()

    def _act_on(self, arrived: list[tuple[tuple[int, tuple[NAMES, ...]], list[int]]]) -> None:
        for (step, checks), record in arrived:
            if not record[0]:
                continue
            note = StepNote(step=step, checks=checks, skips=self._on_hit == "skip")
            found = hit_of(note, record, self._num_steps)
            if found is not None:
                self._hits.append(found)
                self._pending.append(found)
        while self._pending:
            hit = self._pending.popleft()
            if self._on_hit == "raise":
                raise NonFiniteError(f"{hit}{advice(hit)}")
            if self._on_hit == "skip":
                _log.warning("%s; the update was skipped on the device", hit)
            else:
                assert callable(self._on_hit)
                self._on_hit(hit)
