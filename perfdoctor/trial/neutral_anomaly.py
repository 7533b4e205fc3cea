"""Autograd's anomaly detection: off while on."""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.trial.neutraliser import Mode, Neutraliser


class NeutralAnomaly(Neutraliser):
    """The global switch only: a `with detect_anomaly():` in the loop sets it again at every step."""

    modes = (Mode(name="gone", text="anomaly detection off"),)

    def __init__(self) -> None:
        super().__init__()
        autograd: Any = sys.modules["torch"].autograd
        self._autograd = autograd
        self._before = bool(sys.modules["torch"].is_anomaly_enabled())
        self._check_nan = bool(sys.modules["torch"].is_anomaly_check_nan_enabled())

    def refusal(self) -> str:
        return "" if self._before else "it is switched on inside the step, where the trial does not reach it"

    def switch(self, mode: str) -> None:
        super().switch(mode)
        if self._before:
            self._autograd.set_detect_anomaly(not mode, self._check_nan)

    def remove(self) -> None:
        if self._before:
            self._autograd.set_detect_anomaly(True, self._check_nan)
