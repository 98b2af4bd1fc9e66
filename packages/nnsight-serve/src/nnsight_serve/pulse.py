"""Whether the engine answers, and what it says of itself.

One question is under way at most, however many ask: an engine that hangs is not asked again before
it has answered.
"""

from __future__ import annotations

import asyncio

from nnsight_core.errors import EngineDeadError
from nnsight_vllm_worker.async_engine import AsyncEngine

WITHIN = 3.0
"""Seconds in which an engine that is well has answered, unless a block holds it."""


class Pulse:
    """Asks one engine.

    Attributes:
        counts: what it said last; see `AsyncEngine.counts`.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.counts: dict[str, int] = {}
        self._engine = engine
        self._asking: asyncio.Task[None] | None = None

    async def beats(self, within: float = WITHIN) -> bool:
        """Whether the engine answers within some seconds, to this or to a question before."""
        if not self._engine.alive:
            return False
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        done, _ = await asyncio.wait((self._asking,), timeout=within)
        well = bool(done) and not self._asking.cancelled() and self._asking.exception() is None
        return well and self._engine.alive

    async def _ask(self) -> None:
        try:
            self.counts = await self._engine.counts()
        except EngineDeadError:
            return

    def stop(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()
