"""Locations: what a block can name, and when in a step each is reached.

A step is one forward pass of a request. Its locations are reached in phases: the modules (and
`.source` operations) in forward order, then the logits, then the sampled ids; the finished output
comes once, after the last step.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When a location is reached."""

    FORWARD = 0
    LOGITS = 1
    SAMPLES = 2
    RESULT = 3
    OVER = 4


class Location:
    """One place where a value can be read or written: a module or operation and its side.

    Attributes:
        path: the module's path (`model.layers.3.mlp`), with `.source.NAME` for an operation; empty
            for an engine value.
        side: `output`, `input`, or the engine value's name.
        phase: when it is reached.
        repeats: whether one forward pass reaches it more than once (a module shared by layers).
    """

    __slots__ = ("path", "phase", "repeats", "side")

    def __init__(self, path: str, side: str, phase: Phase = Phase.FORWARD) -> None:
        self.path = path
        self.side = side
        self.phase = phase
        self.repeats = False

    def __str__(self) -> str:
        return f"{self.path}.{self.side}" if self.path else self.side

    def __repr__(self) -> str:
        return f"<Location {self}>"


LOGITS = Location("", "logits", Phase.LOGITS)
SAMPLES = Location("", "samples", Phase.SAMPLES)
RESULT = Location("", "result", Phase.RESULT)
STEP = Location("", "step", Phase.RESULT)
"""Where a run parks that waits for one of its request's later steps to begin."""
