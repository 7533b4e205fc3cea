"""What a trial says of a mode is said in a user's words."""

from __future__ import annotations

import pytest

from perfdoctor.diagnose.finding import Finding, Severity
from perfdoctor.trial.arms import Arm, name_of
from perfdoctor.trial.neutral_copy import GONE as COPY_GONE
from perfdoctor.trial.neutral_copy import MADE_ONCE, PINNED
from perfdoctor.trial.neutral_read import GONE, SPARSE
from perfdoctor.trial.neutraliser import Mode


@pytest.mark.parametrize("mode", [GONE, SPARSE, COPY_GONE, MADE_ONCE, PINNED])
def test_an_arm_is_named_by_what_is_done_not_by_the_name_of_its_mode(mode: Mode) -> None:
    finding = Finding(code="host-sync", severity=Severity.COST, title="reads a device value")
    assert name_of(Arm(finding=finding, mode=mode, switches=())) == f"host-sync ({mode.text})"
