"""Prompts that run in several pieces (chunked prefill), for blocks that only read.

Such a block runs in the last piece, and is to see the whole prompt there. So what it may read, as
far as its text says, is copied from each piece that comes before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from nnsight_core.errors import LocationError
from nnsight_core.interleaver import Observed
from nnsight_core.locations import Location, Phase
from nnsight_core.run import Run
from nnsight_core.values import tensors
from nnsight_core.visit import outside_inference


class Pieces:
    """What has been seen of one request's prompt; looks on at a pass that is not its last.

    Args:
        known: the locations that were recorded.
        reads: what the block may read, as `BlockData.reads` says it.

    Attributes:
        tokens: how many tokens of the prompt have run.
    """

    def __init__(self, known: Collection[Location], run: Run, reads: list[str]) -> None:
        self.tokens = 0
        self._known = known
        self._run = run
        self._reads = _patterns(reads)
        self._seen: dict[tuple[Location, int], list[Tensor]] = {}
        self._failed: dict[Location, Exception] = {}

    def observed(self, tokens: int) -> Iterable[Observed]:
        """Where it looks on in a pass over so many tokens of the prompt."""
        self.tokens += tokens
        return [(at, self) for at in self._known if self._wants(at)]

    def see(self, location: Location, value: Any) -> Any:
        try:
            with outside_inference():
                for index, (_, tensor) in enumerate(tensors(value)):
                    own = self._run.key.rows.view(self._run, location, index, tensor)
                    if own is not None:
                        self._seen.setdefault((location, index), []).append(own.clone())
        except Exception as error:  # it matters only if the block asks for this location
            self._failed[location] = error
        return value

    def before(self, location: Location, index: int) -> list[Tensor]:
        """The rows of a location from the earlier pieces.

        Raises:
            LocationError: they were not kept.
        """
        failed = self._failed.get(location)
        if failed is not None:
            raise failed
        kept = self._seen.get((location, index))
        if kept is not None and not location.repeats:
            return kept
        why = (
            "one forward pass reaches it more than once"
            if location.repeats
            else "the block's text does not say that it reads it"
        )
        raise LocationError(
            f"{location} cannot be served whole: the prompt ran in several pieces, and {why}. Name "
            "the module plainly, or let a step take more tokens (max_num_batched_tokens=)."
        )

    def _wants(self, location: Location) -> bool:
        return location.phase == Phase.FORWARD and self._reads.fullmatch(str(location)) is not None


def _patterns(reads: list[str]) -> re.Pattern[str]:
    """One expression for all patterns: `*` is one part of a path, `**` any number of them."""
    parts = [
        re.escape(read).replace(r"\*\*", ".*").replace(r"\*", "[^.]*").replace("inputs", "input")
        for read in reads
    ]
    return re.compile("|".join(parts) or r"(?!)")
