"""A compiler without a memory for the time of a `with` block, so that functions are traced anew and nothing stays.

Kept aside and put back: the marks of automatic dynamic shapes, counters, lists of break reasons and guard failures,
and what torch has warned of once. Dropped at the end, as it cannot be put back: compiled versions of the functions that
the block came through. They compile again at their next call; all others keep theirs. (`torch._dynamo.reset()` would
drop every compiled function of the process.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import CodeType
from typing import Any

from perfdoctor.watch.patches import Patches


@contextmanager
def fresh_dynamo(codes: Iterable[CodeType] = ()) -> Iterator[None]:
    """Trace anew inside. `codes`: code objects that the block will run, whose compiled versions are dropped at once."""
    convert: Any = import_module("torch._dynamo.convert_frame")
    _forget_stale(convert, set(codes))
    patches, tracker = Patches(), type(convert.input_codes)()
    lists = _Kept()
    try:
        patches.replace(convert, "input_codes", tracker)
        _fresh_shapes(patches, convert)
        with warnings.catch_warnings():
            # torch warns of its own parts, and of what the list says in plain words; `-W error` would end the trace.
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
            yield
    finally:
        patches.undo()
        lists.put_back()
        for code in _alive(tracker):
            _reset_code(code)


def forced_backend(backend: Any) -> Any:
    """A context in which every compiled function uses `backend`, however it was made."""
    import torch

    try:
        return torch.compiler.set_stance("default", force_backend=backend)
    except TypeError:  # a torch whose stances know no backend: each function uses its own
        return nullcontext()


def _forget_stale(convert: Any, codes: set[CodeType]) -> None:
    """Functions that dynamo gave up on are never offered to it again; they, and `codes`, are."""
    for code in _alive(convert.input_codes):
        entries = _num_entries(code)
        if code in codes or entries == 0 or entries >= _limit():
            _reset_code(code)


def _num_entries(code: CodeType) -> int:
    frames: Any = import_module("torch._C._dynamo.eval_frame")
    read = getattr(frames, "_debug_get_cache_entry_list", None)
    return len(read(code)) if read is not None else 0


def _limit() -> int:
    config: Any = import_module("torch._dynamo.config")
    return int(config.cache_size_limit)  # the older name, which newer releases keep as an alias


def _reset_code(code: CodeType) -> None:
    import_module("torch._C._dynamo.eval_frame").reset_code(code)


def _alive(tracker: Any) -> list[CodeType]:
    return [code for code in (reference() for reference in list(tracker.seen)) if code is not None]


def _fresh_shapes(patches: Patches, convert: Any) -> None:
    """Sizes seen here must not turn the user's own compilations dynamic."""
    pgo: Any = import_module("torch._dynamo.pgo")
    state = getattr(pgo, "_CODE_STATE", None)
    if hasattr(pgo, "_CODE_STATE"):
        kind = (
            type(state)(pgo.CodeState) if state is not None else import_module("collections").defaultdict(pgo.CodeState)
        )
        patches.replace(pgo, "_CODE_STATE", kind)
    for module in (pgo, convert):
        if hasattr(module, "put_code_state"):
            patches.replace(module, "put_code_state", lambda *_, **__: None)


class _Kept:
    """Process-wide containers of dynamo as they were."""

    def __init__(self) -> None:
        of_utils: Any = import_module("torch._dynamo.utils")
        output: Any = import_module("torch._dynamo.output_graph")
        self.counters = of_utils.counters
        self.counted = {name: dict(counts) for name, counts in self.counters.items()}
        self.reasons, self.num_reasons = output.graph_break_reasons, len(output.graph_break_reasons)
        self.failures = of_utils.guard_failures
        self.failed = {key: list(value) for key, value in self.failures.items()}
        self.warned: set[str] = getattr(of_utils, "warn_once_cache", set())
        self.warned_before = set(self.warned)

    def put_back(self) -> None:
        """In place: others hold the same containers."""
        self.counters.clear()
        for name, counts in self.counted.items():
            self.counters[name].update(counts)
        del self.reasons[self.num_reasons :]
        self.failures.clear()
        self.failures.update(self.failed)
        self.warned.intersection_update(self.warned_before)
