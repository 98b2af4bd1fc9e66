"""A visit: one value served to one run, and what the run wrote brought back.

The run gets private copies of its rows, made outside inference mode so that PyTorch counts their
versions. A copy whose version has risen, or that was replaced, is copied back over the rows it came
from; nothing else of the engine's memory is touched. In a pass that is over, there is only to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nnsight_core.checks import check_kept
from nnsight_core.errors import WriteError
from nnsight_core.locations import Location
from nnsight_core.run import Run
from nnsight_core.values import (
    dtype_name,
    flat,
    leaves,
    map_tensors,
    of_model,
    plain,
    replaced,
    same,
)


class Rows(Protocol):
    """Which part of a value is a request's own.

    Attributes:
        private: whether the values are copies already, which nothing else reads.
    """

    private: bool

    def view(self, run: Run, location: Location, index: int, tensor: Tensor) -> Tensor | None:
        """A view of the run's rows of the `index`-th tensor of a value.

        None says that the tensor has no rows of requests: it is served whole and cannot be written.

        Raises:
            LocationError: the rows cannot be told apart.
        """
        ...

    def whole(self, run: Run, location: Location, index: int, rows: Tensor) -> Tensor:
        """All rows of the run's step, of which `rows` (already a copy) came in this pass."""
        ...

    def wrote(self, run: Run, location: Location, changed: dict[int, Tensor]) -> None:
        """A run has changed tensors of a value, by their index."""
        ...


_UNCHANGED: dict[int, Tensor] = {}


class Copy(NamedTuple):
    """A private copy: of which rows (None if of a tensor that all requests share), as of when."""

    rows: Tensor | None
    private: Tensor
    version: int


class Visit:
    """One value served to one run.

    Attributes:
        value: the value with a private copy in place of each tensor.
    """

    __slots__ = ("_loose", "_made", "copies", "location", "rows", "run", "value")

    def __init__(self, rows: Rows, run: Run, location: Location, value: Any) -> None:
        self.rows = rows
        self.run = run
        self.location = location
        self.copies: list[Copy] = []
        self._made: dict[int, Copy] = {}
        self.value = map_tensors(value, self._copy)
        self._loose = _loose(self.value)

    def _copy(self, tensor: Tensor) -> Tensor:
        before = self._made.get(id(tensor))
        if before is not None:
            self.copies.append(before)
            return before.private
        own = self.rows.view(self.run, self.location, len(self.copies), tensor)
        private = tensor if own is None else own
        # `data`: a view would share its count of versions with the views of other requests.
        private = private.data if self.rows.private else private.clone()
        if own is not None:
            private = self.rows.whole(self.run, self.location, len(self.copies), private)
        self._made[id(tensor)] = copy = Copy(own, private, private._version)
        self.copies.append(copy)
        return private

    def written(self, given: Any) -> dict[int, Tensor]:
        """The tensors that the run wrote in place or replaced, by their index.

        Raises:
            WriteError: what was written has no rows of this request, or lost its shape or dtype.
        """
        if given is self.value and type(given) is Tensor:
            copy = self.copies[0]
            if given._version == copy.version and not self._unseen(copy):
                return _UNCHANGED
        if self._loose is not None and given is self.value:
            check_kept(self.location, self._loose, given)
        # A list or a dict that was served may have got other tensors, so it is looked at again.
        new = [plain(tensor) for tensor in flat(given)]
        if len(new) != len(self.copies):
            raise WriteError(
                f"{self.location} holds {len(self.copies)} tensors and was left with {len(new)}: a "
                "write must keep how the value is built."
            )
        changed: dict[int, Tensor] = {}
        for index, (copy, now) in enumerate(zip(self.copies, new, strict=True)):
            if now is copy.private and now._version == copy.version and not self._unseen(copy):
                continue
            if copy.rows is None:
                raise WriteError(
                    f"{self.location} holds a tensor of shape {list(now.shape)} that has no rows "
                    "of this request (all requests share it), so it can be read but not written."
                )
            if now.shape != copy.rows.shape:
                raise WriteError(
                    f"{self.location} was changed from {list(copy.rows.shape)} to "
                    f"{list(now.shape)}: a write must keep the rows and the width."
                )
            if now.dtype != copy.rows.dtype:
                raise WriteError(
                    f"{self.location} was changed from {dtype_name(copy.rows.dtype)} to "
                    f"{dtype_name(now.dtype)}: a write must keep the dtype."
                )
            changed[index] = now
        return changed

    def _unseen(self, copy: Copy) -> bool:
        """Whether a copy was written in a way that PyTorch does not count."""
        if not self.run.code.unseen or copy.rows is None:
            return False
        return not same(copy.private, copy.rows)

    def of_model(self, changed: dict[int, Tensor]) -> bool:
        """Whether a tensor that was written lies in the model's own parameters."""
        rows = [self.copies[index].rows for index in changed]
        return any(of_model(r) for r in rows if r is not None)

    def put_back(self, changed: dict[int, Tensor]) -> None:
        """Copy what was written over the rows it came from."""
        for index, now in changed.items():
            own = self.copies[index].rows
            assert own is not None
            own.copy_(now)

    def put_into_copy(self, value: Any, changed: dict[int, Tensor]) -> Any:
        """The value with changed copies of the tensors that were written.

        Raises:
            WriteError: one of them lies in a container that others may hold as well.
        """
        tensors = flat(value)
        new: dict[int, Tensor] = {}
        for index, now in changed.items():
            new[index] = whole = tensors[index].clone()
            own = self.rows.view(self.run, self.location, index, whole)
            assert own is not None
            own.copy_(now)
        try:
            return replaced(value, new)
        except ValueError as error:
            raise WriteError(
                f"{self.location} was written within a {error}, which others may hold as well, so "
                "that it cannot be replaced for this module alone. Write where the tensor comes "
                "from: to the output of the module that makes it."
            ) from None


class Look:
    """One value of a pass that is over, served to one run.

    Args:
        value: made for this run alone, of tensors whose versions are counted from 0.
    """

    __slots__ = ("_loose", "location", "tensors", "value")

    def __init__(self, location: Location, value: Any) -> None:
        self.location = location
        self.value = value
        self._loose = _loose(value)
        self.tensors: Sequence[Tensor]
        if self._loose is None:
            self.tensors = (value,) if type(value) is Tensor else value
        else:
            self.tensors = flat(value)

    def left(self, given: Any) -> bool:
        """Whether the run has left it as it was."""
        if given is not self.value:
            return False
        for tensor in self.tensors:
            if tensor._version:
                return False
        if self._loose is None:
            return True
        now = leaves(given)
        return [(at, id(leaf)) for at, leaf in now] == [(at, id(leaf)) for at, leaf in self._loose]


_TENSORS = {Tensor}


def _loose(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of a value in place of which others may come; None if it can get no others."""
    kind = type(value)
    if kind is Tensor or (kind is tuple and set(map(type, value)) == _TENSORS):
        return None
    return list(leaves(value))


def outside_inference() -> AbstractContextManager[None]:
    """Where tensors are ordinary ones, whose versions PyTorch counts, but without gradients."""
    return _Outside(False) if torch.is_inference_mode_enabled() else _NOTHING


class _Outside(torch.inference_mode):
    def __enter__(self) -> None:
        super().__enter__()
        # As blocks begin, so that nothing need be set for each. It ends with the mode.
        torch._C._set_grad_enabled(False)


_NOTHING: AbstractContextManager[None] = nullcontext()
