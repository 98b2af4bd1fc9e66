"""The step path: what happens around one forward pass of the engine.

    requests come and go → rows are placed → the way is chosen → runs go on → forward, with its
    visits → logits → sampled ids → what ended is collected and sent

A port (`vllm_ports`) calls the methods of `Steps` in this order from vLLM's runner. A pass without
traced requests costs one look at a dict.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor

from nnsight_core.errors import EngineError
from nnsight_core.interleaver import Interleaver, Observed
from nnsight_core.locations import LOGITS, RESULT, SAMPLES, Phase
from nnsight_core.run import Run
from nnsight_vllm_worker.requests import Tracing
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.traced import Arrival, Part, Traced


class Way(Enum):
    """How a pass runs. The eager way reaches every location."""

    PLAIN = "plain"
    """Nothing looks on: vLLM's own pass, untouched."""
    EAGER = "eager"
    """The model's Python runs, and every module reports its visits."""


class Steps:
    """The steps of one engine, and the traced requests in it."""

    def __init__(self, rows: RowMap, interleaver: Interleaver, tracing: Tracing) -> None:
        self.rows = rows
        self.interleaver = interleaver
        self.tracing = tracing
        self.way = Way.PLAIN
        self._drawing: list[tuple[int, Traced]] = []

    def requests(self, new: list[Arrival], gone: set[str]) -> None:
        """Requests come and go; a pass before that was interrupted is over."""
        if self.way is not Way.PLAIN:
            self.way = Way.PLAIN
            self._drawing.clear()
            self.interleaver.advance(Phase.OVER)
        for request in gone:
            self.tracing.gone(request)
        for arrival in new:
            self.tracing.come(arrival)

    def begin(self, batch: list[Part]) -> None:
        """The forward pass is about to run on this batch."""
        self.way = Way.PLAIN
        self._drawing.clear()
        if not self.tracing.requests:
            return
        runs: list[Run] = []
        observed: list[Observed] = []
        order: list[tuple[object, int, int]] = []
        for row, part in enumerate(batch):
            traced = self._enter(part)
            if traced is None:
                order.append((part.request, part.tokens, part.tokens))
                continue
            order.append((traced, part.tokens, traced.live))
            observed += traced.observed(part)
            if traced.draws:
                self._drawing.append((row, traced))
                if traced.run.ready() or traced.run.recorders:
                    runs.append(traced.run)
        if runs or observed:
            self.way = Way.EAGER
            self.rows.place(order)
            self.interleaver.begin(runs, observed)

    def _enter(self, part: Part) -> Traced | None:
        traced = self.tracing.requests.get(part.request)
        if traced is None:
            return None
        try:
            traced.enter(part, self.rows)
        except EngineError as error:
            self.tracing.fail(traced, error)
            return None
        return traced

    def logits(self, logits: Tensor | None) -> None:
        """The forward pass is over; `[requests, vocab]`, before anything is sampled."""
        if self.way is Way.PLAIN:
            return
        self.interleaver.advance(Phase.LOGITS)
        if logits is not None:
            self.interleaver.arrive(LOGITS, logits)
        self.interleaver.advance(Phase.SAMPLES)

    def samples(self, samples: Tensor) -> None:
        """The sampled ids, `[requests, 1]`, before the engine goes on with them."""
        if self.way is not Way.PLAIN:
            self.interleaver.arrive(SAMPLES, samples)
        if self._drawing:
            drawn = samples[[row for row, _ in self._drawing], 0].tolist()
            for (_, traced), token in zip(self._drawing, drawn, strict=True):
                traced.made += 1
                traced.run.over = traced.ending.over(token)

    def end(self) -> list[str]:
        """The pass is over: what ended in it is sent. Gives the requests that blocks have ended."""
        if not self.tracing.awaited and not self.tracing.requests:
            return []
        if self.way is not Way.PLAIN:
            self.way = Way.PLAIN
            self.interleaver.advance(Phase.RESULT)
        stopped = [t.request for _, t in self._drawing if t.run.stopping and not t.run.over]
        for _, traced in self._drawing:
            traced.run.over |= traced.run.stopping
            if traced.run.over:
                self.interleaver.finish(traced.run)
                self.tracing.over(traced)
        self._drawing.clear()
        self.tracing.send()
        return stopped

    def finish(self, traced: Traced, output: Any) -> None:
        """A request has finished: its block makes of that what it can, and is over."""
        run = traced.run
        if not run.started:
            self.tracing.fail(traced, EngineError("The request finished before its first step."))
        self.interleaver.phase = Phase.RESULT
        self.interleaver.finish(run)
        if not run.dead and run.waits_for is RESULT:
            self.interleaver.deliver(run, RESULT, output)
        self.tracing.over(traced)
        self.tracing.send()
