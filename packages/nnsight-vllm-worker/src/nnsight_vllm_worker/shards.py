"""Which part of a location's value each rank holds, told from one run of the model for nobody.

What vLLM's parallel layers and collectives do is known (`vllm_ports.parallel`); what lies between
them follows the tensors: a view of known columns is some of these columns, what is computed from
shards and has their shape is laid out as they are, what is computed from whole tensors is whole.
All of it is compared between the ranks at each visit: what is whole has to be alike, and what each
has a part of has to differ. So a layer which nobody foresaw is refused by name, and never served in
part, or many times over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nnsight_core.locations import Location
from nnsight_core.values import tensors
from nnsight_vllm_worker.layouts import SUM, Layout, Split, Sum, Unknown, fits

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

    def together(self, path: str) -> bool:
        """Whether ranks work together at a module, or at anything in it."""
        ...

    def unfilled(self, path: str) -> bool:
        """Whether a layer leaves its output as it found that memory, where it runs for nobody."""
        ...


class Claim(NamedTuple):
    """What is believed of one tensor, and some of its entries.

    Attributes:
        blank: whether the layout rests on nothing but these entries.
        doubtful: whether zeros say nothing for it: ranks worked at it together, which may go
            another way in a run for somebody, or it comes of memory that was blank.
        entries: those of each piece of its columns apart.
    """

    layout: Layout
    blank: bool = False
    doubtful: bool = False
    entries: tuple[list[float], ...] = ()


class _Known(NamedTuple):
    tensor: Tensor
    layout: Layout
    doubtful: bool


class _Entry(NamedTuple):
    """What went into a module or an operation."""

    tensors: list[Tensor]
    claims: list[Claim]

    @property
    def layouts(self) -> list[Layout]:
        return [claim.layout for claim in self.claims]


_NOTHING = _Entry([], [])
Visits = list[list[Claim]]
"""What is believed of the tensors of a location, for each time that it was reached."""


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
        self._claims: dict[str, Visits] = {}
        self._known: dict[int, list[_Known]] = {}
        self._entries: dict[str, _Entry] = {}
        self.meeting: set[str] = set()
        self._running: list[str] = []
        self._shared = False
        self._inside: list[tuple[list[Claim], int, Tensor]] = []

    def see(self, location: Location, value: Any) -> None:
        """A location is reached."""
        found = [tensor for _, tensor in tensors(value)]
        self._enter_or_leave(location)
        output = location.side == "output"
        entry = self._entries.get(location.path, _NOTHING) if output else _NOTHING
        told = self._layers.told(location.path, location.side, found, entry.layouts)
        if output and self._layers.unfilled(location.path):
            # Else what follows would hold nothing that could be compared.
            for tensor in found:
                tensor.copy_(torch.randn(tensor.shape, generator=self._random))
        claims: list[Claim] = []
        for index, tensor in enumerate(found):
            if index in told:
                claim = Claim(told[index])
            else:
                claim = self._claim(location, found[:index], tensor, entry, claims)
            if not fits(claim.layout, tuple(tensor.shape)):
                claim = claim._replace(layout=Unknown("a rank's part of it cuts a head"))
            if index in told:
                self._same_inside(tensor, claim.layout)
            self._remember(tensor, claim)
            claims.append(claim._replace(entries=_entries(tensor, claim.layout)))
        if not output:
            self._entries[location.path] = _Entry(found, claims)
        self._claims.setdefault(str(location), []).append(claims)

    def _enter_or_leave(self, location: Location) -> None:
        if ".source." in location.path:
            return
        if location.side == "input":
            self._running.append(location.path)
        elif location.path in self._running:
            del self._running[self._running.index(location.path) :]

    def _claim(
        self,
        location: Location,
        before: list[Tensor],
        tensor: Tensor,
        entry: _Entry,
        claims: list[Claim],
    ) -> Claim:
        """What is believed of a tensor of which no layer says anything.

        Args:
            before: those of the same value in front of it, with their `claims`.
        """
        known = self._followed(tensor)
        if known is not None:
            return known
        owner, source, _ = location.path.partition(".source.")
        if source and self._layers.splits(owner):
            self._inside.append((claims, len(claims), tensor))
            return Claim(Unknown("it is computed inside a layer of which each has a part"))
        if entry.tensors:
            layout = _made(tensor, before, entry)
            blank = any(claim.blank for claim in entry.claims)
            doubtful = any(claim.doubtful for claim in entry.claims)
            return Claim(layout, blank, doubtful or self._layers.together(owner))
        return Claim(None, blank=self._shared)

    def whole(self, tensor: Tensor) -> None:
        """A collective has made a tensor whole."""
        self.meeting.update(self._running)
        self._remember(tensor, Claim(None))

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
        self._inside.clear()
        return {
            name: tuple(
                _agreed([claims.get(name, []) for claims in every], index, dummy)
                for index in range(len(own[-1]))
            )
            for name, own in self._claims.items()
        }

    def _same_inside(self, tensor: Tensor, layout: Layout) -> None:
        """What a layer hands out is what operations inside it have made.

        Not of what was summed up: that may have been done where it lies.
        """
        for claims, index, made in self._inside if isinstance(layout, Split) else ():
            if _storage(made) == _storage(tensor) and made.shape == tensor.shape:
                claims[index] = Claim(layout, entries=_entries(made, layout))

    def _remember(self, tensor: Tensor, claim: Claim) -> None:
        self._shared |= claim.layout is not None
        # Held on to, so that its memory is not taken for another tensor's.
        known = _Known(tensor, claim.layout, claim.blank or claim.doubtful)
        self._known.setdefault(_storage(tensor), []).append(known)

    def _followed(self, tensor: Tensor) -> Claim | None:
        """What is believed of a tensor whose memory was seen before; None if it was not."""
        for known in reversed(self._known.get(_storage(tensor), ())):
            if isinstance(known.layout, Split):
                found = _viewed(tensor, known.tensor, known.layout)
                if found is not None:
                    return Claim(found)
            elif _within(tensor, known.tensor):
                return Claim(known.layout, doubtful=known.doubtful)
        if _storage(tensor) in self._known:
            return Claim(Unknown("it is a part of what a rank holds, cut in another way"))
        return None


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


def _made(tensor: Tensor, before: list[Tensor], entry: _Entry) -> Layout:
    """The layout of what was computed from tensors of these layouts.

    Args:
        before: what the same computation gave besides, in front of it.
    """
    like = [
        layout
        for given, layout in zip(entry.tensors, entry.layouts, strict=True)
        if given.shape == tensor.shape and layout is not None
    ]
    if like:
        place = sum(other.shape == tensor.shape for other in before)
        layout = like[min(place, len(like) - 1)]
        if isinstance(layout, Sum):
            # Few computations on summands give summands, and some add them up on the way.
            return Unknown("it is computed from what is still to be summed up")
        return layout
    if any(layout is not None for layout in entry.layouts):
        return Unknown("it is computed from what a rank holds, in a way that is not known")
    return None


def some(tensor: Tensor) -> list[float]:
    """Some entries of a tensor, to be compared with those of another rank."""
    plain = tensor.detach()
    flat = (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)
    if not flat.numel():
        return []
    return flat[:: -(-flat.numel() // _MOST)].double().tolist()


def _entries(tensor: Tensor, layout: Layout) -> tuple[list[float], ...]:
    """Some entries of each piece of a tensor's columns; of all of it, if it is in no pieces."""
    if not isinstance(layout, Split):
        return (some(tensor),)
    widths = [piece.width for piece in layout.pieces]
    return tuple(map(some, tensor.flatten(1).split(widths, 1)))


def _agreed(every: list[Visits], index: int, dummy: bool) -> Layout:
    """The layout of one tensor of a location, from what each rank believes at each visit."""
    layouts: list[Layout] = []
    if len({len(visits) for visits in every}) > 1:
        return Unknown("not every rank runs it")
    for visit in zip(*every, strict=True):
        own = [claims[index] for claims in visit if index < len(claims)]
        if not own:
            continue  # it was reached without this tensor
        layouts.append(
            _of_visit(own, dummy) if len(own) == len(every) else Unknown("not every rank runs it")
        )
    unknown = next((layout for layout in layouts if isinstance(layout, Unknown)), None)
    if unknown is None and any(layout != layouts[0] for layout in layouts):
        return Unknown("a pass reaches it several times, and the ranks hold it in different ways")
    return unknown or layouts[0]


def _of_visit(own: list[Claim], dummy: bool) -> Layout:
    layout = own[0].layout
    if any(claim.layout != layout for claim in own):
        return Unknown("the ranks hold it in different ways")
    if isinstance(layout, Unknown):
        return layout
    pieces = list(
        zip(
            *([torch.tensor(e, dtype=torch.float64) for e in claim.entries] for claim in own),
            strict=True,
        )
    )
    if layout is None:
        return _checked_whole(own, pieces[0], dummy)
    if dummy:
        return layout
    if isinstance(layout, Sum):
        return _checked_sum(pieces[0])
    return _checked_split(layout, pieces)


def _checked_whole(own: list[Claim], held: tuple[Tensor, ...], dummy: bool) -> Layout:
    blank = any(claim.blank for claim in own)
    doubtful = blank or any(claim.doubtful for claim in own)
    if (blank and dummy) or (doubtful and not any(map(_evident, held))):
        return Unknown("nothing says whether each rank holds all of it")
    if not all(itertools.starmap(close, itertools.pairwise(held))):
        return Unknown("its values differ between the ranks")
    return None


def _checked_sum(held: tuple[Tensor, ...]) -> Layout:
    if _evident(held[0]) and all(itertools.starmap(close, itertools.pairwise(held))):
        return Unknown("each rank seems to hold all of it, where it should hold a summand")
    return SUM


def _checked_split(layout: Split, pieces: list[tuple[Tensor, ...]]) -> Layout:
    # Ranks that hold the same columns follow one another, so neighbours show it.
    for piece, held in zip(layout.pieces, pieces, strict=True):
        for rank, (one, other) in enumerate(itertools.pairwise(held), 1):
            alike = close(one, other)
            if rank % piece.replicas and not alike:
                return Unknown("ranks that should hold the same of it hold different values")
            if not rank % piece.replicas and alike and _evident(one):
                return Unknown(
                    "two ranks seem to hold the same of it, where each should hold its own"
                )
    return layout


def _evident(entries: Tensor) -> bool:
    """Whether entries tell anything: zeros are what memory holds that nobody has computed."""
    return bool(entries.nan_to_num(0.0, 0.0, 0.0).any())


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks have computed the same, up to how they round."""
    if one.shape != other.shape:
        return False
    scale = one.abs().nan_to_num(0.0, 0.0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-2, atol=1e-3 * scale, equal_nan=True)
