"""Which script a recording is of, kept with it as a note: a name that can be typed, and nothing else of the machine.

Its arguments are not kept: they may hold what nobody else is to read.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import PurePath

from perfdoctor.record.capture import Note

_CODE = "script"
_OF = "a recording of "
ARGUMENTS = "ARGS..."  # stands for those that are not kept


def script_note(target: str, *, module: bool, arguments: bool) -> Note:
    """The note for `target`, a path or a module's name. A path that leads out of this folder loses its folders."""
    name = target if module else _relative(target)
    typed = shlex.join([*["-m"] * module, name])
    return Note(code=_CODE, text=f"{_OF}{typed}{f' {ARGUMENTS}' * arguments}")


def noted_script(notes: Iterable[Note]) -> str:
    """The script as it is typed behind `perfdoctor trial`; '' where the recording does not say."""
    return next((note.text.removeprefix(_OF) for note in notes if note.code == _CODE), "")


def _relative(path: str) -> str:
    inside = os.path.relpath(path)
    return PurePath(path).name if inside.startswith("..") else PurePath(inside).as_posix()
