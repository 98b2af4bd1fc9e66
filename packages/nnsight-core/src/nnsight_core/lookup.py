"""Where Python looks for a name of a block: in its function, around its class, or in its module."""

from __future__ import annotations

import dis
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from nnsight_core.errors import CaptureError

_FUNCTION = 1
"""Python's flag of code whose variables are known when it is compiled: not a module's, a class's"""


def own_names(code: CodeType, names: Iterable[str]) -> frozenset[str]:
    """Those names that some code never looks for in its module, even while they have no value."""
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}.intersection(names)
    if own:
        # From Python 3.12 on, variables of a comprehension are among those of its function.
        own -= {
            step.argval
            for each in codes(code)
            for step in dis.get_instructions(each)
            if step.opname == "LOAD_GLOBAL"
        }
    return frozenset(own)


def names_around(code: CodeType, names: Iterable[str]) -> frozenset[str]:
    """Those names that the body of a class has from a function around it."""
    if code.co_flags & _FUNCTION:
        return frozenset()
    return frozenset(code.co_freevars).intersection(names)


def variables_around(frame: FrameType, name: str) -> dict[str, Any]:
    """The variables of the function around the body of a class.

    Raises:
        CaptureError: it is not running, so that they cannot be had.
    """
    inner, around = frame.f_code, frame.f_back
    while around is not None:
        code = around.f_code
        if any(constant is inner for constant in code.co_consts):
            if code.co_flags & _FUNCTION:
                return around.f_locals
            inner = code
        around = around.f_back
    raise CaptureError(
        f"{frame.f_code.co_filename}:{frame.f_lineno}: the block uses {name!r}, a variable of a "
        f"function around the class {frame.f_code.co_name!r}, which cannot be had from here. Bind "
        f"it in the class first: `{name} = {name}`."
    )


def codes(code: CodeType) -> list[CodeType]:
    """A code and every one in it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return [code, *(found for each in inner for found in codes(each))]
