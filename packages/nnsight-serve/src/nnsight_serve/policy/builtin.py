"""Python's builtins as restricted blocks have them.

What would go through something without end in C, where no time limit reaches it, or make something
huge is here in Python, or looks at its arguments first.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nnsight_serve.policy import bounds
from nnsight_serve.policy.allowed import CALLABLES, REFUSED_BUILTINS, TYPES
from nnsight_serve.policy.calls import BUILTINS, CLASSES, Refusal, called, over
from nnsight_serve.policy.texts import text_by
from nnsight_serve.policy.values import each, not_allowed, operate, text

__all__ = ["BUILTINS"]


def _range(*args: Any) -> range:
    made = range(*args)
    # What goes through it in C is not reached by the time limit.
    if made and abs((made[-1] - made[0]) // made.step) >= bounds.MAX_ITEMS:
        count = abs((made[-1] - made[0]) // made.step) + 1
        raise bounds.too_large("a range", count, bounds.MAX_ITEMS)
    return made


def _map(function: Any, *values: Any) -> Iterator[Any]:
    one = called(function)
    return (one(*parts) for parts in zip(*map(each, values), strict=False))


def _filter(function: Any, values: Any) -> Iterator[Any]:
    one = bool if function is None else called(function)
    return (part for part in each(values) if one(part))


def _sorted(values: Any, *, key: Any = None, reverse: bool = False) -> list[Any]:
    by = None if key is None else called(key)
    return sorted(each(values), key=by, reverse=reverse)


def _extreme(function: Any) -> Any:
    def of(*values: Any, **named: Any) -> Any:
        if named.get("key") is not None:
            named["key"] = called(named["key"])
        if len(values) == 1:
            # A copy: a key may make the list longer while it is gone through.
            values = (list(each(values[0])),)
        return function(*values, **named)

    return of


def _iter(values: Any) -> Iterator[Any]:
    return iter(each(values))


def _pow(base: Any, exponent: Any, mod: Any = None) -> Any:
    if mod is not None:
        # It is one call, whose time goes with all three.
        for part in (base, exponent, mod):
            bounds.bits(part.bit_length() if isinstance(part, int) else 0, bounds.MAX_MODULAR)
        return pow(base, exponent, mod)
    return operate("**", base, exponent)


def _type(value: Any) -> type:
    if type(value) not in TYPES:
        raise not_allowed(f"`type` of a {type(value).__name__}")
    return type(value)


def _format(value: Any, spec: str = "") -> str:
    return text(value, -1, spec)


def _repr(value: Any) -> str:
    return text_by(repr, value)


def _ascii(value: Any) -> str:
    return text_by(ascii, value)


def _sum(values: Any, start: Any = 0) -> Any:
    # `sum(lists, [])` makes every sum on the way.
    if isinstance(start, int | float | complex | Tensor):
        return sum(each(values), start)
    total = start
    for value in values:
        total = operate("+", total, value)
    return total


def _round(number: Any, digits: Any = None) -> Any:
    if isinstance(digits, int):
        bounds.bits(abs(digits) * 4)
    return round(number) if digits is None else round(number, digits)


_PLAIN = """
    abs callable chr divmod isinstance issubclass len ord hex oct bin next
    True False None Ellipsis NotImplemented
"""
BUILTINS |= {
    **{name: getattr(builtins, name) for name in _PLAIN.split()},
    **{cls.__name__: cls for cls in CLASSES},
    **{name: Refusal(name) for name in REFUSED_BUILTINS},
}
_WRAPPED: dict[str, Any] = {
    "all": over(all),
    "any": over(any),
    "range": _range,
    "round": _round,
    "map": _map,
    "filter": _filter,
    "sorted": _sorted,
    "min": _extreme(min),
    "max": _extreme(max),
    "iter": _iter,
    "pow": _pow,
    "repr": _repr,
    "ascii": _ascii,
    "type": _type,
    "format": _format,
    "sum": _sum,
}
BUILTINS |= _WRAPPED
for _function in (*_WRAPPED.values(), *(BUILTINS[name] for name in _PLAIN.split())):
    if callable(_function):
        CALLABLES[id(_function)] = (_function, "")
