"""The engine for asyncio: vLLM's `AsyncLLM`, with the frames of its workers.

The twin of `SyncEngine`: the same requests go in and the same frames and outputs come back, but any
number of runs go on at once on one event loop, and leaving one aborts what it had in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Self

from nnsight_core.errors import EngineDeadError
from nnsight_core.outputs import RequestOutput
from nnsight_core.tree import ModelTree
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_vllm_worker.blobs import Ledger
from nnsight_vllm_worker.channel import Receiver
from nnsight_vllm_worker.convert import output_of
from nnsight_vllm_worker.engine import BLOCK_TIMEOUT, DEAD, NEVER_ANSWERED, PATIENCE, Output
from nnsight_vllm_worker.progress import Progress
from nnsight_vllm_worker.settings import apply
from nnsight_vllm_worker.submission import Request
from nnsight_vllm_worker.vllm_ports import async_startup, startup


class AsyncEngine:
    """One `AsyncLLM` with blocks in it; belongs to the loop that it was started on.

    Attributes:
        llm: vLLM's own object.
        tree: the model's tree, as its workers recorded it.

    Example:
        >>> engine = await AsyncEngine.start("openai-community/gpt2", {"max_model_len": 256})
        >>> async for key, what in engine.run(requests, {}):
        ...     handle(key, what)
        >>> await engine.close()
    """

    def __init__(self, llm: Any, receiver: Receiver, tree: ModelTree) -> None:
        self.llm = llm
        self.tree = tree
        self._receiver = receiver
        self._ledger = Ledger()
        self._ledger_lock = asyncio.Lock()
        self._running: dict[str, _Running] = {}
        self._apart: set[asyncio.Task[Any]] = set()
        self._closed = False
        asyncio.get_running_loop().add_reader(receiver.fileno, self._read)
        # The descriptor tells of changes only, so what came before it was watched is read now.
        self._read()

    @classmethod
    async def start(
        cls,
        model: str,
        arguments: dict[str, Any],
        pickle: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT,
    ) -> Self:
        """Start an engine on the running loop, which waits meanwhile.

        Args:
            model: a model's name or folder, as vLLM takes it.
            arguments: what `AsyncEngineArgs` takes.
            pickle: whether blocks may carry pickled values.
            block_timeout: seconds that a block may run before it gives control back.

        Raises:
            EngineError: the engine cannot be built, with the root cause.
            ValueError: a setting that cannot be had.
        """
        chosen = apply(arguments)
        receiver = Receiver()
        llm: Any = None
        try:
            with startup.root_cause():
                llm = async_startup.build_async_llm(model, chosen)
                attaching = ("nnsight_attach", (receiver.address, pickle, block_timeout))
                trees = await async_startup.call_workers(llm, *attaching)
            return cls(llm, receiver, ModelTree.model_validate_json(trees[0]))
        except BaseException:
            receiver.close()
            if llm is not None:
                async_startup.shut_down(llm)
            raise

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return not self._closed and async_startup.is_alive(self.llm)

    async def run(
        self, requests: list[Request], blobs: dict[str, Buffer]
    ) -> AsyncGenerator[tuple[str, Frame | Output], None]:
        """Run requests together; frames and outputs come with the key of their request.

        What comes is what `SyncEngine.run` gives. Closing this iterator, or cancelling the task
        that waits for it, aborts what is left of its requests.

        Args:
            blobs: the bytes of the outside tensors that the requests' blocks need, by content.

        Raises:
            EngineDeadError: the engine ended meanwhile.
        """
        run = _Run(self, requests, blobs)
        try:
            async for news in run.news():
                yield news
        finally:
            await self._undisturbed(run.clean())

    async def counts(self) -> dict[str, int]:
        """What the worker holds: blocks, bytes of outside tensors, bytes that blocks wrote."""
        return (await self._rpc("nnsight_counts"))[0]

    async def close(self) -> None:
        """End the engine and its processes."""
        if self._closed:
            return
        if self._apart:
            await asyncio.wait(self._apart, timeout=5)
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._receiver.fileno)
        async_startup.shut_down(self.llm)
        self._receiver.close()

    # -- inside ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Hand every frame that has come to its request."""
        frame = self._receiver.take()
        while frame is not None:
            running = self._running.get(frame.header["key"])
            if running is not None:
                running.take(frame)
            frame = self._receiver.take()

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        if self._closed:
            raise EngineDeadError("The engine was closed.")
        try:
            return await async_startup.call_workers(self.llm, method, args)
        except startup.dead_errors() as error:
            raise EngineDeadError(DEAD) from error

    async def _abort(self, keys: list[str]) -> None:
        try:
            await async_startup.abort(self.llm, keys)
        except startup.dead_errors() as error:
            raise EngineDeadError(DEAD) from error

    async def _undisturbed(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for some work, which goes on to its end even if who waits is cancelled."""
        task = asyncio.create_task(work)
        self._apart.add(task)
        task.add_done_callback(self._apart.discard)
        await asyncio.shield(task)

    async def _use(self, digests: list[str], blobs: dict[str, Buffer]) -> None:
        """Bring outside tensors to the workers, to stay until they are released."""
        async with self._ledger_lock:
            for digest in self._ledger.missing(dict.fromkeys(digests)):
                data = blobs[digest]
                await self._rpc("nnsight_put", digest, bytes(data))
                self._ledger.put(digest, memoryview(data).nbytes)
            self._ledger.use(digests)

    async def _release(self, digests: list[str], doubtful: list[str]) -> None:
        async with self._ledger_lock:
            leaving = self._ledger.release(digests, doubtful)
            if leaving:
                await self._rpc("nnsight_drop", leaving)


class _Run:
    """The requests of one trace in the engine."""

    def __init__(
        self, engine: AsyncEngine, requests: list[Request], blobs: dict[str, Buffer]
    ) -> None:
        self._engine = engine
        self._blobs = blobs
        self._digests = [digest for request in requests for digest in request.blobs]
        self._used = False
        self._queue: asyncio.Queue[tuple[str, Frame | Output | None]] = asyncio.Queue()
        self._requests = [_Running(engine, request, self._queue) for request in requests]

    async def news(self) -> AsyncIterator[tuple[str, Frame | Output]]:
        await self._engine._undisturbed(self._use())
        for running in self._requests:
            running.start()
        left = len(self._requests)
        while left:
            key, what = await self._queue.get()
            if isinstance(what, EngineDeadError):
                raise what
            if not isinstance(what, Frame):
                left -= 1
            if what is not None:
                yield key, what

    async def clean(self) -> None:
        """Leave nothing in the engine, whatever has ended the run."""
        try:
            left = [running for running in self._requests if await running.cancel()]
            if left:
                keys = [running.key for running in left]
                await self._engine._abort(keys)
                await self._engine._rpc("nnsight_forget", keys)
            if self._used:
                failed = [r._request for r in self._requests if r._progress.failed]
                doubtful = [digest for request in failed for digest in request.blobs]
                await self._engine._release(self._digests, doubtful)
        except EngineDeadError:
            # Nothing is left to clean up in an engine that has ended.
            return

    async def _use(self) -> None:
        await self._engine._use(self._digests, self._blobs)
        self._used = True


class _Running:
    """One request in the engine: a task that brings it to its end, fed with its frames."""

    def __init__(
        self,
        engine: AsyncEngine,
        request: Request,
        queue: asyncio.Queue[tuple[str, Frame | Output | None]],
    ) -> None:
        self.key = request.key
        self._engine = engine
        self._request = request
        self._queue = queue
        self._progress = Progress(request)
        self._came = asyncio.Event()
        self._generating = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Give the request to the engine."""
        self._engine._running[self.key] = self
        self._generating = True
        self._task = asyncio.create_task(self._bring())

    def take(self, frame: Frame) -> None:
        """A frame has come; an error ends the request at once."""
        if self._progress.take(frame):
            self._queue.put_nowait((self.key, frame))
        self._came.set()
        if self._progress.failed and self._generating and self._task is not None:
            self._generating = False
            self._task.cancel()

    async def cancel(self) -> bool:
        """Give up on the request; whether anything of it may be left in the engine."""
        self._engine._running.pop(self.key, None)
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
            self._queue.put_nowait((self.key, what))

    async def _finish(self) -> RequestOutput:
        """The request's output, once its blocks have said everything before it."""
        output = output_of(await async_startup.generate(self._engine.llm, self._request))
        self._generating = False
        if not self._progress.answered:
            # What its last step said may be on the way.
            await self._wait(lambda: self._progress.answered, 0.02)
        if not self._progress.ended:
            await self._engine._rpc("nnsight_finish", self.key, output.model_dump_json())
            if not await self._wait(lambda: self._progress.ended, PATIENCE):
                raise EngineDeadError(NEVER_ANSWERED)
        return output

    async def _drop(self) -> Output | None:
        """A block of it has failed: nothing of it goes on."""
        try:
            await self._engine._abort([self.key])
            if self._request.sequences > 1:
                # Blocks of its other sequences may be waiting for an output that will not come.
                await self._engine._rpc("nnsight_forget", [self.key])
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
