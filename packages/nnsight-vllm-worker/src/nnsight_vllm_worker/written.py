"""What blocks wrote, kept to be written again.

When memory for keys and values runs out, vLLM preempts a request: it forgets them and computes the
request's tokens anew later. The block is not run again for those, so what it wrote there is kept
and put where it was; else the request would go on as if nothing had been written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from nnsight_core.interleaver import Observed
from nnsight_core.locations import Location, Phase
from nnsight_core.tree import TOKENS
from nnsight_core.values import map_tensors, of_model
from nnsight_vllm_worker.rows import RowMap

LIMIT = 512 * 2**20
"""Bytes that all requests of a worker together may keep."""


class Allowance:
    """What is left for keeping what blocks wrote."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.left = limit


class Written:
    """What one request's block wrote in the forward pass.

    Attributes:
        lost: why not all of it was kept, if so.
    """

    def __init__(self, rows: RowMap, allowance: Allowance) -> None:
        self.lost: str | None = None
        self._rows = rows
        self._allowance = allowance
        self._used = 0
        self._kept: dict[Location, list[tuple[int, int, Tensor]]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept) or self.lost is not None

    def keep(self, location: Location, position: int, changed: dict[int, Tensor]) -> None:
        """Keep what was written at a location for tokens from `position` on."""
        if location.phase != Phase.FORWARD or self.lost is not None:
            return
        if location.repeats:
            self.lost = f"one forward pass reaches {location} more than once"
            return
        for index, tensor in changed.items():
            axis = self._rows.axis_kept(location, index)
            size = tensor.numel() * tensor.element_size()
            if axis is None or axis.counts != TOKENS:
                self.lost = f"{location} has no rows of tokens"
            elif size > self._allowance.left:
                self.lost = f"blocks keep no more than {LIMIT >> 20} MiB of what they write"
            if self.lost is not None:
                self.release()
                return
            self._allowance.left -= size
            self._used += size
            self._kept.setdefault(location, []).append((position, index, tensor.clone()))

    def release(self) -> None:
        """Keep nothing any longer."""
        self._kept.clear()
        self._allowance.left += self._used
        self._used = 0

    def again(self, key: object, computed: int, tokens: int) -> Iterable[Observed]:
        """What is to be written again in a pass over `tokens` tokens from `computed` on."""
        observer = _Again(self._rows, key, computed, tokens, self._kept)
        return [(location, observer) for location in self._kept]


class _Again:
    """Writes in one forward pass what was written before."""

    def __init__(
        self,
        rows: RowMap,
        key: object,
        computed: int,
        tokens: int,
        kept: dict[Location, list[tuple[int, int, Tensor]]],
    ) -> None:
        self._rows = rows
        self._key = key
        self._computed = computed
        self._until = computed + tokens
        self._kept = kept

    def see(self, location: Location, value: Any) -> Any:
        indices = itertools.count()

        def change(tensor: Tensor) -> Tensor:
            index = next(indices)
            due = [(at, rows) for at, i, rows in self._kept[location] if i == index]
            if not due:
                return tensor
            axis = self._rows.axis(location, index, tensor)
            assert axis is not None
            if location.side == "input" or of_model(tensor):
                tensor = tensor.clone()
            first = self._rows.span(self._key).first
            for position, rows in due:
                start = max(position, self._computed)
                stop = min(position + rows.shape[axis.axis], self._until)
                if start < stop:
                    at = first + start - self._computed
                    own = tensor.narrow(axis.axis, at, stop - start)
                    own.copy_(rows.narrow(axis.axis, start - position, stop - start))
                    self._rows.changed(location, index, at, at + stop - start)
            return tensor

        return map_tensors(value, change)
