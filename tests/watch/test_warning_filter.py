"""Catching one warning among all, whatever user code does to warnings. Raised through the C call that torch uses."""

import ctypes
import sys
import warnings

import pytest

from perfdoctor.watch.warning_filter import WarningCatcher

TEXT = "called a synchronizing CUDA operation (Triggered internally at somewhere.cpp:1.)"
_warn = ctypes.pythonapi.PyErr_WarnEx
_warn.argtypes = [ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t]
_warn.restype = ctypes.c_int


def sync():
    """Warn as torch's C++ does; an error that a filter makes of it comes out as from torch."""
    _warn(UserWarning, TEXT.encode(), 1)


@pytest.fixture
def lines():
    """The lines at which `sync` was caught."""
    found = []

    def caught(text):
        found.append(sys._getframe(3).f_lineno)
        return True

    catcher = WarningCatcher(("called a synchronizing CUDA operation",), caught)
    catcher.install()
    yield found
    catcher.remove()


def test_every_call_is_seen_and_none_reaches_the_user(lines):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(5):
            sync()
    assert len(lines) == 5
    assert len(set(lines)) == 1
    assert seen == []


@pytest.mark.parametrize("action", ["ignore", "error", "always", "default", "module", "once"])
def test_filters_set_inside_change_nothing(lines, action):
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            sync()
        with warnings.catch_warnings():
            warnings.filterwarnings(action, message="called")
            sync()
    assert len(lines) == 6


def test_resetting_sorting_clearing_and_copying_the_filters(lines):
    with warnings.catch_warnings():
        for change in (
            warnings.resetwarnings,
            warnings.filters.clear,
            lambda: warnings.filters.insert(0, ("error", None, Warning, None, 0)),
            lambda: warnings.filters.remove(warnings.filters[0]),
            lambda: warnings.filters.pop(0),
            lambda: warnings.filters.reverse(),
            lambda: warnings.filters.__delitem__(slice(None)),
            lambda: setattr(warnings, "filters", warnings.filters.copy()),
        ):
            change()
            sync()
        filters = warnings.filters
        filters += [("error", None, Warning, None, 0)]
        filters[:] = [("error", None, Warning, None, 0)]
        sync()
    assert len(lines) == 9


def test_the_users_own_warnings_reach_the_users_handler(lines, monkeypatch):
    mine = []
    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: mine.append(str(message)))
        warnings.simplefilter("always")
        for step in range(3):
            sync()
            warnings.warn(f"step {step}", stacklevel=1)
    assert mine == ["step 0", "step 1", "step 2"]
    assert len(lines) == 3


def test_once_filters_of_the_user_still_show_once(lines):
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("again", stacklevel=1)
    assert len(seen) == 1
    assert lines == []


def test_an_error_raised_while_catching_comes_out_of_the_call():
    def refuse(text):
        raise LookupError("no sync here")

    catcher = WarningCatcher(("synchronizing",), refuse)
    catcher.install()
    try:
        with pytest.raises(LookupError, match="no sync here"):
            sync()
    finally:
        catcher.remove()


def test_a_text_seen_before_is_forgotten_by_the_registry():
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("default")
        warnings.showwarning = lambda *_: None
        space = {"sync": sync, "__name__": __name__}
        sync()  # noted in the registry of this module
        seen = []
        catcher = WarningCatcher(("synchronizing",), lambda text: seen.append(text) is None)
        catcher.install()
        try:
            sync()
            exec("sync()", space)
        finally:
            catcher.remove()
    assert len(seen) == 2


def test_removal_restores_the_list_and_keeps_what_the_user_added():
    with warnings.catch_warnings():
        original = warnings.filters
        before = list(original)
        catcher = WarningCatcher(("synchronizing",), lambda text: True)
        catcher.install()
        catcher.remove()
        assert warnings.filters is original
        assert original == before
        catcher.install()
        warnings.filterwarnings("ignore", message="mine")
        catcher.remove()
        assert warnings.filters is original
        assert len(original) == len(before) + 1
        assert original[0][1].pattern == "mine"


def test_removal_inside_a_block_of_the_users():
    with warnings.catch_warnings():
        original = warnings.filters
        before = list(original)
        catcher = WarningCatcher(("synchronizing",), lambda text: True)
        catcher.install()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            catcher.remove()
            assert warnings.filters[0][0] == "error"
            with pytest.raises(UserWarning):
                warnings.warn("x", stacklevel=1)
        assert list(warnings.filters) == before
        assert all(entry[1] is not catcher for entry in warnings.filters)


def test_a_list_put_in_place_by_the_user_is_healed():
    with warnings.catch_warnings():
        seen = []
        catcher = WarningCatcher(("synchronizing",), lambda text: seen.append(text) is None)
        catcher.install()
        warnings.filters = [("ignore", None, Warning, None, 0)]
        sync()
        assert seen == []
        catcher.heal()
        sync()
        assert len(seen) == 1
        catcher.remove()
        assert list(warnings.filters) == [("ignore", None, Warning, None, 0)]
