"""Containers saved above the invokes: each invoke gets a copy, and what they wrote is put together.

with model.trace() as tracer:
    slots = nnsight_core.save([None, None])
    with tracer.invoke("a"):
        slots[0] = model.logits.argmax()
    with tracer.invoke("b"):
        slots[1] = model.logits.argmax()
"""

from __future__ import annotations

import threading
from typing import Any

import numpy
import torch
from torch import Tensor


class _Open(threading.local):
    def __init__(self) -> None:
        self.traces: list[list[Any]] = []


_open = _Open()


def open_shared() -> list[Any]:
    """From now on, what is saved outside a block belongs to one trace; gives its list."""
    _open.traces.append([])
    return _open.traces[-1]


def close_shared(shared: list[Any]) -> None:
    """The body of that trace is over."""
    _open.traces = [other for other in _open.traces if other is not shared]


def offer(value: Any) -> bool:
    """Take a value saved outside a block; False if no trace is open here."""
    if not _open.traces:
        return False
    _open.traces[-1].append(value)
    return True


def merge(base: Any, versions: list[Any]) -> Any:
    """What invokes made of one value, put together in the order of the invokes.

    Lists are put together slot by slot (a slot that an invoke left as it was is unwritten), with
    what invokes appended after them; dicts by key; sets by element. Of anything else, and of a list
    that an invoke made shorter, the last one that was changed is taken.
    """
    written = [version for version in versions if not same(version, base)]
    if not written:
        return base
    size = len(base) if isinstance(base, list) else 0
    if type(base) is list and all(type(v) is list and len(v) >= size for v in written):
        slots = [_last(base[i], [v[i] for v in written]) for i in range(size)]
        return [*slots, *(part for v in written for part in v[size:])]
    if type(base) is dict and all(type(v) is dict for v in written):
        gone = {key for key in base if any(key not in v for v in written)}
        made = {
            key: _last(value, [v[key] for v in written])
            for key, value in base.items()
            if key not in gone
        }
        for version in written:
            made.update({key: value for key, value in version.items() if key not in base})
        return made
    if type(base) is set and all(type(v) is set for v in written):
        gone = set().union(*(base - v for v in written))
        return (base - gone).union(*(v - base for v in written))
    return written[-1]


def put_into(base: Any, value: Any) -> Any:
    """Give the user's own object its new content, where it has any; what its name is to hold."""
    if value is base:
        return base
    if type(base) is list and type(value) is list:
        base[:] = value
        return base
    if type(base) is dict and type(value) is dict:
        base.clear()
        base.update(value)
        return base
    if type(base) is set and type(value) is set:
        base.clear()
        base.update(value)
        return base
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal all the way down."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    try:
        return bool(one == other)
    except Exception:  # a class may compare in its own way, or not at all
        return False


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


def _last(base: Any, versions: list[Any]) -> Any:
    written = [version for version in versions if not same(version, base)]
    if len(written) > 1 and isinstance(base, list | dict | set):
        return merge(base, written)
    return written[-1] if written else base
