"""How long the texts may be that restricted blocks make of values, and numbers of texts.

One call into C makes the text of a list and of all that is in it. It is counted here first, where a
time limit reaches: what a list holds in many places is looked at once, and written as often.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy
from torch import Tensor

from nnsight_serve.policy import bounds
from nnsight_serve.policy.text import refused

_ENCODINGS = ("utf-8", "utf8", "ascii", "latin-1")
_NUMBER = 32
"""How many characters a number takes, about."""
_SUMMARISED = 1000
"""Up to how many elements an array is written in full; else seven at most along each axis."""
_ITEMS = type({}.items())
_VIEWS = (type({}.keys()), type({}.values()), _ITEMS)
_CONVERSION = re.compile(r"%(?:\(([^)]*)\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?.?", re.DOTALL)
_WIDTH = re.compile(r"\*|\d{5}")


def text_by(function: Callable[[Any], str], value: Any) -> str:
    """The text that `repr`, `str` or the like makes of a value.

    Raises:
        PolicyError: it is too long, or the value holds itself, so that nobody knows how long it is.
    """
    measured(value)
    made = function(value)
    bounds.items(len(made))
    return made


def measured(value: Any) -> int:
    """About how many characters a value's text has.

    Raises:
        PolicyError: too many, or the value holds itself.
    """
    found = len(value) if isinstance(value, str) else _length(value, {})
    bounds.items(found)
    return found


def _length(value: Any, known: dict[int, int | None]) -> int:
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, bytes | bytearray):
        return 4 * len(value) + 14
    if isinstance(value, int):
        return value.bit_length() // 3 + 2
    if isinstance(value, float | complex | None):
        return _NUMBER
    if isinstance(value, Tensor | numpy.ndarray):
        count = math.prod(value.shape)
        if count > _SUMMARISED:
            count = math.prod(min(size, 7) for size in value.shape)
        return (count + 4) * _NUMBER
    parts = _parts(value)
    if parts is None:
        return len(repr(value))  # it holds no values of a block's own
    if id(value) not in known:
        known[id(value)] = None
        total = len(type(value).__name__) + sum(map(len, getattr(value, "_fields", ()))) + 2
        for part in parts:
            total += _length(part, known) + 2
            bounds.items(total)
        known[id(value)] = total
    found = known[id(value)]
    if found is None:
        raise refused(f"the text of a {type(value).__name__} that holds itself is not allowed")
    return found


def _parts(value: Any) -> Iterable[Any] | None:
    """What a value holds whose text is written into its own."""
    if isinstance(value, _ITEMS):
        return chain.from_iterable(value)
    if isinstance(value, (list, tuple, set, frozenset, *_VIEWS)):
        return value
    if isinstance(value, dict):
        return chain(value, value.values())
    if isinstance(value, OSError):
        return (*value.args, value.filename, value.filename2)
    if isinstance(value, BaseException):
        return value.args
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return None


def formatted(text: str | bytes | bytearray, values: Any) -> None:
    """Refuse a `text % values` that would make something too large."""
    plain = text if isinstance(text, str) else text.decode("latin-1")
    given = values.values() if isinstance(values, dict) else values
    given = given if isinstance(values, dict | tuple) else (values,)
    longest = max(map(measured, given), default=0)
    total = len(plain)
    for found in _CONVERSION.finditer(plain):
        key, *widths = found.groups(default="")
        if "(" in key:
            raise refused(f"the key {key[:40]!r} in a text to format is not allowed")
        if any(_WIDTH.search(width) for width in widths):
            raise refused(
                "a width like that in a text to format is not allowed", "Make it narrower."
            )
        total += longest + sum(int(width or 0) for width in widths)
        bounds.items(total)


def spec(text: str) -> None:
    """Refuse a format like `:1000000000d`."""
    if _WIDTH.search(text):
        raise refused(f"the format {text[:40]!r} is not allowed", "Make it narrower.")


def text_of(*args: Any, **named: Any) -> str:
    """`str(...)`."""
    if args and len(args) + len(named) == 1:
        return text_by(str, args[0])
    encoding = named.get("encoding", args[1] if len(args) > 1 else "utf-8")
    if not isinstance(encoding, str) or encoding.lower() not in _ENCODINGS:
        raise refused(f"the encoding {str(encoding)[:40]!r} is not allowed", "Use UTF-8.")
    return str(*args, **named)


def whole_of(*args: Any, **named: Any) -> int:
    """`int(...)`."""
    value = args[0] if args else 0
    if isinstance(value, str | bytes | bytearray):
        base = bounds.whole(named.get("base", args[1] if len(args) > 1 else 10))
        # Of base 0 the text itself says which, at most 16.
        bounds.bits(len(value) * ((base or 16) - 1).bit_length())
    return int(*args, **named)
