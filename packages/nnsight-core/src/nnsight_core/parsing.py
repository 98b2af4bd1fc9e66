"""Python's text as a tree."""

from __future__ import annotations

import ast
from typing import Any

_TRIES = 5


def parse(text: str, filename: str = "<unknown>", mode: str = "exec") -> Any:
    """The tree of a text, as `ast.parse` makes it.

    Python 3.11 counts how deep it is in while it makes a tree, and takes it for a fault of its own
    (`SystemError`) if a garbage collection in the middle, whose finalisers run code, upsets that.

    Raises:
        SyntaxError: the text is no Python.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(text, filename, mode)
        except SystemError:
            continue
    return ast.parse(text, filename, mode)
