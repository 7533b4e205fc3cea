"""Keeping hooks out of torch.compile: what runs inside compiled code would be compiled in its turn."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any


def frame_evaluation() -> Any:
    """torch's switch for what it compiles (`set_eval_frame`); None where torch is not loaded."""
    torch: Any = sys.modules.get("torch")
    return None if torch is None else torch._C._dynamo.eval_frame


def keep_uncompiled(code: CodeType) -> bool:
    """Have torch.compile run it as it is. What it calls is looked at as ever: hooks of the user's.

    False where torch is not loaded, or has another way to say so.
    """
    frames = frame_evaluation()
    if hasattr(frames, "skip_code"):  # until 2.6
        frames.skip_code(code)
        return True
    if not hasattr(frames, "_FrameExecStrategy"):
        return False
    action = frames._FrameAction
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return True
