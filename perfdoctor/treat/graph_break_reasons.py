"""From dynamo's text about a graph break to a place, a reason in plain words and the change to make."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

from perfdoctor.record.capture import Frame
from perfdoctor.record.owners import TORCH, USER, file_owner, shown_file

_PLACE = re.compile(r"in user code at (?P<file>[^\n]+?):(?P<line>\d+)\n")
_REASON = re.compile(r"(?:Graph Break )?Reason: (?P<reason>.*?)(?=\n\s*User code traceback:|\Z)", re.DOTALL)
_FRAMES = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?')
_WHOLE_FRAME = (
    "Skipping the function",
    "skip tracing the frame",
    "then skipping the rest",
    "graph break in a for/while",
)
_LIMIT = re.compile(r"(?:recompile|cache size) limit exceeded", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A line at which torch.compile ends one graph and has to start another.

    `site` is the line to change: the user's innermost. `library` is the line inside a library where that one ends up.
    `runs_eagerly`: the rest of the function (or all of it) is not compiled at all; what follows in it was not looked
    at, so look again after the change.
    """

    site: Frame
    kind: str  # 'print', 'logging', 'item', 'branch', 'mask', ...; 'other' where dynamo's own words stand
    reason: str
    change: str
    text: str = ""  # the source line
    library: Frame | None = None
    runs_eagerly: bool = False
    torch_text: str = ""  # dynamo's own words

    def __str__(self) -> str:
        eager = "\n    what follows in this function runs eagerly and was not looked at" if self.runs_eagerly else ""
        return f"{self.site}  {self.text}\n    {self.reason}{eager}\n    do: {self.change}"


def parse_break(text: str) -> GraphBreak | None:
    """One break from the text that dynamo logs for it, or from the error it raises under `fullgraph=True`."""
    if _LIMIT.search(text):
        return None  # a recompilation, counted as one
    reason = _reason_text(text)
    frames = _frames(text)
    if not frames:
        return None
    site = next((frame for frame in reversed(frames) if frame.owner == USER), frames[-1])
    inner = frames[-1]
    line = linecache.getline(site.file, site.line).strip()
    kind, words, change = _words(reason, line, site, inner)
    return GraphBreak(
        site=site,
        kind=kind,
        reason=words,
        change=change,
        text=line,
        library=None if inner == site else inner,
        runs_eagerly=any(mark in text for mark in _WHOLE_FRAME),
        torch_text=reason,
    )


def _reason_text(text: str) -> str:
    found = _REASON.search(text)
    reason = found["reason"] if found else re.split(r"\n\s*(?:from user code|User code traceback):", text)[0]
    return re.split(r"\n\s*Stack variable source attribution|\n\*\*\* While handling", reason)[0].strip()


def _frames(text: str) -> list[Frame]:
    """Outermost first; the place that dynamo names is the last."""
    trace = re.split(r"(?:User code traceback|from user code|following user code):", text)[-1]
    trace = trace.split("most recent bytecode")[0]
    frames = [_frame(each["file"], int(each["line"]), each["function"] or "") for each in _FRAMES.finditer(trace)]
    place = _PLACE.search(text)
    if place and (not frames or (frames[-1].file, frames[-1].line) != (place["file"], int(place["line"]))):
        frames.append(_frame(place["file"], int(place["line"]), ""))
    return [frame for frame in frames if not frame.file.startswith("<frozen")]


def _frame(file: str, line: int, function: str) -> Frame:
    name = re.sub(r"^torch_dynamo_resume_in_(\w+?)_at_\d+$", r"\1", function.strip())
    return Frame(file=shown_file(file), line=line, function=name, owner=file_owner(file))


def _words(reason: str, line: str, site: Frame, inner: Frame) -> tuple[str, str, str]:
    if inner.owner == TORCH and inner.file.replace("\\", "/").endswith("optim/optimizer.py"):
        return _OPTIMIZER
    found = next(((kind, words, change) for pattern, kind, words, change in _ROWS if re.search(pattern, reason)), None)
    if found is not None and found[0] == "item" and re.search(r"\brandom\.", line):
        return _RANDOM  # numpy's generators are traced as tensors that are read
    if found is not None:
        return found
    return "other", *_dynamo_words(reason)


def _dynamo_words(reason: str) -> tuple[str, str]:
    """What dynamo says itself: its explanation and its first hint that names something to do."""
    explanation = re.search(r"Explanation: (.+)", reason)
    hints: list[str] = [
        hint
        for hint in re.findall(r"Hint: (.+)", reason)
        if "report an issue" not in hint and "file an issue" not in hint
    ]
    lines = [each.strip() for each in reason.splitlines() if each.strip()]
    words = explanation[1] if explanation else next((each for each in lines if not each.endswith(":")), "not traceable")
    words = re.sub(r" in file `[^`]+`", "", words)
    return words.strip().rstrip("."), (hints[0].strip() if hints else "move this line out of the compiled function")


_OPTIMIZER = (
    "optimizer",
    "the optimizer's step is no part of the graph of the forward pass",
    "compile the model, or a function of forward and loss; call optimizer.step() outside "
    "(under torch.compile(optimizer.step) this one break is torch's own, and the update after it is one graph)",
)
_RANDOM = (
    "random",
    "it draws a random number in Python",
    "draw it with torch on the device (torch.rand), or outside and pass it in as a tensor",
)
_MASK = "select with torch.where, or multiply by the mask: the size of the result must not depend on the data"
# (pattern of dynamo's text, kind, reason, change); the first that fits wins. Texts of torch 2.13 and older ones.
_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        r"(?:builtin|operator|BuiltinVariable\()\W*print\b", "print", "print is no part of a graph",
        "print after the compiled call, every N steps; or remove it",
    ),
    (
        r"logging\.Logger|[Ll]ogger method|<Logger ", "logging", "a logger call is no part of a graph",
        "return what is to be logged and log it after the compiled call, every N steps; or list the method in "
        "torch._dynamo.config.ignore_logging_functions",
    ),
    (
        r"module: _?warnings\b|qualname: _?(?:warnings\.)?warn\b", "warning", "a warning is no part of a graph",
        "warn once, outside the compiled function",
    ),
    (
        r"[Dd]ata.dependent (?:branch|jump|control|assert|expression|symbolic)|generic_jump"
        r"|attempted to jump with TensorVariable|Could not guard on data-dependent",
        "branch", "it branches on a value that only the device knows",
        "select with torch.where (both sides computed), or decide outside the compiled function",
    ),
    (
        r"Tensor\.item\b|call_method TensorVariable\(\) item|\b_local_scalar_dense|SymNodeVariable.*float",
        "item", "it turns a tensor into a Python number",
        "keep it a tensor; read it after the compiled call, every N steps",
    ),
    (
        r"call_method TensorVariable\(\) tolist|Tensor\.tolist", "tolist", "it turns a tensor into a Python list",
        "keep it a tensor; read it after the compiled call",
    ),
    (
        r"torch\.nn\.functional\.one_hot", "mask", "the size of the result depends on the data",
        "give one_hot the number of classes: one_hot(labels, num_classes=10)",
    ),
    (
        r"builtin operator `(?:range|sorted|list|sum|divmod|round|slice)` with argument types \[[^\]]*Tensor"
        r"|BuiltinVariable\((?:range|sorted)\)",
        "item", "Python has to know the numbers in a tensor here",
        "compute it with torch (torch.sort, torch.arange, a mask); or take the number outside and pass it in",
    ),
    (
        r"aten\.(?:nonzero|masked_select|unique|_unique2|bincount|repeat_interleave)|[Dd]ynamic.(?:output )?shape",
        "mask", "the size of the result depends on the data", _MASK,
    ),
    (
        r"Tensor\.backward\b|\) backward\b|\bautograd\.(?:backward|grad)\b", "backward",
        "backward() runs in autograd, outside the graph of the forward pass (its own graph is compiled all the same)",
        "compile the model, or a function of forward and loss, and call backward() outside",
    ),
    (
        r"Optimizer\.zero_grad|Optimizer\.step|torch[./]optim", *_OPTIMIZER,
    ),
    (
        r"creation function with requires_grad", "requires_grad",
        "it makes a tensor that requires grad inside the graph",
        "make the parameter outside the compiled function",
    ),
    (
        r"no exception handler|Observed exception", "exception",
        "tracing ended in an exception here, which running it need not raise: often a Python value made from a tensor "
        "(the text of an f-string, a length)",
        "call it without torch.compile: if it raises there too, that error is the cause; else keep what depends on "
        "tensors a tensor, and make texts of it after the compiled call",
    ),
    (
        r"requires_grad_\(|Tensor\.requires_grad_", "requires_grad",
        "it changes requires_grad of a tensor of the graph",
        "set requires_grad before the compiled function",
    ),
    (
        r"module: time\b|\btime\.(?:perf_counter|time|monotonic)|qualname: (?:perf_counter|monotonic|time)(?:_ns)?\b"
        r"|method `(?:now|utcnow|today)` of class `type`|datetime",
        "clock", "it reads a clock or sleeps, which a graph cannot hold", "take the time outside the compiled function",
    ),
    (
        r"Random\.\w+|module: random\b|random\.(?:random|randint|choice)|np\.random|numpy\.random|mtrand",
        *_RANDOM,
    ),
    (
        r"\.numpy\(\)|numpy", "numpy", "it leaves torch for numpy", "compute it with torch",
    ),
    (
        r"builtin\W+(?:open|input|exec|eval)\b|\bio\.|module: (?:io|os|pathlib|_io|posix)\b|posix\.",
        "file", "it reads or writes a file", "do input and output outside the compiled function",
    ),
    (
        r"torch\.(?:save|load)\b|function `(?:save|load)`",
        "file", "it reads or writes a file", "do input and output outside the compiled function",
    ),
    (
        r"manual_seed|set_rng_state", "seed", "it sets a random seed", "set seeds outside the compiled function",
    ),
    (
        r"`\w*[Ll]ock` context manager|module: _?thread\w*|_thread\.\w+|threading\.", "thread",
        "it works with threads or locks, which a graph cannot hold", "do that outside the compiled function",
    ),
    (
        r"`tqdm\b|tqdm\.", "print", "a progress bar is no part of a graph", "draw it around the compiled call",
    ),
    (
        r"method `write(?:lines)?` of class|TextIOWrapper|BufferedWriter|BufferedReader", "file",
        "it reads or writes a file", "do input and output outside the compiled function",
    ),
    (
        r"copy\.deepcopy\(\) on tensors", "deepcopy", "a tensor cannot be copied this way inside a graph",
        "use tensor.clone(), or copy outside the compiled function",
    ),
    (
        r"pdb|breakpoint", "breakpoint", "a breakpoint is no part of a graph", "remove it",
    ),
    (
        r"torch\._dynamo\.graph_break\(\)", "explicit", "torch._dynamo.graph_break() is called here", "remove the call",
    ),
    (
        r"torch\._dynamo\.disable|torch\.compiler\.disable|disable\(\) recursively|disabled (?:function|wrapper)",
        "disabled", "it calls a function that is excluded from compilation (torch.compiler.disable)",
        "take the decorator off, or call it outside the compiled function",
    ),
    (
        r"generator", "generator", "a generator cannot be compiled", "return a list or a stacked tensor",
    ),
)  # fmt: skip
