"""Writes that nothing reads: to a value whose visit is over, or to what all requests share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from nnsight_core.errors import LateWriteError, WriteError
from nnsight_core.locations import Location

RECENT = 2
_FORGET_FROM = 256


class Past:
    """The tensors that one block was handed and may not write any more, with their versions."""

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._over: list[tuple[weakref.ref[Tensor], int, Location, int]] = []
        self._forget_from = _FORGET_FROM
        self._lent: list[tuple[Tensor, int, str]] = []

    def close(self, location: Location, tensors: Iterable[Tensor], line: int) -> None:
        """A visit is over: what these tensors of it hold from here on is read by nobody."""
        for tensor in tensors:
            if type(tensor) is Tensor:
                self._over.append((weakref.ref(tensor), tensor._version, location, line))

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
        for reference, version, location, line in (
            self._over if last is None else self._over[-last:]
        ):
            tensor = reference()
            if tensor is not None and tensor._version != version:
                return LateWriteError(
                    f"{location} was written in place after its visit was over (after line {line} "
                    f"of {self._filename}), so nothing reads what was written. Write before the "
                    "block asks for a later location, or write to a clone if the value is only for "
                    "the block's own use."
                )
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
        self._lent.clear()
