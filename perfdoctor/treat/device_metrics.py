"""Metrics that stay on the device until they have come to the host by themselves: `DeviceMetrics`.

metrics = perfdoctor.DeviceMetrics(every=10, sinks=SummaryWriter())
for batch in loader:
    loss, accuracy = train_step(batch)
    metrics.update(loss=loss, accuracy=accuracy)      # one small launch; the host does not wait
    bar.set_postfix(metrics.latest())                 # floats that have arrived already
print(metrics.read().statistics["loss"].mean)         # waits, at the end
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import kernel_launch, metrics_launch, metrics_reference
from perfdoctor.kernels.pointer_table import is_capturing
from perfdoctor.treat.devices import named_device, numbered_device
from perfdoctor.treat.host_ring import HostRing
from perfdoctor.treat.metric_inputs import (
    as_inputs,
    as_weight,
    deferred_values,
    is_deferred,
    merged,
    outside_transforms,
    tensor_device,
)
from perfdoctor.treat.metric_ranks import over_ranks
from perfdoctor.treat.metric_readings import Reading, check_statistic, reading_of
from perfdoctor.treat.metric_sinks import give_to_all, sinks_of

_SLOTS = 32  # values in flight; the host is rarely further ahead of the device than that many updates
_KEPT_LAUNCHES = 8  # of the same metrics, with values of other types
_MAX_METRICS = metrics_reference.DECAY_ROW


class DeviceMetrics:
    """Accumulates scalars on the device: mean, sum, last, min, max and a moving average of each, weighted.

    One launch adds all values of an update (sixteen a launch), in float64. On every `every`-th update the state is
    copied to pinned memory on a side stream; what has arrived is given out by `latest()` and to the sinks. Only
    `read()` waits.

    What differs from `loss.item()` in the loop: `latest()` is some steps old (its `.step` says which), as far as the
    host is ahead of the device, and so are the lines in the log; each has its own step. Sinks are called from
    `update()`, `latest()`, `flush()` and `read()`, at the first of these after the value has arrived. Where more than
    32 copies are on their way, an update's copy is left out (`num_left_out`); the sums lose nothing.

    In a CUDA graph: call `update()` once before the capture, `update()` inside it (the launch is captured, its
    addresses fixed; Python numbers are frozen, as everywhere in a graph), and after a replay `flush()`, which starts
    the copy. `latest()` does so by itself when none is on its way. Warm-up updates count until `reset()`.

    In DDP each rank accumulates its own values, without communication; `read()` combines the ranks.
    Call `update()` outside of regions that torch.compile traces, and everything from one thread. A `DeviceMetrics`
    cannot be copied or pickled.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        every: int = 1,
        statistic: str = "last",
        ema_decay: float = 0.99,
        sinks: object = (),
        start_step: int = 0,
        kernel: str | None = None,
    ) -> None:
        """`device`: that of the first tensor where None. `every`: updates between two copies to the host.

        `statistic`: what a reading shows by name and sinks get: last, mean, sum, min, max, ema or weight.
        `sinks`: a SummaryWriter, a Lightning logger, a function of a reading, or several of them.
        `start_step`: the step before the first update. `kernel`: "triton" (None means it on a GPU) or "torch".

        Raises UsageError for a value that none of these can be.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"every={every!r}: expected a whole number of updates, 1 or more")
        if not isinstance(ema_decay, (int, float)) or not 0 <= ema_decay < 1:
            raise UsageError(f"ema_decay={ema_decay!r}: expected 0 <= ema_decay < 1 (0.99 averages about 100 steps)")
        if not isinstance(start_step, int) or isinstance(start_step, bool):
            raise UsageError(f"start_step={start_step!r}: expected a whole number, the step before the first update")
        check_statistic(statistic)
        kernel_launch.check_kernel(kernel, metrics_launch.KERNELS)
        self._every = every
        self._shown = statistic
        self._decay = float(ema_decay)
        self._sinks = sinks_of(sinks)
        self._start_step = start_step
        self._kernel = kernel
        self._rows: dict[str, int] = {}
        self._known: dict[tuple[str, ...], list[Any]] = {}
        self._deferred: dict[str, Any] = {}
        self._num_calls = 0
        self._is_graphed = False
        self._latest = reading_of({}, start_step, 0, statistic)
        self.num_left_out = 0
        """copies to the host that were left out because too many were on their way"""
        self.state: Tensor | None = None
        """float64 [64, 8] on the device: a row a metric (see `metrics_reference`); None before the first update"""
        self._arrived: deque[tuple[Any, Any]] = deque()  # not given out yet: a sink may have raised
        self._newest: tuple[Any, Any] | None = None  # not made a reading of yet
        self._is_guessed = False
        if device is not None:
            self._place(named_device(device, "DeviceMetrics"))

    def update(self, values: Mapping[str, Any] | None = None, /, *, weight: float | Tensor = 1.0, **named: Any) -> None:
        """Adds one value to each metric named: `update(loss=loss, acc=acc, weight=len(batch))`.

        A value is a tensor of one element of any real type (bf16 is read as it is and added in float64; a gradient
        graph is left alone), a number, or a torchmetrics object. Its `compute()` is called only when a copy is due, on
        this rank's part, and once more, over all ranks, by `read()`, which has that result as each statistic.
        `weight` weighs all values of the update. A dictionary takes names that Python's do not:
        `update({"val/loss": loss})`. One call is one step: pass all values of a step together.

        Raises UsageError for another value, a tensor on another GPU, or more than 63 metrics.
        """
        if values is not None:
            named = merged(values, named)
        known = self._known.get(tuple(named))
        if known is None or not self._added_again(known, named, weight):
            with outside_transforms():
                self._add(as_inputs(named), as_weight(weight))
        self._deliver()  # last: where a sink raises, the update is complete

    def latest(self) -> Reading:
        """The newest values that have arrived, with their step; empty before the first. Never waits.

        It can be called anywhere, a graph capture included (nothing arrives there).
        """
        self._deliver()
        if self._is_graphed and self._is_idle():
            self.flush()
        return self._shown_last()

    def _is_idle(self) -> bool:
        return self.state is not None and self._ring.num_in_flight == 0 and not is_capturing(self.state.device)

    def flush(self) -> None:
        """Starts a copy of the state as it is now. Never waits. For graphs: call it after a replay.

        Raises UsageError in a graph capture.
        """
        if self.state is None:
            return
        if is_capturing(self.state.device):
            raise UsageError("DeviceMetrics.flush() in a graph capture would copy at every replay: call it after one")
        self._deliver()
        slot = self._ring.next_slot
        if slot is None:
            self.num_left_out += 1
            return
        with torch.no_grad():
            self._ring.sources[slot].copy_(self.state)
        self._send(slot)

    def read(self, *, across_ranks: bool = True, group: Any = None) -> Reading:
        """The values of all updates so far. Waits for the device; meant for the end of an epoch or a run.

        Where torch.distributed is initialised, every rank must call it, and each gets the metrics of all ranks: `mean`
        weighs every value by its own weight, `sum`, `weight`, `min` and `max` are over all ranks' values, `last` and
        `ema` are means over the ranks. `across_ranks=False` reads this rank alone. Values still on their way go to the
        sinks first; the reading itself does not. A torchmetrics object talks to its own kind on the other ranks, so
        every rank must have passed it to `update`, if only before its first value.

        Raises UsageError in a graph capture, or on all ranks for a torchmetrics object that one rank lacks, or has no
        values in while the object keeps lists of them.
        """
        if self.state is not None and is_capturing(self.state.device):
            raise UsageError("DeviceMetrics.read() waits for the device, which a graph capture forbids: read after it")
        rows: dict[str, list[float]] = {}
        if self.state is not None:
            cells = self.state.cpu().tolist()
            rows = {name: cells[row] for name, row in self._rows.items()}
            while self._ring.num_in_flight:
                self._arrived.append(self._ring.wait_oldest())
            self._deliver()
        across_ranks = across_ranks and torch.distributed.is_available() and torch.distributed.is_initialized()
        computing = list(self._deferred)
        if across_ranks:
            rows, computing = over_ranks(rows, self._deferred, group)
        rows = self._with_deferred(rows, computing, across_ranks)
        reading = self._reading(rows, self._num_calls)
        if not across_ranks or reading.step >= self._shown_last().step:
            self._latest, self._newest = reading, None
        return reading

    def reset(self) -> None:
        """Forgets what was added so far, on the device, in the order of the stream; steps are counted on.

        Values still on their way arrive all the same.
        """
        if self.state is not None:
            with torch.no_grad():
                metrics_reference.clear(self.state)

    def __getstate__(self) -> Any:
        raise UsageError(
            "DeviceMetrics cannot be copied or pickled: it holds device memory and copies that are on their way. Make "
            "a new one; keep what read() gives"
        )

    def _place(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"DeviceMetrics on {device}: expected a CUDA device, or the CPU")
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise UsageError(
                    f"DeviceMetrics on {device}: torch sees no CUDA device here; pass device='cpu' or None"
                )
            device = numbered_device(device, "DeviceMetrics")
        if is_capturing(device):
            raise UsageError(
                "DeviceMetrics: the first update() lies in a graph capture, where its memory would belong to it: "
                "update once before the capture (the warm-up step does), or pass device="
            )
        with torch.no_grad(), torch.inference_mode(False):
            self.state = metrics_reference.new_state(device, self._decay)
            self._ring = HostRing(self.state, _SLOTS)
            self._scratch = torch.empty_like(self.state)
        self._scratch_address = self._scratch.data_ptr() if self._ring.addresses else 0
        self._known.clear()
        self._launcher = metrics_launch.Launcher(self.state, self._kernel)

    def _move(self, device: torch.device) -> None:
        """From the CPU, where the first updates had nothing but numbers, to the device of the first tensor."""
        self._deliver()
        before = self.state
        assert before is not None
        self._place(device)
        with torch.no_grad():
            cast("Tensor", self.state).copy_(before.pin_memory(), non_blocking=True)
        self._is_guessed = False

    def _added_again(self, launches: list[Any], named: dict[str, Any], weight: Any) -> bool:
        """Whether this update was done by a launch that an earlier one like it has prepared."""
        is_due = (self._num_calls + 1) % self._every == 0
        slot = self._ring.next_slot if is_due else None
        snapshot = self._scratch_address if slot is None else self._ring.addresses[slot]
        stream = self._launcher.stream()
        for launch in launches:
            if launch.run(stream, snapshot, weight, named):
                break
        else:
            return False  # also in a graph capture
        self._num_calls += 1
        if slot is not None:
            self._send(slot)
        elif is_due:
            self.num_left_out += 1
        return True

    def _send(self, slot: int) -> None:
        self._ring.send(slot, (tuple(self._rows), self._num_calls), len(self._rows))

    def _add(self, inputs: dict[str, Any], weight: Any) -> None:
        """Adds values of any kind."""
        device = tensor_device([*inputs.values(), weight])
        if self.state is None:
            self._place(device)
            self._is_guessed = device.type == "cpu"
        elif self._is_guessed and device.type == "cuda":
            self._move(device)
        ready = self._ready_values(inputs)
        rows = self._rows_of(ready)
        local = [self._local(name, value) for name, value in ready.items()]
        by = self._local("weight", weight)
        slot = self._slot_if_due()
        if ready:
            with torch.no_grad():
                self._launcher.accumulate(self._scratch if slot is None else self._ring.sources[slot], rows, local, by)
            if slot is not None:
                self._send(slot)
        if ready and len(ready) == len(inputs):
            self._remember(tuple(inputs), self._launcher.repeated(rows, local, by))

    def _remember(self, names: tuple[str, ...], launch: Any | None) -> None:
        """Keeps the launch for the next updates of these names, the newest first."""
        if launch is None or not self._ring.addresses:
            return
        known = self._known.setdefault(names, [])
        known[:] = [launch, *(each for each in known if each is not launch)][:_KEPT_LAUNCHES]

    def _slot_if_due(self) -> int | None:
        """Counts the update; where its values are to be copied to the host, the slot for them."""
        assert self.state is not None
        if is_capturing(self.state.device):
            self._is_graphed = True
            return None
        self._num_calls += 1
        if self._num_calls % self._every:
            return None
        slot = self._ring.next_slot
        self.num_left_out += slot is None
        return slot

    def _rows_of(self, names: Iterable[str]) -> list[int]:
        new = [name for name in names if name not in self._rows]
        room = _MAX_METRICS - len(self._rows)
        if len(new) > room:
            raise UsageError(f"{new[room]!r} would be metric {_MAX_METRICS + 1}: a DeviceMetrics holds {_MAX_METRICS}, "
                             "make a second one")  # fmt: skip
        for name in new:
            self._rows[name] = len(self._rows)
        return [self._rows[name] for name in names]

    def _ready_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What is added now: the result of a torchmetrics object only where a copy is due."""
        for name in self._deferred.keys() & inputs:
            if not is_deferred(inputs[name]):
                del self._deferred[name]  # a plain value has taken its name
        if not any(is_deferred(value) for value in inputs.values()):
            return inputs
        assert self.state is not None
        if is_capturing(self.state.device):
            raise UsageError("a torchmetrics object in a graph capture would be frozen there: pass it after the replay")
        is_due = (self._num_calls + 1) % self._every == 0
        ready: dict[str, Any] = {}
        for name, value in inputs.items():
            results = {name: value}
            if is_deferred(value):
                results = self._computed(name, value) if is_due else {}
            twice = sorted(ready.keys() & results)
            if twice:
                raise UsageError(f"update() got {', '.join(twice)} twice: by name and from a torchmetrics object")
            ready.update(results)
        deferred = {name: value for name, value in inputs.items() if is_deferred(value)}
        if deferred.keys() - self._deferred:
            self._known.clear()  # a launch that is repeated would pass by a name that has changed its kind
        self._deferred.update(deferred)
        return ready

    def _computed(self, name: str, metric: Any) -> dict[str, Any]:
        """What it computes now. One that cannot is forgotten: `read()` gives the other metrics."""
        try:
            return deferred_values(name, metric)
        except Exception:
            self._deferred.pop(name, None)
            raise

    def _with_deferred(
        self, rows: dict[str, list[float]], computing: list[str], across_ranks: bool
    ) -> dict[str, list[float]]:
        """Rows with what these torchmetrics objects compute now; over all ranks they do so themselves."""
        found: dict[str, Any] = {}
        for name in computing:
            found.update(deferred_values(name, self._deferred[name], across_ranks))
        for name, value in found.items():
            rows[name] = metrics_reference.row_of(float(value), rows.get(name))
        return rows

    def _local(self, name: str, value: Tensor | float) -> Tensor | float:
        """A value that the device of the state can read."""
        assert self.state is not None
        if not isinstance(value, Tensor) or value.device == self.state.device:
            return value
        if value.device.type == "cpu":
            number: float = value.item()  # a CPU tensor: nothing to wait for
            return number
        raise UsageError(
            f"{name} is on {value.device}, the metrics are on {self.state.device}: use one for each device"
        )

    def _deliver(self) -> None:
        if self.state is None:
            return
        if self._ring.num_in_flight:
            self._arrived += self._ring.take_arrived()
        if self._arrived:
            self._give_out()

    def _give_out(self) -> None:
        """To the sinks, oldest first. Where one raises, the values behind it come at the next call."""
        if not self._sinks:  # nobody looks at it before `latest()` does; a reading of two metrics takes 5 us to build
            self._newest = self._arrived.pop()
            self._arrived.clear()
        while self._arrived:
            self._newest = self._arrived.popleft()
            give_to_all(self._sinks, self._shown_last())

    def _shown_last(self) -> Reading:
        """The newest values that have arrived."""
        if self._newest is not None:
            (names, num_calls), cells = self._newest
            self._newest = None
            self._latest = self._reading(dict(zip(names, cells, strict=False)), num_calls)
        return self._latest

    def _reading(self, rows: Mapping[str, list[float]], num_calls: int) -> Reading:
        """`num_calls`: updates that the host called; the device counts those in graph replays too."""
        return reading_of(rows, self._start_step, num_calls, self._shown)
