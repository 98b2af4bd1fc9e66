"""The backend that runs traces on a server, over HTTP, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing
from functools import partial
from typing import Any

import httpx

from nnsight_client.asked import Asked
from nnsight_client.connection import connect_async, near, speaking, thinking
from nnsight_client.http_backend import HttpBackend, check, sendable
from nnsight_client.patience import sending_async
from nnsight_client.refusals import error_of, missing_in
from nnsight_core.async_run import need_loop
from nnsight_core.backend import EditInfo, EditList, EditSpec, Event, Invoke
from nnsight_core.edits import owner
from nnsight_core.errors import EngineError
from nnsight_core.kept import KeptValues
from nnsight_core.tree import ModelTree
from nnsight_core.wire.frames import MEDIA_TYPE, Frame, FrameReader


class HttpAsyncBackend:
    """Runs invokes on an nnsight server. See `nnsight_core.AsyncBackend`.

    Args:
        now: the backend of the same server that waits for its answers; what both do is its.

    Attributes:
        now: as given.
        kept: what blocks kept on the server's engine for this process.
    """

    def __init__(self, now: HttpBackend, api_key: str | None = None) -> None:
        self.now = now
        # Whoever lists values, or lets go of them, is not to wait for the server.
        self.kept = now.kept = KeptValues(self)
        self._freeing: dict[asyncio.Task[None], list[str]] = {}
        self._api_key = api_key
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(
        self, invokes: list[Invoke], streams: Callable[[], bool]
    ) -> AsyncGenerator[Event, None]:
        self._client()
        asked = self.now.asked(invokes, later=True)
        asked.encoder.take_along(self.now.held)
        return self._run(asked, streams)

    async def _run(self, asked: Asked, streams: Callable[[], bool]) -> AsyncGenerator[Event, None]:
        streaming = streams()
        for event in asked.refused:
            yield event
        if not asked.sent:
            return
        if self._freeing:
            await asyncio.wait([*self._freeing])  # else there might be no room yet for new ones
        about = {**self.now.about(), "streams": streaming, "tells": True}
        with asked.answered(about["freed"]):
            async with aclosing(self._frames(asked, about)) as frames:
                async for frame in frames:
                    for event in asked.events(frame):
                        yield event

    async def describe(self) -> ModelTree:
        return await asyncio.to_thread(self.now.describe)

    async def install(self, edit: EditSpec) -> EditInfo:
        # To ask for the tree here would hold up the loop.
        encoder = self.now.encoded(edit, later=True)
        held = self.now.held
        encoder.take_along(held)

        async def ask(without: Collection[str]) -> httpx.Response:
            content = encoder.install(edit, owner(), without).to_bytes()
            how = {"headers": {"Content-Type": MEDIA_TYPE}, "timeout": thinking()}
            return await self._send("POST", "/v1/edits", content=content, **how)

        with speaking(self.now.url):
            answer = await ask(held)
            if missing_in(answer) is not None:
                held -= set(encoder.blobs)
                encoder.check_unchanged()
                answer = await ask(())
        return self.now.installed(answer, edit, encoder)

    async def clear(self, ids: list[str] | None) -> None:
        if ids == []:
            return  # which the address cannot say
        params = {} if ids is None else {"id": ids}
        answer = await self._ask("DELETE", "/v1/edits", params=params)
        self.now.told.take(EditList.model_validate(answer.json()))
        self.now.cleared(ids)

    def edits(self) -> list[EditInfo]:
        return self.now.told.edits()

    async def aedits(self) -> list[EditInfo]:
        answer = await self._ask("GET", "/v1/edits")
        self.now.told.take(EditList.model_validate(answer.json()))
        return self.edits()

    def let_go(self, ids: list[str], why: str) -> None:
        """Let kept values go, soon. See `nnsight_core.kept.Holder`."""
        try:
            task = asyncio.get_running_loop().create_task(self._free(ids, why))
        except RuntimeError:
            self.kept.disown(ids)  # the next trace tells of them
            return
        self._freeing[task] = ids
        task.add_done_callback(self._freed)

    async def _free(self, ids: list[str], why: str) -> None:
        await self._ask("POST", "/v1/kept/free", json={"ids": ids, "why": why})

    def _freed(self, task: asyncio.Task[None]) -> None:
        ids = self._freeing.pop(task, [])
        if task.cancelled() or task.exception() is not None:
            self.kept.disown(ids)  # the next trace tells of them

    def list_kept(self) -> list[tuple[str, int, float]]:
        """The kept values of this process whose time is not over. See `nnsight_core.kept.Holder`.

        Of those that left the server otherwise nothing is known here.
        """
        most = self.now.told.keep_seconds
        found = [(handle.id, handle.bytes, handle.age) for handle in self.kept.handles()]
        return [row for row in found if most is None or row[2] <= most]

    async def aclose(self) -> None:
        ids = self.kept.ended()
        self.kept.close()
        # Those of a loop that has ended are closed with it.
        if self._http is not None and self._loop is need_loop():
            if ids:
                self.let_go(ids, "its handle was freed")
            if self._freeing:
                await asyncio.wait([*self._freeing])
            await self._http.aclose()
        await asyncio.to_thread(self.now.close)

    def _client(self) -> httpx.AsyncClient:
        """The connections, which belong to the loop on which they were first used.

        Raises:
            EngineError: no loop runs here, or another one.
        """
        loop = need_loop()
        if self._http is None or self._loop is None or self._loop.is_closed():
            self._http = connect_async(self.now.url, self._api_key, self.now.verify)
            self._loop = loop
            # What a loop that was closed did not come to.
            for ids in self._freeing.values():
                self.kept.disown(ids)
            self._freeing.clear()
        if self._loop is not loop:
            raise EngineError(
                "This model is in use on another event loop: use it inside one `asyncio.run`, or "
                "make another model."
            )
        return self._http

    async def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        send = partial(self._client().stream, method, path, **what)
        async with sending_async(send, self.now.retries) as response:
            await response.aread()
        return response

    async def _ask(self, method: str, path: str, **what: Any) -> httpx.Response:
        with speaking(self.now.url):
            answer = await self._send(method, path, **what)
        if not answer.is_success:
            raise error_of(answer, self.now.url)
        return answer

    async def _frames(self, asked: Asked, about: dict[str, Any]) -> AsyncGenerator[Frame, None]:
        """Ask for a trace; the frames that come back, as they come."""
        url, held, blobs = self.now.url, self.now.held, set(asked.encoder.blobs)
        reader = FrameReader()
        for left_out in (held & blobs, set[str]()):
            frame = asked.encoder.frame(left_out, **about)
            # Packing holds up the loop, and copying does not for long.
            pack = partial(sendable, frame, near(url))
            parts, headers = pack() if near(url) else await asyncio.to_thread(pack)
            with speaking(url):
                how = {"content": _Pieces(parts), "headers": headers}
                send = partial(self._client().stream, "POST", "/v1/trace", **how)
                async with sending_async(send, self.now.retries) as response:
                    if not response.is_success:
                        await response.aread()
                        if missing_in(response) is not None and left_out:
                            held -= blobs
                            asked.encoder.check_unchanged()
                            continue
                    check(response, url)
                    self.now.served.take(response.headers)
                    held |= blobs
                    async for chunk in response.aiter_raw():
                        for frame in reader.feed(chunk):
                            yield frame
                    reader.end()
                    return


class _Pieces:
    """The pieces of a body, which may be sent more than once."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
