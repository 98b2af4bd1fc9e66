"""Guards of values: their attributes, items and operators, as restricted blocks reach them.

They go by the type of a value, and let through what `nnsight_serve.policy.allowed` lists.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
from torch import Tensor, nn

from nnsight_core.block_tracer import BlockTracer
from nnsight_core.cache import Cache, CachedModule, CachedVisit
from nnsight_core.errors import PolicyError
from nnsight_core.loops import StepChoice, StepLoop
from nnsight_core.node import SIDES, Node, Operation, Root, Source
from nnsight_core.outputs import LateResult, RequestOutput
from nnsight_serve.policy import bounds, texts
from nnsight_serve.policy.allowed import CALLABLES, METHODS, MODULES, TENSOR, learn
from nnsight_serve.policy.text import refused

OURS = (BlockTracer, StepChoice, StepLoop, Cache, CachedModule, CachedVisit)
OUTSIDE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that came with blocks; any other is a part of the engine."""
CACHED = frozenset(("keys", "items", "values", "get", "missing", "visits"))
"""What a cache has besides the names of modules."""
_VALUES = ("logits", "samples")
_OF_NODES = frozenset((*SIDES, *_VALUES, "skip", "get", "tokenizer"))
_OF_TOKENIZERS = """
    bos_token bos_token_id convert_ids_to_tokens convert_tokens_to_ids decode encode eos_token
    eos_token_id pad_token pad_token_id unk_token unk_token_id vocab_size
"""
TOKENIZER = frozenset(_OF_TOKENIZERS.split())
"""The attributes of tokenizers."""
_SCALARS = (bool, int, float, complex, str, type(None))


def attribute(owner: Any, name: str) -> Any:
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
        _check_inside(owner)
        return getattr(owner, name)
    elif kind is ModuleType:
        if name in MODULES.get(owner.__name__, ()) and sys.modules[owner.__name__] is owner:
            value = getattr(owner, name)
            if callable(value) and id(value) not in CALLABLES:
                learn(owner.__name__, name, value)  # a library has put another in its place
            return value
        raise not_allowed(f"`{owner.__name__}.{name}`")
    elif isinstance(owner, nn.Module) and owner in OUTSIDE:
        return _of_outside(owner, name)
    elif _may_have(owner, kind, name):
        return getattr(owner, name)
    raise not_allowed(f"`.{name}` of a {kind.__name__}")


def _may_have(owner: Any, kind: type, name: str) -> bool:
    if kind is LateResult:
        return name in RequestOutput.model_fields
    if kind in OURS:
        # What their classes do not have is the name of a module.
        return not hasattr(kind, name) or name in CACHED or kind not in (Cache, CachedModule)
    if isinstance(owner, tuple):
        fields = getattr(kind, "_fields", None) or getattr(kind, "__match_args__", ())
        return name in fields or name in METHODS[tuple]
    if isinstance(owner, BaseException):
        return name == "args"
    if isinstance(owner, numpy.generic):
        return name in ("item", "dtype")
    return is_tokenizer(kind) and name in TOKENIZER


def _of_outside(module: nn.Module, name: str) -> Any:
    """What a module holds; what its class has under that name is never looked for."""
    own = vars(module)
    for held in (own["_parameters"], own["_buffers"], own["_modules"], own):
        if name in held:
            return held[name]
    raise not_allowed(f"`.{name}` of a {type(module).__name__}")


def _of_node(owner: Node, name: str) -> Any:
    """A module of the model, or what one holds: values, and no part of the engine."""
    if hasattr(type(owner), name) and name not in _OF_NODES:
        raise not_allowed(f"`.{name}` of the model")
    if name == "source":
        _check_inside(owner)
    value = getattr(owner, name)
    if name in SIDES or isinstance(owner, Root) and name in _OF_NODES:
        return value
    if isinstance(value, (Node, *_SCALARS)) or name == "skip":
        return value
    if isinstance(value, Tensor):
        module = owner._places.modules[owner._path]
        if name in module._parameters or name in module._buffers:
            return value  # any other may be what all requests share, as their keys and values
    if isinstance(value, tuple) and all(isinstance(part, _SCALARS) for part in value):
        return value
    if type(value) in METHODS and not isinstance(value, list | dict | set):
        return value
    raise not_allowed(f"`.{name}` of {owner!r}, a {type(value).__name__} of the engine,")


def _check_inside(place: Node | Operation | Source) -> None:
    """Refuse to look at operations among which are those on every request's keys and values."""
    module = place._places.modules.get(place._path.partition(".source.")[0])
    if module is not None and hasattr(module, "kv_cache"):
        raise refused(
            f"the inside of {place._path} is not allowed: it has the keys and values of all "
            "requests,",
            "Read its inputs and its output instead.",
        )


def is_tokenizer(kind: type) -> bool:
    """Whether values of a type are tokenizers."""
    base = sys.modules.get("transformers.tokenization_utils_base")
    return base is not None and issubclass(kind, base.PreTrainedTokenizerBase)


def not_allowed(what: str) -> PolicyError:
    """The error for a use of a value that is not on the list."""
    return refused(f"{what} is not allowed")


def item_of(owner: Any, index: Any) -> Any:
    """`owner[index]`."""
    if isinstance(owner, Node):
        # A text names a module as an attribute does, and anything else might become such a text.
        if type(index) is str:
            if index.startswith("_"):
                raise not_allowed(f"`[{index!r}]` of the model")
            return _of_node(owner, index)
        if type(index) not in (int, slice):
            raise not_allowed(f"a {type(index).__name__} as an index of the model")
    elif isinstance(owner, Tensor | numpy.ndarray):
        bounds.index(owner, index)
    return owner[index]


def item(owner: Any) -> Any:
    """What `owner[...] = value` and `del owner[...]` change."""
    if isinstance(owner, Tensor) or type(owner) in (dict, numpy.ndarray):
        return owner
    if type(owner) is list:
        bounds.items(len(owner))
        return owner
    raise not_allowed(f"to change an item of a {type(owner).__name__}")


def index_of_store(index: Any) -> Any:
    """The index of `owner[index] = value`, of which PyTorch and NumPy would make arrays."""
    for part in index if isinstance(index, tuple) else (index,):
        bounds.nested(part)
    return index


def side(owner: Any, name: str) -> Any:
    """What `owner.name = value` changes: a module's side, and nothing else."""
    if isinstance(owner, Node | Operation) and name in (*SIDES[:3], *_VALUES):
        return owner
    raise not_allowed(f"to assign `.{name}` of a {type(owner).__name__}")


def each(values: Any) -> Any:
    """What a loop goes through."""
    if isinstance(values, Tensor):
        bounds.parts(len(values) if values.dim() else 0)
    return values


def spread(values: Any) -> Any:
    """`*values`."""
    if isinstance(values, Tensor):
        return each(values)
    if isinstance(values, list | tuple | set | str | dict | range):
        bounds.items(len(values))
    return values


def single(value: Any) -> Any:
    """A part of `a < b < c`, which has a meaning for single values only."""
    if isinstance(value, Tensor | numpy.ndarray) and math.prod(value.shape) > 1:
        raise refused("a chain of comparisons of tensors is not allowed", "Compare two at a time.")
    return value


def _check(symbol: str, left: Any, right: Any) -> None:
    if symbol == "%" and isinstance(left, str | bytes | bytearray):
        texts.formatted(left, right)
    else:
        bounds.operands(symbol, left, right)


def operate(symbol: str, left: Any, right: Any) -> Any:
    """`left symbol right`."""
    _check(symbol, left, right)
    return bounds.BINARY[symbol](left, right)


def in_place(symbol: str, left: Any, right: Any) -> Any:
    """What `left symbol= right` leaves."""
    if symbol == "+" and type(left) is list and type(right) is not list:
        # An iterator over the very list would go on for ever, where no time limit reaches it.
        right = list(right)
    _check(symbol, left, right)
    return bounds.IN_PLACE[symbol](left, right)


def augment_item(owner: Any, index: Any, symbol: str) -> Callable[[Any], None]:
    """`owner[index] symbol= value`, once the value is there."""
    held = item_of(owner, index)

    def store(value: Any) -> None:
        made = in_place(symbol, held, value)
        item(owner)[index] = made

    return store


def augment_side(owner: Any, name: str, symbol: str) -> Callable[[Any], None]:
    """`owner.name symbol= value`, once the value is there."""
    held = attribute(side(owner, name), name)

    def store(value: Any) -> None:
        setattr(owner, name, in_place(symbol, held, value))

    return store


def text(value: Any, conversion: int, spec: str) -> str:
    """A part of an f-string."""
    texts.spec(spec)
    if conversion != -1:
        value = texts.text_by({"r": repr, "s": str, "a": ascii}[chr(conversion)], value)
    texts.measured(value)
    made = format(value, spec)
    bounds.items(len(made) * 2)
    return made
