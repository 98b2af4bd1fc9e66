"""The engine for asyncio: vLLM's `AsyncLLM`, with the frames of its workers.

The twin of `SyncEngine`: the same requests go in and the same frames and outputs come back, but any
number of runs go on at once on one event loop, and leaving one aborts what it had in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Coroutine
from typing import Any, Self

from nnsight_core.backend import EditInfo, EditSpec
from nnsight_core.errors import EngineDeadError
from nnsight_core.keeps import LIMIT, SECONDS
from nnsight_core.kept import KeptValues
from nnsight_core.policy import TRUSTED_PATH
from nnsight_core.tree import ModelTree
from nnsight_core.wire.code import check_content
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_vllm_worker.async_requests import Requests, Running
from nnsight_vllm_worker.blobs import Ledger
from nnsight_vllm_worker.channel import Receiver
from nnsight_vllm_worker.edits import Edits, Installed
from nnsight_vllm_worker.engine import BLOCK_TIMEOUT, DEAD, Output
from nnsight_vllm_worker.requests import handles_of
from nnsight_vllm_worker.settings import apply
from nnsight_vllm_worker.submission import Carried, Request
from nnsight_vllm_worker.vllm_ports import async_startup, incoming, metrics, startup, tokenizer


class AsyncEngine:
    """One `AsyncLLM` with blocks in it; belongs to the loop that it was built on.

    Args:
        model: a model's name or folder, as vLLM takes it.
        arguments: what `AsyncEngineArgs` takes.
        pickle: whether blocks may carry pickled values.
        block_timeout: seconds that a block may run before it gives control back.
        keep_bytes: how much memory the values may take that blocks keep.
        keep_seconds: how long they stay.
        max_saves: how many bytes the saves of one request may have; None for any.
        policy: what blocks may do, as the import path of a `nnsight_core.policy.Policy`.
        whole: whether frames come whole, for whoever reads them; who only passes them on may begin
            before the end of a large one has come.

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
        max_saves: int | None = None,
        policy: str = TRUSTED_PATH,
        whole: bool = True,
    ) -> None:
        chosen = apply(arguments)
        self.loop = asyncio.get_running_loop()
        self._receiver = Receiver(whole)
        limits = (block_timeout, keep_bytes, keep_seconds, max_saves)
        self._attaching = (self._receiver.address, pickle, *limits, policy)
        self._keep_seconds = keep_seconds
        self.kept = KeptValues(self)
        self._ledger = Ledger()
        self._lock = asyncio.Lock()
        self.running: dict[str, Running] = {}
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
                trees = await self.rpc("nnsight_attach", *self._attaching)
                await async_startup.ask_once(self.llm)
        except BaseException:
            self._closed = True
            self._receiver.close()
            async_startup.shut_down(self.llm)
            raise
        self.tree = ModelTree.model_validate_json(trees[0])
        async_startup.when_dead(self.llm, self._receiver.break_off)
        self.loop.add_reader(self._receiver.fileno, self._read)
        # The descriptor tells of changes only, so what came before it was watched is read now.
        self._read()

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return not self._closed and async_startup.is_alive(self.llm)

    @property
    def under_way(self) -> int:
        """How many sequences have been sent and have not finished, whoever sent them."""
        return self.edits.under_way

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
        run = Requests(self, requests, blobs)
        answers = True
        try:
            run.begin()
            async for news in run.news():
                yield news
        except EngineDeadError:
            # It may also hang, and then has nothing to say to what is left of the run.
            answers = False
            raise
        finally:
            cleaning = self._apart_from(run.clean())
            if answers:
                await asyncio.shield(cleaning)

    async def install(
        self, spec: EditSpec, carried: Carried, blobs: dict[str, Buffer], owner: str = ""
    ) -> EditInfo:
        """Install an edit on every rank, or on none; see `SyncEngine.install`."""
        edit = self.edits.new(spec, carried, blobs, owner)
        # Else an edit whose installer was cancelled might be on some of the ranks.
        return await self.undisturbed(self._install(edit, blobs))

    async def _install(self, edit: Installed, blobs: dict[str, Buffer]) -> EditInfo:
        await self.use(edit.carried.blobs, blobs)
        try:
            answers = await self.rpc("nnsight_install", edit.id, edit.carried.data)
            self.edits.add(edit, answers[0])
        except BaseException:
            await self.rpc("nnsight_uninstall", [edit.id])
            await self.release(edit.carried.blobs, ())
            raise
        return edit.info

    async def clear(self, ids: list[str] | None) -> None:
        """Clear edits, or all of them; requests that have them end with them."""
        self.edits.clear(ids)
        await self.sweep()

    async def sweep(self) -> None:
        """Let go of the cleared edits that no request needs any more."""
        idle = self.edits.idle()
        if idle:
            await self.rpc("nnsight_uninstall", [edit.id for edit in idle])
            await self.release([digest for edit in idle for digest in edit.carried.blobs], ())

    def let_go(self, ids: list[str], why: str) -> None:
        """Let kept values go, soon."""
        self._apart_from(self.rpc("nnsight_let_go", ids, why))

    def list_kept(self) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each value whose handle has come home."""
        found = [(kept.id, kept.bytes, kept.age) for kept in self.kept.handles()]
        return [kept for kept in found if kept[2] <= self._keep_seconds]

    async def all_kept(self) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each value that is kept, whoever has its handle."""
        return (await self.rpc("nnsight_kept", time.monotonic()))[0]

    async def counts(self) -> dict[str, int]:
        """What the worker holds: blocks, bytes of outside tensors, bytes that blocks wrote.

        Edits that were cleared, or whose time is over, are not among it once nothing needs them.
        """
        await self.sweep()
        return (await self.rpc("nnsight_counts"))[0]

    def cut(self, why: str) -> None:
        """End every run that is under way; each raises `EngineDeadError`, and leaves nothing."""
        first = {id(running.waiting): running for running in self.running.values()}
        for running in first.values():
            running.waiting.put(running.key, EngineDeadError(why))

    def metrics(self) -> Any:
        """vLLM's own, as a registry of Prometheus's client."""
        return metrics.registry()

    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of its tokenizer, by name.

        Raises:
            NotSupportedError: it has none of transformers'.
        """
        return tokenizer.files_of(self.llm)

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

    # -- for the requests in it --------------------------------------------------------------------

    def _read(self) -> None:
        """Hand every frame that has come to its request."""
        if self._closed:
            return
        frame = self._receiver.take()
        while frame is not None:
            self.edits.note(frame)
            running = self.running.get(frame.header["key"])
            if running is not None:
                running.take(frame)
            elif frame.header["kind"] == "ended":
                self.kept.disown(handles_of(frame))
            frame = self._receiver.take()
        if self._receiver.more:
            self.loop.call_soon(self._read)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker.

        Raises:
            EngineDeadError: the engine has ended.
        """
        if self._closed:
            raise EngineDeadError("The engine was closed.")
        try:
            return await async_startup.call_workers(self.llm, method, args)
        except startup.dead_errors() as error:
            raise EngineDeadError(DEAD) from error

    async def abort(self, keys: list[str]) -> None:
        """End requests."""
        try:
            await async_startup.abort(self.llm, keys)
        except startup.dead_errors() as error:
            raise EngineDeadError(DEAD) from error

    async def undisturbed(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for some work, which goes on to its end even if who waits is cancelled."""
        return await asyncio.shield(self._apart_from(work))

    def _apart_from(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._apart.add(task)
        task.add_done_callback(self._apart.discard)
        return task

    def missing(self, digests: Collection[str]) -> list[str]:
        """Which outside tensors the workers do not hold now."""
        return self._ledger.missing(digests)

    async def use(self, digests: Collection[str], blobs: dict[str, Buffer]) -> None:
        """Bring outside tensors to the workers, to stay until they are released.

        Raises:
            EngineError: one has changed since it was taken along, and the workers let it go.
        """
        async with self._lock:
            for digest in self._ledger.missing(dict.fromkeys(digests)):
                data = blobs[digest]
                check_content(digest, data)
                await self.rpc("nnsight_put", digest, bytes(data))
                self._ledger.put(digest, memoryview(data).nbytes)
            self._ledger.use(digests)

    async def release(self, digests: Collection[str], doubtful: Collection[str]) -> None:
        """Let outside tensors go that nobody needs; those of blocks that failed in any case."""
        async with self._lock:
            leaving = self._ledger.release(digests, doubtful)
            if leaving:
                await self.rpc("nnsight_drop", leaving)
