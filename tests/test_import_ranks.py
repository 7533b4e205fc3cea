"""The order of the rooms: a module imports its own folder and lower ranks only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "perfdoctor"
RANKS = {
    "version": 0, "errors": 0, "units": 0,
    "record": 1,
    "watch": 2, "emulate": 2, "kernels": 2,
    "bench": 3, "diagnose": 3, "treat": 3,
    "trial": 4,
    "report": 5,
    "doors": 6, "cli": 6,
}  # fmt: skip
# Rooms of one rank that meet, only this way round: cli is the doors' command line, bench measures the treatments.
NEIGHBOURS = {("cli", "doors"), ("bench", "treat")}
MODULES = sorted(
    path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if len(path.relative_to(PACKAGE).parts) > 1
)
TORCH = ("torch", "triton", "lightning", "pytorch_lightning", "tensorboard", "transformers")
FREE_OF_TORCH = ("record", "diagnose", "report")


def imported(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Every module that is imported anywhere in the tree, functions and TYPE_CHECKING blocks included.

    `package` is the dotted package of the module, against which relative imports are resolved.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def imports_of(module: Path) -> list[str]:
    tree = ast.parse((PACKAGE / module).read_text("utf-8"), str(module))
    return list(imported(tree, ".".join(("perfdoctor", *module.parts[:-1]))))


def rooms_imported(module: Path) -> set[str]:
    return {name.split(".")[1] for name in imports_of(module) if name.startswith("perfdoctor.")}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_module_imports_its_own_room_and_lower_ranks(module: Path) -> None:
    own = module.parts[0]
    for room in rooms_imported(module) - {own}:
        assert room in RANKS, f"{module} imports perfdoctor.{room}, which is no room"
        assert RANKS[room] < RANKS[own] or (own, room) in NEIGHBOURS, f"{module} imports perfdoctor.{room}"


def test_diagnose_does_not_import_the_live_hooks() -> None:
    for module in MODULES:
        if module.parts[0] == "diagnose":
            assert not rooms_imported(module) & {"watch", "emulate"}, module


@pytest.mark.parametrize("module", [m for m in MODULES if m.parts[0] in FREE_OF_TORCH], ids=str)
def test_recordings_are_read_and_judged_without_torch(module: Path) -> None:
    assert not [name for name in imports_of(module) if name.split(".")[0] in TORCH]


def test_the_errors_and_units_import_nothing_of_the_package() -> None:
    for name in ("errors", "units", "version"):
        assert not [m for m in imports_of(Path(f"{name}.py")) if m.startswith("perfdoctor")]


def test_the_reader_of_imports_sees_them_all() -> None:
    source = "import a.b\nfrom . import c\ndef f():\n    from ..doors.x import y\n"
    assert list(imported(ast.parse(source), "perfdoctor.watch")) == [
        "a.b",
        "perfdoctor.watch.c",
        "perfdoctor.doors.x.y",
    ]
