"""Whether a text still says what the code that is running was made from.

People edit a file while the program that was made from it waits for an engine. What is compared is
what instructions name: names, constants and operators, in the order of the text. Tools rewrite code
when they import it (pytest its `assert`s, type checkers what is annotated), so that only Python's
own loader is expected to make exactly what the text says; of others, at least that.
"""

from __future__ import annotations

import ast
import dis
import os
from collections.abc import Iterable
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType
from typing import Any

from nnsight_core.lookup import codes

Mark = tuple[str, str]
"""What an instruction names: the kind and the text of it."""


def edit_in(frame: FrameType, text: str, body: list[ast.stmt]) -> str | None:
    """What a file no longer says, or says anew, in the statements of a block; None if nothing.

    Args:
        frame: where the block stands.
        text: the whole file as it is read now.
    """
    running = frame.f_code
    if not os.path.exists(running.co_filename):
        return None  # nobody can have edited it
    told = _counterpart(text, running)
    if told is None:
        return None
    lines = range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)
    nodes = [node for statement in body for node in ast.walk(statement)]
    plain = type(frame.f_globals.get("__loader__")) is SourceFileLoader
    exact = plain and not any(isinstance(node, ast.AnnAssign) for node in nodes)
    return difference(running, told, set(lines) - asserted(nodes), exact)


def asserted(nodes: Iterable[ast.AST]) -> set[int]:
    """The lines of assertions, of which `python -O` leaves nothing and pytest makes much."""
    found = [node for node in nodes if isinstance(node, ast.Assert)]
    return {n for node in found for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def difference(running: CodeType, told: CodeType, lines: set[int], exact: bool) -> str | None:
    """What the code made from a text names otherwise than the code that is running does.

    Args:
        exact: whether the code that is running may name nothing besides.
    """
    old, new = _marks(running, lines), _marks(told, lines)
    if old == new:
        return None
    known = set(old)
    for mark in new:
        if mark not in known:
            return f"says {mark[1]}, which the running code does not"
    if not exact:
        return None
    known = set(new)
    for mark in old:
        if mark not in known:
            return f"no longer says {mark[1]}, which the running code does"
    return "says in another order, or more or less often, what the running code does"


@lru_cache(maxsize=64)
def compiled(text: str, filename: str) -> list[CodeType]:
    """Every code of a file; none if it cannot be compiled by itself."""
    try:
        return codes(compile(text, filename, "exec", dont_inherit=True))
    except (SyntaxError, ValueError):
        return []


def _counterpart(text: str, running: CodeType) -> CodeType | None:
    place = (running.co_qualname, running.co_firstlineno)
    for code in compiled(text, running.co_filename):
        if (code.co_qualname, code.co_firstlineno) == place:
            return code
    return None


_NAMES = {*dis.hasname, *dis.haslocal, *dis.hasfree}
_OPERATORS = ("BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "UNARY_")


def _marks(code: CodeType, lines: set[int]) -> list[Mark]:
    found: list[Mark] = []
    for step in dis.get_instructions(code):
        if step.positions is None or step.positions.lineno not in lines:
            continue
        value = step.argval
        if isinstance(value, CodeType):
            found += _marks(value, lines)
        elif step.opcode in _NAMES:
            # Newer Pythons have instructions that name two.
            names = value if isinstance(value, tuple) else (value,)
            found += [("name", name) for name in names if isinstance(name, str)]
        elif step.opcode in dis.hasconst or step.opname == "LOAD_SMALL_INT":
            # Where a function returns nothing is said at another line when lines follow.
            if value is not None:
                found.append(("constant", _told(value)))
        elif step.opname.startswith(_OPERATORS):
            found.append(("operator", step.argrepr or step.opname))
    return found


def _told(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_told, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_told, value))})"
    return repr(value)
