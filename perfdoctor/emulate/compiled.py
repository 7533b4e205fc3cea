"""torch.compile on the emulated device: the function runs eagerly, said once in a note."""

from __future__ import annotations

from typing import Any

import torch

from perfdoctor.emulate.patches import Patches
from perfdoctor.record.capture import Note

_notes: list[list[Note]] = []
_NOTE = Note(
    code="compile-eager",
    text="torch.compile ran eagerly on the emulated CUDA device: graph breaks and recompilations were not looked for",
)


def install(patches: Patches) -> None:
    """Replace torch.compile until `patches` is undone."""
    from torch._dynamo import trace_rules

    compile_function = torch.compile
    stance: list[Any] = []

    def compile_eagerly(model: Any = None, **kwargs: Any) -> Any:
        if not stance:
            stance.append(torch.compiler.set_stance("force_eager"))
        _say()
        # The compiler never runs: its options are checked by nobody, and its import takes seconds.
        return compile_function(model, backend="eager")

    def restore() -> None:
        while stance:
            stance.pop().__exit__(None, None, None)

    patches.set(torch, "compile", compile_eagerly)
    patches.on_undo(restore)
    rules = trace_rules.get_torch_obj_rule_map
    if not rules.cache_info().currsize:
        # Filled in here it would know the stand-ins, and no more the functions that they stand for.
        patches.on_undo(rules.cache_clear)


def _say() -> None:
    for notes in _notes:
        if _NOTE not in notes:
            notes.append(_NOTE)


def open_notes(notes: list[Note]) -> None:
    """Let `notes` be told."""
    _notes.append(notes)


def close_notes(notes: list[Note]) -> None:
    """Stop the last opening of `notes`."""
    for index in range(len(_notes) - 1, -1, -1):
        if _notes[index] is notes:
            del _notes[index]
            return
