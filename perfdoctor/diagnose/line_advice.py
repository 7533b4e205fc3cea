"""Advice that fits the line: the same kind of wait has another cure in a `while`, in a length, in an index.

A rule looks at the text of the user's line, or at the library file that made the call. First match wins; a line that
none knows gets the advice of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from perfdoctor.diagnose.advice import advice_for_kind
from perfdoctor.diagnose.finding import Advice
from perfdoctor.diagnose.line_rules import BY_LIBRARY, BY_LINE, THROUGH_TORCH, Rule
from perfdoctor.record.capture import Site
from perfdoctor.record.syntax import parsed


def advice_at(kind: str, site: Site | None) -> Advice:
    """The advice for a sync or copy of `kind` at `site`: of its line where one is known, else of its kind."""
    rule = _rule_at(kind, site)
    if rule is None or site is None:
        return advice_for_kind(kind)
    return Advice(text=rule.text, lines=tuple(written(line, code_of(site.text)) for line in rule.lines))


def _rule_at(kind: str, site: Site | None) -> Rule | None:
    if site is None:
        return None
    if site.library is not None:
        found = _first(BY_LIBRARY, kind, site.library.file.replace("\\", "/"))
        if found is not None or site.library.owner != "torch":
            return found
        # torch reads for a call of the line's own (`.item()` through its dispatcher), or for what is known of it.
        return _first(BY_LINE if _OWN_READ.search(site.text) else THROUGH_TORCH, kind, code_of(site.text))
    return _first(BY_LINE, kind, code_of(site.text))


def _first(rules: Iterable[Rule], kind: str, text: str) -> Rule | None:
    return next((rule for rule in rules if text and kind in rule.kinds and rule.pattern.search(text)), None)


def code_of(line: str) -> str:
    """The line without the comment behind it."""
    for found in _COMMENT.finditer(line):
        before = line[: found.start()]
        if before.count("'") % 2 == before.count('"') % 2 == 0:
            return before
    return line


_COMMENT = re.compile(r"\s*#")
_OWN_READ = re.compile(r"\.(item|tolist|cpu|numpy)\(\)")
# One line of these may hold a whole block, which does not go under an `if` as it is.
_COMPOUND = re.compile(r"(def|class|for|while|with|if|elif|else|try|except|finally|async|match)\b")
_TARGET = re.compile(r"([\w.]+)\s*\+=")
_DETACHED = re.compile(r"\{detached\|(.*)\}")
# What reads one number at once, and the tensor that stays.
_READS = (
    (re.compile(r"\bfloat\((\w+(?:\.\w+)*)(?:\.item\(\))?\)"), r"\1.detach()"),
    (re.compile(r"(?:\.detach\(\))?(?:\.cpu\(\))?\.item\(\)"), ".detach()"),
)


def written(line: str, own: str) -> str:
    """A line to paste, with the user's own line, or the name it assigns to, where the rule says so."""
    if "{line}" in line:
        return line.replace("{line}", own if _is_statement(own) else "...   # what it does now")
    target = _TARGET.match(own)
    line = line.replace("{target}", target[1] if target else "total")
    return _DETACHED.sub(lambda found: _detached(own) or found[1], line)


def _detached(line: str) -> str:
    """The line with each read left out; '' where it holds none of a known form, or is part of a statement."""
    found = line
    for pattern, tensor in _READS:
        found = pattern.sub(tensor, found)
    return found if found != line and _is_statement(found) else ""


def _is_statement(line: str) -> bool:
    """Not a part of one, nor the head of a block. `return` stands in a function that is not seen."""
    return not _COMPOUND.match(line) and parsed(line.removeprefix("return ")) is not None
