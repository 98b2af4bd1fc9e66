"""Copies of what blocks want of a pass that runs vLLM's own way, taken when it is over."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nnsight_core.interleaver import Interleaver, Observed
from nnsight_core.locations import Location
from nnsight_core.run import Run
from nnsight_core.values import flat
from nnsight_core.wants import Way
from nnsight_vllm_worker.rows import Placed, RowMap
from nnsight_vllm_worker.taps import Kept, Taps
from nnsight_vllm_worker.traced import Entry


@dataclass(slots=True, eq=False)
class Seat:
    """A block's place in a pass.

    Attributes:
        row: its row among the requests of the batch.
        observed: what looks on besides its block.
        taps: the taps that it may want.
        logits: whether it wants the logits.
        way: the fastest way that gives it what it wants.
        place: its request's place among those of which copies are kept.
    """

    entry: Entry
    row: int
    observed: list[Observed]
    taps: dict[Location, None] = field(default_factory=dict)
    logits: bool = False
    way: Way = Way.PLAIN
    place: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing has to be known of the pass for it."""
        traced = self.entry.traced
        return traced.idle or traced.skips(self.entry)

    @property
    def last(self) -> bool:
        """Whether its request surely ends with this pass."""
        return self.entry.draws and self.entry.traced.ending.last(self.entry.step)


class Copies:
    """What is kept of one pass for some of its requests, one after the other.

    Args:
        seats: their blocks; those of one request follow one another.
        tokens: how many tokens each request of the batch has.
        first: the slot of the first request.

    Attributes:
        requests: the requests' rows among those of the batch.
        spans: the rows of each request's step in the batch.
        first: the slot of the first one.
        ahead: how many passes after that of its seats it is of.
        blind: whether all of the requests end by their length alone.
        values: by tap, in the order of the forward pass.
    """

    def __init__(self, taps: Taps, seats: list[Seat], tokens: Sequence[int], first: int) -> None:
        self.seats = seats
        self.ahead = 0
        self.blind = all(seat.entry.traced.ending.blind for seat in seats)
        self.requests: list[int] = []
        self.spans: list[tuple[int, int]] = []
        stops = list(itertools.accumulate(tokens))
        for seat in seats:
            if not self.requests or self.requests[-1] != seat.row:
                self.requests.append(seat.row)
                self.spans.append((stops[seat.row] - seat.entry.live, stops[seat.row]))
            seat.place = len(self.requests) - 1
        spans = self.spans
        self.values: Mapping[Location, Any] = {}
        self.rows = sum(stop - start for start, stop in spans)
        wanted = {at for seat in seats for at in seat.taps}
        self.wanted = tuple(at for at in taps.taps if at in wanted)
        self._heard: dict[Location, Any] = {}
        self._listening = False
        self._short: torch.OutOfMemoryError | None = None
        self._taps = taps
        self.first = first

    def next(self) -> Copies:
        """Those of the pass after it, which is over the same requests, a token further each."""
        after = copy(self)
        after.ahead += 1
        after.values = {}
        return after

    def take(self) -> None:
        """Copy what lies in the slots.

        Raises:
            torch.OutOfMemoryError: memory is short.
        """
        if self._short is not None:
            raise self._short
        if self._listening:
            self.values = self._heard
        elif self.wanted:
            lengths = [stop - start for start, stop in self.spans]
            self.values = self._taps.copies(self.wanted, self.first, lengths)

    def give_up(self) -> list[Seat]:
        """Keep nothing; gives the blocks that had wanted something."""
        wanting = [seat for seat in self.seats if seat.taps or seat.logits]
        self.seats = [seat for seat in self.seats if not (seat.taps or seat.logits)]
        self.values = {}
        return wanting

    def listen(self) -> None:
        """Have it copied within the pass: there are more rows than slots."""
        self._listening = True
        self._taps.listen(self.wanted, self._hear)

    def _hear(self, at: Location, tensors: list[Tensor]) -> None:
        if self._short is not None:
            return
        try:
            cut = cut_rows(tensors, self.spans)
        except torch.OutOfMemoryError as error:
            if self._taps.count > 1:
                raise
            # The pass is everybody's: whom the copies are for is told when it is over.
            self._short = error
            self._heard.clear()
        else:
            self._heard[at] = self._taps.value(at, self._taps.whole(at, cut))

    def own(self, run: Run, at: Location, rows: RowMap) -> Any:
        """What of a tap is one run's own, in tensors that nobody else has been given."""
        if isinstance(self.values, Kept):
            return rows.completed(run, at, self.values.of(at, rows.span(run.key).row))
        return rows.own(run, at, self.values[at])

    def tensors(self) -> list[Tensor]:
        """The memory of the copies."""
        if isinstance(self.values, Kept):
            return self.values.tensors()
        return flat(list(self.values.values()))

    def visit(self, interleaver: Interleaver) -> None:
        """Bring the copies to the runs that wait for them, as a forward pass would."""
        for location in self.values:
            if location in interleaver.waiting or location in interleaver.observers:
                interleaver.arrive(location, self.values[location])
            else:
                interleaver.passed.add(location)

    def order(self, in_batch: bool) -> list[Placed]:
        """The requests as `RowMap.place` takes them.

        Args:
            in_batch: whether they have the places that they have in the batch.
        """
        keys: list[list[object]] = [[] for _ in self.requests]
        for seat in self.seats:
            keys[seat.place].append(seat.entry.traced)
        return [
            # Copies hold nothing but the step's own tokens.
            Placed(keys[place], stop - start, stop - start, row if in_batch else place)
            for place, (row, (start, stop)) in enumerate(
                zip(self.requests, self.spans, strict=True)
            )
        ]


def cut_rows(tensors: list[Tensor], spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Copies of the rows of some spans, one after the other."""
    return [torch.cat([t[start:stop] for start, stop in spans]) for t in tensors]


def take_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """A copy of some rows, without waiting for the device."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)].clone()
    index = torch.tensor(rows, pin_memory=tensor.is_cuda)
    return tensor.index_select(0, index.to(tensor.device, non_blocking=True))
