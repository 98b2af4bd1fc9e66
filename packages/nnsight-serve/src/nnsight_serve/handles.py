"""The values that clients keep on the engine: who has the handle of each."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from nnsight_core.wire.frames import Frame
from nnsight_vllm_worker.requests import handles_of

_REMEMBERED = 1 << 12
"""Of how many handles that stand for nothing any more it is known whose they were, as the engine
knows why."""


class Handles:
    """Whose the handles are that have gone out.

    Args:
        seconds: after which the engine lets a value go, whoever has its handle.

    Attributes:
        seconds: as given.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._of: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._were: OrderedDict[str, str] = OrderedDict()

    def went(self, frame: Frame, caller: str) -> list[str]:
        """A frame goes to a caller; the handles in it are that caller's from now on."""
        ids = handles_of(frame)
        for id in ids:
            self._of[id] = caller, time.monotonic()
        self._forget()
        return ids

    def of(self, caller: str, ids: Iterable[str]) -> list[str]:
        """Which of some handles are a caller's."""
        # Traces are read in threads, so that an id may leave between two looks.
        found = [(id, self._of.get(id)) for id in ids]
        return [id for id, held in found if held is not None and held[0] == caller]

    def owned_by(self, caller: str) -> Callable[[str], bool]:
        """Says whether a handle is a caller's, or was before its value went."""
        return lambda id: bool(self.of(caller, [id])) or self._were.get(id) == caller

    def freed(self, ids: Iterable[str]) -> None:
        """Handles that stand for nothing any more."""
        for id in ids:
            held = self._of.pop(id, None)
            if held is not None:
                self._were[id] = held[0]
        while len(self._were) > _REMEMBERED:
            self._were.popitem(last=False)

    def _forget(self) -> None:
        oldest = time.monotonic() - self.seconds - 1
        while self._of and next(iter(self._of.values()))[1] < oldest:
            self.freed([next(iter(self._of))])
