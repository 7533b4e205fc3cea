"""The pointer tables that CUDA graphs replay: each lives as long as its graph.

A graph reads the table at every replay, so the table must not go before it. The driver says when a graph is gone (a
CUDA user object that the graph holds, see walker.cpp). Without the compiled walker nobody does: tables then stay until
the process ends, each of 48 bytes a small gradient, 16 bytes a chunk, and 34 KB: 0.2 MB for 4000 gradients of 256
elements, 0.4 MB for 5.3 GB of gradients. Calls over the same gradients in one graph share one table.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfdoctor.kernels import walker

if TYPE_CHECKING:
    from perfdoctor.kernels.pointer_table import GradTable


_tokens = itertools.count(1)


class CapturedTables:
    """The tables that were built while a CUDA graph was captured."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tables: dict[int, GradTable] = {}
        self._by_content: dict[tuple[Any, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def find(self, content: tuple[Any, ...], build: Callable[[], GradTable]) -> GradTable:
        """The table that this graph capture already has for these gradients, or a new one."""
        compiled = walker.compiled_walker()
        with self._lock:
            if compiled is not None:
                self._drop(compiled.take_dead())
            capture = compiled.capture_of(content[1]) if compiled is not None else 0
            known = self._by_content.get((capture, content))
            if known is not None:
                return self._tables[known]
            token = next(_tokens)
            table = self._tables[token] = build()
            if compiled is not None and capture and compiled.lives_with_graph(content[1], token):
                self._by_content[(capture, content)] = token
            return table

    def _drop(self, tokens: list[int]) -> None:
        """Forgets tables whose graphs are gone."""
        for token in tokens:
            self._tables.pop(token, None)
        self._by_content = {key: token for key, token in self._by_content.items() if token in self._tables}
