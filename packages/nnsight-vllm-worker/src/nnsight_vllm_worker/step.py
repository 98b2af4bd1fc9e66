"""The step path: what happens around one forward pass of the engine.

    requests come and go → each request's way is chosen → rows are placed → forward, with its
    visits → logits → sampled ids → what ended is collected and sent

A port (`vllm_ports`) calls the methods of `Steps` in this order from vLLM's runner. A pass without
traced requests costs one look at a dict. The ways are those of `wants.Way`: blocks run within the
pass (interleaved, eager), when it is over (after), or when the next one is on its way (deferred).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from nnsight_core.errors import EngineError
from nnsight_core.interleaver import Interleaver
from nnsight_core.locations import LOGITS, RESULT, SAMPLES, Location, Phase
from nnsight_core.wants import Way
from nnsight_vllm_worker.copies import Copies, Seat, take_rows
from nnsight_vllm_worker.deferred import Deferred, parts_of
from nnsight_vllm_worker.requests import FOREIGN, Tracing
from nnsight_vllm_worker.rows import Placed, RowMap
from nnsight_vllm_worker.steady import lasting
from nnsight_vllm_worker.taps import Taps
from nnsight_vllm_worker.traced import Arrival, Entry, Part, Traced


class Passes(Protocol):
    """What a port calls around each pass, on any rank. See `Steps`."""

    taps: Taps

    @property
    def busy(self) -> bool: ...

    @property
    def graphs(self) -> bool: ...

    @property
    def breaks(self) -> tuple[Location, ...]: ...

    def requests(self, new: list[Arrival], gone: set[str]) -> None: ...

    @property
    def lasting(self) -> int: ...

    def again(self) -> None: ...

    def begin(self, batch: list[Part]) -> None: ...

    def listen(self) -> None: ...

    def visit(self, location: Location, tensors: list[Tensor]) -> None: ...

    def forwarded(self) -> None: ...

    def logits(self, logits: Tensor | None) -> None: ...

    def samples(self, samples: Tensor) -> None: ...

    def end(self) -> list[str]: ...


_Lasts = tuple[Way, Copies | None, Collection[int]]
_PLAIN: _Lasts = (Way.PLAIN, None, ())
_SHORT = (
    "The engine has no memory for copies of what the block reads in this step ({}). Read fewer "
    "locations at once, or leave more memory (gpu_memory_utilization=)."
)


class Steps:
    """The steps of one engine, and the blocks of the requests in it.

    Args:
        compiled: whether the engine compiles its model; otherwise every pass is eager.

    Attributes:
        way: how the pass runs that is running, the slowest way of its requests.
        graphs: whether it may replay vLLM's graphs.
        breaks: the taps at which its blocks run; graphs that break there may be replayed.
    """

    _joint = False
    """Whether other ranks go by how long a plan lasts."""

    def __init__(
        self, rows: RowMap, interleaver: Interleaver, tracing: Tracing, taps: Taps, compiled: bool
    ) -> None:
        self.rows = rows
        self.interleaver = interleaver
        self.tracing = tracing
        self.taps = taps
        self.deferred = Deferred(rows, tracing, interleaver)
        self.way = Way.PLAIN
        self.graphs = True
        self.breaks: tuple[Location, ...] = ()
        self._unheard: list[Copies] = []
        self._left = self._released = 0
        self._compiled = compiled
        self._final = False
        self._here: set[str] = set()
        self._within: list[Seat] = []
        self._after: Copies | None = None
        self._later: Copies | None = None
        self._logits: Tensor | None = None
        self._lasts = _PLAIN

    @property
    def busy(self) -> bool:
        """Whether `begin` has to be called before a pass."""
        return bool(self.tracing.requests) or self.tracing.tables.placed

    @property
    def plain(self) -> bool:
        """Whether the pass runs the model's plain Python."""
        return self.way is Way.EAGER

    @property
    def lasting(self) -> int:
        """How many passes after it may be begun with `again`."""
        kept = self._joint or self.tracing.tables.released == self._released
        return self._left if kept else 0

    def requests(self, new: list[Arrival], gone: set[str]) -> None:
        """Requests come and go. One that was preempted may come again."""
        if self._within or self._later is not None:
            self._interrupted()
        if new or gone:
            self._left, self._lasts = 0, _PLAIN
        self.taps.want()
        if new and not self.tracing.awaited:
            self.deferred.apart = True
        for request in gone:
            self._here.discard(request)
            self._gone(request)
        for arrival in new:
            if arrival.request not in self._here:
                self._here.add(arrival.request)
                self.tracing.come(arrival)
        if new:
            self.tracing.send()

    def _gone(self, request: str) -> None:
        foreign = FOREIGN + request in self.tracing.foreign
        if foreign:
            # Nobody will say that it has finished, and with what.
            self.deferred.run()
            for traced in tuple(self.tracing.requests.get(request, ())):
                self.interleaver.finish(traced.run)
                self.tracing.over(traced)
        self.tracing.gone(request)
        if foreign:
            self.tracing.send()
            self.tracing.forget(FOREIGN + request)

    def _interrupted(self) -> None:
        """The pass before was left in the middle: its blocks will not see the rest of it."""
        unseen = self._later.seats if self._later is not None else []
        self.taps.rest()
        self._reset()
        self.interleaver.advance(Phase.OVER)
        for seat in unseen:
            error = EngineError("The forward pass of a step was interrupted.")
            self.tracing.fail(seat.entry.traced, error)

    def begin(self, batch: list[Part]) -> None:
        """The forward pass is about to run on this batch."""
        self._reset()
        every = [seat for row, part in enumerate(batch) for seat in self._enter(row, part)]
        self._final = len({s.row for s in every}) == len(batch) and all(s.last for s in every)
        self._place_writes(batch)
        seats = [seat for seat in every if seat.observed or not seat.idle]
        self.way = max([self._way(seat) for seat in seats], default=Way.PLAIN)
        if self.way is Way.AFTER:
            self._join(seats)
        if self.way >= Way.INTERLEAVED:
            self._run_within(batch, seats)
        elif seats:
            self._copy_from(batch, seats)
        copied = [at for copies in self._copies() for at in copies.wanted]
        busy = self.taps.busy(copied, self.tracing.tables.tensors)
        self.taps.want(busy)
        self._left = 0
        if self.way < Way.AFTER and self.graphs:
            self._left = lasting(batch, every, self._joint)
        if self._left:
            self._released = self.tracing.tables.released
            self._lasts = self.way, self._later and self._later.next(), busy

    def again(self) -> None:
        """The pass is over the requests of the one before, a token further each, as it `lasts`."""
        self._reset()
        self._left -= 1
        self.way, self._later, busy = self._lasts
        if self._later is not None:
            self._lasts = self.way, self._later.next(), busy
        self.taps.want(busy)

    def _place_writes(self, batch: list[Part]) -> None:
        """Let the taps write what blocks have them write in this pass."""
        first, placed = 0, []
        for part in batch:
            table = self.tracing.written.get(part.request)
            if table is not None:
                try:
                    placed.append((first, table.spans(part.computed, part.tokens)))
                except EngineError as error:
                    for traced in list(self.tracing.requests[part.request]):
                        if traced.lowered is not None:
                            self.tracing.fail(traced, error)
            first += part.tokens
        self.tracing.tables.place(placed)

    def _enter(self, row: int, part: Part) -> Iterator[Seat]:
        for traced in tuple(self.tracing.requests.get(part.request, ())):
            try:
                yield Seat(traced.enter(part), row, list(traced.observed(part)))
            except EngineError as error:
                self.tracing.fail(traced, error)

    def _join(self, seats: list[Seat]) -> None:
        """Let the blocks of one request see a pass at the same time, in their order."""
        after = {seat.row for seat in seats if seat.way is Way.AFTER}
        for seat in seats:
            if seat.row in after:
                seat.way = Way.AFTER

    def _way(self, seat: Seat) -> Way:
        """The fastest way that gives a request what it wants of this pass."""
        traced, way = seat.entry.traced, Way.PLAIN
        if seat.entry.draws and (traced.run.ready(seat.entry.step) or traced.run.recorders):
            want = traced.wants.at(seat.entry.step)
            way, seat.logits = want.way, want.logits
            seat.taps.update((self.taps.named[name], None) for name in want.taps)
        for location, _ in seat.observed:
            looks = Way.INTERLEAVED if traced.written else Way.DEFERRED
            # What is written again at an input is a changed copy, which a tap cannot hand on.
            copied = traced.written and location.side == "input"
            way = max(way, Way.EAGER if copied or location not in self.taps.taps else looks)
            seat.taps[location] = None
        if way is not Way.PLAIN and not self._compiled:
            way = Way.EAGER
        seat.way = way
        return way

    def _run_within(self, batch: list[Part], seats: list[Seat]) -> None:
        """Begin a pass in which blocks run."""
        self.deferred.run()
        self.deferred.join()
        entries: dict[int, list[Entry]] = {}
        for seat in seats:
            entries.setdefault(seat.row, []).append(seat.entry)
        placed = []
        for row, part in enumerate(batch):
            own = entries.get(row, [])
            live = own[0].live if own else part.tokens
            placed.append(Placed([entry.traced for entry in own], part.tokens, live, row))
        self.rows.place(placed, len(batch))
        self._within = seats
        self.graphs = False
        self.interleaver.reachable = None
        if self.way is Way.INTERLEAVED:
            wanted = {at for seat in seats for at in seat.taps}
            self.breaks = tuple(at for at in self.taps.taps if at in wanted)
            self.interleaver.reachable = self.breaks
        self._begin(seats)

    def _copy_from(self, batch: list[Part], seats: list[Seat]) -> None:
        """Begin a pass of vLLM's own, of which copies are kept."""
        tokens = [part.tokens for part in batch]
        after = [seat for seat in seats if seat.way is Way.AFTER]
        later = [seat for seat in seats if seat.way is not Way.AFTER]
        if any(self.deferred.holds(seat.entry.traced) for seat in after):
            self.deferred.run()
        if later:
            self._later = Copies(self.taps, later, tokens, 0)
        if after:
            first = self._later.rows if self._later is not None else 0
            self._after = Copies(self.taps, after, tokens, first)
        kept = self._copies()
        if not any(copies.wanted for copies in kept):
            return
        if sum(copies.rows for copies in kept) <= self.taps.slots:
            self.taps.place([span for copies in kept for span in copies.spans])
        else:
            self.graphs = False
            self._unheard = kept

    def _copies(self) -> list[Copies]:
        return [copies for copies in (self._later, self._after) if copies is not None]

    def listen(self) -> None:
        """The pass runs compiled and without graphs, so that taps can call us."""
        for copies in self._unheard:
            copies.listen()
        self.taps.listen(self.breaks, self.visit)

    def visit(self, location: Location, tensors: list[Tensor]) -> None:
        """A tap is reached in a pass that runs compiled."""
        if not self.interleaver.watching:
            self.interleaver.passed.add(location)
            return
        self.interleaver.arrive(location, self.taps.value(location, tensors))

    def forwarded(self) -> None:
        """The forward pass is over; `logits` comes next."""
        for copies in self._copies():
            with self._short(copies):
                copies.take()

    @contextmanager
    def _short(self, copies: Copies) -> Iterator[None]:
        """Within it, memory that is short for copies ends the requests that they are for."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._joint:
                raise  # the other ranks have joined in what this one could not do
            self._left, self._lasts = 0, _PLAIN
            for seat in copies.give_up():
                self.tracing.fail(seat.entry.traced, EngineError(_SHORT.format(error)))

    def logits(self, logits: Tensor | None) -> None:
        """`[requests, vocab]`, before anything is sampled."""
        self.taps.rest()
        if self._after is not None and logits is not None:
            self._run_after(self._after, logits.shape[0])
        if self.way >= Way.AFTER:
            self.interleaver.advance(Phase.LOGITS)
            if logits is not None:
                self.interleaver.arrive(LOGITS, logits)
            self.interleaver.advance(Phase.SAMPLES)
        if self._later is not None and any(seat.logits for seat in self._later.seats):
            assert logits is not None
            with self._short(self._later):
                self._logits = take_rows(logits, self._later.requests)

    def _run_after(self, copies: Copies, requests: int) -> None:
        """Run blocks on the copies, between the forward pass and the sampler."""
        self.deferred.join()
        self.rows.place(copies.order(in_batch=True), requests)
        self._within = copies.seats
        self.interleaver.reachable = copies.values.keys()
        self._begin(copies.seats)
        copies.visit(self.interleaver)

    def _begin(self, seats: list[Seat]) -> None:
        for seat in seats:
            seat.entry.take(self.rows)
        runs, observed = parts_of(seats, self.way)
        self.interleaver.begin(runs, observed)

    def samples(self, samples: Tensor) -> None:
        """The sampled ids, `[requests, 1]`, before the engine goes on with them."""
        if self.way >= Way.AFTER:
            self.interleaver.arrive(SAMPLES, samples)
        drawing = [seat for seat in self._within if seat.entry.draws]
        if drawing:
            tokens = [0] * len(drawing)
            # Where no token can end a request, the device need not be waited for.
            if not all(seat.entry.traced.ending.blind for seat in drawing):
                tokens = samples[[seat.row for seat in drawing], 0].tolist()
            for seat, token in zip(drawing, tokens, strict=True):
                traced = seat.entry.traced
                traced.made += 1
                traced.run.over = traced.ending.over(seat.entry.step, token)
        if self._later is not None:
            self.deferred.add(self._later, self._logits, samples)

    def end(self) -> list[str]:
        """The pass is over: what ended in it is sent. Gives the requests that blocks have ended."""
        if not self._within and not self.tracing.awaited and not self.tracing.requests:
            # Passes that nobody is there to see, which are held until they were looked at.
            self.deferred.run()
            self._reset()
            return []
        if self.way >= Way.AFTER:
            self.interleaver.advance(Phase.RESULT)
        drawing = [seat.entry.traced for seat in self._within if seat.entry.draws]
        stopped = [t.request for t in drawing if t.run.stopping and not t.run.over]
        if stopped:
            # The other blocks of such a request have seen all of its steps, too.
            self.deferred.run()
            drawing += [t for r in set(stopped) for t in self.tracing.requests.get(r, ())]
        for traced in dict.fromkeys(drawing):
            run = traced.run
            run.over |= traced.request in stopped
            if run.over and traced.alone:
                self.deferred.catch_up(traced)
            if run.over:
                self.interleaver.finish(run)
                self.tracing.over(traced)
        self._reset()
        # The blocks that look at this pass run when the next one is on its way, if one comes.
        self.deferred.run(leave=0 if self._final else 1)
        self.tracing.send()
        return stopped

    def finish(self, traced: Traced, output: Any) -> None:
        """A request has finished: its block makes of that what it can, and is over."""
        run = traced.run
        self.deferred.settle()
        if traced.alone and not run.started:
            traced.made = len(output.outputs[0].token_ids)
            self.deferred.catch_up(traced)
        if not run.started:
            self.tracing.fail(traced, EngineError("The request finished before its first step."))
        interleaver = run.interleaver or self.interleaver
        interleaver.phase = Phase.RESULT
        interleaver.finish(run)
        if not run.dead and run.waits_for is RESULT:
            interleaver.deliver(run, RESULT, output)
        self.tracing.over(traced)
        self.tracing.send()

    def _reset(self) -> None:
        self.way = Way.PLAIN
        self.graphs = True
        self.breaks = ()
        self._within = []
        self._unheard = []
        self._after = self._later = self._logits = None
