"""What the instruction that a frame is executing was in the source: the exact expression, or its opcode.

Python 3.11 keeps the columns of every instruction, so that `a.item() + b.item()` has two different calls on one line.
"""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import opcode
from types import CodeType, FrameType
from typing import NamedTuple

from perfdoctor.record.syntax import parsed

_CACHE_OPCODE = opcode.opmap.get("CACHE", 0)
_KEPT: dict[tuple[int, int], tuple[CodeType, Instruction]] = {}


class Instruction(NamedTuple):
    """One executing instruction. `node` is None where the source is not to be had."""

    opname: str  # of the unspecialised opcode: 'CALL', 'BINARY_SUBSCR', 'POP_JUMP_IF_FALSE', ...
    node: ast.AST | None
    text: str
    callee: str = ""  # the last name of what is called, from the bytecode


def current_instruction(frame: FrameType) -> Instruction:
    """The instruction that `frame` is executing. The answer is kept for each place in the code."""
    code, offset = frame.f_code, frame.f_lasti
    key = (id(code), offset)
    kept = _KEPT.get(key)
    if kept is not None and kept[0] is code:
        return kept[1]
    found = _read(code, offset)
    _KEPT[key] = (code, found)
    return found


def executing_line(frame: FrameType) -> int:
    """The line that `frame` is executing. Python 3.11 gives the first line of an f-string for each of its fields: here
    it is the line of the field's value."""
    code, offset = frame.f_code, frame.f_lasti
    line = frame.f_lineno or code.co_firstlineno  # f_lineno is None while an artificial instruction runs
    if offset < 2 or not opcode.opname[code.co_code[offset]].startswith("FORMAT_"):
        return line
    before, here = itertools.islice(code.co_positions(), offset // 2 - 1, offset // 2 + 1)
    return before[0] or line if here[0] != here[1] else line


def called_name(frame: FrameType) -> str:
    """The last name of what the frame is calling: 'item' for `loss.item()`, '' for no call."""
    instruction = current_instruction(frame)
    node = instruction.node
    return call_name(node.func) if isinstance(node, ast.Call) else instruction.callee


def call_name(func: ast.AST) -> str:
    """`a.b.item` -> 'item', `float` -> 'float'."""
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


def _read(code: CodeType, offset: int) -> Instruction:
    raw = code.co_code
    while offset > 0 and raw[offset] == _CACHE_OPCODE:  # a frame that called Python code points behind its instruction
        offset -= 2
    opname = opcode.opname[raw[offset]] if 0 <= offset < len(raw) else ""
    position = next(itertools.islice(code.co_positions(), offset // 2, None), None)
    text = _segment(code.co_filename, position) if position else ""
    node = _parse(text)
    return Instruction(opname, node, text, _callee(code, offset) if node is None else "")


def _segment(file: str, position: tuple[int | None, int | None, int | None, int | None]) -> str:
    first, last, start, end = position
    if first is None or last is None or start is None or end is None:
        return ""
    lines = linecache.getlines(file)[first - 1 : last]
    if not lines:
        return ""
    # Columns count UTF-8 bytes.
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    return b"".join(encoded).decode(errors="replace")


def _parse(text: str) -> ast.AST | None:
    if not text:
        return None
    for source in (f"({text})", text):
        tree = parsed(source)
        if tree is not None and len(tree.body) == 1:
            only = tree.body[0]
            return only.value if isinstance(only, ast.Expr) else only
    return None


def _callee(code: CodeType, offset: int) -> str:
    """Who is called at `offset`, without source: back over the arguments by their effect on the stack."""
    before = [instruction for instruction in dis.get_instructions(code) if instruction.offset <= offset]
    if not before or not before[-1].opname.startswith("CALL"):
        return ""
    missing = (before[-1].arg or 0) + (before[-1].opname == "CALL_KW")
    for instruction in reversed(before[:-1]):
        name = instruction.opname
        if name in ("PRECALL", "KW_NAMES", "CACHE", "PUSH_NULL"):
            continue
        if missing <= 0:
            return str(instruction.argval) if name.startswith("LOAD_") and isinstance(instruction.argval, str) else ""
        missing -= dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    return ""
