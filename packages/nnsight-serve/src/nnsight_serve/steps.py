"""In which way the steps of a request ran, by what its blocks say when they end."""

from __future__ import annotations

from collections import Counter
from typing import Any

WAYS = ("eager", "interleaved", "after", "deferred", "tables", "plain")
"""The ways of steps, the slowest first."""


class Steps:
    """Counts the steps of a request, each once, however many blocks were there.

    A step ran as slowly as its slowest block had it.

    Example:
        >>> steps = Steps()
        >>> steps.take({"key": "0", "ways": {"eager": 4}})
        >>> steps.take({"key": "0", "ways": {"plain": 3, "eager": 1}, "edit": "probe#1"})
        >>> steps.new()
        {'eager': 4}
    """

    def __init__(self) -> None:
        # Of each sequence: how many of its steps ran in a way or in a slower one.
        self._until: dict[tuple[str, int], dict[str, int]] = {}
        self._told: Counter[str] = Counter()

    def take(self, header: dict[str, Any]) -> None:
        """A block has ended; this says how the steps of its sequence ran by then."""
        until = self._until.setdefault((header["key"], header.get("sequence", 0)), {})
        ways, total = header.get("ways") or {}, 0
        for way in WAYS:
            total += ways.get(way, 0)
            until[way] = max(until.get(way, 0), total)

    def new(self) -> dict[str, int]:
        """How many steps more ran in each way than were told of before."""
        found: Counter[str] = Counter()
        for until in self._until.values():
            before = 0
            for way in WAYS:
                found[way] += until[way] - before
                before = until[way]
        new = found - self._told
        self._told += new
        return dict(new)
