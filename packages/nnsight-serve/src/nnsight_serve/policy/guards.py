"""The guards of restricted blocks: each attribute, item, call and operator goes through one.

A block cannot name anything that was not given to it, and from what it has it gets on only through
these. They go by the type of a value and let through what `nnsight_serve.policy.allowed` lists.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
from torch import Tensor, nn

from nnsight_core.block_tracer import BlockTracer
from nnsight_core.cache import Cache, CachedModule, CachedVisit
from nnsight_core.loops import StepChoice, StepLoop
from nnsight_core.node import SIDES, Node, Operation, Root, Source
from nnsight_core.outputs import LateResult, RequestOutput
from nnsight_core.run import Run
from nnsight_serve.policy import bounds
from nnsight_serve.policy.allowed import (
    CALLABLES,
    ERRORS,
    LAYERS,
    METHODS,
    MODULES,
    REFUSED_BUILTINS,
    TENSOR,
    TYPES,
    learn,
)
from nnsight_serve.policy.text import refused

_VALUES = ("logits", "samples")
_OF_NODES = frozenset((*SIDES, *_VALUES, "skip", "get", "tokenizer"))
_OURS = (BlockTracer, StepChoice, StepLoop, Cache, CachedModule, CachedVisit)
_OF_TOKENIZERS = """
    bos_token bos_token_id convert_ids_to_tokens convert_tokens_to_ids decode encode eos_token
    eos_token_id pad_token pad_token_id unk_token unk_token_id vocab_size
"""
_TOKENIZER = frozenset(_OF_TOKENIZERS.split())
_TOKENIZER_OPTIONS = {"skip_special_tokens", "add_special_tokens"}
_SCALARS = (bool, int, float, complex, str, type(None))
_CACHED = frozenset(("keys", "items", "values", "get", "missing", "visits"))


def _attribute(owner: Any, name: str) -> Any:
    """`owner.name`."""
    kind = type(owner)
    names = METHODS.get(kind)
    if names is not None:
        if name in names:
            return getattr(owner, name)
    elif isinstance(owner, Tensor):
        if name in TENSOR:
            return getattr(owner, name)
    elif isinstance(owner, Node):
        return _of_node(owner, name)
    elif kind in (Operation, Source):
        return getattr(owner, name)
    elif kind is ModuleType:
        if name in MODULES.get(owner.__name__, ()) and sys.modules[owner.__name__] is owner:
            value = getattr(owner, name)
            if callable(value) and id(value) not in CALLABLES:
                learn(owner.__name__, name, value)  # a library has put another in its place
            return value
        raise _not_allowed(f"`{owner.__name__}.{name}`")
    elif _may_have(owner, kind, name):
        return getattr(owner, name)
    raise _not_allowed(f"`.{name}` of a {kind.__name__}")


def _may_have(owner: Any, kind: type, name: str) -> bool:
    if kind is LateResult:
        return name in RequestOutput.model_fields
    if kind in _OURS:
        # What their classes do not have is the name of a module.
        return not hasattr(kind, name) or name in _CACHED or kind not in (Cache, CachedModule)
    if isinstance(owner, tuple):
        fields = getattr(kind, "_fields", None) or getattr(kind, "__match_args__", ())
        return name in fields or name in METHODS[tuple]
    if isinstance(owner, BaseException):
        return name == "args"
    if isinstance(owner, nn.Module):
        own = owner.__dict__
        held = (own["_parameters"], own["_buffers"], own["_modules"], own)
        return any(name in part for part in held)
    if isinstance(owner, numpy.generic):
        return name in ("item", "dtype")
    return _is_tokenizer(kind) and name in _TOKENIZER


def _of_node(owner: Node, name: str) -> Any:
    """A module of the model, or what one holds: values, and no part of the engine."""
    if hasattr(type(owner), name) and name not in _OF_NODES:
        raise _not_allowed(f"`.{name}` of the model")
    value = getattr(owner, name)
    if name in SIDES or isinstance(owner, Root) and name in _OF_NODES:
        return value
    if isinstance(value, (Node, Tensor, *_SCALARS)) or name == "skip":
        return value
    if isinstance(value, tuple) and all(isinstance(part, _SCALARS) for part in value):
        return value
    if type(value) in METHODS and not isinstance(value, list | dict | set):
        return value
    raise _not_allowed(f"`.{name}` of {owner!r}, a {type(value).__name__} of the engine,")


def _is_tokenizer(kind: type) -> bool:
    base = sys.modules.get("transformers.tokenization_utils_base")
    return base is not None and issubclass(kind, base.PreTrainedTokenizerBase)


def _not_allowed(what: str) -> PermissionError:
    return refused(f"{what} is not allowed")


def _getitem(owner: Any, index: Any) -> Any:
    """`owner[index]`."""
    if isinstance(owner, Node):
        # A text names a module as an attribute does.
        if isinstance(index, str):
            if index.startswith("_"):
                raise _not_allowed(f"`[{index!r}]` of the model")
            return _of_node(owner, index)
    elif isinstance(owner, Tensor):
        bounds.index(owner, index)
    return owner[index]


def _item(owner: Any) -> Any:
    """What `owner[...] = value` and `del owner[...]` change."""
    if isinstance(owner, Tensor) or type(owner) in (dict, numpy.ndarray):
        return owner
    if type(owner) is list:
        bounds.items(len(owner))
        return owner
    raise _not_allowed(f"to change an item of a {type(owner).__name__}")


def _side(owner: Any, name: str) -> Any:
    """What `owner.name = value` changes: a module's side, and nothing else."""
    if isinstance(owner, Node | Operation) and name in (*SIDES[:3], *_VALUES):
        return owner
    raise _not_allowed(f"to assign `.{name}` of a {type(owner).__name__}")


def _getiter(values: Any) -> Any:
    """What a loop goes through."""
    if isinstance(values, Tensor):
        bounds.items(len(values) if values.dim() else 0)
    return values


def _spread(values: Any) -> Any:
    """`*values`."""
    if isinstance(values, Tensor | list | tuple | set | str | dict | range):
        bounds.items(len(values))
    return values


def _single(value: Any) -> Any:
    """A part of `a < b < c`, which has a meaning for single values only."""
    if isinstance(value, Tensor | numpy.ndarray) and math.prod(value.shape) > 1:
        raise refused("a chain of comparisons of tensors is not allowed", "Compare two at a time.")
    return value


def _operate(symbol: str, left: Any, right: Any) -> Any:
    """`left symbol right`."""
    bounds.operands(symbol, left, right)
    return bounds.BINARY[symbol](left, right)


def _in_place(symbol: str, left: Any, right: Any) -> Any:
    """What `left symbol= right` leaves."""
    if symbol == "+" and type(left) is list and type(right) is not list:
        # An iterator over the very list would go on for ever, where no time limit reaches it.
        right = list(right)
    bounds.operands(symbol, left, right)
    return bounds.IN_PLACE[symbol](left, right)


def _augment_item(owner: Any, index: Any, symbol: str) -> Callable[[Any], None]:
    """`owner[index] symbol= value`, once the value is there."""
    held = _getitem(owner, index)

    def store(value: Any) -> None:
        made = _in_place(symbol, held, value)
        _item(owner)[index] = made

    return store


def _augment_side(owner: Any, name: str, symbol: str) -> Callable[[Any], None]:
    """`owner.name symbol= value`, once the value is there."""
    held = _attribute(_side(owner, name), name)

    def store(value: Any) -> None:
        setattr(owner, name, _in_place(symbol, held, value))

    return store


def _text(value: Any, conversion: int, spec: str) -> str:
    """A part of an f-string."""
    bounds.spec(spec)
    if conversion != -1:
        value = {"r": repr, "s": str, "a": ascii}[chr(conversion)](value)
    made = format(value, spec)
    bounds.items(len(made) * 2)
    return made


# -- calls ----------------------------------------------------------------------------------------


def _call(function: Any) -> Any:
    """What is called where a block says `function(...)`."""
    kind = type(function)
    known = CALLABLES.get(id(function))
    if known is not None and known[0] is function:
        if isinstance(function, numpy.ufunc):
            return _plain_call(function)
        return _bounded(known[1], function) if known[1] else function
    if kind is FunctionType:
        if function.__builtins__ is BUILTINS:
            return function
    elif kind in (BuiltinFunctionType, MethodType):
        return _method(function, function.__self__, function.__name__)
    elif isinstance(function, type):
        if function in _CLASSES:
            return _over(function) if function in _GATHERING else function
    elif isinstance(function, Node):
        _check_module(function)
        return function
    elif kind in LAYERS:
        return _layer(function)
    elif kind is functools.partial:
        return functools.partial(_call(function.func), *function.args, **function.keywords)
    elif kind is _Refusal:
        raise function.error()
    raise _not_allowed(f"to call {_named(function)}")


def _check_module(node: Node) -> None:
    """Refuse to call what writes the keys and values of every request."""
    module = node._places.modules.get(node._path)
    if module is not None and any(hasattr(part, "kv_cache") for part in module.modules()):
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
    elif _is_tokenizer(type(owner)) and name in _TOKENIZER:
        return functools.partial(_tokenize, function)
    raise _not_allowed(f"to call {_named(function)}")


_OWN_METHODS: list[tuple[Any, tuple[str, ...] | frozenset[str]]] = [
    (Node | Operation, ("skip", "get")),
    (BlockTracer, ("all", "stop", "cache", "barrier", "invoke")),
    (Cache, _CACHED),
    (tuple, METHODS[tuple]),
    (numpy.generic, ("item",)),
    (Run, ("_save_method", "_keep_method")),
]


def _named(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return f"`{name}`" if isinstance(name, str) else f"a {type(function).__name__}"


def _bounded(name: str, function: Any, *owner: Any) -> Any:
    """A call of PyTorch, whose arguments are looked at first."""

    def called(*args: Any, **named: Any) -> Any:
        bounds.arguments(name, (*owner, *args), named)
        return function(*args, **named)

    return called


def _layer(module: nn.Module) -> Any:
    def called(*args: Any, **named: Any) -> Any:
        bounds.layer(module, (*args, *named.values()))
        return module(*args, **named)

    return called


def _over(function: Any) -> Any:
    """What goes through its arguments, if they are not too long."""

    def called(*values: Any, **named: Any) -> Any:
        return function(*map(_getiter, values), **named)

    return called


def _plain_call(function: Any) -> Any:
    """A function of NumPy's, whose keywords may make an array hold anything."""

    def called(*args: Any, axis: Any = None) -> Any:
        return function(*args) if axis is None else function(*args, axis=axis)

    return called


def _in_place_of_list(owner: list[Any], values: Iterable[Any]) -> None:
    found = values if type(values) is list else list(values)
    bounds.items(len(owner) + len(found))
    owner.extend(found)


def _sort(owner: list[Any], *, key: Any = None, reverse: bool = False) -> None:
    owner.sort(key=None if key is None else _call(key), reverse=reverse)


def _tokenize(function: Any, *args: Any, **named: Any) -> Any:
    odd = next((name for name in named if name not in _TOKENIZER_OPTIONS), None)
    if odd is not None or len(args) > 1:
        raise _not_allowed(f"`{odd or 'a second argument'}` of a tokenizer")
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


# -- builtins -------------------------------------------------------------------------------------


class _Refusal:
    """Stands for a builtin that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def error(self) -> PermissionError:
        return _not_allowed(f"`{self._name}`")

    def __repr__(self) -> str:
        return f"<{self._name}: not allowed here>"


def _range(*args: Any) -> range:
    made = range(*args)
    # What goes through it in C is not reached by the time limit.
    if made and abs((made[-1] - made[0]) // made.step) >= bounds.MAX_ITEMS:
        count = abs((made[-1] - made[0]) // made.step) + 1
        raise bounds.too_large("a range", count, bounds.MAX_ITEMS)
    return made


def _map(function: Any, *values: Any) -> Iterator[Any]:
    called = _call(function)
    return (called(*each) for each in zip(*map(_getiter, values), strict=False))


def _filter(function: Any, values: Any) -> Iterator[Any]:
    called = bool if function is None else _call(function)
    return (each for each in _getiter(values) if called(each))


def _sorted(values: Any, *, key: Any = None, reverse: bool = False) -> list[Any]:
    called = None if key is None else _call(key)
    return sorted(_getiter(values), key=called, reverse=reverse)


def _extreme(function: Any) -> Any:
    def of(*values: Any, **named: Any) -> Any:
        if named.get("key") is not None:
            named["key"] = _call(named["key"])
        if len(values) == 1:
            # A copy: a key may make the list longer while it is gone through.
            values = (list(_getiter(values[0])),)
        return function(*values, **named)

    return of


def _iter(values: Any) -> Iterator[Any]:
    return iter(_getiter(values))


def _pow(base: Any, exponent: Any, mod: Any = None) -> Any:
    if mod is not None:
        return pow(base, exponent, mod)
    return _operate("**", base, exponent)


def _type(value: Any) -> type:
    if type(value) not in TYPES:
        raise _not_allowed(f"`type` of a {type(value).__name__}")
    return type(value)


def _format(value: Any, spec: str = "") -> str:
    return _text(value, -1, spec)


def _sum(values: Any, start: Any = 0) -> Any:
    # `sum(lists, [])` makes every sum on the way.
    if isinstance(start, int | float | complex | Tensor):
        return sum(_getiter(values), start)
    total = start
    for value in values:
        total = _operate("+", total, value)
    return total


def _round(number: Any, digits: Any = None) -> Any:
    if isinstance(digits, int):
        bounds.bits(abs(digits) * 4)
    return round(number) if digits is None else round(number, digits)


_CLASSES: frozenset[type] = frozenset(
    (
        *(bool, int, float, complex, str, list, tuple, dict, set, frozenset, slice),
        *(enumerate, zip, reversed),
        *ERRORS,
    )
)
"""The classes of Python's that may be called."""
_GATHERING = (list, tuple, set, frozenset, enumerate, zip, reversed)
_PLAIN = """
    abs callable chr divmod isinstance issubclass len ord repr hex oct bin ascii next
    True False None Ellipsis NotImplemented
"""
BUILTINS: dict[str, Any] = {
    **{name: getattr(builtins, name) for name in _PLAIN.split()},
    **{cls.__name__: cls for cls in _CLASSES},
    **{name: _Refusal(name) for name in REFUSED_BUILTINS},
}
"""The builtins of restricted blocks."""
_WRAPPED: dict[str, Any] = {
    "all": _over(all),
    "any": _over(any),
    "range": _range,
    "round": _round,
    "map": _map,
    "filter": _filter,
    "sorted": _sorted,
    "min": _extreme(min),
    "max": _extreme(max),
    "iter": _iter,
    "pow": _pow,
    "type": _type,
    "format": _format,
    "sum": _sum,
}
BUILTINS |= _WRAPPED
for _function in (*_WRAPPED.values(), *(BUILTINS[name] for name in _PLAIN.split())):
    if callable(_function):
        CALLABLES[id(_function)] = (_function, "")

GUARDS: dict[str, Any] = {
    "_getattr_": _attribute,
    "_getitem_": _getitem,
    "_getiter_": _getiter,
    "_item_": _item,
    "_side_": _side,
    "_spread_": _spread,
    "_operate_": _operate,
    "_single_": _single,
    "_inplacevar_": _in_place,
    "_augment_item_": _augment_item,
    "_augment_side_": _augment_side,
    "_text_": _text,
    "_call_": _call,
}
"""The guards by the names that a guarded text calls them by."""


def allow(function: Any) -> Any:
    """Let blocks call a function of ours that they are given."""
    CALLABLES[id(function)] = (function, "")
    return function
