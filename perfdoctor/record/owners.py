"""Whose code a file is: the user's, torch's, a library's, or Python's own. By path alone; imports none of them."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
from pathlib import PurePath

USER = "user"
TORCH = "torch"
PYTHON = "python"
PERFDOCTOR = "perfdoctor"

_OWNERS = {
    "torch": TORCH,
    "functorch": TORCH,
    "torchgen": TORCH,
    "triton": TORCH,
    "pytorch_lightning": "lightning",
    "lightning": "lightning",
    "lightning_fabric": "lightning",
    "lightning_utilities": "lightning",
    "transformers": "transformers",
    "accelerate": "transformers",
    "torchmetrics": "torchmetrics",
    "tensorboard": "logger",
    "tensorboardX": "logger",
    "wandb": "logger",
    "mlflow": "logger",
    "tqdm": "logger",
    "comet_ml": "logger",
    "neptune": "logger",
    "loguru": "logger",
    "rich": "logger",
    "perfdoctor": PERFDOCTOR,
}

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_CELL = re.compile(r"<ipython-input-(\d+)-")


@functools.lru_cache(maxsize=4096)
def file_owner(file: str) -> str:
    """The owner of a source file, as in `record.capture.Frame.owner`; other installed packages go by their name.

    Code that torch.compile generated counts as torch's; code without a file (`<string>`, a notebook cell) as the
    user's.
    """
    if file.startswith("<"):
        return _synthetic_owner(file)
    path = file.replace("\\", "/")
    if path.startswith(_PACKAGE_ROOT.replace("\\", "/") + "/"):
        return PERFDOCTOR
    if "/torchinductor_" in path or "/.triton/cache/" in path:
        return TORCH
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            package = path.rsplit(folder, 1)[1].split("/", 1)[0].removesuffix(".py")
            if path.rsplit(folder, 1)[1].startswith("torch/utils/tensorboard/"):
                return "logger"
            return _OWNERS.get(package, package)
    if path.startswith(_torch_folder()):
        return TORCH
    if os.path.realpath(file).startswith(_STDLIB):
        return "logger" if "/logging/" in path else PYTHON
    return USER


def is_generated(file: str) -> bool:
    """Whether code of the user's came from `exec` and has no line to show: a dataclass's `__repr__` in `<string>`.

    The cell of a notebook is none, nor is other code that left its source for tracebacks.
    """
    if not file.startswith("<") or file_owner(file) != USER or _CELL.match(file):
        return False
    return file.startswith("<attrs generated ") or not linecache.getlines(file)


def package_path(file: str) -> str:
    """The path of a library's file from its package on, with forward slashes: 'torch/optim/adam.py'."""
    path = file.replace("\\", "/")
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rsplit(folder, 1)[1]
    for package in _OWNERS:  # a source checkout
        marker = f"/{package}/"
        if marker in path:
            return package + "/" + path.split(marker, 1)[1]
    return path


def shown_file(file: str) -> str:
    """The name a person knows a file by: a notebook cell as `In[5]`, anything else as it is."""
    match = _CELL.match(file)
    if match:
        return f"In[{match.group(1)}]"
    if "ipykernel_" not in file:
        return file
    cell = _cell_numbers().get(file)
    return file if cell is None else f"In[{cell}]"


def _cell_numbers() -> dict[str, int]:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return numbers if isinstance(numbers, dict) else {}


def _synthetic_owner(file: str) -> str:
    if file.startswith("<frozen"):
        return PYTHON
    if "eval_with_key" in file or file.startswith("<torch"):
        return TORCH
    return USER


@functools.lru_cache(maxsize=1)
def _loaded_torch_folder(file: str) -> str:
    return str(PurePath(file).parent).replace("\\", "/") + "/"


def _torch_folder() -> str:
    torch = sys.modules.get("torch")
    file = getattr(torch, "__file__", None)
    return _loaded_torch_folder(file) if file else "\0"
