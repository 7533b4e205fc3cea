"""The lines that a user writes to keep several treatments: those of one call are one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

# `name = Call(..., argument=value, ...)   # a remark`
_CALL = re.compile(r"(?P<head>\w+ = [\w.]+\(\.\.\.), (?P<arguments>[^()#]+)\)(?:\s+# (?P<remark>.+))?")


def merged(lines: Iterable[str]) -> tuple[str, ...]:
    """The lines in their order, none twice; of one call with `...` the arguments together, where it stood first."""
    calls: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    found: dict[str, None] = {}
    for line in lines:
        call = _CALL.fullmatch(line)
        found[line if call is None else call["head"]] = None
        if call is not None:
            arguments, remarks = calls.setdefault(call["head"], ({}, {}))
            arguments.update(dict.fromkeys(call["arguments"].split(", ")))
            remarks.update(dict.fromkeys([call["remark"]] if call["remark"] else []))
    return tuple(_written(line, *calls[line]) if line in calls else line for line in found)


def _written(head: str, arguments: Iterable[str], remarks: Iterable[str]) -> str:
    remark = "; ".join(remarks)
    return f"{head}, {', '.join(arguments)})" + (f"   # {remark}" if remark else "")
