"""`TREATMENTS`: every change to a loop that can be tried and taken back, gathered from the files by kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat.graphed_step import GRAPHED_STEP
from perfdoctor.treat.switches_compile import COMPILE
from perfdoctor.treat.switches_host import HOST
from perfdoctor.treat.switches_loader import LOADER
from perfdoctor.treat.switches_optimizer import OPTIMIZER
from perfdoctor.treat.switches_precision import PRECISION
from perfdoctor.treat.treatment import Loop, Treatment

TREATMENTS: tuple[Treatment, ...] = (*LOADER, *HOST, *OPTIMIZER, *PRECISION, *COMPILE, GRAPHED_STEP)


def treatment(name: str) -> Treatment:
    """The treatment of that name; `UsageError` lists the names where there is none."""
    for each in TREATMENTS:
        if each.name == name:
            return each
    raise UsageError(f"no treatment {name!r}; there are: {', '.join(each.name for each in TREATMENTS)}")


@contextmanager
def treated(loop: Loop, *names: str) -> Iterator[Loop]:
    """Apply treatments by name, in order, for the time of the block; `TreatmentRefused` says which does not fit."""
    if not names:
        yield loop
        return
    first = treatment(names[0])
    reason = first.refuses(loop)
    if reason:
        raise TreatmentRefused(f"{first.name}: {reason}")
    with first.applied(loop) as changed, treated(changed, *names[1:]) as last:
        yield last
