"""Rows: which part of a step's packed values belongs to which request.

vLLM packs the tokens of all requests of a step along one axis, in the order of its batch, and what
it computes per request (logits, sampled ids) along another. Which axis of which tensor is which was
recorded when the engine started, by running the model at two sizes, so that a tensor whose length
happens to equal the number of tokens is never cut by mistake.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nnsight_core.errors import LocationError
from nnsight_core.locations import LOGITS, SAMPLES, Location
from nnsight_core.run import Run
from nnsight_core.tree import REQUESTS, TOKENS, TensorInfo
from nnsight_core.values import map_tensors
from nnsight_vllm_worker.layouts import Layout, Split, Sum, Unknown


class Span(NamedTuple):
    """One request's place in a forward pass.

    Its tokens are `first:stop`; those of its step are `start:stop` (the ones before are computed
    anew, after a preemption); `row` is its place among the requests.
    """

    first: int
    start: int
    stop: int
    row: int


class Change(NamedTuple):
    """Rows that were written: of which tensor of a value, along which of its axes."""

    tensor: int
    axis: int
    start: int
    stop: int


class Placed(NamedTuple):
    """A request in a pass: the keys of its runs, its tokens, those of its step, its place."""

    keys: Sequence[object]
    tokens: int
    live: int
    row: int


@dataclass(frozen=True, slots=True)
class Axis:
    """Which axis of a tensor counts what."""

    axis: int
    counts: str


Reason = str


def axis_of(info: TensorInfo) -> Axis | Reason | None:
    """The axis along which requests lie; None if there is none, a reason if it is not known."""
    named = [(i, d) for i, d in enumerate(info.shape) if isinstance(d, str)]
    if not named:
        return None
    if len(named) > 1 or named[0][1] not in (TOKENS, REQUESTS):
        return f"its shape {info} does not say which part belongs to which request"
    return Axis(*named[0])


class RowMap:
    """The spans of the forward pass that is running. See `nnsight_core.visit.Rows`.

    Keys of runs are `Traced`s, which know what came of their request's prompt before.

    Args:
        like: another map, whose recorded axes this one shares.
        private: whether the values are copies already, which nothing else reads.

    Attributes:
        layouts: how the ranks hold the tensors of locations that not each holds whole.
        changes: what was written since somebody last asked; None if nobody asks.
    """

    def __init__(self, like: RowMap | None = None, private: bool = False) -> None:
        per_request = (Axis(0, REQUESTS),)
        self.private = private
        self._axes: dict[Location, tuple[Axis | Reason | None, ...]] = {
            LOGITS: per_request,
            SAMPLES: per_request,
        }
        self.layouts: dict[Location, tuple[Layout, ...]] = {}
        self.changes: list[Change] | None = None
        if like is not None:
            self._axes = like._axes
        self._spans: dict[object, Span] = {}
        self._totals: dict[str, int] = {}

    def know(
        self, location: Location, infos: tuple[TensorInfo, ...], layouts: tuple[Layout, ...] = ()
    ) -> None:
        """Take over what was recorded of a location."""
        axes: list[Axis | Reason | None] = [axis_of(info) for info in infos]
        for index, layout in enumerate(layouts):
            axis = axes[index]
            if isinstance(layout, Unknown):
                axes[index] = f"it lies on several ranks, and {layout.why}"
            elif layout is not None and (not isinstance(axis, Axis) or axis.axis != 0):
                axes[index] = "it lies on several ranks, and does not begin with its rows"
        self._axes[location] = tuple(axes)
        if any(isinstance(layout, Split | Sum) for layout in layouts):
            self.layouts[location] = layouts

    def known(self) -> Collection[Location]:
        """The locations that were recorded."""
        return self._axes.keys()

    def place(self, order: Sequence[Placed], requests: int) -> None:
        """Take the rows of a pass, or of copies that hold some requests' tokens only.

        Args:
            order: the requests, as their tokens follow one another.
            requests: how many there are along the other axis.
        """
        self._spans = {}
        first = 0
        for keys, tokens, live, row in order:
            stop = first + tokens
            for key in keys:
                self._spans[key] = Span(first, stop - live, stop, row)
            first = stop
        self._totals = {TOKENS: first, REQUESTS: requests}

    def count(self, tokens: int, requests: int) -> None:
        """Take how many tokens and requests a pass has, and no more."""
        self._totals = {TOKENS: tokens, REQUESTS: requests}

    def span(self, key: object) -> Span:
        """The place of a request."""
        return self._spans[key]

    def axis(self, location: Location, index: int, tensor: Tensor) -> Axis | None:
        """Along which axis the requests lie in the `index`-th tensor of a value; None if nowhere.

        Raises:
            LocationError: it is not known, or not as it was recorded.
        """
        axes = self._axes.get(location)
        if axes is None:
            raise LocationError(
                f"{location} did not run when the engine recorded its locations, so its rows "
                "cannot be told apart."
            )
        axis = axes[index] if index < len(axes) else "it was built otherwise when it was recorded"
        if axis is None:
            return None
        if isinstance(axis, str):
            raise LocationError(f"{location} cannot be served: {axis}.")
        total = self._totals[axis.counts]
        if tensor.dim() <= axis.axis or tensor.shape[axis.axis] < total:
            raise LocationError(
                f"{location} has shape {list(tensor.shape)} in a step of {total} {axis.counts}, "
                "which is not how it was recorded."
            )
        return axis

    def axis_kept(self, location: Location, index: int) -> Axis | None:
        """As `axis`, of a tensor that was served before."""
        axis = self._axes[location][index]
        return axis if isinstance(axis, Axis) else None

    # -- Rows ------------------------------------------------------------------------------------

    def view(self, run: Run, location: Location, index: int, tensor: Tensor) -> Tensor | None:
        axis = self.axis(location, index, tensor)
        if axis is None:
            return None
        span = self._spans[run.key]
        if axis.counts == TOKENS:
            return tensor.narrow(axis.axis, span.start, span.stop - span.start)
        return tensor.narrow(axis.axis, span.row, 1)

    def whole(self, run: Run, location: Location, index: int, rows: Tensor) -> Tensor:
        pieces: Any = run.key.pieces
        if pieces is None:
            return rows
        axis = self.axis_kept(location, index)
        if axis is None or axis.counts != TOKENS:
            return rows
        return torch.cat([*pieces.before(location, index), rows], axis.axis)

    def own(self, run: Run, location: Location, value: Any) -> Any:
        """The run's own part of a value that nothing else reads, and no run has been given."""
        indices = itertools.count()

        def cut(tensor: Tensor) -> Tensor:
            rows = self.view(run, location, next(indices), tensor)
            # `data`: a view would share its count of versions with the views of other requests.
            return (tensor if rows is None else rows).data

        return self.completed(run, location, map_tensors(value, cut))

    def completed(self, run: Run, location: Location, value: Any) -> Any:
        """A run's own part of a value, with the rows that came in passes before."""
        if run.key.pieces is None:
            return value
        indices = itertools.count()
        return map_tensors(value, lambda rows: self.whole(run, location, next(indices), rows))

    def changed(self, location: Location, index: int, start: int, stop: int) -> None:
        """Rows of a tensor are written, counted along the axis of requests."""
        axis = self.axis_kept(location, index)
        if self.changes is not None and axis is not None:
            self.changes.append(Change(index, axis.axis, start, stop))

    def wrote(self, run: Run, location: Location, changed: dict[int, Tensor]) -> None:
        span = self._spans[run.key]
        for index in changed if self.changes is not None else ():
            axis = self.axis_kept(location, index)
            if axis is not None and axis.counts == TOKENS:
                self.changed(location, index, span.start, span.stop)
            else:
                self.changed(location, index, span.row, span.row + 1)
        run.key.written.keep(location, run.key.position, changed)
