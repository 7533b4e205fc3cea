"""The rules of `line_advice`: which lines, as people write them, want another cure than their kind.

Each rule is of some kinds, and of lines (or library files) that its pattern finds. First match wins, so the narrow ones
stand in front. In lines to paste `{line}` stands for the user's own, `{detached|...}` for it with the read left out (or
what follows the bar, where that cannot be written), `{target}` for the name that it adds to.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Rule(NamedTuple):
    """One cure. `kinds`: names of `sync_kinds.KINDS`."""

    kinds: frozenset[str]
    pattern: re.Pattern[str]
    text: str
    lines: tuple[str, ...] = ()


def _rule(kinds: str, pattern: str, text: str, *lines: str) -> Rule:
    return Rule(frozenset(kinds.split()), re.compile(pattern), text, lines)


_SCALARS = "item tolist cpu numpy"
_READS = f"{_SCALARS} scalar_index optimizer_internal"
_SHOWN = "item tolist cpu numpy format_tensor print_tensor logging"
_MASKS = "boolean_mask masked_select nonzero"
_STORED = r"\]\s*([-+*/|&^@%]|//|\*\*|<<|>>)?=[^=]"
_MAKERS = r"\b(tensor|as_tensor|asarray|FloatTensor|LongTensor|Tensor|new_tensor)\("
_SIZED = r"\b(range|arange|zeros|ones|empty|full|randn?|randint|split)\([^)]*(int\(|\.(item|tolist|max|sum)\()"
_NONFINITE = r"isnan|isinf|isfinite|is_finite|is_nan|\b(\w+) != \1\b"
# Of gradients; `self.norm(x)`, `norm1`, `layer_norm` and `normalize` are layers.
_NORM = r"(clip_grad_norm|\b(\w*(grad|total|global|weight|param)\w*_)?g?norms?\b(?!\s*\())"
_LOGGED = (
    r"\b(print|info|debug|warning|add_scalars?|(?<!torch\.)(?<!math\.)(?<!np\.)log|log_dict|log_metrics?|log_scalar|"
    r"set_postfix|set_postfix_str|set_description|write|writerow)\("
)
_EVERY = ("if step % 50 == 0:", "    {line}")
_KEPT = "{detached|value = loss.detach()}   # a device tensor; nothing waits"
_WATCH = (
    "with perfdoctor.NonFiniteWatch(model) as watch:   # around the loop",
    "    watch.check(loss)                             # before optimizer.step()",
    "    watch.step()                                  # after it; raises, a few steps late",
)

BY_LIBRARY = (
    _rule(
        "clip_grad_norm",
        r"torch/nn/utils/clip_grad\.py$",
        "leave error_if_nonfinite=False: it clips the same and waits for nothing; a bad norm is told by NonFiniteWatch",
        "torch.nn.utils.clip_grad_norm_(params, max_norm)   # error_if_nonfinite=False",
    ),
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

_SELECTIONS = (
    _rule(
        _MASKS,
        r"\.backward\(|\.grad\(",
        "the forward pass selects with a device mask, and its gradient again: mend it there (torch.where)",
    ),
    _rule(
        "boolean_mask", _STORED, "write with torch.where instead: its shape is known", "x = torch.where(mask, value, x)"
    ),
    _rule(
        "boolean_mask masked_select",
        r"\b(cross_entropy|nll_loss|CrossEntropyLoss|NLLLoss)\(",
        "let the loss leave rows out (ignore_index), or multiply by the mask",
        "loss = F.cross_entropy(logits, targets.masked_fill(~keep, -100))   # ignore_index=-100",
    ),
)

_NONFINITE_READS = (
    _rule(
        f"{_SCALARS} tensor_to_bool print_tensor format_tensor",
        _NONFINITE,
        "perfdoctor.NonFiniteWatch checks loss and gradients and waits for nothing; "
        "other values: torch.nan_to_num, or torch.where on the device",
        *_WATCH,
    ),
)

_GRADIENTS = (
    _rule(
        "item",
        r"\b(sqrt|sum)\(.*\.grad\b.*\bfor\b|^(?!.*\bfor\b).*\.grad\b.*(norm\(|\bpow\(|square\(|\*\* ?2)"
        r"|norm\([^)]*\.grad\b|\+= ?\w*norm\w*(\.data|\.detach\(\))*\.item\(\) ?\*\* ?2",
        "the norm of all gradients in one launch: perfdoctor.grad_norm, a device tensor to read every N steps",
        "norm = perfdoctor.grad_norm(params)   # params = list(model.parameters()), once",
    ),
    _rule(
        "item",
        r"\.grad\b",
        "perfdoctor.grad_stats reads all gradients in one launch: norm, mean, largest of each; read them every N steps",
        "stats = perfdoctor.grad_stats(model.named_parameters())",
        "if step % 50 == 0:",
        "    print(stats.per_tensor.l2.tolist(), stats.total.l2.item())",
    ),
    _rule(
        "tensor_to_bool",
        r"norm",
        "clip without asking: it scales on the device",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), limit)",
        "p.grad.mul_((limit / norm).clamp(max=1.0))   # or each by hand",
    ),
    _rule(_SHOWN, rf"{_LOGGED}.*{_NORM}", "log every N steps: the norm may stay a device tensor until then", *_EVERY),
    _rule(
        "item",
        _NORM,
        "leave the norm a device tensor (arithmetic works on it), and read it every N steps, where it is logged",
        _KEPT,
    ),
)

_LENGTHS = (
    _rule(
        f"{_READS} h2d_pageable h2d_blocking",
        r"pack_padded_sequence",
        "take the lengths from the collate function, where the host knows them already",
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
)

_READS_OF_LOOPS = (
    _rule("cpu", r"state_dict\(", "keep the copy on the device (value.clone()), or make it every N steps"),
    _rule(
        "item cpu numpy tolist",
        r"\benvs?\.step\(",
        "an environment on the host needs its action: step many environments at once, one read for all",
    ),
    _rule(
        "item",
        r"scheduler\.step\(",
        "step the scheduler with its metric once an epoch, or every N steps",
        *_EVERY,
    ),
    _rule(
        "item",
        r"\bself\.log(_dict)?\(",
        "give it the tensor: Lightning makes a number of it every log_every_n_steps",
        "self.log('loss', loss)   # no .item()",
    ),
    _rule(_SHOWN, _LOGGED, "log every N steps", *_EVERY),
    _rule(
        "item",
        r"\.append\(",
        "append the detached tensor, and make numbers of the whole list every N steps, or once an epoch",
        "{detached|losses.append(loss.detach())}   # nothing waits",
        "values = torch.stack(losses).tolist()     # one wait",
    ),
    _rule(
        "cpu numpy",
        r"\.append\(|\.extend\(|\.update\(|\+=",
        "collect detached tensors on the device, and copy them once, at the end of the epoch",
        "outputs.append(out.detach())     # no wait",
        "outputs = torch.cat(outputs).cpu()   # one wait",
    ),
    _rule(
        "item",
        r"\.update\(",
        "give the meter the detached tensor: its sum stays on the device until it is shown, every N steps",
        "{detached|meter.update(loss.detach(), n)}   # nothing waits",
    ),
    _rule(
        "item",
        r"\+=.*(==|!=|\beq\(|correct|hits|matches|sum\(\))",
        "count on the device, and read the count at the end of the epoch, or every N steps",
        "{detached|correct += (out.argmax(1) == y).sum()}   # a device tensor; nothing waits",
    ),
    _rule(
        "item",
        r"\bmath\.|\bnp\.",
        "compute it with torch on the device (torch.exp, torch.sqrt), and read the result every N steps",
    ),
    _rule(
        "item",
        r"^return\b",
        "return the detached tensor, and let the caller read it every N steps",
        "{detached|return loss.detach()}",
    ),
    _rule(
        "item",
        r"^(el)?if\b|^while\b|^assert\b",
        "decide on the device (torch.where), or every N steps",
        "if step % 50 == 0 and loss.item() > limit:",
    ),
    _rule(
        "item",
        r"\+=",
        "sum detached tensors on the device and read the sum every N steps",
        "{detached|total += loss.detach()}   # a device tensor; nothing waits",
        "if step % 50 == 0:",
        "    print({target}.item() / 50); {target}.zero_()",
    ),
    _rule("item", r"[^=!<>]=[^=]", "keep the detached tensor, and read it every N steps, where it is shown", _KEPT),
    _rule(
        "cpu numpy",
        r"numpy\(|\bnp\.|_score\(|metric",
        "compute it with torch on the device, or copy with non_blocking=True into pinned memory behind an event",
        "host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)   # once",
        "host.copy_(x, non_blocking=True); copied.record()",
        "copied.synchronize()   # later, when the value is needed",
    ),
    _rule(
        "tolist",
        r"\b(multinomial|topk|sort|argsort|argmax|nonzero)\b",
        "index with the device tensor itself (gather, index_select); make it a list only where Python needs one",
    ),
    _rule("print_tensor format_tensor", "", "make text of it every N steps", *_EVERY),
)

_TESTS = (
    _rule("tensor_to_bool", r"^while\b", "run a fixed number of turns, or test every N turns"),
    _rule(
        "tensor_to_bool",
        r"^assert\b",
        "assert on the device, where nothing waits for it",
        "torch._assert_async((x >= 0).all())",
    ),
    _rule(
        "tensor_to_bool",
        r"^(el)?if\b.*\.(any|all|sum)\(",
        "go on as if the test had passed (a masked sum of nothing is 0), or test every N steps",
        "loss = (per_row_loss * keep).sum() / keep.sum().clamp(min=1)",
    ),
    _rule(
        "tensor_to_bool",
        r"(?<![.\w])(max|min)\(|^(el)?if\b.*\b(best|lowest|highest|min|max)\w*\s*:$",
        "compare on the device",
        "best = torch.minimum(best, loss.detach())   # torch.maximum, torch.stack(values).max()",
    ),
    _rule("tensor_to_bool", r"(?<![.\w])sorted\(", "sort on the device", "values = torch.stack(values).sort().values"),
    _rule(
        "tensor_to_bool",
        r"\b(equal|allclose)\(",
        "compare every N steps, or keep the answer on the device",
        "same = (a == b).all()   # a device tensor",
    ),
)

_COPIES = (
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
    _rule(
        "h2d_pageable",
        r"non_blocking\s*=\s*True",
        "non_blocking=True waits all the same, because the source is not pinned: pin it",
        "loader = DataLoader(..., pin_memory=True)",
    ),
    _rule("other_sync", r"histc\(", "give histc its bounds", "torch.histc(x, bins, min=-1.0, max=1.0)"),
)

# Of lines that have torch read or copy: what is a rule of theirs all the same.
THROUGH_TORCH = (_SELECTIONS[0], *_NONFINITE_READS, _LENGTHS[0])
BY_LINE = (*_SELECTIONS, *_NONFINITE_READS, *_GRADIENTS, *_LENGTHS, *_READS_OF_LOOPS, *_TESTS, *_COPIES)
