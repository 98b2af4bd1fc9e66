"""What a trace answers: its frames, sent as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nnsight_core.wire.frames import MEDIA_TYPE, Buffer, Frame, Padding
from nnsight_core.wire.messages import AliveMessage, DoneMessage, FinishedMessage
from nnsight_core.wire.went import WentSender
from nnsight_serve.engine import edits_of
from nnsight_serve.handles import Handles
from nnsight_serve.incoming import Trace
from nnsight_serve.refusals import record_of
from nnsight_vllm_worker.async_engine import AsyncEngine

PIECE = 1 << 19
"""Bytes that are given to a socket at a time."""
_MUCH = 1 << 20
"""Bytes that take long to pack."""
SILENCE = 10.0
"""Seconds of silence after which a client is told that the server is there."""


async def frames_of(
    engine: AsyncEngine, trace: Trace, handles: Handles, caller: str = ""
) -> AsyncGenerator[Frame, None]:
    """Run a trace; the frames for its client, in which an invoke's key is its index.

    What the worker sends is passed on unread, but for that key. Of a trace that is left before its
    end, nothing stays on the engine.
    """
    for index, error in trace.refused.items():
        yield _finished(index, error)
    left = set(trace.index_of.values())
    went = {index: WentSender(str(index)) for index in left}
    sent: list[str] = []
    over = False
    try:
        async with aclosing(engine.run(trace.requests, trace.blobs)) as news:
            async for key, what in news:
                index = trace.index_of[key]
                if isinstance(what, Frame):
                    sent += handles.went(what, caller)
                    what.header["key"] = str(index)
                    yield what
                    continue
                if not isinstance(what, BaseException) and not what.finished:
                    yield went[index].message(what).frame()
                    continue
                left.discard(index)
                if isinstance(what, BaseException):
                    yield _finished(index, what)
                else:
                    yield FinishedMessage(key=str(index), output=what).frame()
        over = True
    except Exception as error:
        # The engine has ended, or an edit that was asked for has been cleared meanwhile.
        for index in sorted(left):
            yield _finished(index, error)
        over = True
    finally:
        if not over and sent and engine.alive:
            handles.freed(sent)
            engine.let_go(sent, "the client that kept it went away")
    yield _done(engine, handles).frame() if trace.tells else DoneMessage().frame()


async def beating(frames: AsyncGenerator[Frame, None]) -> AsyncGenerator[Frame, None]:
    """Frames as they come, and a sign of life where none comes for a while."""
    async with aclosing(frames):
        while True:
            coming = asyncio.ensure_future(anext(frames, None))
            try:
                while not (await asyncio.wait((coming,), timeout=SILENCE))[0]:
                    yield AliveMessage().frame()
            finally:
                if not coming.done():
                    coming.cancel()
                    with suppress(asyncio.CancelledError):
                        await coming
            frame = coming.result()
            if frame is None:
                return
            yield frame


class FrameResponse(Response):
    """A stream of frames, each sent when it is there; a client that leaves ends their making.

    Args:
        compress: whether frames may be packed.
        headers: what is said before them.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        frames: AsyncGenerator[Frame, None],
        compress: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers=headers)
        # The length of what is still to be made is not known.
        del self.headers["content-length"]
        self._frames = beating(frames)
        self._compress = compress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            await asyncio.wait((sending, leaving))
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                if frame.coming is not None and not self._compress:
                    await _pass_on(frame, frame.coming, send)
                    continue
                for piece in _pieces(await self._parts(frame)):
                    await _go(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self, frame: Frame) -> list[Buffer]:
        if frame.coming is not None:
            frame = replace(frame, buffers=[piece async for piece in frame.coming], coming=None)
        if self._compress and sum(frame.sizes) > _MUCH:
            # To pack much would make every other request wait.
            return await asyncio.to_thread(frame.parts, True)
        return frame.parts(self._compress)


async def _pass_on(frame: Frame, coming: AsyncIterable[Buffer], send: Send) -> None:
    """Send a frame as its pieces come."""
    await _go(send, frame.head())
    padding = Padding(frame.sizes)
    async for piece in coming:
        for part in _pieces(padding.after(piece)):
            await _go(send, part)


async def _go(send: Send, body: Buffer) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _pieces(parts: list[Buffer]) -> Iterator[Buffer]:
    """The parts of a frame as bodies of a size that sockets like."""
    small = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        if len(small) + len(view) <= PIECE:
            small += view
            continue
        if small:
            yield bytes(small)
            small.clear()
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]
    if small:
        yield bytes(small)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _done(engine: AsyncEngine, handles: Handles) -> DoneMessage:
    return DoneMessage(edits=edits_of(engine), keep_seconds=handles.seconds)


def _finished(index: int, error: BaseException) -> Frame:
    return FinishedMessage(key=str(index), error=record_of(error)).frame()
