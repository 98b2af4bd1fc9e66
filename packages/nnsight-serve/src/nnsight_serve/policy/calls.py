"""The guard of calls: what a restricted block may call, and how large its arguments may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy
from torch import Tensor, nn

from nnsight_core.block_tracer import BlockTracer
from nnsight_core.cache import Cache
from nnsight_core.errors import PolicyError
from nnsight_core.node import Node, Operation
from nnsight_serve.policy import bounds, texts
from nnsight_serve.policy.allowed import CALLABLES, CONTEXTS, ERRORS, METHODS, TENSOR
from nnsight_serve.policy.text import refused
from nnsight_serve.policy.values import CACHED, OUTSIDE, TOKENIZER, each, is_tokenizer, not_allowed

_TOKENIZER_OPTIONS = {"skip_special_tokens", "add_special_tokens"}
BUILTINS: dict[str, Any] = {}
"""The builtins of restricted blocks, by which their own functions are known."""
CLASSES: frozenset[type] = frozenset(
    (
        *(bool, int, float, complex, str, list, tuple, dict, set, frozenset, slice),
        *(enumerate, zip, reversed),
        *ERRORS,
    )
)
"""The classes of Python's that may be called."""
_MAKING: dict[type, Callable[..., Any]] = {int: texts.whole_of, str: texts.text_of}
_GATHERING = (list, tuple, set, frozenset, enumerate, zip, reversed)


class Refusal:
    """Stands for a builtin that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def error(self) -> PolicyError:
        """The error of whoever calls it."""
        return not_allowed(f"`{self._name}`")

    def __repr__(self) -> str:
        return f"<{self._name}: not allowed here>"


def called(function: Any) -> Any:
    """What is called where a block says `function(...)`."""
    kind = type(function)
    known = CALLABLES.get(id(function))
    if known is not None and known[0] is function:
        scalar = isinstance(function, type) and issubclass(function, numpy.generic)
        if scalar or isinstance(function, numpy.ufunc):
            return _plain_call(function)
        return _bounded(known[1], function) if known[1] else function
    if kind is FunctionType:
        if function.__builtins__ is BUILTINS:
            return function
    elif kind in (BuiltinFunctionType, MethodType):
        return _method(function, function.__self__, function.__name__)
    elif isinstance(function, type):
        if function in CLASSES:
            return _MAKING.get(function) or (over(function) if function in _GATHERING else function)
    elif isinstance(function, Node):
        _check_module(function)
        return function
    elif isinstance(function, nn.Module):
        if function in OUTSIDE:
            return _layer(function)
    elif isinstance(function, CONTEXTS):
        return functools.partial(functools.partial, _within, function)  # as a decorator
    elif kind is functools.partial:
        return functools.partial(called(function.func), *function.args, **function.keywords)
    elif kind is Refusal:
        raise function.error()
    raise not_allowed(f"to call {_named(function)}")


def _check_module(node: Node) -> None:
    """Refuse to call what writes the keys and values of every request."""
    if node._path in node._places.modules and node._places.stateful(node._path) is not None:
        raise refused(
            f"to call {node!r} is not allowed: it holds the keys and values of all requests,",
            "Read its output instead.",
        )


def _method(function: Any, owner: Any, name: str) -> Any:
    if isinstance(owner, Tensor):
        if name in TENSOR:
            return _bounded(name, function, owner)
    elif isinstance(owner, str) and name in METHODS[str]:
        check = _TEXTS.get(name)
        return function if check is None else functools.partial(check, owner)
    elif type(owner) is list and name == "extend":
        return functools.partial(_in_place_of_list, owner)
    elif type(owner) is list and name == "sort":
        return functools.partial(_sort, owner)
    elif isinstance(owner, numpy.ndarray) and name in METHODS[numpy.ndarray]:
        return _plain_call(function)
    elif name in METHODS.get(type(owner), ()) or any(
        isinstance(owner, kind) and name in names for kind, names in _OWN_METHODS
    ):
        return function
    elif is_tokenizer(type(owner)) and name in TOKENIZER:
        return functools.partial(_tokenize, function)
    raise not_allowed(f"to call {_named(function)}")


_OWN_METHODS: list[tuple[Any, tuple[str, ...] | frozenset[str]]] = [
    (Node | Operation, ("skip", "get")),
    (BlockTracer, ("all", "stop", "cache", "barrier", "invoke")),
    (Cache, CACHED),
    (tuple, METHODS[tuple]),
    (numpy.generic, ("item",)),
]


def _named(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return f"`{name}`" if isinstance(name, str) else f"a {type(function).__name__}"


def _bounded(name: str, function: Any, *owner: Any) -> Any:
    """A call of PyTorch, whose arguments are looked at first."""

    def checked(*args: Any, **named: Any) -> Any:
        bounds.arguments(name, (*owner, *args), named)
        return function(*args, **named)

    return checked


def _within(context: Any, function: Any, *args: Any, **named: Any) -> Any:
    """What `@torch.no_grad()` makes of a function."""
    with context:
        return called(function)(*args, **named)


CALLABLES[id(_within)] = (_within, "")


def _layer(module: nn.Module) -> Any:
    def checked(*args: Any, **named: Any) -> Any:
        bounds.layer(module, (*args, *named.values()))
        return module(*args, **named)

    return checked


def over(function: Any) -> Any:
    """What goes through its arguments, if they are not too long."""

    def checked(*values: Any, **named: Any) -> Any:
        return function(*map(each, values), **named)

    return checked


def _plain_call(function: Any) -> Any:
    """A function of NumPy's, whose keywords may make an array hold anything."""

    def checked(*args: Any, axis: Any = None) -> Any:
        for part in args:
            bounds.nested(part)
        return function(*args) if axis is None else function(*args, axis=axis)

    return checked


def _in_place_of_list(owner: list[Any], values: Iterable[Any]) -> None:
    found = values if type(values) is list else list(values)
    bounds.items(len(owner) + len(found))
    owner.extend(found)


def _sort(owner: list[Any], *, key: Any = None, reverse: bool = False) -> None:
    owner.sort(key=None if key is None else called(key), reverse=reverse)


def _tokenize(function: Any, *args: Any, **named: Any) -> Any:
    odd = next((name for name in named if name not in _TOKENIZER_OPTIONS), None)
    if odd is not None or len(args) > 1:
        raise not_allowed(f"`{odd or 'a second argument'}` of a tokenizer")
    given = args[0] if args else ""
    if isinstance(given, str | list | tuple | Tensor) and len(given) > bounds.MAX_TOKENIZED:
        raise bounds.too_large("a text to tokenize", len(given), bounds.MAX_TOKENIZED)
    return function(*args, **named)


def _join(owner: str, values: Iterable[str]) -> str:
    found = list(values)
    bounds.items(sum(len(v) + len(owner) for v in found if isinstance(v, str)))
    return owner.join(found)


def _replace(owner: str, old: str, new: str, count: int = -1) -> str:
    if isinstance(old, str) and isinstance(new, str):
        found = owner.count(old)
        times = found if count < 0 else min(found, count)
        bounds.items(len(owner) + times * len(new))
    return owner.replace(old, new, count)


def _padded(name: str) -> Callable[..., str]:
    def pad(owner: str, width: int, *fill: str) -> str:
        bounds.items(width)
        return getattr(owner, name)(width, *fill)

    return pad


_TEXTS: dict[str, Callable[..., Any]] = {
    "join": _join,
    "replace": _replace,
    **{name: _padded(name) for name in ("center", "ljust", "rjust", "zfill")},
}
