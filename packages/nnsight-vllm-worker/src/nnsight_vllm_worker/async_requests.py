"""Requests in the engine for asyncio: brought to their ends, told in order, held when need be."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from nnsight_core.errors import EngineDeadError
from nnsight_core.outputs import CompletionOutput, RequestOutput
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_vllm_worker.convert import output_of
from nnsight_vllm_worker.engine import DEAD, NEVER_ANSWERED, PATIENCE, Output
from nnsight_vllm_worker.progress import Progress
from nnsight_vllm_worker.requests import handles_of
from nnsight_vllm_worker.submission import Request
from nnsight_vllm_worker.vllm_ports import async_startup, startup

if TYPE_CHECKING:
    from nnsight_vllm_worker.async_engine import AsyncEngine

AHEAD, AHEAD_BYTES = 32, 64 << 20
"""Outputs, and bytes of saves, that wait for the reader of a run; then its requests are held."""


class Requests:
    """The requests of one trace in the engine."""

    def __init__(
        self, engine: AsyncEngine, requests: list[Request], blobs: dict[str, Buffer]
    ) -> None:
        self._engine = engine
        self._blobs = blobs
        self._digests = [digest for request in requests for digest in request.blobs]
        self._used = False
        self._waiting = _Waiting()
        self._given = requests
        self._requests: list[Running] = []

    def begin(self) -> None:
        """From here on the requests have their edits, whatever is cleared before they run.

        Raises:
            ValueError: an edit that one asks for has been cleared.
        """
        for request in self._given:
            self._engine.edits.begin(request)
            self._requests.append(Running(self._engine, request, self._waiting))

    async def news(self) -> AsyncIterator[tuple[str, Frame | Output]]:
        await self._engine.undisturbed(self._use())
        for running in self._requests:
            running.start()
        left = len(self._requests)
        while left:
            key, what = await self._waiting.take()
            if isinstance(what, EngineDeadError):
                raise what
            if not isinstance(what, Frame):
                left -= not isinstance(what, RequestOutput) or what.finished
            if what is not None:
                yield key, what

    async def clean(self) -> None:
        """Leave nothing in the engine, whatever has ended the run."""
        try:
            left = [running for running in self._requests if await running.cancel()]
            if left:
                keys = [running.key for running in left]
                await self._engine.abort(keys)
                await self._engine.rpc("nnsight_forget", keys)
            for running in self._requests:
                self._engine.edits.end(running._request)
            await self._engine.sweep()
            if self._used:
                failed = [r._request for r in self._requests if r._progress.failed]
                doubtful = [digest for request in failed for digest in request.blobs]
                await self._engine.release(self._digests, doubtful)
            unread = [handle for frame in self._waiting.frames() for handle in handles_of(frame)]
            if unread:
                await self._engine.rpc("nnsight_let_go", unread, "nobody waited for it")
        except EngineDeadError:
            # Nothing is left to clean up in an engine that has ended.
            return

    async def _use(self) -> None:
        await self._engine.use(self._digests, self._blobs)
        self._used = True
        ended = self._engine.kept.ended()
        if ended:
            await self._engine.rpc("nnsight_let_go", ended, "its handle was freed")


class _Waiting:
    """What waits for the reader of a run, and how much that is."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Frame | Output | None]] = asyncio.Queue()
        self._outputs = self._bytes = 0
        self._taken = asyncio.Event()

    def put(self, key: str, what: Frame | Output | None) -> None:
        self._count(what, 1)
        self._queue.put_nowait((key, what))

    async def take(self) -> tuple[str, Frame | Output | None]:
        key, what = await self._queue.get()
        self._count(what, -1)
        self._taken.set()
        return key, what

    def frames(self) -> list[Frame]:
        """The frames that nobody has taken; nothing is left after that."""
        left: list[Frame] = []
        while not self._queue.empty():
            _, what = self._queue.get_nowait()
            if isinstance(what, Frame):
                left.append(what)
        return left

    @property
    def much(self) -> bool:
        """Whether that is more than may wait."""
        return self._outputs > AHEAD or self._bytes > AHEAD_BYTES

    async def less(self) -> None:
        """Wait until the reader has taken half of it."""
        while self._outputs > AHEAD // 2 or self._bytes > AHEAD_BYTES // 2:
            self._taken.clear()
            await self._taken.wait()

    def _count(self, what: Frame | Output | None, sign: int) -> None:
        if isinstance(what, Frame):
            self._bytes += sign * sum(what.sizes)
        else:
            self._outputs += sign


class Running:
    """One request in the engine: a task that brings it to its end, fed with its frames.

    Attributes:
        key: the request's.
        waiting: what waits for the reader of its run.
    """

    def __init__(self, engine: AsyncEngine, request: Request, waiting: _Waiting) -> None:
        self.key = request.key
        self._engine = engine
        self._request = request
        self.waiting = waiting
        self._progress = Progress(request)
        self._ahead: deque[Frame] = deque()
        self._outputs: deque[RequestOutput] = deque()
        self._lengths: dict[int, int] = {}
        self._parts: dict[int, CompletionOutput] = {}
        self._came = asyncio.Event()
        self._generating = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Give the request to the engine."""
        self._engine.running[self.key] = self
        self._generating = True
        self._task = asyncio.create_task(self._bring())

    def take(self, frame: Frame) -> None:
        """A frame has come; an error ends the request at once."""
        if self._progress.take(frame):
            self._ahead.append(frame)
        self._came.set()
        self._pass_on()
        if self._progress.failed and self._generating and self._task is not None:
            self._generating = False
            self._task.cancel()

    async def cancel(self) -> bool:
        """Give up on the request; whether anything of it may be left in the engine."""
        self._engine.running.pop(self.key, None)
        if self._task is None or self._task.done():
            return False
        self._task.cancel()
        await asyncio.wait([self._task])
        return True

    async def _bring(self) -> None:
        what: Output | None = None
        try:
            what = await self._finish()
        except asyncio.CancelledError:
            if not self._progress.failed:
                raise
            what = await self._drop()
        except startup.dead_errors():
            what = EngineDeadError(DEAD)
        except Exception as error:
            what = error
        finally:
            # Whatever has happened, nobody waits for this request any longer.
            while self._ahead:
                self.waiting.put(self.key, self._ahead.popleft())
            self.waiting.put(self.key, what)

    async def _finish(self) -> RequestOutput:
        """The request's output, once its blocks have said everything before it."""
        made: Any = None
        async with aclosing(async_startup.generate(self._engine.llm, self._request)) as outputs:
            async for made in outputs:
                if not made.finished:
                    await self._went(self._whole(output_of(made)))
        output = self._whole(output_of(made))
        self._generating = False
        if not self._progress.answered:
            # What its last step said may be on the way.
            await self._wait(lambda: self._progress.answered, 0.02)
        if not self._progress.ended:
            await self._engine.rpc("nnsight_finish", self.key, output.model_dump_json())
            if not await self._wait(lambda: self._progress.ended, PATIENCE):
                raise EngineDeadError(NEVER_ANSWERED)
        self._pass_on()
        self._lengths |= _lengths(output)
        self._pass_on()
        return output

    def _whole(self, output: RequestOutput) -> RequestOutput:
        """The output with all sequences; a streamed one has only those that have come further."""
        self._parts |= {part.index: part for part in output.outputs}
        output.outputs = [self._parts[index] for index in sorted(self._parts)]
        return output

    async def _went(self, output: RequestOutput) -> None:
        """The request has come further; a reader who is slow holds it up."""
        self._outputs.append(output)
        self._pass_on()
        if self.waiting.much:
            await async_startup.hold(self._engine.llm, [self.key])
            try:
                await self.waiting.less()
            finally:
                await async_startup.go_on(self._engine.llm, [self.key])

    def _pass_on(self) -> None:
        """Pass on what has come: each output with all that was saved up to it, and no more."""
        while True:
            while self._ahead and self._due(self._ahead[0].header):
                self.waiting.put(self.key, self._ahead.popleft())
            if not self._outputs:
                return
            lengths = _lengths(self._outputs[0])
            if not self._progress.told(lengths):
                return
            self._lengths |= lengths
            while self._ahead and self._due(self._ahead[0].header):
                self.waiting.put(self.key, self._ahead.popleft())
            self.waiting.put(self.key, self._outputs.popleft())

    def _due(self, header: dict[str, Any]) -> bool:
        """Whether what a frame says belongs to what has been passed on, or to no step."""
        return header.get("made", 0) <= self._lengths.get(header["sequence"], 0)

    async def _drop(self) -> Output | None:
        """A block of it has failed: nothing of it goes on."""
        try:
            await self._engine.abort([self.key])
            if not self._progress.ended:
                # Its edits, and blocks of its other sequences, may wait for what will not come.
                await self._engine.rpc("nnsight_forget", [self.key])
        except EngineDeadError as error:
            return error
        return None

    async def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while not done():
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return False
        return True


def _lengths(output: RequestOutput) -> dict[int, int]:
    """How many tokens each sequence has."""
    return {part.index: len(part.token_ids) for part in output.outputs}
