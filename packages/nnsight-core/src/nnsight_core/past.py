"""Writes that nothing reads: to a value whose visit is over, or to what all requests share.

Or that may be meant to be read and may not: to what a location was set to, after it was.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

from torch import Tensor

from nnsight_core.errors import LateWriteError, WriteError
from nnsight_core.locations import Location
from nnsight_core.values import same

RECENT = 2
_FORGET_FROM = 256


_Over = tuple[weakref.ref[Tensor], int, Location, int, Tensor | None]
"""A tensor of a visit that is over: its version, where, after which line, and what it held."""


class Past:
    """The tensors that one block was handed and may not write any more, with their versions.

    Args:
        unseen: whether the block may write in a way that PyTorch does not count.
    """

    def __init__(self, filename: str, unseen: bool) -> None:
        self._filename = filename
        self._unseen = unseen
        self._over: list[_Over] = []
        # Else a block that writes to one too late and binds the name anew would not be found out.
        self._held: deque[Tensor] = deque(maxlen=RECENT)
        self._forget_from = _FORGET_FROM
        self._given: list[tuple[Tensor, int, Location]] = []
        self._lent: list[tuple[Tensor, int, str]] = []

    def close(self, location: Location, tensors: Iterable[Tensor], line: int) -> None:
        """A visit is over: what these tensors of it hold from here on is read by nobody."""
        for tensor in tensors:
            if type(tensor) is Tensor:
                was = tensor.clone() if self._unseen else None
                self._over.append((weakref.ref(tensor), tensor._version, location, line, was))
                self._held.append(tensor)

    def give(self, location: Location, tensor: Tensor) -> None:
        """A location was set to this, of which it has a copy."""
        if not tensor.is_inference():
            self._given.append((tensor, tensor._version, location))

    def lend(self, name: str, tensor: Tensor) -> None:
        """A tensor of the model itself is handed out."""
        if not tensor.is_inference():
            self._lent.append((tensor, tensor._version, name))

    def check(self, last: int | None = None) -> WriteError | None:
        """An error if something was written in place.

        Args:
            last: look at the last so many tensors only, so that a block of many reads does not look
                at all of them at each; what is missed is found when the block ends.
        """
        over = self._over if last is None else self._over[-last:]
        for reference, version, location, line, was in over:
            tensor = reference()
            if tensor is None:
                continue
            if tensor._version != version or (was is not None and not same(tensor, was)):
                return LateWriteError(
                    f"{location} was written in place after its visit was over (after line {line} "
                    f"of {self._filename}), so nothing reads what was written. Write before the "
                    "block asks for a later location, or write to a clone if the value is only for "
                    "the block's own use."
                )
        for tensor, version, location in self._given:
            if tensor._version != version:
                return WriteError(
                    f"What {location} was set to was changed in place afterwards, which does not "
                    f"change {location}. Change it before, or write to {location} itself; or, if "
                    "it is for later use, go on with a clone."
                )
        self._given.clear()
        for tensor, version, name in self._lent:
            if tensor._version != version:
                return WriteError(
                    f"{name} is a tensor of the model, which every request shares: a block cannot "
                    "write it. Use a clone for the block's own use."
                )
        if len(self._over) > self._forget_from:
            self._over = [entry for entry in self._over if entry[0]() is not None]
            # Where all of them are kept, they are not gone through again for every new one.
            self._forget_from = max(_FORGET_FROM, 2 * len(self._over))
        return None

    def clear(self) -> None:
        """Hold nothing any longer."""
        self._over.clear()
        self._held.clear()
        self._given.clear()
        self._lent.clear()
