"""The local backend for asyncio: a model's traces on an `AsyncLLM` in this process's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from nnsight_core.async_run import need_loop
from nnsight_core.backend import EditInfo, EditSpec, Event, Finished, Invoke
from nnsight_core.edits import owner
from nnsight_core.errors import EngineDeadError, EngineError
from nnsight_core.kept import KeptValues
from nnsight_core.tree import ModelTree
from nnsight_core.wire.blocks import check_block
from nnsight_vllm_worker.async_engine import AsyncEngine
from nnsight_vllm_worker.backend import event_of, own_errors, placed
from nnsight_vllm_worker.encoding import BlockEncoder
from nnsight_vllm_worker.prompts import sampling_names
from nnsight_vllm_worker.submission import Request


class LocalAsyncBackend:
    """Runs invokes on an async engine. See `nnsight_core.AsyncBackend`.

    Args:
        build: builds the engine on the running loop.
        attached: is told of each engine that is ready.
        tokenizer: gives the model's tokenizer.
        pickle: whether blocks may hold what only cloudpickle ships.
        device: where saved tensors arrive.

    Attributes:
        engine: the engine, once one is built.
    """

    def __init__(
        self,
        build: Callable[[], AsyncEngine],
        attached: Callable[[AsyncEngine], None],
        tokenizer: Callable[[], Any],
        *,
        pickle: bool = True,
        device: str = "cpu",
    ) -> None:
        self.engine: AsyncEngine | None = None
        self._build = build
        self._attached = attached
        self._tokenizer = tokenizer
        self._pickle = pickle
        self._device = device
        self._lock = asyncio.Lock()
        self._ready = False

    def start(self) -> AsyncEngine:
        """The engine, built on the running loop when it is first needed.

        Raises:
            EngineError: no loop runs here, it is not the engine's, or the engine cannot be built.
        """
        loop = need_loop()
        if self.engine is None:
            self.engine = self._build()
        if self.engine.loop is not loop:
            raise EngineError(
                "This engine belongs to another event loop, the one that it was built on: use the "
                "model inside one `asyncio.run`, or build another model."
            )
        return self.engine

    async def ready(self) -> AsyncEngine:
        """The engine, with its workers attached."""
        engine = self.start()
        async with self._lock:
            if not self._ready:
                await engine.attach()
                self._ready = True
                self._attached(engine)
        return engine

    def submit(
        self, invokes: list[Invoke], streams: Callable[[], bool]
    ) -> AsyncGenerator[Event, None]:
        sampling_names().check_invokes(invokes)  # before an engine is built
        encoder = self._encoder()
        made: list[Request | Exception] = []
        for invoke in invokes:
            try:
                made.append(encoder.request(invoke))
            except Exception as error:
                # With one invoke there is nothing that its error could take along.
                if len(invokes) == 1 or isinstance(error, TypeError):
                    raise
                made.append(error)
        # The user's tensors may change before the engine has them.
        for digest in self.start().missing(encoder.blobs):
            encoder.blobs[digest] = bytes(encoder.blobs[digest])
        return self._run(invokes, made, encoder, streams)

    async def _run(
        self,
        invokes: list[Invoke],
        made: list[Request | Exception],
        encoder: BlockEncoder,
        streams: Callable[[], bool],
    ) -> AsyncGenerator[Event, None]:
        streaming = streams()
        engine = await self.ready()
        requests: list[Request] = []
        index_of: dict[str, int] = {}
        for index, (invoke, request) in enumerate(zip(invokes, made, strict=True)):
            try:
                if isinstance(request, Exception):
                    raise request
                check_block(invoke, engine.tree)
                engine.edits.chosen(request.names)
            except Exception as error:
                if len(invokes) == 1:
                    raise
                yield Finished(index, None, error)
                continue
            if streaming:
                request.stream()
            index_of[request.key] = index
            requests.append(request)
        async with aclosing(engine.run(requests, encoder.blobs)) as news:
            async for key, what in news:
                index = index_of[key]
                event = event_of(invokes[index], index, what, engine.kept)
                yield placed(event, self._device)

    def _encoder(self) -> BlockEncoder:
        # The tree may not be known yet, so that blocks are checked when it is.
        return BlockEncoder(None, self._tokenizer(), self._pickle, kept=self.start().kept)

    @property
    def kept(self) -> KeptValues:
        """What blocks kept on the engine."""
        return self.start().kept

    async def describe(self) -> ModelTree:
        return (await self.ready()).tree

    async def install(self, edit: EditSpec) -> EditInfo:
        encoder = self._encoder()
        carried = encoder.block(edit.invoke)
        assert carried is not None
        engine = await self.ready()
        check_block(edit.invoke, engine.tree)
        with own_errors(edit.invoke):
            return await engine.install(edit, carried, encoder.blobs, owner())

    async def clear(self, ids: list[str] | None) -> None:
        await (await self.ready()).clear(ids)

    def edits(self) -> list[EditInfo]:
        return [] if self.engine is None else self.engine.edits.infos()

    async def aedits(self) -> list[EditInfo]:
        return self.edits()

    async def aclose(self) -> None:
        """End the engine and its processes."""
        if self.engine is not None:
            await self.engine.close()

    def forget(self) -> None:
        """Let another engine be built when one is needed next."""
        if self.engine is not None and self.engine.alive:
            raise EngineDeadError("The engine runs; end it first: `await model.aclose()`.")
        self.engine, self._ready = None, False
