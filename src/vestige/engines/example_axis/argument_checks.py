"""Is a value only looked at to raise an error? Then nothing is looked at, and nothing is raised.

Libraries check what they are given: `if not valid.all(): raise ValueError`. An error that depends on values would tell
of examples, and without the error the check changes no result: so the answer is always the one that raises nothing.
This holds for code of installed libraries alone; in code of the user's, a check is a read of values.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__)
LIBRARIES = os.path.dirname(_TORCH) + os.sep
"""Where libraries are installed."""
BETWEEN = (
    *(os.path.join(_TORCH, name) for name in ("_ops.py", "_tensor.py", "overrides.py", "utils")),
    os.path.dirname(sys.modules["vestige"].__file__ or ""),
)
"""Files whose frames are between the check and the operator that reads the value."""

CHECK = "torch_compilable_check"
"""What transformers' models call with a condition, and with the words of an error."""
TORCHS = os.path.join(_TORCH, "__init__.py")
"""Where torch has functions of this kind, `torch._check` and others."""

Span = tuple[int | None, int | None, int | None, int | None]


def answer() -> bool | None:
    """What is answered to the library's code that asks; None where the value is looked at for something else."""
    frame, called = _asking(), False
    while frame is not None and _is_check(frame.f_code):
        frame, called = frame.f_back, True
    if frame is None or not frame.f_code.co_filename.startswith(LIBRARIES):
        return None
    return True if called else _of(frame.f_code, frame.f_lasti)


def is_message() -> bool:
    """Whether a library's code asks for words that a check would raise with its error."""
    frame = _asking()
    if frame is None or not frame.f_code.co_filename.startswith(LIBRARIES):
        return False
    return any(first <= frame.f_lineno <= last for first, last in _calls(frame.f_code.co_filename))


def _asking() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(BETWEEN):
        frame = frame.f_back
    return frame


def _is_check(code: CodeType) -> bool:
    """Whether a function does nothing but raise an error if a condition does not hold."""
    return code.co_name == CHECK or (code.co_name.startswith("_check") and code.co_filename == TORCHS)


@cache
def _of(code: CodeType, at: int) -> bool | None:
    asked = next(islice(code.co_positions(), at // 2, None), None)
    for node in _checks(code.co_filename):
        if asked in (_span(node), *_spans(node.test)):
            wanted = set(_answers(node.test, isinstance(node, ast.Assert)))
            return wanted.pop() if len(wanted) == 1 else None
    return None


@cache
def _checks(path: str) -> tuple[ast.If | ast.Assert, ...]:
    """The conditions of a file of which one branch only raises an error."""
    return tuple(
        node
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _raises(node))
    )


@cache
def _calls(path: str) -> tuple[tuple[int, int], ...]:
    """The first and last lines of the calls of such functions in a file."""
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == CHECK
    )


def _tree(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError):
        return ast.Module([], [])


def _raises(node: ast.If) -> bool:
    *before, last = node.body
    return isinstance(last, ast.Raise) and all(isinstance(each, ast.Assign | ast.Expr) for each in before)


def _answers(test: ast.expr, wanted: bool) -> Iterator[bool]:
    """What each question of a condition must be answered for it to be `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _answers(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for each in test.values:
            yield from _answers(each, wanted)
    else:
        yield wanted


def _spans(test: ast.expr) -> Iterator[Span]:
    """Where a condition and the questions that it is made of are; what they are computed of is not among them."""
    yield _span(test)
    parts = [test.operand] if isinstance(test, ast.UnaryOp) else test.values if isinstance(test, ast.BoolOp) else []
    for each in parts:
        yield from _spans(each)


def _span(node: ast.expr | ast.stmt) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
