"""`self.log` in a Lightning fit without a stall: values go to the bar and the loggers when they have arrived."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from perfdoctor.treat.device_metrics import DeviceMetrics
from perfdoctor.treat.metric_readings import Reading
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.sync_guard import allow_sync

_MOST_NAMES = 63  # of one DeviceMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A log line whose tensors are on their way. `step` is None where Lightning chooses it."""

    names: tuple[str, ...]
    plain: Mapping[str, Any]
    step: int | None
    usual_step: int
    epoch: int


class DeferredLogging:
    """Keeps Lightning from reading logged tensors in the middle of an epoch; figures of an epoch are read as ever.

    Lightning reads each metric with `prog_bar=True` at the end of every batch, and all metrics on every
    `log_every_n_steps`-th. Here both get a copy on a side stream instead. Values and steps in the loggers are those
    that they would have been; only the moment is later.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._logger_connector
        self._results = trainer.fit_loop.epoch_loop._results
        self._patches = Patches()
        device = trainer.strategy.root_device
        self._bar = DeviceMetrics(device)
        self._lines = DeviceMetrics(device, sinks=self._arrived)
        self._names: tuple[set[str], set[str]] = (set(), set())  # in the bar, in the lines
        self._waiting: dict[int, _Line] = {}
        self._num_lines = 0
        self._is_keeping = False
        self._is_batch_end = False

    def apply(self) -> None:
        """Begin."""
        patches, results, connector = self._patches, self._results, self._connector
        module: Any = sys.modules[type(results).__module__]
        scalars = module.convert_tensors_to_scalars
        self._original_metrics = results.metrics
        self._original_log = connector.log_metrics
        self._original_batch_end = connector.on_batch_end

        def convert(value: Any) -> Any:
            return value if self._is_keeping else scalars(value)

        patches.replace(module, "convert_tensors_to_scalars", convert)
        patches.replace(results, "metrics", self._metrics)
        patches.replace(connector, "log_metrics", self._log_metrics)
        patches.replace(connector, "on_batch_end", self._on_batch_end)

    def undo(self) -> None:
        """Take everything back, and give out what is still on its way."""
        self._patches.undo()
        self.flush()

    def flush(self) -> None:
        """Wait for the lines that are on their way, and give them out."""
        if self._waiting:
            with allow_sync("perfdoctor: the last log lines"):
                self._arrived(self._lines.read(across_ranks=False))

    def _on_batch_end(self) -> None:
        self._is_batch_end = True
        try:
            self._original_batch_end()
        finally:
            self._is_batch_end = False
        self._lines.latest()

    def _metrics(self, on_step: bool) -> Any:
        """Lightning's metrics of now, those for the bar as floats that have arrived."""
        self._is_keeping = on_step
        try:
            found = self._original_metrics(on_step)
        finally:
            self._is_keeping = False
        if on_step and found["pbar"]:
            found["pbar"] = self._shown(found["pbar"])
        return found

    def _shown(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        tensors, rest = self._parted(metrics, self._names[0])
        if self._is_batch_end and tensors:  # once a batch: others ask again in between
            self._bar.update(tensors)
        latest = self._bar.latest()
        arrived = {name: latest[name] for name in tensors if name in latest}
        return {name: arrived.get(name, rest.get(name)) for name in metrics if name in arrived or name in rest}

    def _log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        trainer, connector = self._trainer, self._connector
        if not trainer.loggers or not metrics:
            return
        tensors, rest = self._parted(metrics, self._names[1])
        if connector._first_loop_iter is None or not trainer.training or not tensors:
            self.flush()
            self._original_log(metrics, step)
            return
        connector._logged_metrics.update(metrics)
        self._num_lines += 1
        self._waiting[self._num_lines] = _Line(
            names=tuple(tensors), plain=rest, step=step, epoch=trainer.current_epoch,
            usual_step=trainer.fit_loop.epoch_loop._batches_that_stepped,
        )  # fmt: skip
        left_out = self._lines.num_left_out
        self._lines.update(tensors)
        if self._lines.num_left_out > left_out:  # too many on their way: no line may be lost
            self.flush()

    def _parted(self, metrics: Mapping[str, Any], known: set[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors that can come later, and the rest as numbers."""
        tensors, rest = {}, {}
        for name, value in metrics.items():
            has_room = name in known or len(known) < _MOST_NAMES
            if isinstance(value, Tensor) and value.is_cuda and value.numel() == 1 and has_room:
                known.add(name)
                tensors[name] = value
            else:
                rest[name] = value.item() if isinstance(value, Tensor) else value
        return tensors, rest

    def _arrived(self, reading: Reading) -> None:
        """The values of an update are on the host. Those of a step that was left out come with a later one."""
        line = self._waiting.pop(reading.step, None)
        if line is None or not self._trainer.loggers:
            return
        scalars = {**line.plain, **{name: reading[name] for name in line.names}}
        step = line.step
        if step is None:
            named = scalars.pop("step", None)
            step = line.usual_step if named is None else int(named)
            if named is None:
                scalars.setdefault("epoch", line.epoch)
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics=scalars, step=step)
            logger.save()
