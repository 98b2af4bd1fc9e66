"""Copies of what blocks want of a pass that runs vLLM's own way, taken when it is over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nnsight_core.interleaver import Interleaver, Observed
from nnsight_core.locations import Location
from nnsight_core.wants import Way
from nnsight_vllm_worker.tables import Span
from nnsight_vllm_worker.taps import Taps
from nnsight_vllm_worker.traced import Entry


@dataclass(slots=True, eq=False)
class Seat:
    """A request's place in a pass.

    Attributes:
        row: its row among the requests of the batch.
        observed: what looks on besides its block.
        taps: the taps that it may want.
        logits: whether it wants the logits.
        way: the fastest way that gives it what it wants.
        spans: the rows of its part of the pass that the tables write.
    """

    entry: Entry
    row: int
    observed: list[Observed]
    taps: dict[Location, None] = field(default_factory=dict)
    logits: bool = False
    way: Way = Way.PLAIN
    spans: tuple[Span, ...] = ()

    @property
    def last(self) -> bool:
        """Whether its request surely ends with this pass."""
        return self.entry.draws and self.entry.traced.ending.last(self.entry.step)


class Copies:
    """What is kept of one pass for some of its requests, one after the other.

    Args:
        seats: the requests.
        spans: the rows of each in the batch.
        first: the slot of the first of them.

    Attributes:
        values: by tap, in the order of the forward pass.
    """

    def __init__(self, taps: Taps, seats: list[Seat], spans: list[tuple[int, int]], first: int):
        self.seats = seats
        self.spans = spans
        self.values: dict[Location, Any] = {}
        self.rows = sum(stop - start for start, stop in spans)
        wanted = {at for seat in seats for at in seat.taps}
        self.wanted = [at for at in taps.taps if at in wanted]
        self._taps = taps
        self._first = first

    def take(self) -> None:
        """Copy what lies in the slots."""
        if self.wanted and not self.values:
            self.values = self._taps.copies(self.wanted, self._first, self.rows)

    def listen(self) -> None:
        """Have it copied within the pass: there are more rows than slots."""
        self._taps.listen(self.wanted, self._hear)

    def _hear(self, at: Location, tensors: list[Tensor]) -> None:
        cut = [torch.cat([t[start:stop] for start, stop in self.spans]) for t in tensors]
        self.values[at] = self._taps.value(at, cut)

    def visit(self, interleaver: Interleaver) -> None:
        """Bring the copies to the runs that wait for them, as a forward pass would."""
        for location, value in self.values.items():
            if location in interleaver.waiting or location in interleaver.observers:
                interleaver.arrive(location, value)
            else:
                interleaver.passed.add(location)

    def order(self) -> list[tuple[object, int, int, int]]:
        """The requests' keys, rows and places, as `RowMap.place_copies` takes them."""
        return [
            (seat.entry.traced, stop - start, seat.entry.live, place)
            for place, (seat, (start, stop)) in enumerate(zip(self.seats, self.spans, strict=True))
        ]


def spans_of(seats: Sequence[Seat], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The rows of the steps of these requests in a batch of so many tokens each."""
    stops = list(itertools.accumulate(tokens))
    return [(stops[seat.row] - seat.entry.live, stops[seat.row]) for seat in seats]


def take_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """A copy of some rows, without waiting for the device."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)].clone()
    index = torch.tensor(rows, pin_memory=tensor.is_cuda)
    return tensor.index_select(0, index.to(tensor.device, non_blocking=True))
