"""Why torch.compile compiled a function again: the guard that failed, in plain words, and what to change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from perfdoctor.record.capture import Frame

_BATCH = (
    "give every batch the same shape: DataLoader(drop_last=True), pad to fixed lengths; or mark the dimension with "
    "torch._dynamo.mark_dynamic(x, {dim}) before the first call"
)
_FLOAT = (
    "hold it in a tensor made once ({short} = torch.tensor({old}, device=...)) and changed with {short}.fill_(value); "
    "or keep it out of the compiled function"
)
_COUNTER = (
    "keep a counter outside the compiled function, or in a tensor made once and changed in place (register_buffer, "
    "add_(1)); keep a size or a number of rounds to a few values"
)
_OTHER = "pass the same value each time, or decide outside the compiled function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompilation:
    """A function that was compiled again, and the guard that did not hold.

    `count`: how often, by guards of this kind. `at_calls`: indices of the calls during which it happened (0 is the
    first call). `call` is None where graph_breaks makes the call itself. `limit_hit`: dynamo reached its limit and runs
    what is new eagerly from then on.
    """

    function: Frame  # the function that was compiled again, at its first line
    call: Frame | None  # the user's line that called it
    kind: str  # 'size', 'number', 'attribute', 'global', 'dtype', 'grad mode', 'object', ...
    guard: str  # the failed guard as dynamo writes it
    reason: str
    change: str
    count: int
    at_calls: tuple[int, ...] = ()
    limit_hit: bool = False
    cause: Frame | None = None  # the line that built the loader whose last batch is smaller

    def __str__(self) -> str:
        where = f"{self.call or self.function}  {self.function.function} compiled again {_times(self.count)}"
        limit = "\n    the limit of recompilations is reached: it runs eagerly now" if self.limit_hit else ""
        cause = f"\n    the last batch of the loader built at {self.cause}" if self.cause is not None else ""
        return f"{where}\n    {self.reason} (guard: {self.guard}){cause}{limit}\n    do: {self.change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardWords:
    """A failed guard in plain words."""

    kind: str
    reason: str
    change: str


def first_guard(reasons: Sequence[str]) -> str | None:
    """The failed guard of the newest compiled version, on one line, without dynamo's ids and source comment.

    None where only the backend differs: that is another compilation, not a recompilation.
    """
    for reason in reasons:
        line = reason.strip().splitlines()[0] if reason.strip() else ""
        guard = re.sub(r"^\d+/\d+(?:_\d+)?:\s*", "", line)
        guard = re.split(r"\s{2,}#|\s+#\s", guard)[0].strip()
        if guard and "BACKEND_MATCH" not in guard:
            return guard
    return None


def explain_guard(guard: str) -> GuardWords:
    """Plain words for a guard such as `tensor 'x' size mismatch at index 0. expected 24, actual 8`."""
    for pattern, kind, reason, change in _ROWS:
        found = re.search(pattern, guard)
        if found:
            values = {key: _named(value) for key, value in found.groupdict().items() if value is not None}
            return GuardWords(kind=kind, reason=reason.format(**values), change=change.format(**values))
    equal = re.fullmatch(r"(?P<name>[^=<>!]+?) == (?P<old>.+)", guard)
    if equal:
        return _value_words(equal["name"], equal["old"])
    return GuardWords(
        kind="other",
        reason="a condition that the compiled code relies on no longer holds",
        change="keep what the guard names the same from call to call, or pass it as a tensor",
    )


def _value_words(name: str, old: str) -> GuardWords:
    """A Python value that is a constant of the graph: an argument, a global, an attribute or an item."""
    is_float = re.fullmatch(r"-?(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)", old) is not None
    is_number = is_float or re.fullmatch(r"-?\d+", old) is not None
    held = re.fullmatch(r"G\['(\w+)'\](?P<rest>.*)", name)
    position = re.fullmatch(r"args\[\d+\]", name)
    what, kind = f"the {'number' if is_number else 'value'} {_named(name)}", "number" if is_number else "value"
    if held:
        what, kind = f"the global {held[1]}{held['rest']}", "global"
    elif re.fullmatch(r"list\(dict\.keys\((.+)\)\)\[\d+\]", name):
        what, kind = f"a key of {name[15:].partition(')')[0]}", "keys"
    elif re.search(r"[.\[]", name) and not position:
        what, kind = name, "attribute"
    reason = f"{what} is a constant of the graph: it was {old} and changed"
    short = "lr" if position else re.sub(r"^.*\[['\"](\w+)['\"]\]$|^.*\.(\w+)$", lambda m: m[1] or m[2], name)
    change = _FLOAT.format(short=short, old=old) if is_float else _COUNTER if is_number else _OTHER
    return GuardWords(kind=kind, reason=reason, change=change)


def _named(value: str) -> str:
    """A name as its reader knows it: torch calls what a module is called with `args[0]`."""
    return re.sub(r"^args\[(\d+)\]", lambda found: f"positional argument {int(found[1]) + 1}", value)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# (pattern, kind, reason, change), the first that fits wins. The words take the pattern's groups.
_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        r"tensor '(?P<name>.+?)' size mismatch at index (?P<dim>\d+)\. expected (?P<old>\S+?), actual (?P<new>\S+)",
        "size", "the size of {name} in dimension {dim} was {old} and is now {new}", _BATCH,
    ),
    (
        r"(?P<name>[\w.\[\]'\"]+)\.size\(\)\[(?P<dim>\d+)\]",
        "size", "the size of {name} in dimension {dim} is outside what the code was compiled for", _BATCH,
    ),
    (
        r"tensor '(?P<name>.+?)' stride mismatch at index (?P<dim>\d+)\. expected (?P<old>\S+?), actual (?P<new>\S+)",
        "stride", "the stride of {name} in dimension {dim} was {old} and is now {new}",
        "give it the same memory layout each time: x.contiguous() before the call",
    ),
    (
        r"tensor '(?P<name>.+?)' rank mismatch\. expected (?P<old>\S+?), actual (?P<new>\S+)",
        "size", "{name} had {old} dimensions and has now {new}", "give it the same number of dimensions each time",
    ),
    (
        r"tensor '(?P<name>.+?)' dtype mismatch\. expected (?P<old>\S+?), actual (?P<new>\S+)",
        "dtype", "the dtype of {name} was {old} and is now {new}", "convert it to one dtype before the call",
    ),
    (
        r"tensor '(?P<name>.+?)' requires_grad mismatch",
        "grad mode", "{name} requires grad in one call and not in another",
        "call it with the same requires_grad each time, or compile training and evaluation apart",
    ),
    (
        r"tensor '(?P<name>.+?)' .*(?:device|dispatch key)",
        "device", "{name} changed its device or its kind (autocast, inference mode, a subclass)",
        "call it in the same modes and on the same device each time",
    ),
    (
        r"GLOBAL_STATE changed|check_global_state|is_grad_enabled|grad_mode",
        "grad mode", "a mode of torch changed between calls: grad mode, autocast, deterministic algorithms",
        "call it in the same modes each time: one compiled function for training, another for evaluation",
    ),
    (
        r"expected type of '(?P<name>.+?)' to be a tensor type,.*found (?P<new>.+)",
        "object", "{name} is of another type now: {new}", "pass the same type of tensor each time",
    ),
    (
        r"\btraining\b",
        "training mode", "the model went from train() to eval() or back",
        "two versions, one for each mode, are as it should be; do not switch inside the step",
    ),
    (
        r"(?:set|dict|list)\.__contains__\((?P<name>[^,()]+)|(?P<word>.+) in (?P<type>.+)",
        "keys", "a container that the code looks into holds other things than before",
        "pass containers with the same keys each time, or decide outside the compiled function",
    ),
    (
        r"len\((?P<name>[^()]+)\)",
        "length", "the length of {name} changed",
        "pass a container of the same length each time, or one stacked tensor",
    ),
    (
        r"check_obj_id\((?P<name>[^,()]+)|check_type_id\((?P<type>[^,()]+)| is (?:not )?",
        "object", "another object, or one of another type, stands where the code was compiled for one",
        "pass the same object each time: a new closure, lambda or module for each call compiles each time",
    ),
)  # fmt: skip
