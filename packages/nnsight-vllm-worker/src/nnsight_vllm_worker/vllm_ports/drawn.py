"""Tokens that are drawn a second time, since vLLM has dropped the first one.

Relies on (vLLM 0.26.0 and 0.27.1): with async scheduling, `reset_prefix_cache` with
`reset_running_requests=True` preempts the requests of the pass that is under way, and drops what it
draws. So of such a request no more is known when it runs again than in that pass. After any other
preemption the token of the last pass is among what is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from nnsight_vllm_worker.traced import Part


class Drawn:
    """How much was known of each request in the last pass that has drawn a token for it."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._drawing: list[str] = []
        self._ahead = 0

    def gone(self, requests: Iterable[str]) -> None:
        """Requests have left the engine; others may have their ids."""
        for request in requests:
            self._known.pop(request, None)

    def again(self) -> None:
        """The pass is over the requests of the one before, a token further each."""
        self._ahead += 1

    def begin(self, batch: list[Part]) -> list[Part]:
        """The parts of a pass; those that draw a token a second time say so."""
        known = self._known
        for request in self._drawing:
            if request in known:
                known[request] += self._ahead
        self._ahead = 0
        batch = [
            part if part.known > known.get(part.request, 0) else part._replace(again=True)
            for part in batch
        ]
        drawing = [part for part in batch if part.computed + part.tokens >= part.known]
        self._drawing = [part.request for part in drawing]
        known.update((part.request, part.known) for part in drawing)
        return batch
