"""Passes that are like the one before: the same requests, a token further each.

Most passes of an engine are. What they need of us is worked out for the first of them and holds for
as many as are known beforehand to want the same, whatever blocks do meanwhile: a block may want
less than that, and never more. So each rank of an engine knows for itself when the next plan comes.
Only what the taps write may have to end sooner, with a block that fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnsight_core.locations import STEP
from nnsight_core.lowering.affine import Steps
from nnsight_vllm_worker.copies import Seat
from nnsight_vllm_worker.traced import Part

MOST = 16
"""Passes that a plan holds for: what blocks do not want any more is copied for no longer."""


class Repeats:
    """Tells a port whether a pass is over the requests of the one before, a token further each."""

    def __init__(self) -> None:
        self._scheduled: Sequence[Any] = ()
        self._computed = np.zeros(0, dtype=np.int64)

    def begin(self, scheduled: Sequence[Any], computed: Sequence[int]) -> None:
        """A pass that runs these tokens, after so many computed ones of each request."""
        self._scheduled = scheduled
        self._computed = np.array(computed)

    def goes_on(self, scheduled: Sequence[Any], computed: np.ndarray) -> bool:
        """Whether this pass comes right after that one."""
        if scheduled != self._scheduled:
            return False
        self._computed += 1
        return np.array_equal(computed, self._computed)


def lasting(batch: list[Part], seats: list[Seat], joint: bool) -> int:
    """How many passes after this one, over the same requests, want the same.

    Args:
        seats: the blocks of the requests, all of which look at copies or at nothing.
        joint: whether other ranks go by it, which hear of nothing that happens meanwhile.
    """
    if any(part.tokens != 1 or part.known != part.computed + 1 for part in batch):
        return 0
    blocks = Counter(seat.row for seat in seats)
    return max(0, min([MOST, *(_lasts(seat, blocks[seat.row], joint) for seat in seats)]))


def _lasts(seat: Seat, blocks: int, joint: bool) -> int:
    traced, step = seat.entry.traced, seat.entry.step
    run = traced.run
    if step == 0 or seat.observed:
        return 0
    if not (run.dead or traced.alone) and (
        not run.started or (run.waits_for is STEP and run.awaits > step)
    ):
        return 0
    left = traced.ending.most - step - 2
    if traced.lowered is not None:
        # If one block of a request fails, what the others write is written anew, and what it
        # writes itself no longer.
        if blocks > 1 or (joint and not (traced.alone or run.dead)):
            return 0
        left = min([left, *(_alike(write.steps, step) for write in traced.lowered.writes)])
    return left


def _alike(steps: Steps, step: int) -> int:
    """How many steps after this one are all among those chosen, or all not, as this one."""
    if not steps or step > steps[-1]:
        return sys.maxsize
    if step == steps[-1]:
        return 0
    if isinstance(steps, range) and steps.step == 1:
        return (steps.stop - 1 if step >= steps.start else steps.start - 1) - step
    return 0
