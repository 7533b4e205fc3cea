"""`PerfDoctorTrainerCallback`: the training of a Hugging Face Trainer, watched.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[perfdoctor.PerfDoctorTrainerCallback()])
    trainer.train()                                     # prints the report at the end

Importing this module imports no transformers; making a callback does.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from perfdoctor.doors.callback_class import LateCallback
from perfdoctor.doors.windows import Scalars, WatchedRun, WindowOptions, Windows
from perfdoctor.errors import SessionError, UsageError
from perfdoctor.watch.patches import Patches

# Parts of a training: what fails, fails in one of them. The first three enclose the others where they exist.
_PARTS = ("_run_epoch", "_evaluate", "_finalize_training")
_OLDER_PARTS = ("training_step", "get_batch_samples", "_maybe_log_save_evaluate", "_evaluate", "_finalize_training")


class PerfDoctorTrainerCallback(WatchedRun, LateCallback):
    """Watches a window of `Trainer.train` and reports, as `PerfDoctorCallback` does for Lightning.

    The window begins with the training: `warmup` steps, then `active` steps in each phase of a session; with
    `every_n_steps` another one begins every that many steps. The report is printed at the end by rank 0, after an
    exception too, and is there as `report`; `report_dir` gets it as text and JSON. The figures `perfdoctor/step_ms`,
    ... go through `trainer.log`, that is to every logger of the Trainer and to `state.log_history`. With
    `every_n_steps` every step is timed as well (`step_ns`), and those that take far longer than the others (`outliers`)
    are billed to what happened in them; the last report says so.

    Hugging Face's Trainer tells its callbacks nothing about an exception: while it trains, some of its methods are
    wrapped on that very object, to take everything back whichever way the training ends.

    Raises:
        UsageError: a wrong number, or transformers is not installed.
    """

    def __init__(
        self,
        warmup: int = 5,
        active: int = 10,
        every_n_steps: int | None = None,
        report_dir: str | os.PathLike[str] | None = None,
        *,
        profiled: bool | None = None,
    ) -> None:
        """`profiled`: as for `perfdoctor.watch`."""
        super().__init__()
        self.options = WindowOptions(
            warmup=warmup, active=active, every_n_steps=every_n_steps, report_dir=report_dir, profiled=profiled
        )
        self._patches: Patches
        self._trainer: Any
        self._unprinted: bool
        self.__dict__.update(self.unseen())

    def unseen(self) -> dict[str, Any]:
        """The attributes that a training changes, as they are before the first."""
        return {"_windows": None, "_patches": Patches(), "_trainer": None, "_unprinted": False}

    @classmethod
    def library_bases(cls) -> list[type]:
        """The Trainer's callback class. Raises UsageError where transformers is not installed."""
        try:
            return [importlib.import_module("transformers.trainer_callback").TrainerCallback]
        except ImportError as error:
            raise UsageError(
                f"PerfDoctorTrainerCallback needs transformers: pip install 'perfdoctor[transformers]' ({error})"
            ) from error

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is about to begin: refuse what cannot be watched.

        Raises:
            SessionError: another session is running, or the Trainer has a second PerfDoctorTrainerCallback.
            UsageError: `report_dir` cannot be made.
        """
        self._take_back()
        trainer = _trainer_of(self)
        others = [each for each in trainer.callback_handler.callbacks if isinstance(each, PerfDoctorTrainerCallback)]
        if len(others) > 1:
            raise SessionError(f"{len(others)} PerfDoctorTrainerCallbacks in one Trainer: pass one")
        self._windows = Windows(
            options=self.options, log=self._log_scalars, rank=int(args.process_index),
            micro_batches=int(args.gradient_accumulation_steps),
        )  # fmt: skip
        self._windows.check()
        self._trainer = trainer
        self._guard(trainer)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first epoch: open the first window. Not earlier: nobody hears of another callback that fails when the
        training begins."""
        windows = self._windows
        if windows is None or windows.begun:
            return
        windows.begin(int(state.global_step))
        self._note_loader(kwargs.get("train_dataloader"))
        self._note_rare(self._trainer, windows)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two steps windows end and begin."""
        windows, step = self._windows, int(state.global_step)
        if windows is None:
            return
        if windows.session is not None and windows.session.done:
            windows.end()
            if self.options.every_n_steps is not None:
                self._unprinted |= windows.read(step)
        if windows.is_due(step):
            windows.open(step)
            self._note_loader(kwargs.get("train_dataloader"))
        windows.between_steps()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation inside the training is no part of a step."""
        if self._windows is not None:
            self._windows.set_apart()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What comes now, up to the next epoch's first batch, is its end."""
        if self._windows is not None:
            self._windows.epoch_ended()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is over."""
        self._end()

    def _guard(self, trainer: Any) -> None:
        """Hear of what ends the training: an exception in the loop or in another callback, or its regular end."""
        parts = _PARTS if hasattr(trainer, "_run_epoch") else _OLDER_PARTS
        for name in parts:
            if hasattr(trainer, name):
                self._patches.replace(trainer, name, self._guarded(getattr(trainer, name)))
        handler = trainer.callback_handler
        self._patches.replace(handler, "call_event", self._guarded(handler.call_event))

    def _note_rare(self, trainer: Any, windows: Windows) -> None:
        """What is rare, where the whole run is timed."""
        for name, noted in (("_evaluate", windows.as_evaluation), ("_save_checkpoint", windows.as_checkpoint)):
            if windows.clock is not None and hasattr(trainer, name):
                self._patches.replace(trainer, name, noted(getattr(trainer, name)))

    def _guarded(self, original: Any) -> Any:
        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                if original.__name__ == "_finalize_training":  # before the loggers close
                    self._read()
                return original(*args, **kwargs)
            except BaseException:
                self._end()
                raise

        return guarded

    def _end(self) -> None:
        """Take everything back, and report."""
        try:
            self._read()
        finally:
            self._take_back()
        self._print()

    def _read(self) -> None:
        if self._windows is not None and self._trainer is not None:
            self._unprinted |= self._windows.finish(int(self._trainer.state.global_step))

    def _take_back(self) -> None:
        self._patches.undo()
        if self._windows is not None:
            self._windows.drop()

    def _print(self) -> None:
        report, trainer = self.report, self._trainer
        if self._unprinted and report is not None and trainer is not None and trainer.is_world_process_zero():
            print(report)
        self._unprinted = False
        self._trainer = None

    def _log_scalars(self, scalars: Scalars, step: int) -> None:
        if scalars:
            self._trainer.log(dict(scalars))

    def _note_loader(self, loader: Any) -> None:
        session = self._windows.session if self._windows is not None else None
        if session is not None:
            session.recorder.batches.loader = loader


def _trainer_of(callback: Any) -> Any:
    """The Trainer that is calling: callbacks are not told which it is."""
    frame = sys._getframe(2)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if any(each is callback for each in getattr(getattr(owner, "callback_handler", None), "callbacks", ())):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise UsageError("PerfDoctorTrainerCallback: no Trainer is calling it; pass it to Trainer(callbacks=[...])")
