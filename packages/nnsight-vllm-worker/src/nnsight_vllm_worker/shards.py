"""Which part of a location's value each rank holds, told from one run of the model for nobody.

What vLLM's parallel layers and collectives do is known (`vllm_ports.parallel`); what lies between
them follows the tensors: a view of known columns is some of these columns, what is computed from
shards and has their shape is laid out as they are, what is computed from whole tensors is whole.
What is taken for whole is compared between the ranks, so that a layer which nobody foresaw is
refused by name and never served in part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nnsight_core.locations import Location
from nnsight_core.values import tensors
from nnsight_vllm_worker.layouts import Layout, Split, Unknown, fits

_MOST = 32
"""Entries of a tensor that are compared between ranks."""


class Layers(Protocol):
    """What is known of a model's layers."""

    def told(
        self, path: str, side: str, tensors: list[Tensor], entry: list[Layout]
    ) -> dict[int, Layout]:
        """The layouts that a layer gives to tensors of its input or output, by their index.

        Args:
            entry: the layouts of its input.
        """
        ...

    def splits(self, path: str) -> bool:
        """Whether a layer is split over the ranks itself, so that its operations are as well."""
        ...

    def unfilled(self, path: str) -> bool:
        """Whether a layer leaves its output as it found that memory, where it runs for nobody."""
        ...


class Claim(NamedTuple):
    """What is believed of one tensor, and some of its entries.

    Attributes:
        blank: whether the layout rests on nothing but these entries.
        made: whether it is that of what the tensor was computed from.
    """

    layout: Layout
    entries: list[float]
    blank: bool = False
    made: bool = False


class _Known(NamedTuple):
    tensor: Tensor
    layout: Layout


class Shards:
    """Follows the tensors of one forward pass on this rank.

    Args:
        layers: what layers say.
        rank: which rank this is.

    Attributes:
        meeting: the modules in which ranks meet in a collective.
    """

    def __init__(self, layers: Layers, rank: int) -> None:
        self._layers = layers
        self._random = torch.Generator().manual_seed(rank)
        self._claims: dict[str, list[Claim]] = {}
        self._known: dict[int, list[_Known]] = {}
        self._entries: dict[str, tuple[list[Tensor], list[Layout]]] = {}
        self.meeting: set[str] = set()
        self._running: list[str] = []
        self._blank: set[str] = set()
        self._shared = False
        self._inside: list[tuple[str, int, Tensor]] = []

    def see(self, location: Location, value: Any) -> None:
        """A location is reached."""
        found = [tensor for _, tensor in tensors(value)]
        self._enter_or_leave(location)
        _, laid = self._entries.get(location.path, ([], []))
        told = self._layers.told(location.path, location.side, found, laid)
        if location.side == "output" and self._layers.unfilled(location.path):
            # Else what follows would hold nothing that could be compared.
            for tensor in found:
                tensor.copy_(torch.randn(tensor.shape, generator=self._random))
        claims: list[Claim] = []
        for index, tensor in enumerate(found):
            claim = self._claim(location, index, found, told)
            if not fits(claim.layout, tuple(tensor.shape)):
                claim = claim._replace(layout=Unknown("a rank's part of it cuts a head"))
            self._remember(tensor, claim.layout)
            claims.append(claim)
        if location.side == "input":
            self._entries[location.path] = found, [claim.layout for claim in claims]
            if any(claim.blank for claim in claims):
                self._blank.add(location.path)
        self._claims.setdefault(str(location), claims)

    def _enter_or_leave(self, location: Location) -> None:
        if ".source." in location.path:
            return
        if location.side == "input":
            self._running.append(location.path)
        elif location.path in self._running:
            del self._running[self._running.index(location.path) :]

    def _claim(
        self, location: Location, index: int, found: list[Tensor], told: dict[int, Layout]
    ) -> Claim:
        """What is believed of the `index`-th of the tensors that were found."""
        tensor = found[index]
        entries = some(tensor)
        if index in told:
            self._same_inside(tensor, told[index])
            return Claim(told[index], entries)
        layout, sure = self._followed(tensor)
        if sure:
            return Claim(layout, entries)
        owner, source, _ = location.path.partition(".source.")
        if source and self._layers.splits(owner):
            self._inside.append((str(location), index, tensor))
            why = "it is computed inside a layer of which each has a part"
            return Claim(Unknown(why), entries)
        entry, laid = self._entries.get(location.path, ([], []))
        if location.side == "output" and entry:
            layout = _made(tensor, found[:index], entry, laid)
            return Claim(layout, entries, location.path in self._blank, made=True)
        return Claim(None, entries, blank=self._shared)

    def whole(self, tensor: Tensor) -> None:
        """A collective has made a tensor whole."""
        self.meeting.update(self._running)
        self._remember(tensor, None)

    def layouts(
        self, agree: Callable[[Any], list[Any]], dummy: bool
    ) -> dict[str, tuple[Layout, ...]]:
        """The layouts of every location, by its name, as far as the ranks agree.

        Args:
            agree: gives each rank what all of them hand in.
            dummy: whether the weights were never loaded, so that equal values say nothing.
        """
        every = agree(self._claims)
        self._known.clear()
        self._entries.clear()
        return {
            name: tuple(
                _agreed([claims.get(name) for claims in every], index, dummy)
                for index in range(len(own))
            )
            for name, own in self._claims.items()
        }

    def _same_inside(self, tensor: Tensor, layout: Layout) -> None:
        """What a layer hands out is what operations inside it have made.

        Not of what was summed up: that may have been done where it lies.
        """
        for name, index, made in self._inside if isinstance(layout, Split) else ():
            if _storage(made) == _storage(tensor) and made.shape == tensor.shape:
                claims = self._claims[name]
                claims[index] = claims[index]._replace(layout=layout)

    def _remember(self, tensor: Tensor, layout: Layout) -> None:
        self._shared |= layout is not None
        # Held on to, so that its memory is not taken for another tensor's.
        self._known.setdefault(_storage(tensor), []).append(_Known(tensor, layout))

    def _followed(self, tensor: Tensor) -> tuple[Layout, bool]:
        """The layout of a tensor whose memory was seen before, and whether it was."""
        for known in reversed(self._known.get(_storage(tensor), ())):
            if isinstance(known.layout, Split):
                found = _viewed(tensor, known.tensor, known.layout)
                if found is not None:
                    return found, True
            elif _within(tensor, known.tensor):
                return known.layout, True
        if _storage(tensor) in self._known:
            return Unknown("it is a part of what a rank holds, cut in another way"), True
        return None, False


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _within(tensor: Tensor, known: Tensor) -> bool:
    """Whether the memory of a tensor lies within that of a known one."""
    (start, stop), (first, last) = _span(tensor), _span(known)
    return first <= start and stop <= last


def _span(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()


def _viewed(tensor: Tensor, known: Tensor, layout: Split) -> Split | None:
    """The layout of a view of the rows of a known tensor; None if it is another kind of view."""
    if tensor.dim() < 2 or tensor.shape[0] != known.shape[0]:
        return None
    if tensor.dtype != known.dtype or tensor.stride(0) != known.stride(0):
        return None
    if not (_dense(tensor) and _dense(known)):
        return None
    start = int(tensor.storage_offset() - known.storage_offset())
    return layout.between(start, start + tensor[0].numel())


def _dense(tensor: Tensor) -> bool:
    return tensor[0].is_contiguous()


def _made(tensor: Tensor, before: list[Tensor], entry: list[Tensor], laid: list[Layout]) -> Layout:
    """The layout of what was computed from tensors of these layouts.

    Args:
        before: what the same computation gave besides, in front of it.
    """
    like = [
        layout
        for given, layout in zip(entry, laid, strict=True)
        if given.shape == tensor.shape and layout is not None
    ]
    if like:
        place = sum(other.shape == tensor.shape for other in before)
        return like[min(place, len(like) - 1)]
    if any(layout is not None for layout in laid):
        return Unknown("it is computed from what a rank holds, in a way that is not known")
    return None


def some(tensor: Tensor) -> list[float]:
    """Some entries of a tensor, to be compared with those of another rank."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel() or flat.is_complex():
        return []
    return flat[:: -(-flat.numel() // _MOST)].double().tolist()


def _agreed(claims: list[list[Claim] | None], index: int, dummy: bool) -> Layout:
    if any(each is None or index >= len(each) for each in claims):
        return Unknown("not every rank runs it")
    own = [each[index] for each in claims if each is not None]
    layout = own[0].layout
    if any(claim.layout != layout for claim in own):
        return Unknown("the ranks hold it in different ways")
    values = [torch.tensor(claim.entries, dtype=torch.float64) for claim in own]
    if isinstance(layout, Split) and own[0].made and not dummy:
        alone = any(piece.replicas < len(own) for piece in layout.pieces)
        if alone and any(own[0].entries) and all(close(values[0], v) for v in values[1:]):
            return Unknown("each rank seems to hold all of it, where it should hold a part")
    if layout is not None:
        return layout
    if own[0].blank and (dummy or not any(own[0].entries)):
        return Unknown("nothing says whether each rank holds all of it")
    if any(not close(values[0], other) for other in values[1:]):
        return Unknown("its values differ between the ranks")
    return None


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks have computed the same, up to how they round."""
    if one.shape != other.shape:
        return False
    scale = one.abs().nan_to_num(0.0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-2, atol=1e-3 * scale, equal_nan=True)
