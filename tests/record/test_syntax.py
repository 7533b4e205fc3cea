"""Source as a tree, also where something parses in between."""

from __future__ import annotations

import ast

import pytest

from perfdoctor.record import syntax
from perfdoctor.record.syntax import parsed


def test_what_is_no_python_has_no_tree() -> None:
    tree = parsed("x = 1")
    assert isinstance(tree, ast.Module)
    assert isinstance(tree.body[0], ast.Assign)
    assert parsed("x = ") is None
    assert parsed("x\0") is None


def test_a_parse_that_another_one_disturbed_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, calls = ast.parse, []

    def disturbed(text: str) -> ast.Module:
        calls.append(text)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=36, after=42)")
        return parse(text)

    monkeypatch.setattr(syntax.ast, "parse", disturbed)
    assert parsed("x = 1") is not None
    assert len(calls) == 3
