"""One traced request: its run, how far it has come, and what a forward pass does for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nnsight_core.errors import EngineError
from nnsight_core.interleaver import Observed
from nnsight_core.run import Run
from nnsight_core.wire.messages import WarningData
from nnsight_vllm_worker.pieces import Pieces
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.vllm_ports.ending import Ending
from nnsight_vllm_worker.written import Written


class Arrival(NamedTuple):
    """A request as it comes to the worker: its prompt, and its sampling parameters."""

    request: str
    prompt: list[int]
    params: object
    cached: int
    """Tokens of the prompt that will not run, since a cache holds them."""


class Part(NamedTuple):
    """A request's part in a forward pass.

    `tokens` of it run, after `computed` others, of the `known` ones: its prompt and what was drawn.
    """

    request: str
    tokens: int
    computed: int
    known: int


class Traced:
    """One traced request.

    Attributes:
        request: the engine's id.
        key: what the holder of the engine knows it by; `sequence` tells its sequences apart.
        made: how many steps it has made.
        draws: whether this pass draws a token, which ends a step; others only compute tokens.
        live: the tokens of this pass that belong to its step, the last ones.
        position: the place of the first of them among the request's tokens.
        pieces: what was seen of the prompt, if it runs in pieces.
        written: what its block wrote, to be written again if it is computed anew.
        sent: whether its block has said all that it has to say.
        waits: whether it was said that the block waits for the finished output.
    """

    def __init__(self, request: str, key: str, sequence: int, prompt: int, run: Run) -> None:
        self.request = request
        self.key = key
        self.sequence = sequence
        self.prompt = prompt
        self.run = run
        self.made = 0
        self.draws = False
        self.live = 0
        self.position = 0
        self.pieces: Pieces | None = None
        self.sent = False
        self.waits = False
        self.reads: list[str] = []
        self.notes: list[WarningData] = []
        self.blobs: list[str] = []
        self.written: Written
        self.ending: Ending

    def enter(self, part: Part, rows: RowMap) -> None:
        """A forward pass will run a part of this request.

        Raises:
            EngineError: its block cannot see or change what it should, for the reason given.
        """
        step = part.known - self.prompt
        if step < self.made:
            raise EngineError("vLLM ran a step of the request again, so what was read is not its.")
        self.run.step = step
        self.draws = part.computed + part.tokens >= part.known
        self.live = 1 if step else part.tokens
        self.position = part.known - self.live if self.draws else part.computed
        if step == 0 and not self.run.started:
            self._piece(part, rows)
            return
        self.pieces = None
        if self.written.lost is not None and not (self.draws and part.tokens == 1):
            raise EngineError(
                "The request was preempted and is computed anew, and what its block wrote was not "
                f"kept ({self.written.lost}). Run fewer requests at once, or give the engine more "
                "memory for keys and values."
            )

    def observed(self, part: Part) -> Iterable[Observed]:
        """What looks on in the pass besides the block."""
        if self.pieces is not None and not self.draws:
            return self.pieces.observed(part.tokens)
        if self.written and self.made and part.tokens > (1 if self.draws else 0):
            return self.written.again(self, part.computed, part.tokens)
        return ()

    def _piece(self, part: Part, rows: RowMap) -> None:
        if part.computed == 0:
            self.pieces = None  # else of a prefill that was preempted in the middle
            if self.draws:
                return
            if self.run.reader:
                self.pieces = Pieces(rows, self.run, self.reads)
                return
        elif self.pieces is not None and self.pieces.tokens == part.computed:
            return
        raise EngineError(
            f"The prompt of {self.prompt} tokens did not run whole in one step ({part.tokens} ran, "
            f"after {part.computed}), so the block cannot see and change it as a whole."
        )
