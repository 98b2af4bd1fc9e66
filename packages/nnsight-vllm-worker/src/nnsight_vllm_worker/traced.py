"""One block in a request: its run, how far it has come, and what a forward pass does for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from nnsight_core.errors import EngineError
from nnsight_core.interleaver import Observed
from nnsight_core.locations import Location
from nnsight_core.lowering import Lowered
from nnsight_core.run import Run
from nnsight_core.wants import Wants
from nnsight_core.wire.bounded import Room
from nnsight_core.wire.messages import WarningData
from nnsight_core.wire.told import Told
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

    @property
    def extra(self) -> dict[str, Any]:
        """The `extra_args` of its sampling parameters."""
        params: Any = self.params
        return (params and params.extra_args) or {}


class Part(NamedTuple):
    """A request's part in a forward pass.

    `tokens` of it run, after `computed` others, of the `known` ones: its prompt and what was drawn.
    `again` says that an earlier pass has drawn the same token, which was dropped.
    """

    request: str
    tokens: int
    computed: int
    known: int
    again: bool = False


class Entry(NamedTuple):
    """What a pass does for one traced request.

    Attributes:
        draws: whether it draws a token, which ends a step; others only compute tokens.
        live: its tokens that belong to the step, the last ones.
        position: the place of the first of them among the request's tokens.
        pieces: what was seen of the prompt, if it runs in pieces. It is the pass's own: when its
            block sees the pass, the request may be further on.
    """

    traced: Traced
    step: int
    draws: bool
    live: int
    position: int
    pieces: Pieces | None

    def take(self, rows: RowMap, ahead: int = 0) -> None:
        """Its block is about to see the pass, or one so many passes later, with these rows."""
        traced = self.traced
        traced.run.step = self.step + ahead
        traced.position = self.position + ahead
        traced.pieces = self.pieces
        traced.rows = rows


class Traced:
    """One block in a request: the request's own, or an edit's.

    Attributes:
        request: the engine's id.
        key: what the holder of the engine knows it by; `sequence` tells its sequences apart.
        edit: the id of the edit whose block it is; empty for the request's own.
        made: how many steps its block has seen drawn.
        position: the place of its step's first token among the request's, in the pass that its
            block sees.
        rows: the row map of that pass.
        wants: what its block wants of its steps.
        ways: how many steps ran in which way.
        lowered: what the taps write for it.
        alone: whether they do all that its block does; it is run when the request is over.
        told: what was told of its saves, if they are wanted as they are made; `said` up to which
            step.
        room: how much its request may still bring home, if there is a limit.
        pieces: what was seen of the prompt before that pass, if it runs in pieces.
        written: what its block wrote, to be written again if it is computed anew.
        sent: whether its block has said all that it has to say.
        waits: whether it was said that the block waits for the finished output.
    """

    def __init__(
        self, request: str, key: str, sequence: int, edit: str, prompt: int, run: Run
    ) -> None:
        self.request = request
        self.key = key
        self.sequence = sequence
        self.edit = edit
        self.prompt = prompt
        self.run = run
        self.made = 0
        self.position = 0
        self.ways: Counter[str] = Counter()
        self.rows: RowMap
        self.wants: Wants
        self.pieces: Pieces | None = None
        self._pieces: Pieces | None = None
        self.sent = False
        self.waits = False
        self.reads: list[str] = []
        self.known: Collection[Location] = ()
        self.notes: list[WarningData] = []
        self.blobs: list[str] = []
        self.written: Written
        self.lowered: Lowered | None = None
        self.alone = False
        self.told: Told | None = None
        self.room: Room | None = None
        self.said = 0
        self.ending: Ending

    @property
    def place(self) -> dict[str, Any]:
        """What its messages say of whose they are."""
        return {"key": self.key, "sequence": self.sequence, "edit": self.edit}

    @property
    def idle(self) -> bool:
        """Whether nothing of it runs any more; what it wrote may still have to be kept up."""
        return self.run.dead and not self.run.recorders

    def writes_in(self, step: int) -> bool:
        """Whether the taps write something for it in a step."""
        return self.lowered is not None and any(step in w.steps for w in self.lowered.writes)

    def skips(self, entry: Entry) -> bool:
        """Whether nothing has to be known of a pass."""
        return self.alone and self.ending.blind and not self.ending.last(entry.step)

    def enter(self, part: Part) -> Entry:
        """A forward pass will run a part of this request.

        Raises:
            EngineError: its block cannot see or change what it should, for the reason given.
        """
        step = part.known - self.prompt
        draws = part.computed + part.tokens >= part.known
        # What taps do alone is the same each time that a step runs.
        if step < self.made or (part.again and not self.alone):
            raise EngineError("vLLM ran a step of the request again, so what was read is not its.")
        live = 1 if step else part.tokens
        position = part.known - live if draws else part.computed
        # What taps do alone looks at nothing, so that its prompt may run in any pieces.
        if step == 0 and not self.run.started and not self.alone:
            self._piece(part, draws)
            return Entry(self, step, draws, live, position, self._pieces)
        self._pieces = None
        if self.written.lost is not None and not (draws and part.tokens == 1):
            raise EngineError(
                "The request was preempted and is computed anew, and what its block wrote was not "
                f"kept ({self.written.lost}). Run fewer requests at once, or give the engine more "
                "memory for keys and values."
            )
        return Entry(self, step, draws, live, position, None)

    def observed(self, part: Part) -> Iterable[Observed]:
        """What looks on in the pass besides the block."""
        draws = part.computed + part.tokens >= part.known
        if self._pieces is not None and not draws:
            return self._pieces.observed(part.tokens)
        if self.written and self.made and part.tokens > (1 if draws else 0):
            return self.written.again(self, part.computed, part.tokens)
        return ()

    def forget(self) -> None:
        """Hold no values any longer: its block has said all that it has to say.

        It and its run hold each other, and would hold them until Python looks for cycles.
        """
        self.run.forget()
        self.told = self.pieces = self._pieces = None

    def _piece(self, part: Part, draws: bool) -> None:
        if part.computed == 0:
            self._pieces = None  # else of a prefill that was preempted in the middle
            if draws:
                return
            if self.run.reader:
                self._pieces = Pieces(self.known, self.run, self.reads)
                return
        elif self._pieces is not None and self._pieces.tokens == part.computed:
            return
        raise EngineError(
            f"The prompt of {self.prompt} tokens did not run whole in one step ({part.tokens} ran, "
            f"after {part.computed}), so the block cannot see and change it as a whole."
        )
