"""A look at another thread's frame: the right one, and no garbage collection while the interpreter holds its lock."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from perfdoctor.watch.thread_frames import frame_of


def _waiting(started: threading.Event, over: threading.Event) -> None:
    started.set()
    over.wait()


@pytest.mark.parametrize("collecting", [True, False])
def test_the_frame_of_a_thread_with_the_collector_as_it_was(collecting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    look, during = sys._current_frames, []

    def looking() -> object:
        during.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", looking)
    started, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=_waiting, args=(started, over))
    thread.start()
    started.wait()
    try:
        if not collecting:
            gc.disable()
        frame = frame_of(thread.ident or 0)
        assert gc.isenabled() is collecting
    finally:
        gc.enable()
        over.set()
        thread.join()
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "_waiting" in names
    assert during == [collecting and sys.version_info >= (3, 12)]
    assert frame_of(thread.ident or 0) is None
