"""Advice that fits the line: the same kind of wait has another cure in a `while`, in a length, in an index.

A rule looks at the text of the user's line, or at the library file that made the call. First match wins; a line that
none knows gets the advice of its kind.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from perfdoctor.diagnose.advice import advice_for_kind
from perfdoctor.diagnose.finding import Advice
from perfdoctor.record.capture import Site


class _Rule(NamedTuple):
    kinds: frozenset[str]
    pattern: re.Pattern[str]
    text: str
    lines: tuple[str, ...] = ()


def _rule(kinds: str, pattern: str, text: str, *lines: str) -> _Rule:
    return _Rule(frozenset(kinds.split()), re.compile(pattern), text, lines)


_READS = "item tolist cpu numpy scalar_index optimizer_internal"
_MASKS = "boolean_mask masked_select nonzero"
_STORED = r"\]\s*([-+*/|&^@%]|//|\*\*|<<|>>)?=[^=]"
_MAKERS = r"\b(tensor|as_tensor|asarray|FloatTensor|LongTensor|Tensor|new_tensor)\("
_SIZED = r"\b(range|arange|zeros|ones|empty|full|randn?|randint|split)\([^)]*(int\(|\.(item|tolist|max|sum)\()"

_BY_LIBRARY = (
    _rule(
        _READS,
        r"torch/optim/lr_scheduler\.py$",
        "the scheduler turns its metric into a number: step it once an epoch, or every N steps",
        "if step % 50 == 0:",
        "    scheduler.step(loss)",
    ),
    _rule(
        "h2d_pageable h2d_blocking",
        r"torch/optim/swa_utils\.py$",
        "the averaged model copies its own counter: update the average every N steps",
        "if step % 10 == 0:",
        "    averaged.update_parameters(model)",
    ),
)

_BY_LINE = (
    _rule(
        _MASKS,
        r"\.backward\(|\.grad\(",
        "the forward pass selects with a device mask, and its gradient again: mend it there (torch.where)",
    ),
    _rule(
        "boolean_mask", _STORED, "write with torch.where instead: its shape is known", "x = torch.where(mask, value, x)"
    ),
    _rule(
        _READS, r"pack_padded_sequence", "take the lengths from the collate function, where the host knows them already"
    ),
    _rule("cpu", r"state_dict\(", "keep the copy on the device (value.clone()), or make it every N steps"),
    _rule(
        "item cpu numpy tolist",
        r"\benvs?\.step\(",
        "an environment on the host needs its action: step many environments at once, one read for all",
    ),
    _rule(
        "item",
        r"(\b(int|float)\(|\.item\().*\bfor\b|^for\b.*\.item\(|\bmap\((int|float)\b",
        "read them all at once: torch.stack (or the tensor itself) and one .tolist(), every N steps",
        "values = torch.stack(values).tolist()   # one wait",
    ),
    _rule(
        "item scalar_index tolist",
        rf"{_SIZED}|\b(max_?len\w*|len\w*|size\w*)\s*=",
        "sizes belong on the host: take them from the collate function or the input's shape, where they are known",
    ),
    _rule(
        "tolist",
        r"\b(multinomial|topk|sort|argsort|argmax|nonzero)\b",
        "index with the device tensor itself (gather, index_select); make it a list only where Python needs one",
    ),
    _rule("tensor_to_bool", r"^while\b", "run a fixed number of turns, or test every N turns"),
    _rule(
        "tensor_to_bool",
        r"^assert\b",
        "assert on the device, where nothing waits for it",
        "torch._assert_async(torch.isfinite(loss).all())",
    ),
    _rule(
        "tensor_to_bool",
        r"isnan|isinf|isfinite|\b(\w+) != \1\b",
        "let the device decide with torch.where, or look every N steps",
        "value = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))",
    ),
    _rule(
        "tensor_to_bool",
        r"^(el)?if\b.*\.(any|all|sum)\(",
        "go on as if the test had passed (a masked sum of nothing is 0), or test every N steps",
        "loss = (per_row_loss * keep).sum() / keep.sum().clamp(min=1)",
    ),
    _rule(
        "tensor_to_bool",
        r"(?<![.\w])(max|min)\(",
        "compare on the device",
        "best = torch.minimum(best, loss)   # torch.maximum, torch.stack(values).max()",
    ),
    _rule("tensor_to_bool", r"(?<![.\w])sorted\(", "sort on the device", "values = torch.stack(values).sort().values"),
    _rule(
        "tensor_to_bool",
        r"\b(equal|allclose)\(",
        "compare every N steps, or keep the answer on the device",
        "same = (a == b).all()   # a device tensor",
    ),
    _rule(
        "tensor_to_bool",
        r"norm",
        "scale on the device, without asking",
        "p.grad.mul_((limit / norm).clamp(max=1.0))   # or torch.nn.utils.clip_grad_norm_",
    ),
    _rule(
        "h2d_pageable h2d_blocking",
        r"\b(randperm|randint|permutation)\(",
        "draw the indices on the device",
        "index = torch.randperm(n, device=device)",
    ),
    _rule(
        "h2d_blocking",
        _MAKERS + r"\W*\w*(item|loss|reward|length|lens)",
        "built from values of this step: keep them on the device (torch.stack), or copy from pinned memory",
        "x = torch.tensor(values).pin_memory().to(device, non_blocking=True)",
    ),
    _rule(
        "h2d_blocking",
        rf"{_MAKERS}|\b(full|zeros|ones|eye|arange|linspace|randn?|empty)\(",
        "make it on the device; a constant once, before the loop",
        "self.register_buffer('weight', torch.tensor([...]))   # once, moved by model.to(device)",
        "scale = torch.full((), 0.07, device=x.device)         # or filled on the device",
    ),
    _rule(
        "h2d_blocking",
        _STORED,
        "the number written travels to the device: write a slice, use masked_fill_, or a device tensor made once",
    ),
    _rule(
        "h2d_pageable h2d_blocking",
        rf"^(?!.*(\.(to|cuda|copy_|type|type_as)\(|device|{_STORED})).*\w\[",
        "the index travels to the device: make it there, once",
        "index = torch.randperm(n, device=x.device)   # or torch.tensor([...], device=...)",
    ),
    _rule(
        "h2d_blocking",
        r"\.(to|cuda|copy_)\(",
        "copy without waiting, out of pinned memory",
        "x = x.to(device, non_blocking=True)   # x is pinned",
    ),
    _rule(
        "h2d_pageable",
        r"from_numpy|as_tensor|\bnp\.",
        "pin it and copy without waiting, or keep it on the device",
        "x = torch.from_numpy(array).pin_memory().to(device, non_blocking=True)",
    ),
    _rule("other_sync", r"histc\(", "give histc its bounds", "torch.histc(x, bins, min=-1.0, max=1.0)"),
)


def advice_at(kind: str, site: Site | None) -> Advice:
    """The advice for a sync or copy of `kind` at `site`: of its line where one is known, else of its kind."""
    if site is not None and site.library is not None:
        for rule in _BY_LIBRARY:
            if kind in rule.kinds and rule.pattern.search(site.library.file.replace("\\", "/")):
                return Advice(text=rule.text, lines=rule.lines)
    elif site is not None and site.text:
        for rule in _BY_LINE:
            if kind in rule.kinds and rule.pattern.search(site.text):
                return Advice(text=rule.text, lines=rule.lines)
    return advice_for_kind(kind)
