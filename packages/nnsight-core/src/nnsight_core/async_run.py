"""A trace on a model for asyncio: what is iterated over, or awaited, once its body is over."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing
from types import CodeType, FrameType
from typing import Any

from nnsight_core.backend import AsyncBackend, Event, Finished, Invoke, Went
from nnsight_core.errors import EngineDeadError, EngineError, ProtocolError
from nnsight_core.outcome import Outcome, reraise
from nnsight_core.outputs import RequestOutput
from nnsight_core.progress import Bar

AHEAD = 16
"""Outputs that wait for their reader; then its requests wait, too."""

Home = Callable[[list[Outcome], BaseException | None, FrameType | None], Exception | None]


class AsyncRun:
    """The requests of one trace, begun when the body is over.

    Iterated over, it gives each request's output whenever one has come further, with what was saved
    by then (`output.saves`, `output.new_saves`). A reader that is slow slows its own requests. To
    leave the loop early, or to cancel the task in it, aborts them.

    Awaited, it gives the finished output, or a list of them if the trace had several invokes; as
    often as it is awaited. The saved names are then bound where the trace was written, if it is
    awaited there, and are in `tracer.saves` in any case.

    Raises:
        EngineError: no event loop runs here.

    Example:
        >>> with model.trace("Hello", max_tokens=8) as tracer:
        ...     for step in tracer.all():
        ...         hidden = model.transformer.h[6].output.save()
        >>> async for output in tracer.backend:
        ...     print(output.outputs[0].text, output.new_saves)
    """

    def __init__(
        self,
        backend: AsyncBackend,
        invokes: list[Invoke],
        home: Home,
        frame: FrameType | None,
        bar: Bar | None = None,
    ) -> None:
        need_loop()
        self._work = _Work(backend, invokes, bar)
        self._home: Home | None = home
        self._error: Exception | None = None
        # A frame that is held keeps this object alive, and a trace that nobody reads is to end.
        self._frame = _sign(frame)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        self._work.stream(True)
        return self._outputs(self._user(sys._getframe(1)))

    def __await__(self) -> Generator[Any, None, Any]:
        self._work.stream(False)
        return self._result(self._user(sys._getframe(1))).__await__()

    def whole(self) -> AsyncRun:
        """The same, of which only finished outputs are wanted."""
        self._work.stream(False)
        return self

    async def aclose(self) -> None:
        """Abort what is left of the requests."""
        await self._work.abort()

    async def _outputs(self, frame: FrameType | None) -> AsyncGenerator[RequestOutput, None]:
        work = self._work
        try:
            async for output in work.outputs():
                yield output
        finally:
            if not work.over:
                await work.abort()
        self._finish(frame)

    async def _result(self, frame: FrameType | None) -> Any:
        await self._work.drain()
        self._finish(frame)
        found = [outcome.output for outcome in self._work.outcomes]
        return found[0] if len(found) == 1 else found

    def _finish(self, frame: FrameType | None) -> None:
        """Bind what has come home, and raise what there is to raise."""
        if self._home is not None:
            home, self._home = self._home, None
            failure = self._work.failure
            try:
                expected = isinstance(failure, ProtocolError | EngineDeadError)
                if failure is not None and not expected:
                    raise failure
                self._error = home(self._work.outcomes, failure, frame)
            except Exception as raised:
                self._error = raised
            for outcome in self._work.outcomes:
                # What its block held need not stay.
                outcome.invoke = Invoke(None)
        reraise(self._error)

    def _user(self, frame: FrameType) -> FrameType | None:
        """The frame that waits, if the trace was written in it."""
        return frame if _sign(frame) == self._frame else None

    def __del__(self) -> None:
        if "_work" in vars(self):
            self._work.abandon()


_LEFT = "The trace was left before its end, which aborted it."
_TASKS: set[asyncio.Task[None]] = set()
"""A loop holds its tasks weakly."""


class _Work:
    """The requests themselves, and the task that brings them to their end.

    It knows nothing of the trace, which may be let go of meanwhile.
    """

    def __init__(self, backend: AsyncBackend, invokes: list[Invoke], bar: Bar | None) -> None:
        self._bar = bar
        self.outcomes = [Outcome(index, invoke) for index, invoke in enumerate(invokes)]
        self.failure: BaseException | None = None
        self._streams: bool | None = None
        self._draining = False
        self._ready: deque[RequestOutput] = deque()
        # Each is cleared by the one who waits for it, and by nobody else.
        self._came, self._taken = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # Who does not say in time what is wanted gets everything.
        events = backend.submit(invokes, lambda: self._streams is not False)
        self._task = self._loop.create_task(self._bring(events))
        _TASKS.add(self._task)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        _TASKS.discard(task)
        if task.cancelled() and self.failure is None:
            self.failure = EngineError(_LEFT)  # it had not even begun
        self._came.set()

    @property
    def over(self) -> bool:
        """Whether the requests are."""
        return self._task.done()

    def stream(self, streams: bool) -> None:
        """Say whether outputs are wanted as they come, if that was not said before."""
        if self._streams is None:
            self._streams = streams

    async def _bring(self, events: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    outcome = self.outcomes[event.invoke]
                    outcome.take(event)
                    if self._bar is not None:
                        self._bar.take(event)
                    if isinstance(event, Went | Finished) and outcome.output is not None:
                        await self._offer(outcome.output)
        except asyncio.CancelledError:
            self.failure = EngineError(_LEFT)
            raise
        except BaseException as error:
            self.failure = error
        finally:
            if self._bar is not None:
                self._bar.close()

    async def _offer(self, output: RequestOutput) -> None:
        if self._draining:
            return
        self._ready.append(output.model_copy())
        self._came.set()
        while len(self._ready) >= AHEAD and not self._draining:
            self._taken.clear()
            await self._taken.wait()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The outputs as they come; of requests that are over, the last ones again."""
        if self._draining or (self.over and not self._ready):
            await self.drain()
            for outcome in self.outcomes:
                if outcome.output is not None:
                    yield outcome.output
            return
        while True:
            while self._ready:
                output = self._ready.popleft()
                self._taken.set()
                yield output
            if self.over:
                return
            self._came.clear()
            await self._came.wait()

    async def drain(self) -> None:
        """Wait for the end; whoever is cancelled here aborts the requests."""
        self._draining = True
        self._ready.clear()
        self._taken.set()
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            await self.abort()
            raise

    async def abort(self) -> None:
        """End the requests, and wait until nothing is left of them."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Nobody will ever read this."""
        if not self._task.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)


def need_loop() -> asyncio.AbstractEventLoop:
    """The running event loop.

    Raises:
        EngineError: none runs here.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise EngineError(
            "A model in mode='async' is used inside a running event loop: put this into an "
            "`async def` function, and run it with `asyncio.run`."
        ) from None


def _sign(frame: FrameType | None) -> tuple[int, CodeType] | None:
    return None if frame is None else (id(frame), frame.f_code)
