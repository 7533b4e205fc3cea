"""`PerfDoctorCallback`: a Lightning Trainer's fit, watched and, where asked, treated.

    trainer = Trainer(callbacks=[perfdoctor.PerfDoctorCallback(report_dir="reports")])
    trainer.fit(model, loader)                          # prints the report at the end

Importing this module imports no Lightning; making a callback does.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from perfdoctor.doors.callback_class import LateCallback
from perfdoctor.doors.lightning_data import FetchWaits
from perfdoctor.doors.lightning_phases import LightningPhases
from perfdoctor.doors.lightning_treatments import Treatments, check_names
from perfdoctor.doors.windows import Scalars, WatchedRun, WindowOptions, Windows
from perfdoctor.errors import SessionError, UsageError
from perfdoctor.watch.patches import Patches

_log = logging.getLogger("perfdoctor")
_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


class PerfDoctorCallback(WatchedRun, LateCallback):
    """Watches a window of `Trainer.fit`, of `pytorch_lightning` and of `lightning.pytorch` alike, and reports.

    The window begins with the training, after the sanity check: `warmup` steps (more while the loop compiles or its
    memory grows), then `active` steps in each phase of a session (see `perfdoctor.watch`); after that everything is
    taken back and training goes on unwatched. With `every_n_steps` another window begins every that many steps.
    Nothing is added to a measured step that waits for the device; the wait to start and stop the profiler lies between
    two phases.

    The report is printed at the end of the fit by rank 0, after an exception too, and is there as `report`.
    `report_dir` gets it as `perfdoctor.txt` and `perfdoctor.json` (`perfdoctor-step000100.*` with `every_n_steps`;
    other ranks add `-rank1`, and rank 0 speaks of all of them); without it no file is written. The trainer's loggers
    get `perfdoctor/step_ms`, `busy_ratio`, `syncs_per_step`, `data_wait_ms` and `idle_ms/<cause>`, as far as they were
    measured, when a window is over and is read: at the first batch after it with `every_n_steps`, else at the end of
    training. An evaluation inside the training is no part of a step.

    With `every_n_steps` every step of the fit is timed as well (`step_ns`), and those that take far longer than the
    others (`outliers`) are billed to what happened in them: checkpoint, evaluation, epoch end, recompilation, garbage
    collection. The last report says so, and the loggers get `perfdoctor/bare_step_ms` and `outlier_ms/<cause>`.

    Every hook that Lightning calls is a range for torch.profiler and for Nsight Systems while one of them listens.

    `treatments`, in place during the fit (the first three do nothing on the CPU):
        "prefetch"          the next batches are copied to the device while the step runs (`DevicePrefetcher`). Hooks
                            that expect a batch on the host (`on_before_batch_transfer`, `transfer_batch_to_device`)
                            and loaders with a state of their own are refused.
        "deferred-logging"  `self.log` without a stall, for the progress bar and the loggers (`DeviceMetrics`). The bar
                            shows values, and the loggers get their lines, when they have arrived: about one step late,
                            each line under its own step. At the end of an epoch they are waited for.
        "clip"              gradients are clipped by `perfdoctor.clip_grad_norm_` wherever the Trainer would clip by
                            norm; equal to torch's but for rounding. Not with plugins that clip in their own way.
        "nan-watch"         `NonFiniteWatch`: NonFiniteError some steps after the loss or a gradient has gone bad.
    All but "clip" leave every number as it is, to the bit.

    Raises:
        UsageError: a wrong number, an unknown treatment, or Lightning is not installed.
    """

    lent = ("log", "log_dict")

    @classmethod
    def library_bases(cls) -> list[type]:
        """The Callback of each Lightning that is loaded; where none is, of one that is installed."""
        loaded = [sys.modules[f"{name}.callbacks"].Callback for name in _PACKAGES if f"{name}.callbacks" in sys.modules]
        return loaded or [_installed()]

    def __init__(
        self,
        warmup: int = 5,
        active: int = 10,
        every_n_steps: int | None = None,
        report_dir: str | os.PathLike[str] | None = None,
        treatments: Sequence[str] = (),
        *,
        profiled: bool | None = None,
    ) -> None:
        """`profiled`: as for `perfdoctor.watch`."""
        super().__init__()
        self.options = WindowOptions(
            warmup=warmup, active=active, every_n_steps=every_n_steps, report_dir=report_dir, profiled=profiled
        )
        self.treatments = check_names(treatments)
        self._waits: FetchWaits | None
        self._phases: LightningPhases | None
        self._treated: Treatments | None
        self._rare: Patches
        self._guard: Patches
        self._unprinted: bool
        self.__dict__.update(self.unseen())

    def unseen(self) -> dict[str, Any]:
        """The attributes that a fit changes, as they are before the first."""
        nothing = dict.fromkeys(("_windows", "_waits", "_phases", "_treated"))
        return {**nothing, "_rare": Patches(), "_guard": Patches(), "_unprinted": False}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be watched before anything is hooked.

        Raises:
            SessionError: another session is running, or the Trainer has a second PerfDoctorCallback.
            UsageError: `report_dir` cannot be made.
        """
        if stage != "fit":
            return
        self._take_back(None)  # a fit before may have ended in a way that told nobody
        others = sum(isinstance(each, PerfDoctorCallback) for each in trainer.callbacks)
        if others > 1:
            raise SessionError(f"{others} PerfDoctorCallbacks in one Trainer: pass one")

        def log(scalars: Scalars, step: int) -> None:
            _log_scalars(trainer, scalars, step)

        windows = Windows(
            options=self.options, log=log, rank=int(trainer.global_rank),
            micro_batches=int(trainer.accumulate_grad_batches),
        )  # fmt: skip
        windows.check()
        self._windows = windows
        self._hear_of_the_end(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training begins: treat it, and open the first window."""
        assert self._windows is not None
        self._treated = Treatments(self.treatments, trainer, pl_module)
        self._treated.apply()
        self._waits = FetchWaits(trainer, self._windows)
        self._phases = LightningPhases(trainer, self._windows)
        self._windows.begin(_step_of(trainer))
        self._watch(trainer)
        self._note_rare(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch may bring another loader."""
        if self._treated is not None:
            self._treated.epoch_starts()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Between two batches windows end and begin."""
        windows = self._windows
        if windows is None:
            return
        step = _step_of(trainer)
        if windows.session is not None and windows.session.done:
            self._unwatch()
            windows.end()
            self._unprinted = True
            if self.options.every_n_steps is not None:
                windows.read(step)
        if windows.is_due(step):
            windows.open(step)
            self._watch(trainer)
        windows.between_steps()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """A loss is there."""
        if self._treated is not None:
            self._treated.has_loss(loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over."""
        if self._treated is not None:
            self._treated.batch_ends(outputs)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """An evaluation inside the training is no part of a step."""
        if self._windows is not None:
            self._windows.set_apart()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log lines on their way go out before those of the epoch."""
        if self._treated is not None:
            self._treated.epoch_ends()
        if self._windows is not None:
            self._windows.epoch_ended()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over: take everything back and read the window."""
        self._end(trainer, None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The progress bar is gone: print."""
        self._print(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit has failed or was interrupted: take everything back, report what was seen."""
        try:
            self._end(trainer, exception)
        except Exception as error:  # log lines of a device in error, say: the user's exception is the one to be seen
            _log.warning("perfdoctor could not give out everything of the fit that failed: %r", error)
        self._print(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Whatever happened, nothing stays hooked."""
        self._take_back(None)

    def _hear_of_the_end(self, trainer: Any) -> None:
        """Lightning tells one callback after the other of an exception, and none after one that fails at that."""
        run = trainer.fit_loop.run

        @functools.wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except BaseException as error:
                if self in trainer.callbacks:  # not while a tuner tries things before the training
                    self.on_exception(trainer, None, error)
                raise

        self._guard.replace(trainer.fit_loop, "run", guarded)

    def _watch(self, trainer: Any) -> None:
        """A window has opened."""
        assert self._waits is not None
        assert self._phases is not None
        self._waits.install()
        self._phases.install()

    def _note_rare(self, trainer: Any) -> None:
        """Lightning says itself what is an evaluation and what a checkpoint."""
        windows, loop = self._windows, getattr(trainer.fit_loop.epoch_loop, "val_loop", None)
        if windows is None or windows.clock is None:
            return
        self._rare.replace(trainer, "save_checkpoint", windows.as_checkpoint(trainer.save_checkpoint))
        if loop is not None:
            self._rare.replace(loop, "run", windows.as_evaluation(loop.run))

    def _unwatch(self, *, over: bool = False) -> None:
        """A window has ended; `over`: the whole fit."""
        timed = self._windows is not None and self._windows.clock is not None
        if self._waits is not None and (over or not timed):
            self._waits.remove()
        if over:
            self._rare.undo()
        if self._phases is not None:
            self._phases.remove()

    def _end(self, trainer: Any, exception: BaseException | None) -> None:
        windows = self._windows
        try:
            if windows is not None:
                self._unwatch(over=True)
                self._unprinted |= windows.finish(_step_of(trainer))
        finally:
            self._take_back(exception)

    def _take_back(self, exception: BaseException | None) -> None:
        treated, self._treated = self._treated, None
        self._guard.undo()
        try:
            if treated is not None:
                treated.undo(exception)
        finally:
            self._unwatch(over=True)
            if self._windows is not None:
                self._windows.drop()

    def _print(self, trainer: Any) -> None:
        report = self.report
        if self._unprinted and report is not None and trainer.is_global_zero:
            print(report)
        self._unprinted = False


def _installed() -> Any:
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}.callbacks").Callback
        except ImportError:
            continue
    raise UsageError("PerfDoctorCallback needs Lightning: pip install 'perfdoctor[lightning]'")


def _step_of(trainer: Any) -> int:
    """The step of Lightning's own log lines: batches that were stepped on, however many optimizers there are."""
    loop = getattr(trainer.fit_loop, "epoch_loop", None)
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))


def _log_scalars(trainer: Any, scalars: Scalars, step: int) -> None:
    if not scalars or not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)
        logger.save()
