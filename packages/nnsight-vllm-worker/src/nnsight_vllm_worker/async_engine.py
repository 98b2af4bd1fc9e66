"""The engine for asyncio: vLLM's `AsyncLLM`, with the frames of its workers.

The twin of `SyncEngine`: the same requests go in and the same frames and outputs come back, but any
number of runs go on at once on one event loop, and leaving one aborts what it had in the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine
from contextlib import aclosing
from typing import Any, Self

from nnsight_core.backend import EditInfo, EditSpec
from nnsight_core.errors import EngineDeadError
from nnsight_core.keeps import LIMIT, SECONDS
from nnsight_core.kept import KeptValues
from nnsight_core.outputs import CompletionOutput, RequestOutput
from nnsight_core.tree import ModelTree
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_vllm_worker.blobs import Ledger
from nnsight_vllm_worker.channel import Receiver
from nnsight_vllm_worker.convert import output_of
from nnsight_vllm_worker.edits import Edits, Installed
from nnsight_vllm_worker.engine import BLOCK_TIMEOUT, DEAD, NEVER_ANSWERED, PATIENCE, Output
from nnsight_vllm_worker.progress import Progress
from nnsight_vllm_worker.requests import handles_of
from nnsight_vllm_worker.settings import apply
from nnsight_vllm_worker.submission import Carried, Request
from nnsight_vllm_worker.vllm_ports import async_startup, incoming, startup

AHEAD, AHEAD_BYTES = 32, 64 << 20
"""Outputs, and bytes of saves, that wait for the reader of a run; then its requests are held."""


class AsyncEngine:
    """One `AsyncLLM` with blocks in it; belongs to the loop that it was built on.

    Args:
        model: a model's name or folder, as vLLM takes it.
        arguments: what `AsyncEngineArgs` takes.
        pickle: whether blocks may carry pickled values.
        block_timeout: seconds that a block may run before it gives control back.
        keep_bytes: how much memory the values may take that blocks keep.
        keep_seconds: how long they stay.

    Attributes:
        llm: vLLM's own object.
        tree: the model's tree, as its workers recorded it; there once the engine is attached.
        loop: the event loop that it belongs to.
        edits: what is installed on it.
        kept: what blocks left on it.

    Raises:
        EngineError: the engine cannot be built, with the root cause.
        ValueError: a setting that cannot be had.

    Example:
        >>> engine = await AsyncEngine.start("openai-community/gpt2", {"max_model_len": 256})
        >>> async for key, what in engine.run(requests, {}):
        ...     handle(key, what)
        >>> await engine.close()
    """

    tree: ModelTree

    def __init__(
        self,
        model: str,
        arguments: dict[str, Any],
        pickle: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT,
        keep_bytes: int = LIMIT,
        keep_seconds: float = SECONDS,
    ) -> None:
        chosen = apply(arguments)
        self.loop = asyncio.get_running_loop()
        self._receiver = Receiver()
        limits = (block_timeout, keep_bytes, keep_seconds)
        self._attaching = (self._receiver.address, pickle, *limits)
        self._keep_seconds = keep_seconds
        self.kept = KeptValues(self)
        self._ledger = Ledger()
        self._lock = asyncio.Lock()
        self._running: dict[str, _Running] = {}
        self._apart: set[asyncio.Task[Any]] = set()
        self._closed = False
        try:
            with startup.root_cause():
                self.llm = async_startup.build_async_llm(model, chosen)
        except BaseException:
            self._receiver.close()
            raise
        self.edits = Edits(incoming.under_way(self.llm))
        incoming.mark_requests(self.llm, self.edits.marks)

    @classmethod
    async def start(cls, *args: Any, **kwargs: Any) -> Self:
        """Build an engine on the running loop, which waits meanwhile, and attach to it."""
        engine = cls(*args, **kwargs)
        await engine.attach()
        return engine

    async def attach(self) -> None:
        """Have the workers record the model; before that, nothing runs.

        Raises:
            EngineError: they cannot, with the root cause.
        """
        if hasattr(self, "tree"):
            return
        try:
            with startup.root_cause():
                trees = await self._rpc("nnsight_attach", *self._attaching)
        except BaseException:
            self._closed = True
            self._receiver.close()
            async_startup.shut_down(self.llm)
            raise
        self.tree = ModelTree.model_validate_json(trees[0])
        self.loop.add_reader(self._receiver.fileno, self._read)
        # The descriptor tells of changes only, so what came before it was watched is read now.
        self._read()

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
            run.begin()
            async for news in run.news():
                yield news
        finally:
            await self._undisturbed(run.clean())

    async def install(
        self, spec: EditSpec, carried: Carried, blobs: dict[str, Buffer], owner: str = ""
    ) -> EditInfo:
        """Install an edit on every rank, or on none; see `SyncEngine.install`."""
        edit = self.edits.new(spec, carried, owner)
        task = asyncio.ensure_future(self._install(edit, blobs))
        # Else an edit whose installer was cancelled would be there, and nobody would know its name.
        await self._undisturbed(_waited(task))
        return task.result()

    async def _install(self, edit: Installed, blobs: dict[str, Buffer]) -> EditInfo:
        await self._use(edit.carried.blobs, blobs)
        try:
            self.edits.add(edit, await self._rpc("nnsight_install", edit.id, edit.carried.data))
        except BaseException:
            await self._rpc("nnsight_uninstall", [edit.id])
            await self._release(edit.carried.blobs, ())
            raise
        return edit.info

    async def clear(self, ids: list[str] | None) -> None:
        """Clear edits, or all of them; requests that have them end with them."""
        self.edits.clear(ids)
        await self._sweep()

    async def _sweep(self) -> None:
        """Let go of the cleared edits that no request needs any more."""
        idle = self.edits.idle()
        if idle:
            await self._rpc("nnsight_uninstall", [edit.id for edit in idle])
            await self._release([digest for edit in idle for digest in edit.carried.blobs], ())

    def let_go(self, ids: list[str], why: str) -> None:
        """Let kept values go, soon."""
        self._apart_from(self._rpc("nnsight_let_go", ids, why))

    def list_kept(self) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each value whose handle has come home."""
        found = [(kept.id, kept.bytes, kept.age) for kept in self.kept.handles()]
        return [kept for kept in found if kept[2] <= self._keep_seconds]

    async def counts(self) -> dict[str, int]:
        """What the worker holds: blocks, bytes of outside tensors, bytes that blocks wrote."""
        return (await self._rpc("nnsight_counts"))[0]

    async def close(self) -> None:
        """End the engine and its processes."""
        if self._closed:
            return
        self.kept.close()
        if self._apart:
            await asyncio.wait(self._apart, timeout=5)
        self._closed = True
        self.loop.remove_reader(self._receiver.fileno)
        async_startup.shut_down(self.llm)
        self._receiver.close()

    # -- inside ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Hand every frame that has come to its request."""
        frame = self._receiver.take()
        while frame is not None:
            self.edits.note(frame)
            running = self._running.get(frame.header["key"])
            if running is not None:
                running.take(frame)
            elif frame.header["kind"] == "ended":
                self.kept.disown(handles_of(frame))
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
        await asyncio.shield(self._apart_from(work))

    def _apart_from(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._apart.add(task)
        task.add_done_callback(self._apart.discard)
        return task

    async def _use(self, digests: Collection[str], blobs: dict[str, Buffer]) -> None:
        """Bring outside tensors to the workers, to stay until they are released."""
        async with self._lock:
            for digest in self._ledger.missing(dict.fromkeys(digests)):
                data = blobs[digest]
                await self._rpc("nnsight_put", digest, bytes(data))
                self._ledger.put(digest, memoryview(data).nbytes)
            self._ledger.use(digests)

    async def _release(self, digests: Collection[str], doubtful: Collection[str]) -> None:
        async with self._lock:
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
        self._waiting = _Waiting()
        self._given = requests
        self._requests: list[_Running] = []

    def begin(self) -> None:
        """From here on the requests have their edits, whatever is cleared before they run.

        Raises:
            ValueError: an edit that one asks for has been cleared.
        """
        for request in self._given:
            self._engine.edits.begin(request)
            self._requests.append(_Running(self._engine, request, self._waiting))

    async def news(self) -> AsyncIterator[tuple[str, Frame | Output]]:
        await self._engine._undisturbed(self._use())
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
                await self._engine._abort(keys)
                await self._engine._rpc("nnsight_forget", keys)
            for running in self._requests:
                self._engine.edits.end(running._request)
            await self._engine._sweep()
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
        ended = self._engine.kept.ended()
        if ended:
            await self._engine._rpc("nnsight_let_go", ended, "its handle was freed")


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
            self._bytes += sign * sum(memoryview(b).nbytes for b in what.buffers)
        else:
            self._outputs += sign


class _Running:
    """One request in the engine: a task that brings it to its end, fed with its frames."""

    def __init__(self, engine: AsyncEngine, request: Request, waiting: _Waiting) -> None:
        self.key = request.key
        self._engine = engine
        self._request = request
        self._waiting = waiting
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
        self._engine._running[self.key] = self
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
            while self._ahead:
                self._waiting.put(self.key, self._ahead.popleft())
            self._waiting.put(self.key, what)

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
            await self._engine._rpc("nnsight_finish", self.key, output.model_dump_json())
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
        if self._waiting.much:
            await async_startup.hold(self._engine.llm, [self.key])
            try:
                await self._waiting.less()
            finally:
                await async_startup.go_on(self._engine.llm, [self.key])

    def _pass_on(self) -> None:
        """Pass on what has come: each output with all that was saved up to it, and no more."""
        while True:
            while self._ahead and self._due(self._ahead[0].header):
                self._waiting.put(self.key, self._ahead.popleft())
            if not self._outputs:
                return
            lengths = _lengths(self._outputs[0])
            if not self._progress.told(lengths):
                return
            self._lengths |= lengths
            while self._ahead and self._due(self._ahead[0].header):
                self._waiting.put(self.key, self._ahead.popleft())
            self._waiting.put(self.key, self._outputs.popleft())

    def _due(self, header: dict[str, Any]) -> bool:
        """Whether what a frame says belongs to what has been passed on, or to no step."""
        return header.get("made", 0) <= self._lengths.get(header["sequence"], 0)

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


def _lengths(output: RequestOutput) -> dict[int, int]:
    """How many tokens each sequence has."""
    return {part.index: len(part.token_ids) for part in output.outputs}


async def _waited(task: asyncio.Future[Any]) -> None:
    await asyncio.wait([task])
