"""Every rank but the first: it runs no block, and does what the first rank tells it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from nnsight_core.errors import LocationError
from nnsight_core.interleaver import Interleaver
from nnsight_core.locations import LOGITS, SAMPLES, Location
from nnsight_core.node import Places
from nnsight_core.run import Run
from nnsight_core.wants import Way
from nnsight_vllm_worker.called import Called
from nnsight_vllm_worker.copies import cut_rows
from nnsight_vllm_worker.joint import Blocked, Go, Name, Plan, Taken, Tell, Values, or_end
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.tables import Tables
from nnsight_vllm_worker.tap_op import calling
from nnsight_vllm_worker.taps import Taps
from nnsight_vllm_worker.traced import Arrival, Part
from nnsight_vllm_worker.vllm_ports.parallel import Layers, Ranks

_log = logging.getLogger(__name__)
_ENGINES = {at.side: at for at in (LOGITS, SAMPLES)}


class Follower:
    """What this rank does at the word of the first one."""

    def __init__(
        self,
        ranks: Ranks,
        layers: Layers,
        rows: RowMap,
        places: Places,
        tables: Tables,
        taps: Taps,
        record: Callable[[str], None],
    ) -> None:
        self.ranks = ranks
        self.values = Values(ranks, rows, taps.device)
        self._called = Called(self.values, layers, places)
        self._places = places
        self._tables = tables
        self._taps = taps
        self._record = record

    def follow(self, engine: Tensor | None = None) -> Go:
        """Do what is told, up to the word to go on.

        Args:
            engine: the logits or samples, if they are what is reached.
        """
        while True:
            message = self.ranks.receive()
            if isinstance(message, Go):
                return message
            self._do(message, engine)

    def _do(self, told: Tell, engine: Tensor | None) -> None:
        match told.what:
            case "wrote":
                side, writes = told.args
                self.values.take(_ENGINES[side], engine, writes)
            case "call":
                self._call(*told.args)
            case "lend":
                path, name = told.args
                self.ranks.gather(getattr(self._places.modules[path], name))
            case "watch":
                assert self._places.prepare is not None
                self._places.prepare(*told.args)
            case "record":
                with contextlib.suppress(LocationError):  # the first rank raises it as well
                    self._record(*told.args)
            case "fill":
                entry, along, affine, name = told.args
                self._tables.fill(entry, along, affine, self._taps.taps[self.at(name)])
            case "fill_like":
                self._tables.fill_like(*told.args)

    def _call(self, path: str, form: Any) -> None:
        try:
            with calling():
                self._called.run(path, form, None)
        except Exception as error:
            # The block gets it, on the first rank.
            _log.debug("A block called %s: %s", path, error)

    def at(self, name: Name) -> Location:
        """The location of this name."""
        return self._places.location(*name)


class FollowerInterleaver(Interleaver):
    """Stops where the first rank does, and takes part in what happens there."""

    follower: Follower

    def wait(self, names: tuple[Name, ...]) -> None:
        """Stop at these locations, and at no others."""
        nobody: list[Run] = []
        # The same dict: visits that are under way hold it.
        self.waiting.clear()
        self.waiting.update((self.follower.at(name), nobody) for name in names)
        self.watching = bool(names)

    @or_end
    def arrive(self, location: Location, value: Any) -> Any:
        if location not in self.waiting:
            return value
        follower = self.follower
        follower.values.gather(location, value)
        self.watching = False  # what a block calls is no visit
        go = follower.follow()
        self.wait(go.waiting)
        if go.writes is None:
            return value
        return follower.values.take(location, value, go.writes)


class FollowerSteps:
    """The steps of a rank that follows, as a port calls them. See `step.Steps`."""

    def __init__(
        self, rows: RowMap, interleaver: FollowerInterleaver, follower: Follower, taps: Taps
    ) -> None:
        self.rows = rows
        self.interleaver = interleaver
        self.follower = follower
        self.taps = taps
        self.tables = follower._tables
        self.blocked = Blocked()
        self.lasting = 0
        self._plan: Plan | None = None
        self._lasts: tuple[Plan | None, Collection[int]] = (None, ())

    @property
    def busy(self) -> bool:
        """Whether `begin` has to be called before a pass."""
        return self.blocked.busy

    @property
    def plain(self) -> bool:
        """Whether the pass runs the model's plain Python."""
        return self._plan is not None and self._plan.way == Way.EAGER

    @property
    def graphs(self) -> bool:
        """Whether the pass may replay vLLM's graphs."""
        return self._plan is None or self._plan.graphs

    @property
    def breaks(self) -> tuple[Location, ...]:
        """The taps at which graphs break."""
        return () if self._plan is None else tuple(map(self.follower.at, self._plan.breaks))

    @or_end
    def requests(self, new: list[Arrival], gone: set[str]) -> None:
        """Requests come and go."""
        self._rest()
        if new or gone:
            self.lasting = 0
        self.taps.want()
        if self.blocked.come(new, gone):
            self.follower.follow()

    @or_end
    def begin(self, batch: list[Part]) -> None:
        """The forward pass is about to run."""
        go = self.follower.follow()
        plan = self._plan = go.plan
        assert plan is not None
        self.blocked.placed, self.blocked.quiet = plan.placed, plan.quiet
        self.follower.values.spans = plan.spans
        self.rows.count(plan.tokens, plan.requests)
        if plan.slots is not None:
            self.taps.place(plan.slots)
        if plan.entries is not None:
            self.tables.place(plan.entries)
        taken = [self.follower.at(name) for each in plan.taken for name in each.names]
        busy = self.taps.busy(taken, self.tables.tensors)
        self.taps.want(busy)
        self.lasting, self._lasts = plan.lasting, (plan, busy)
        self.interleaver.wait(go.waiting)

    def again(self) -> None:
        """The pass is like the one before. See `step.Steps.again`."""
        self.lasting -= 1
        self._plan, busy = self._lasts
        self.taps.want(busy)

    def listen(self) -> None:
        """The pass runs compiled and without graphs, so that taps can call us."""
        assert self._plan is not None
        for taken in self._plan.taken:
            if taken.spans is not None:
                self._hear(taken)
        self.taps.listen(self.breaks, self.visit)

    def _hear(self, taken: Taken) -> None:
        def hear(at: Location, tensors: list[Tensor]) -> None:
            assert taken.spans is not None
            self.taps.whole(at, cut_rows(tensors, taken.spans))

        self.taps.listen(map(self.follower.at, taken.names), hear)

    def visit(self, location: Location, tensors: list[Tensor]) -> None:
        """A tap is reached in a pass that runs compiled."""
        if location in self.interleaver.waiting:
            self.interleaver.arrive(location, self.taps.value(location, tensors))

    @or_end
    def forwarded(self) -> None:
        """The forward pass is over."""
        for taken in self._plan.taken if self._plan is not None else ():
            if taken.spans is None:
                names = tuple(map(self.follower.at, taken.names))
                self.taps.gather(names, taken.first, taken.rows)

    def logits(self, logits: Tensor | None) -> None:
        """`[requests, vocab]`, before anything is sampled."""
        self.taps.rest()
        self.interleaver.wait(())
        self._stage(logits)

    def samples(self, samples: Tensor) -> None:
        """The sampled ids, before the engine goes on with them."""
        self._stage(samples)

    def end(self) -> list[str]:
        """The pass is over. Only the first rank says which requests blocks have ended."""
        self._stage(None)
        self._rest()
        return []

    @or_end
    def _stage(self, engine: Tensor | None) -> None:
        if self._plan is not None and self._plan.stages:
            self.follower.follow(engine)

    def _rest(self) -> None:
        self.taps.rest()
        self.interleaver.wait(())
        self._plan = None
