"""The step path: what happens around one forward pass of the engine.

    requests come and go → rows are placed → the way is chosen → runs start → forward, with its
    visits → logits → sampled ids → what ended is collected and sent

A port (`vllm_ports`) calls the methods of `Steps` in this order from vLLM's runner. A step without
runs costs one look at a dict.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor

from nnsight_core.errors import EngineError
from nnsight_core.interleaver import Interleaver
from nnsight_core.locations import LOGITS, RESULT, SAMPLES, Phase
from nnsight_core.run import Run
from nnsight_vllm_worker.requests import Traced, Tracing
from nnsight_vllm_worker.rows import RowMap


class Way(Enum):
    """How a step runs. The eager way reaches every location."""

    PLAIN = "plain"
    """No run takes part: vLLM's own step, untouched."""
    EAGER = "eager"
    """The model's Python runs, and every module reports its visits."""


class Steps:
    """The steps of one engine, and the traced requests in it."""

    def __init__(self, rows: RowMap, interleaver: Interleaver, tracing: Tracing) -> None:
        self.rows = rows
        self.interleaver = interleaver
        self.tracing = tracing
        self.way = Way.PLAIN

    def requests(self, new: list[tuple[str, Any, int, int]], gone: set[str]) -> None:
        """Requests come and go.

        Args:
            new: id, `extra_args`, prompt length and cached tokens of each new request.
            gone: ids of those that have finished or were aborted.
        """
        for request in gone:
            self.tracing.gone(request)
        for request, extra, prompt, cached in new:
            self.tracing.come(request, extra, prompt, cached)

    def begin(self, batch: list[tuple[str, int]]) -> None:
        """The forward pass is about to run on this batch: ids and tokens of requests, in order."""
        self.way = Way.PLAIN
        traced = self.tracing.requests
        starting = [traced[r] for r, _ in batch if r in traced and not traced[r].started]
        if not starting:
            return
        self.way = Way.EAGER
        self.rows.place([(traced.get(r, r), tokens) for r, tokens in batch])
        tokens = dict(batch)
        self.interleaver.begin([t.run for t in starting if self._may_start(t, tokens[t.request])])

    def _may_start(self, traced: Traced, tokens: int) -> bool:
        traced.started = True
        if tokens == traced.prompt and not traced.cached:
            return True
        traced.run.error = EngineError(
            f"The prompt of {traced.prompt} tokens did not run whole in one step ({tokens} ran, "
            f"{traced.cached} came from the prefix cache), so the block cannot see it whole."
        )
        self.tracing.end(traced.run)
        return False

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

    def end(self) -> None:
        """The step is over: what ended in it is sent."""
        if self.way is Way.PLAIN:
            return
        self.way = Way.PLAIN
        self.interleaver.advance(Phase.RESULT)
        self.tracing.send()

    def result(self, run: Run, output: Any) -> None:
        """Hand the finished output to a run that waits for it."""
        self.interleaver.phase = Phase.RESULT
        self.interleaver.deliver(run, RESULT, output)
        self.tracing.send()
