"""What the tests of the doors share."""

import pytest


class Settled:
    """A loop that has settled from the start: phases begin at known steps."""

    def settled(self):
        return True


@pytest.fixture
def settled(monkeypatch):
    """Sessions take their loop for settled at once."""
    from perfdoctor.watch import recorder

    monkeypatch.setattr(recorder, "Settling", Settled)
