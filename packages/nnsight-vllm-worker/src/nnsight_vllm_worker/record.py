"""Recording: what every location holds, seen by running the model at two sizes.

A dimension that follows the number of tokens from one run to the other is the token axis; one that
stays is a width. No requests are in the engine while this runs, and no KV cache is touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from nnsight_core.interleaver import Interleaver
from nnsight_core.locations import Location
from nnsight_core.node import Places
from nnsight_core.tree import REQUESTS, TOKENS, Dim, ModelTree, TensorInfo
from nnsight_core.values import dtype_name, map_tensors, tensors
from nnsight_core.watch import Watch, recording
from nnsight_vllm_worker.layouts import Layout, Sum, Unknown, whole_shape
from nnsight_vllm_worker.rows import RowMap

SIZES = ((11, 2), (17, 3))
"""Tokens and requests of the two runs: no two of these numbers, nor their ratios, coincide."""

Shapes = tuple[tuple[str, str, tuple[int, ...]], ...]


class Slot(int):
    """Stands for the tensor of this number in the form of a value."""


class Record:
    """What was seen at each location.

    Attributes:
        seen: the tensors of each location, with symbolic shapes.
        repeated: the locations that one forward pass reaches more than once.
        forms: how each value is built, with a `Slot` for each tensor.
        order: the locations in the order of the forward pass.
        layouts: how the ranks hold the tensors of each location, by its name, if there are several.
        rank, ranks: which of them this one is, and how many there are.
    """

    def __init__(self) -> None:
        self.forms: dict[Location, Any] = {}
        self.order: list[Location] = []
        self.seen: dict[Location, tuple[TensorInfo, ...]] = {}
        self.repeated: set[Location] = set()
        self.layouts: dict[str, tuple[Layout, ...]] = {}
        self.rank, self.ranks = 0, 1

    def teach(
        self, rows: RowMap, places: Places, locations: Iterable[Location] | None = None
    ) -> None:
        """Let the row map know what was seen at some locations, or at all of them.

        Args:
            places: where the locations are, which may not be those that were recorded.
        """
        for seen in self.seen if locations is None else locations:
            location = places.location(seen.path, seen.side)
            location.repeats = seen in self.repeated
            rows.know(location, self.seen[seen], self.layouts.get(str(seen), ()))

    def tree(self, tree: ModelTree, watch: Watch) -> ModelTree:
        """The tree with what was seen in it."""
        modules = {}
        for path, info in tree.modules.items():
            at = info.same_as or path
            output = watch.places.location(at, "output")
            entry = watch.places.location(at, "input")
            modules[path] = info.model_copy(
                update={
                    "repeats": output in self.repeated,
                    "output": self.whole(output),
                    "input": self.whole(entry),
                }
            )
        return tree.model_copy(update={"modules": modules, "ranks": self.ranks})

    def whole(self, location: Location) -> tuple[TensorInfo, ...] | None:
        """The tensors of a location as a single GPU has them; None if it was not seen."""
        infos = self.seen.get(location)
        layouts = self.layouts.get(str(location))
        if infos is None or layouts is None:
            return infos
        return tuple(
            _whole(info, layout, self.ranks) for info, layout in zip(infos, layouts, strict=True)
        )


def _whole(info: TensorInfo, layout: Layout, ranks: int) -> TensorInfo:
    if layout is None:
        return info
    if isinstance(layout, Unknown):
        return info.model_copy(update={"shape": ("?",) * len(info.shape)})
    if isinstance(layout, Sum):
        return info.model_copy(update={"shared": "sum"})
    shape = whole_shape(layout, info.shape, ranks)
    return info.model_copy(update={"shape": shape, "shared": "columns"})


def record(
    interleaver: Interleaver,
    forward: Callable[[int, int], None],
    sizes: Any = SIZES,
    see: Callable[[Location, Any], None] = lambda location, value: None,
) -> Record:
    """Run the model at two sizes and compare.

    Args:
        forward: runs it on so many tokens, and the logits of so many requests.
        see: called with each location's value in the first run.
    """
    runs: list[dict[Location, Shapes]] = []
    found = Record()
    for tokens, requests in sizes:
        shapes: dict[Location, Shapes] = {}

        def note(location: Location, value: Any, shapes: dict[Location, Shapes] = shapes) -> None:
            if not runs:
                see(location, value)
            if location in shapes:
                found.repeated.add(location)
            else:
                found.order.append(location)
            number = itertools.count()
            found.forms[location] = map_tensors(value, lambda _: Slot(next(number)))
            shapes[location] = tuple(
                (at, dtype_name(t.dtype), tuple(t.shape)) for at, t in tensors(value)
            )

        with recording(interleaver, note):
            forward(tokens, requests)
        runs.append(shapes)
    found.order = list(dict.fromkeys(found.order))
    first, second = runs
    for location in first.keys() & second.keys():
        found.seen[location] = _compare(first[location], second[location], sizes)
    return found


def _compare(first: Shapes, second: Shapes, sizes: Any) -> tuple[TensorInfo, ...]:
    infos = []
    for index, (at, dtype, shape) in enumerate(first):
        other = second[index][2] if index < len(second) else ()
        dims: tuple[Dim, ...] = ("?",) * len(shape)
        if len(other) == len(shape):
            dims = tuple(_dim(pair, sizes) for pair in zip(shape, other, strict=True))
        infos.append(TensorInfo(at=at, dtype=dtype, shape=dims))
    return tuple(infos)


def _dim(pair: tuple[int, int], sizes: Any) -> Dim:
    if pair[0] == pair[1]:
        return pair[0]
    (tokens, requests), (more_tokens, more_requests) = sizes
    if pair == (tokens, more_tokens):
        return TOKENS
    return REQUESTS if pair == (requests, more_requests) else "?"
