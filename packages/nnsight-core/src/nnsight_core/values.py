"""Values as modules pass them: tensors, alone or in tuples, lists, dicts and named records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with each tensor changed; tensors are visited in a fixed order."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple:
        return tuple([map_tensors(v, change) for v in value])
    if kind is list:
        return [map_tensors(v, change) for v in value]
    if isinstance(value, tuple):
        parts = [map_tensors(v, change) for v in value]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if isinstance(value, dict):
        parts = {k: map_tensors(v, change) for k, v in value.items()}
        return parts if kind is dict else kind(**parts)
    return value


def replaced(value: Any, new: dict[int, Tensor]) -> Any:
    """The structure with other tensors in it, by their place among those of `flat`.

    What holds none of them stays the very object, since others may fill it or look into it.

    Raises:
        ValueError: one of them lies in a list, or in a dict within the structure.
    """
    first = 0

    def put(part: Any, depth: int) -> Any:
        nonlocal first
        held = len(flat(part))
        if new.keys().isdisjoint(range(first, first + held)):
            first += held
            return part
        if isinstance(part, Tensor):
            first += 1
            return new[first - 1]
        if isinstance(part, tuple):
            parts = [put(inner, depth + 1) for inner in part]
            kind = type(part)
            return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        if isinstance(part, dict) and depth < 2:
            parts = {key: put(inner, depth + 1) for key, inner in part.items()}
            return parts if type(part) is dict else type(part)(**parts)
        raise ValueError(type(part).__name__)

    return put(value, 0)


def of_model(tensor: Tensor) -> bool:
    """Whether a tensor lies in the model's own parameters, which a write must not change."""
    return isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter)


def same(here: Tensor, there: Tensor) -> bool:
    """Whether two tensors of one shape hold the same, not being a number included."""
    if torch.equal(here, there):
        return True
    return bool(((here == there) | ((here != here) & (there != there))).all())


def plain(tensor: Tensor) -> Tensor:
    """The tensor without a class of the user's, whose code would run wherever it is used."""
    if type(tensor) is Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return tensor.as_subclass(Tensor)


def all_plain(value: Any) -> Any:
    """A value of plain tensors in Python's own containers, so that its use runs no user's code."""
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, dict):
        return {k if type(k) is str else repr(k): all_plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        parts = [all_plain(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def refilled(old: Any, new: Any) -> Any:
    """`new`, which is built as `old` is, in containers of the classes that `old` has."""
    if old is new or isinstance(new, Tensor):
        return plain(new) if isinstance(new, Tensor) else new
    parts = iter([plain(tensor) for tensor in flat(new)])
    return map_tensors(old, lambda _: next(parts))


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a structure with how it is reached (`[0]`, `['hidden_states']`, or empty)."""
    for path, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield path, leaf


def flat(value: Any) -> list[Tensor]:
    """The tensors of a structure, in the order of `tensors`; runs no code of its classes."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return [value]
    parts: Any = ()
    if issubclass(kind, dict):
        parts = dict.values(value)
    elif issubclass(kind, tuple):
        parts = tuple.__iter__(value)
    elif issubclass(kind, list):
        parts = list.__iter__(value)
    return [tensor for part in parts for tensor in flat(part)]


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Each part of a structure that is no container, with how it is reached."""
    if isinstance(value, tuple | list):
        for index, part in enumerate(value):
            for path, leaf in leaves(part):
                yield f"[{index}]{path}", leaf
    elif isinstance(value, dict):
        for key, part in value.items():
            for path, leaf in leaves(part):
                yield f"[{key!r}]{path}", leaf
    else:
        yield "", value


def describe(value: Any) -> str:
    """A short text for messages: `float32 [5, 96]`, `(float32 [5, 96], None)`, `int`."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, tuple | list):
        inner = ", ".join(describe(v) for v in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in value.items()) + "}"
    return "None" if value is None else type(value).__name__


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
