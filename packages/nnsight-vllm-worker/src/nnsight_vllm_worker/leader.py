"""The first of several ranks: it runs the blocks, and tells the others what they have to do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nnsight_core.errors import EngineError, LocationError
from nnsight_core.interleaver import Interleaver
from nnsight_core.locations import Location, Phase
from nnsight_core.lowering import Affine
from nnsight_core.node import Places
from nnsight_core.values import flat
from nnsight_core.wants import Way
from nnsight_core.watchdog import WATCHDOG
from nnsight_vllm_worker.called import Called
from nnsight_vllm_worker.copies import Copies
from nnsight_vllm_worker.joint import Blocked, Go, Name, Plan, Taken, Tell, Values
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.step import Steps
from nnsight_vllm_worker.tables import Tables
from nnsight_vllm_worker.taps import Tap, Taps
from nnsight_vllm_worker.traced import Arrival, Part
from nnsight_vllm_worker.vllm_ports.parallel import Layers, Ranks

ONWARD = Go()


class Leader:
    """What the first rank tells the others, and when they listen.

    Attributes:
        forward: whether the forward pass is under way, so that the others reach what it reaches.
    """

    def __init__(
        self,
        ranks: Ranks,
        layers: Layers,
        rows: RowMap,
        places: Places,
        device: torch.device,
    ) -> None:
        self.ranks = ranks
        self.values = Values(ranks, rows, device)
        self.blocked = Blocked()
        self.forward = False
        self._called = Called(self.values, layers, places)
        self._layers = layers
        self._places = places
        self._listening = False
        self._later: list[Tell] = []
        self._watched: set[str] = set()
        self._watch = places.prepare
        places.prepare = self._prepare
        places.call = self._call
        places.lent = self._lent
        rows.changes = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it, the others wait for what they are told, up to `go`."""
        before, self._listening = self._listening, True
        for told in self._later:
            self.ranks.send(told)
        self._later.clear()
        try:
            yield
        finally:
            self._listening = before

    def go(self, go: Go = ONWARD) -> None:
        """Let the others go on."""
        self.ranks.send(go)

    def tell(self, what: str, *args: Any) -> None:
        """Have the others do something, now or before they do anything else."""
        told = Tell(what, args)
        if self._listening:
            self.ranks.send(told)
        else:
            self._later.append(told)

    def ask(self, what: str, path: str, *args: Any) -> None:
        """Have the others do something at the same time.

        Raises:
            LocationError: they do not listen.
        """
        if not self._listening:
            raise LocationError(
                f"{path} lies on {self.ranks.size} ranks, which have gone on with the forward pass "
                "when this part of the block runs. Name the module plainly in the block, so that "
                "its text shows what it needs."
            )
        self.ranks.send(Tell(what, args))

    def _prepare(self, path: str) -> None:
        """Watch the operations of a forward, on every rank."""
        assert self._watch is not None
        with WATCHDOG.paused():
            self._watch(path)
            if path not in self._watched:
                self.tell("watch", path)
                self._watched.add(path)

    def _call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._layers.local(path):
            return self._called.alone(path, args, kwargs)
        with WATCHDOG.paused():
            tensors = flat((list(args), dict(kwargs)))
            self._called.check(path, tensors)
            form = self._called.form(args, kwargs)
            self.ask("call", path, path, form)
            return self._called.run(path, form, tensors)

    def _lent(self, path: str, name: str, value: Any) -> Any:
        try:
            if not isinstance(value, Tensor):
                self._layers.check(path, name, value)
                return value
            if not value.numel():
                return value  # the engine has let it go, which is said elsewhere
            layout, axis = self._layers.parameter(path, name, value)
        except EngineError as error:
            raise LocationError(f"{path}.{name} cannot be had: {error}.") from None
        tensor = value
        if layout is None:
            return tensor
        with WATCHDOG.paused():
            self.ask("lend", f"{path}.{name}", path, name)
            return self.ranks.join(layout, tensor, axis)


class LeaderInterleaver(Interleaver):
    """The interleaver of the first rank: what is reached is whole, and writes reach all ranks."""

    leader: Leader

    def arrive(self, location: Location, value: Any) -> Any:
        leader = self.leader
        met = location in self.waiting or location in self.skips or location in self.observers
        if not met or (location.phase == Phase.FORWARD and not leader.forward):
            return super().arrive(location, value)
        values = leader.values
        whole = values.gather(location, value)
        with leader.listening():
            seen = super().arrive(location, whole)
            writes = values.written(value, whole, seen)
            if location.phase == Phase.FORWARD:
                leader.go(Go(self.awaited(), writes))
            elif writes is not None:
                leader.tell("wrote", location.side, writes)
        if writes is not None:
            return values.spread(location, value, seen, writes)
        return value if whole is not value else seen

    def awaited(self) -> tuple[Name, ...]:
        """The locations at which something is to happen."""
        every = itertools.chain(self.waiting, self.skips, self.observers)
        return tuple((at.path, at.side) for at in dict.fromkeys(every) if at.phase == Phase.FORWARD)


class LeaderTables(Tables):
    """The tables of the first rank, which the others' are like."""

    def __init__(self, taps: Taps, leader: Leader) -> None:
        super().__init__(taps)
        self._leader = leader

    def fill(self, entry: int, along: int, affine: Affine, tap: Tap) -> None:
        super().fill(entry, along, affine, tap)
        sent = replace(affine, operand=_host(affine.operand), along=_host(affine.along))
        self._leader.tell("fill", entry, along, sent, (tap.location.path, tap.location.side))

    def fill_like(self, new: int, entry: int, after: int) -> None:
        super().fill_like(new, entry, after)
        self._leader.tell("fill_like", new, entry, after)


class LeaderSteps(Steps):
    """The steps of the first rank. See `Steps`."""

    leader: Leader
    interleaver: LeaderInterleaver
    _told: tuple[Any, Any] = (None, None)
    _joint = True

    @property
    def busy(self) -> bool:
        return self.leader.blocked.busy

    def requests(self, new: list[Arrival], gone: set[str]) -> None:
        leader = self.leader
        leader.forward = False
        if not leader.blocked.come(new, gone):
            super().requests(new, gone)
            return
        with leader.listening():
            super().requests(new, gone)
            leader.go()

    def begin(self, batch: list[Part]) -> None:
        leader = self.leader
        with leader.listening():
            super().begin(batch)
            plan = self._plan(batch)
            waiting = self.interleaver.awaited() if self.way >= Way.INTERLEAVED else ()
            leader.blocked.placed = plan.placed
            leader.blocked.quiet = plan.quiet
            leader.go(Go(waiting, None, plan))
        leader.values.spans = plan.spans
        leader.forward = self.way >= Way.INTERLEAVED

    def _plan(self, batch: list[Part]) -> Plan:
        stops = list(itertools.accumulate(part.tokens for part in batch))
        blocks = self.tracing.requests
        spans = tuple(
            (stop - part.tokens, stop)
            for part, stop in zip(batch, stops, strict=True)
            if part.request in blocks
        )
        slots, entries = self.taps.placed, self.tracing.tables.seats
        before, self._told = self._told, (slots, entries)
        return Plan(
            way=int(self.way),
            graphs=self.graphs,
            breaks=tuple((at.path, at.side) for at in self.breaks),
            slots=None if slots is before[0] else slots,
            entries=None if entries is before[1] else entries,
            placed=bool(entries),
            taken=tuple(taken for copies in self._copies() for taken in self._taken(copies)),
            tokens=stops[-1] if stops else 0,
            requests=len(batch),
            spans=spans,
            stages=self.way >= Way.AFTER,
            quiet=not blocks and not self.tracing.tables.placed,
            lasting=self.lasting,
        )

    def _taken(self, copies: Copies) -> Iterator[Taken]:
        shared = [at for at in copies.wanted if self.taps.taps[at].shared]
        if shared:
            names = tuple((at.path, at.side) for at in shared)
            heard = copies.spans if copies in self._unheard else None
            yield Taken(names, copies.first, copies.rows, heard)

    def logits(self, logits: Tensor | None) -> None:
        self.leader.forward = False
        self._stage(lambda: Steps.logits(self, logits))

    def samples(self, samples: Tensor) -> None:
        self._stage(lambda: Steps.samples(self, samples))

    def end(self) -> list[str]:
        self.leader.forward = False
        return self._stage(lambda: Steps.end(self))

    def _stage(self, run: Callable[[], Any]) -> Any:
        """Let blocks run that may need the other ranks, if any run now."""
        if self.way < Way.AFTER:
            return run()
        with self.leader.listening():
            done = run()
            self.leader.go()
        return done


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
