"""Held requests: they make no step until they may go on, and slow nobody else meanwhile.

Who reads a request's stream slowly has it held, under the key that its sampling parameters carry;
all sequences of a request carry the same one. A held request that runs keeps its place and its keys
and values for as long as nobody else needs them: for another's memory, or its seat among
`max_num_seqs`, it is preempted, as vLLM preempts, and computes its keys and values anew when it
goes on. A held request that waits, for its first step or preempted, is not started. While all that
is left is held, the engine sleeps until something comes for it.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/core/sched/scheduler.py` and `vllm/v1/engine/core.py`):
- A utility call runs the method of that name of the `EngineCore`, between two steps and in its
  thread; its `scheduler` is ours. `has_requests` says whether to step; if not, the core waits for
  the next message, once no step is in flight.
- Whatever has not ended is in `requests`, and in `running`, `waiting` or `skipped_waiting`.
  `schedule` runs what it finds in these, may leave out one that runs, and lets no more than
  `max_num_running_reqs` run. A new list may take the place of `running`.
- `schedule` peeks at the head of a queue, calls `kv_cache_manager.allocate_slots`, which does
  nothing and gives None where there is no room, and then takes the head from the queue.
- `_preempt_request(request, timestamp)` frees the blocks of a request that was in `running`, puts
  it at the head of `waiting`, and has the runners told with the step that is being scheduled.
- `has_finished_requests` says whether the runners are still to be told of what has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods

_METHODS = {
    "_preempt_request": ("request", "timestamp"),
    "has_requests": (),
    "has_finished_requests": (),
}
_ATTRIBUTES = ("requests", "running", "waiting", "skipped_waiting", "max_num_running_reqs")
_CONNECTORS = ("connector", "ec_connector")
_QUEUE = {
    "prepend_request": ("request",),
    "remove_request": ("request",),
    "remove_requests": ("requests",),
}


def listen() -> None:
    """Give the engine core the calls that reach its scheduler."""
    from vllm.v1.engine.core import EngineCore

    def nnsight_hold(self: Any, keys: list[str]) -> None:
        self.scheduler.holding.hold(keys)

    def nnsight_go_on(self: Any, keys: list[str]) -> None:
        self.scheduler.holding.go_on(keys)

    for call in (nnsight_hold, nnsight_go_on):
        setattr(EngineCore, call.__name__, call)


class Holding:
    """The keys of a scheduler's requests that are held.

    Args:
        entry: the entry of `extra_args` that a request's key is in.
    """

    def __init__(self, scheduler: Any, entry: str) -> None:
        manager = scheduler.kv_cache_manager
        check_methods(scheduler, _METHODS)
        check_attributes(scheduler, (*_ATTRIBUTES, *_CONNECTORS, "pause_state"))
        check_methods(scheduler.waiting, _QUEUE)
        check_methods(manager, {"allocate_slots": ("request",)})
        self.keys: set[str] = set()
        self._scheduler = scheduler
        self._entry = entry
        # Held requests that run, kept out of the step that is being scheduled.
        self._apart: list[Any] = []
        self._preempted: list[Any] = []
        allocate = manager.allocate_slots

        def allocate_slots(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            while blocks is None and self._apart:
                self._preempt()
                blocks = allocate(*args, **kwargs)
            return blocks

        manager.allocate_slots = allocate_slots

    def hold(self, keys: Iterable[str]) -> None:
        """Hold what is there of these; a request may have ended before its holder knew."""
        self.keys |= self._known().intersection(keys)

    def go_on(self, keys: Iterable[str]) -> None:
        """Let requests go on, held or not."""
        self.keys.difference_update(keys)

    def is_all(self) -> bool:
        """Whether there is nothing to do but for held requests."""
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self._scheduler
        return (
            bool(self.keys)
            # What has paused the engine waits until nothing is left in it.
            and scheduler.pause_state == PauseState.UNPAUSED
            and not scheduler.has_finished_requests()
            # A connector moves keys and values on with steps that run nothing.
            and all(getattr(scheduler, name) is None for name in _CONNECTORS)
            and all(map(self._is_held, scheduler.requests.values()))
        )

    @contextmanager
    def kept_out(self) -> Iterator[None]:
        """Keep held requests out of a step that is scheduled meanwhile."""
        if self.keys:
            self.keys &= self._known()
        if not self.keys:
            yield
            return
        scheduler = self._scheduler
        before = scheduler.running
        self._apart = [request for request in before if self._is_held(request)]
        others = [request for request in before if not self._is_held(request)]
        queues = [
            (queue, [request for request in queue if self._is_held(request)])
            for queue in (scheduler.waiting, scheduler.skipped_waiting)
        ]
        for queue, held in queues:
            queue.remove_requests(held)
        # With a seat for each that waits, none of those that are started takes a held one's.
        seats = scheduler.max_num_running_reqs - len(before)
        for _ in range(min(len(self._apart), sum(len(queue) for queue, _ in queues) - seats)):
            self._preempt()
        scheduler.running = others
        try:
            yield
        finally:
            place = {request: index for index, request in enumerate(before)}
            scheduler.running = sorted(
                self._apart + scheduler.running, key=lambda r: place.get(r, len(place))
            )
            for queue, held in queues:
                for request in reversed(held):
                    queue.prepend_request(request)
            for request in self._preempted:
                scheduler.waiting.prepend_request(request)
            self._apart, self._preempted = [], []

    def _preempt(self) -> None:
        """Take from the held request that came last what it has."""
        request = self._apart.pop()
        self._scheduler._preempt_request(request, time.monotonic())
        # It goes back after the step: the head of the queue may be about to be taken for another.
        self._scheduler.waiting.remove_request(request)
        self._preempted.append(request)

    def _known(self) -> set[str]:
        return {key for r in self._scheduler.requests.values() if (key := self._key(r))}

    def _is_held(self, request: Any) -> bool:
        return self._key(request) in self.keys

    def _key(self, request: Any) -> str | None:
        extra = request.sampling_params and request.sampling_params.extra_args
        return extra.get(self._entry) if extra else None
