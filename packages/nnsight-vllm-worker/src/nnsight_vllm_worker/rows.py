"""Rows: which part of a step's packed values belongs to which request.

vLLM packs the tokens of all requests of a step along one axis, in the order of its batch, and what
it computes per request (logits, sampled ids) along another. Which axis of which tensor is which was
recorded when the engine started, by running the model at two sizes, so that a tensor whose length
happens to equal the number of tokens is never cut by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nnsight_core.errors import LocationError
from nnsight_core.locations import LOGITS, SAMPLES, Location
from nnsight_core.run import Run
from nnsight_core.tree import REQUESTS, TOKENS, TensorInfo


class Span(NamedTuple):
    """One request's place in a step: its tokens `start:stop`, and its `row` among the requests."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class Axis:
    """Which axis of a tensor counts what."""

    axis: int
    counts: str


Unknown = str


def axis_of(info: TensorInfo) -> Axis | Unknown | None:
    """The axis along which requests lie; None if there is none, a reason if it is not known."""
    named = [(i, d) for i, d in enumerate(info.shape) if isinstance(d, str)]
    if not named:
        return None
    if len(named) > 1 or named[0][1] not in (TOKENS, REQUESTS):
        return f"its shape {info} does not say which part belongs to which request"
    return Axis(*named[0])


class RowMap:
    """The spans of the step that is running. See `nnsight_core.visit.Rows`."""

    def __init__(self) -> None:
        per_request = (Axis(0, REQUESTS),)
        self._axes: dict[Location, tuple[Axis | Unknown | None, ...]] = {
            LOGITS: per_request,
            SAMPLES: per_request,
        }
        self._spans: dict[object, Span] = {}
        self._totals: dict[str, int] = {}

    def know(self, location: Location, infos: tuple[TensorInfo, ...]) -> None:
        """Take over what was recorded of a location."""
        self._axes[location] = tuple(axis_of(info) for info in infos)

    def place(self, order: list[tuple[object, int]]) -> None:
        """Take the rows of a step: each request's key and number of tokens, in batch order."""
        self._spans = {}
        start = 0
        for row, (key, tokens) in enumerate(order):
            self._spans[key] = Span(start, start + tokens, row)
            start += tokens
        self._totals = {TOKENS: start, REQUESTS: len(order)}

    def view(self, run: Run, location: Location, index: int, tensor: Tensor) -> Tensor | None:
        """The run's rows of a tensor. See `nnsight_core.visit.Rows.view`."""
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
        span = self._spans[run.key]
        if axis.counts == TOKENS:
            return tensor.narrow(axis.axis, span.start, span.stop - span.start)
        return tensor.narrow(axis.axis, span.row, 1)
