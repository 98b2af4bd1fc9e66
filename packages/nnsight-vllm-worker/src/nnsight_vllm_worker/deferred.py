"""Deferred reads: blocks that only look run after the pass, on copies, while the device goes on.

A pass whose blocks only look is vLLM's own. Right after it, the rows that they want are copied on
the device; the blocks run on the copies when the next pass is on its way, on a stream of their own,
with the same order of calls as in any other pass. So they are one pass late and no later, and what
they wait for (a number, a save) is waited for beside the engine's work and not within it.

They run in the engine's own thread: what a block sets of PyTorch and Python (`isolation`) belongs
to the process, so that a thread of their own would let it leak into the engine's work. And while a
block is there that has run within a pass, on the engine's own stream, all of them stay on that one:
what a block holds would else be read and let go on two streams that know nothing of each other.
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nnsight_core.interleaver import Interleaver, Observed
from nnsight_core.locations import LOGITS, SAMPLES, Location
from nnsight_core.run import Run
from nnsight_core.values import flat
from nnsight_core.wants import Way
from nnsight_vllm_worker.copies import Copies, Seat, take_rows
from nnsight_vllm_worker.requests import Tracing
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.traced import Traced


class Pass:
    """One pass that is over, for the blocks that have still to see it."""

    def __init__(self, copies: Copies, logits: Tensor | None, samples: Tensor) -> None:
        self.copies = copies
        self.logits = logits
        self.samples = take_rows(samples, copies.requests)
        self.done: torch.cuda.Event | None = None
        self._tokens = None if copies.blind else self.samples
        if samples.is_cuda:
            if self._tokens is not None:
                self._tokens = torch.empty_like(self.samples, device="cpu", pin_memory=True)
                self._tokens.copy_(self.samples, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record()

    def tokens(self) -> list[int]:
        """The drawn tokens, as soon as the device has drawn them; zeros if no request minds."""
        if self._tokens is None:
            return [0] * len(self.copies.requests)
        if self.done is not None:
            self.done.synchronize()
        return self._tokens.flatten().tolist()


class Deferred:
    """The passes whose blocks have still to run.

    Args:
        rows: the row map of the engine's own passes.
        interleaver: that of the engine's own passes.

    Attributes:
        apart: whether the blocks run on a stream of their own.
    """

    def __init__(self, rows: RowMap, tracing: Tracing, interleaver: Interleaver) -> None:
        self.rows = RowMap(rows, private=True)
        self.interleaver = Interleaver(self.rows, interleaver.on_end)
        self.interleaver.places = interleaver.places
        self._passes: deque[Pass] = deque()
        self._placed: list[tuple[int, int]] | None = None
        self._tracing = tracing
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.apart = True

    def holds(self, traced: Traced) -> bool:
        """Whether the block of a request has still to see a pass."""
        return any(s.entry.traced is traced for each in self._passes for s in each.copies.seats)

    def add(self, copies: Copies, logits: Tensor | None, samples: Tensor) -> None:
        """A pass has drawn its tokens."""
        self._passes.append(Pass(copies, logits, samples))

    def settle(self) -> None:
        """Let the engine's own stream wait for what blocks have done on theirs."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def join(self) -> None:
        """From now on, blocks run on the engine's own stream, after what they have done before."""
        if self.apart:
            self.settle()
        self.apart = False

    def run(self, leave: int = 0) -> None:
        """Run the blocks for the passes that wait, but for the last `leave` ones."""
        while len(self._passes) > leave:
            seen = self._passes.popleft()
            with self._beside(seen):
                self._show(seen)
                self._draw(seen)
                self._tracing.send()

    def _show(self, seen: Pass) -> None:
        """The pass as the blocks see it."""
        interleaver = self.interleaver
        copies = seen.copies
        if copies.spans is not self._placed:
            self._placed = copies.spans
            self.rows.place(copies.order(in_batch=False), len(copies.requests))
        seats = [seat for seat in copies.seats if not seat.entry.traced.run.over]
        for seat in seats:
            seat.entry.take(self.rows, copies.ahead)
        engines: dict[Location, Any] = {} if seen.logits is None else {LOGITS: seen.logits}
        engines[SAMPLES] = seen.samples
        # In forward order: `ChainMap` begins with its last map.
        values = ChainMap(engines, copies.values)  # type: ignore[arg-type]

        def own(run: Run, location: Location) -> Any:
            if location in engines:
                return self.rows.own(run, location, engines[location])
            return copies.own(run, location, self.rows)

        interleaver.show(*parts_of(seats, Way.DEFERRED, copies.ahead), values, own)

    def _draw(self, seen: Pass) -> None:
        """Judge by the drawn tokens which requests have ended."""
        tokens = seen.tokens()
        for seat in seen.copies.seats:
            traced, token = seat.entry.traced, tokens[seat.place]
            step = seat.entry.step + seen.copies.ahead
            if not seat.entry.draws or traced.run.over:
                continue
            traced.made = step + 1
            if traced.ending.over(step, token):
                if traced.alone:
                    self.catch_up(traced)
                self.interleaver.finish(traced.run)
                self._tracing.over(traced)

    def catch_up(self, traced: Traced) -> None:
        """Run a block for all of its request's steps, none of which it looks at."""
        run = traced.run
        written = [traced.writes_in(step) for step in range(traced.made)]
        traced.ways.update(tables=sum(written), plain=len(written) - sum(written))
        run.step, run.known = 0, traced.made - 1
        # Its steps are all behind it, the last one as well as the first.
        over, run.over = run.over, False
        self.interleaver.show([run], (), {})
        run.over = over

    @contextmanager
    def _beside(self, seen: Pass) -> Iterator[None]:
        """Within it, the device works beside the engine's own stream."""
        if self._stream is None or seen.done is None or not self.apart:
            yield
            return
        self._stream.wait_event(seen.done)
        for tensor in flat([*seen.copies.tensors(), seen.logits, seen.samples]):
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield


def parts_of(seats: list[Seat], way: Way, ahead: int = 0) -> tuple[list[Run], list[Observed]]:
    """The runs that take part in a pass of this way, and what looks on besides them.

    Args:
        ahead: how many passes after that of the seats it is.
    """
    runs = []
    for seat in seats:
        traced = seat.entry.traced
        if seat.entry.draws and not traced.alone:
            takes_part = traced.run.ready() or bool(traced.run.recorders)
            tables = traced.writes_in(seat.entry.step + ahead)
            way_taken = "tables" if tables else way.name.lower() if takes_part else "plain"
            traced.ways[way_taken] += 1
            if takes_part:
                runs.append(traced.run)
    return runs, [each for seat in seats for each in seat.observed]
