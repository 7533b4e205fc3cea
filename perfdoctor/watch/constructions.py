"""Where optimizers are built: the line to change when their step is slow."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from perfdoctor.record.call_site import SiteTable
from perfdoctor.record.capture import Site
from perfdoctor.watch.patches import Patches


class OptimizerConstructions:
    """Notes the line of each optimizer built while installed. One built before is not known."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._lines: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._patches = Patches()

    def install(self) -> None:
        """Wrap `Optimizer.__init__`: about 5 us for each optimizer."""
        from torch.optim import Optimizer

        initialise: Any = Optimizer.__init__

        @functools.wraps(initialise)
        def initialised(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._lines[optimizer] = self._sites.at(sys._getframe(1))
            initialise(optimizer, *args, **kwargs)

        self._patches.replace(Optimizer, "__init__", initialised)

    def remove(self) -> None:
        """Put `Optimizer.__init__` back; what was noted stays."""
        self._patches.undo()

    def of(self, optimizers: list[Any]) -> tuple[Site, ...]:
        """The lines at which those of the optimizers were built that are known."""
        known = (self._lines.get(optimizer) for optimizer in optimizers)
        return tuple(self._sites.sites[line] for line in known if line is not None)
