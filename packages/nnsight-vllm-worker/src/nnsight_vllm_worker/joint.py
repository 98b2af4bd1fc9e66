"""What the ranks of an engine tell one another.

Blocks run on the first rank alone, so that no two ranks can come to different ends: there is one
run, one error, one clock, one random number. The others hold parts of the model, so they take part
in what needs them, at the moments that the first rank names. Two things they know by themselves,
from what vLLM tells every rank: which requests carry blocks, and when a pass begins.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nnsight_core.errors import LocationError
from nnsight_core.locations import Location
from nnsight_core.tree import TOKENS
from nnsight_core.values import flat, map_tensors, of_model
from nnsight_vllm_worker.layouts import Split, Sum, part
from nnsight_vllm_worker.requests import EDITS, EXTRA
from nnsight_vllm_worker.rows import Change, RowMap
from nnsight_vllm_worker.traced import Arrival
from nnsight_vllm_worker.vllm_ports.parallel import Ranks

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def or_end(step: Callable[..., _T]) -> Callable[..., _T]:
    """What goes wrong in it on this rank ends its process, and so the engine.

    Other ranks would wait for this one for ever.
    """

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> _T:
        try:
            return step(*args, **kwargs)
        except Exception:
            _log.exception("The ranks of the engine have come apart, so it ends.")
            os._exit(1)

    return watched


Name = tuple[str, str]
"""A location's path and side."""
Spans = Sequence[tuple[int, int]]


class Taken(NamedTuple):
    """Copies that the first rank takes of a pass: of taps that not each rank holds whole.

    Attributes:
        first, rows: their slots.
        spans: their rows in the batch, if there are more than slots, so that taps are listened to.
    """

    names: tuple[Name, ...]
    first: int
    rows: int
    spans: Spans | None


class Plan(NamedTuple):
    """How a pass runs. See `step.Steps`.

    Attributes:
        slots, entries: the rows that have slots, and entries of the tables; None for as before.
        placed: whether any have entries.
        tokens: how many the pass has, in how many `requests`.
        spans: the tokens of those that have blocks.
        stages: whether blocks may run between the forward pass and its end.
        quiet: whether nothing more is told until a request with a block comes.
        lasting: for how many passes after it nothing is told, since it holds for them as well.
    """

    way: int
    graphs: bool
    breaks: tuple[Name, ...]
    slots: list[tuple[int, int]] | None
    entries: list[Any] | None
    placed: bool
    taken: tuple[Taken, ...]
    tokens: int
    requests: int
    spans: Spans
    stages: bool
    quiet: bool
    lasting: int


class Writes(NamedTuple):
    """What was written at the location that is reached.

    Attributes:
        copied: whether it goes into a copy, which takes the place of what is there.
    """

    changes: tuple[Change, ...]
    copied: bool


class Go(NamedTuple):
    """Go on: the blocks have run.

    Attributes:
        waiting: the locations of this pass at which to stop.
    """

    waiting: tuple[Name, ...] = ()
    writes: Writes | None = None
    plan: Plan | None = None


class Tell(NamedTuple):
    """Do this, and wait for the next message."""

    what: str
    args: tuple[Any, ...]


class Blocked:
    """Which requests carry blocks, as every rank knows it.

    Attributes:
        quiet: whether the first rank has said that it needs nobody until another one comes.
        placed: whether tables name rows of the pass before.
    """

    def __init__(self) -> None:
        self.quiet = False
        self.placed = False
        self._requests: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether the first rank says before a pass how it runs."""
        return self.placed or (bool(self._requests) and not self.quiet)

    def come(self, new: Iterable[Arrival], gone: Iterable[str]) -> bool:
        """Requests come and go; gives whether one with a block has come."""
        self._requests.difference_update(gone)
        came = False
        for arrival in new:
            carries = EXTRA in arrival.extra or arrival.extra.get(EDITS)
            if carries and arrival.request not in self._requests:
                self._requests.add(arrival.request)
                came = True
        self.quiet = self.quiet and not came
        return came


class Values:
    """Brings together what the ranks hold of a value, and takes apart what was written.

    All ranks call the same methods, of which the first one's give the results.

    Attributes:
        spans: the tokens of the pass that requests with blocks have.
    """

    def __init__(self, ranks: Ranks, rows: RowMap, device: torch.device) -> None:
        self.ranks = ranks
        self.rows = rows
        self.device = device
        self.spans: Spans = ()

    def gather(self, location: Location, value: Any) -> Any:
        """The value with whole tensors in place of shared ones, of the rows that have blocks."""
        layouts = self.rows.layouts.get(location)
        if layouts is None:
            return value
        found = flat(value)
        try:
            axes = [
                self.rows.axis(location, index, tensor) if layouts[index] is not None else None
                for index, tensor in enumerate(found)
            ]
        except (LocationError, IndexError):
            return value  # it is refused where a block is served
        for index, (tensor, axis) in enumerate(zip(found, axes, strict=True)):
            layout = layouts[index]
            if isinstance(layout, Split | Sum):
                every = axis is None or axis.counts != TOKENS
                spans = [(0, tensor.shape[0])] if every else self.spans
                if spans:
                    found[index] = self._whole(layout, tensor, spans)
        return _rebuilt(value, found)

    def _whole(self, layout: Split | Sum, tensor: Tensor, spans: Spans) -> Tensor:
        joined = self.ranks.join(layout, rows_of(tensor, spans))
        if joined is None:
            return tensor
        whole = joined.new_empty((tensor.shape[0], *joined.shape[1:]))
        first = 0
        for start, stop in spans:
            whole[start:stop] = joined[first : first + stop - start]
            first += stop - start
        return whole

    def spread(self, location: Location, value: Any, seen: Any, writes: Writes) -> Any:
        """On the first rank: hand out what was written to `seen`; gives the value to go on with."""
        layouts = self.rows.layouts.get(location, ())
        held, written = flat(value), flat(seen)
        copied: set[int] = set()
        for change in writes.changes:
            index = change.tensor
            layout = layouts[index] if layouts else None
            rows = written[index].narrow(change.axis, change.start, change.stop - change.start)
            if not isinstance(layout, Split | Sum):
                held[index] = written[index]
                self.ranks.broadcast(rows, rows)
                continue
            if writes.copied and index not in copied:
                held[index] = held[index].clone()
                copied.add(index)
            own = held[index].narrow(change.axis, change.start, change.stop - change.start)
            if isinstance(layout, Split):
                own.copy_(self.ranks.deal(layout, rows, own))
            else:
                own.copy_(part(layout, rows, 0, self.ranks.size))
        return _rebuilt(value, held)

    def take(self, location: Location, value: Any, writes: Writes) -> Any:
        """On the other ranks: take what was written; gives the value to go on with."""
        layouts = self.rows.layouts.get(location, ())
        held = flat(value)
        copied: set[int] = set()
        for change in writes.changes:
            index = change.tensor
            layout = layouts[index] if layouts else None
            if writes.copied and index not in copied:
                held[index] = held[index].clone()
                copied.add(index)
            own = held[index].narrow(change.axis, change.start, change.stop - change.start)
            if isinstance(layout, Sum):
                own.zero_()
            elif isinstance(layout, Split):
                own.copy_(self.ranks.deal(layout, None, own))
            else:
                own.copy_(self.ranks.broadcast(None, own))
        return _rebuilt(value, held)

    def written(self, value: Any, whole: Any, seen: Any) -> Writes | None:
        """What runs have written since the location was reached.

        Args:
            whole: what they were shown.
            seen: what their writes have made of it.
        """
        assert self.rows.changes is not None
        changes = tuple(dict.fromkeys(self.rows.changes))
        self.rows.changes.clear()
        if not changes:
            return None
        shown, left, held = flat(whole), flat(seen), flat(value)
        return Writes(
            changes,
            any(left[c.tensor] is not shown[c.tensor] or of_model(held[c.tensor]) for c in changes),
        )


def rows_of(tensor: Tensor, spans: Spans) -> Tensor:
    """Some rows of a tensor, one after the other."""
    if len(spans) == 1:
        start, stop = spans[0]
        return tensor[start:stop]
    return torch.cat([tensor[start:stop] for start, stop in spans])


def _rebuilt(value: Any, parts: list[Tensor]) -> Any:
    """A value built like this one, of these tensors."""
    made = iter(parts)
    return map_tensors(value, lambda _: next(made))
