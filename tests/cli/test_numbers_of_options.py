"""A number that is none is told in the user's words, never by the name of a function of ours."""

from __future__ import annotations

import pytest

from perfdoctor.cli import main

OPTIONS = [
    ("trial", "--seconds"),
    ("trial", "--steps"),
    ("trial", "--warmup"),
    ("trial", "--active"),
    ("trial", "--suspects"),
    ("compare", "--gate"),
    ("compare", "--run-noise"),
]


@pytest.mark.parametrize("text", ["many", "", "nan", "-1", "1e", "inf"])
@pytest.mark.parametrize(("verb", "option"), OPTIONS)
def test_what_is_no_number(verb: str, option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, f"{option}={text}", "a.json", "b.json"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"perfdoctor: argument {option}: ")
    assert said.count("\n") == 1
    assert "_seconds" not in said
    assert "_share" not in said
