"""What the invokes of one trace take along, as it was at the `with` of each.

An invoke runs when its trace is over, and by then the loop around it has gone on. So tensors,
arrays and Python's own containers are copied. A copy serves every invoke for as long as the
original has not changed, since what invokes share is encoded once. If nothing that an invoke takes
along has changed by the time that it runs, it is given the originals after all: these are what
functions that it takes along know. No object is asked whether it equals another: the parts of a
container are the same if they are the very same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, tuple)
_KINDS = frozenset({*_CONTAINERS, numpy.ndarray, Tensor, nn.Parameter})


class _Taken:
    """A copy of one object, and what tells whether the object has changed since.

    Attributes:
        original: the object, which is held so that its id stays its own.
        copy: what stands for it.
        state: how often a tensor was written, the bytes of an array, the parts of a container.
        inner: the copies within the copy of a container.
    """

    __slots__ = ("copy", "inner", "original", "state")

    def __init__(self, original: Any, copy: Any, state: Any = None) -> None:
        self.original = original
        self.copy = copy
        self.state = state
        self.inner: list[_Taken] = []

    def holds(self) -> bool:
        """Whether the object itself is what it was, whatever its parts are."""
        original, state = self.original, self.state
        if self.copy is original:
            return True
        kind = type(original)
        if kind is numpy.ndarray:
            return _content(original) == state
        if kind not in _CONTAINERS:
            return _version(original) == state is not None
        size = len(original) * (2 if kind is dict else 1)
        return size == len(state) and all(map(is_, _parts(original), state))


_Known = dict[int, _Taken]
"""What was taken so far, by the id of the original."""


class Along:
    """What one invoke takes along.

    Args:
        values: the objects.
        taken: what was taken of those that may change.
    """

    def __init__(self, values: list[Any], taken: list[_Taken | None]) -> None:
        self._values = values
        self._taken = taken

    @property
    def copies(self) -> list[Any]:
        """The values, with copies of those that may change."""
        pairs = zip(self._values, self._taken, strict=True)
        return [value if taken is None else taken.copy for value, taken in pairs]

    def as_it_was(self) -> list[Any]:
        """The values themselves; the copies, where any of them has changed since."""
        known: _Known = {}
        if all(taken is None or _unchanged(taken, known) for taken in self._taken):
            return self._values
        return self.copies


class Snapshots:
    """The copies that the invokes of one trace have taken."""

    def __init__(self) -> None:
        self._last: _Known = {}

    def take(self, values: list[Any], shared: Iterable[Any] = ()) -> Along:
        """Some values as they are now; those in one place stay in one place.

        Args:
            shared: objects that stay themselves, wherever they are.
        """
        known = {id(value): _Taken(value, value) for value in shared}
        taken = [self._take(v, known) if type(v) in _KINDS else None for v in values]
        return Along(values, taken)

    def _take(self, value: Any, known: _Known) -> _Taken:
        taken = known.get(id(value))
        if taken is not None:
            return taken
        taken = self._last.get(id(value))
        if taken is not None and _unchanged(taken, known):
            return taken
        kind = type(value)
        if kind in _CONTAINERS:
            taken = self._container(value, known)
        else:
            taken = _of_array(value) if kind is numpy.ndarray else _of_tensor(value)
            known[id(value)] = taken
        self._last[id(value)] = taken
        return taken

    def _container(self, value: Any, known: _Known) -> _Taken:
        kind = type(value)
        taken = _Taken(value, None, list(_parts(value)))
        if kind is not tuple:
            # It is known before its parts are, which may hold it.
            taken.copy = kind()
            known[id(value)] = taken
        parts = list(value.values()) if kind is dict else taken.state
        made = parts
        if not _KINDS.isdisjoint(map(type, parts)):
            made = []
            for part in parts:
                inner = self._take(part, known) if type(part) in _KINDS else None
                if inner is not None:
                    taken.inner.append(inner)
                made.append(part if inner is None else inner.copy)
        if kind is tuple:
            if id(value) in known:  # it was met again below a list in it
                return known[id(value)]
            same = all(map(is_, made, value))
            taken.copy = value if same else tuple(made)
            known[id(value)] = taken
        elif kind is dict:
            taken.copy.update(zip(value, made, strict=True))
        else:
            (taken.copy.extend if kind is list else taken.copy.update)(made)
            if kind is list and not taken.inner:
                taken.state = taken.copy  # nothing is written to it before the trace is over
        return taken


def _unchanged(taken: _Taken, known: _Known) -> bool:
    """Whether a copy still says what its original does, all the way down.

    Args:
        known: what stands for objects by now; gets those in the copy, if it does.
    """
    if known.get(id(taken.original), taken) is not taken:
        return False
    found = {id(taken.original): taken}
    waiting = [taken]
    while waiting:
        taken = waiting.pop()
        if not taken.holds():
            return False
        for inner in taken.inner:
            key = id(inner.original)
            before = found.get(key) or known.get(key)
            if before is None:
                found[key] = inner
                waiting.append(inner)
            elif before is not inner:
                return False
    known.update(found)
    return True


def _parts(value: Any) -> Iterator[Any]:
    return chain(value, value.values()) if type(value) is dict else iter(value)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written, if PyTorch counts that."""
    return None if tensor.is_inference() else tensor._version


def _content(array: numpy.ndarray) -> tuple[Any, ...]:
    return (array.dtype, array.shape, array.tobytes())


def _of_array(array: numpy.ndarray) -> _Taken:
    if array.dtype.hasobject:
        return _Taken(array, array)
    return _Taken(array, array.copy(), _content(array))


def _of_tensor(tensor: Tensor) -> _Taken:
    # What is made in inference mode could not be written by the block.
    with torch.inference_mode(False), torch.no_grad():
        copy = tensor.detach().clone()
        if type(tensor) is nn.Parameter:
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            copy.requires_grad_()
    return _Taken(tensor, copy, _version(tensor))
