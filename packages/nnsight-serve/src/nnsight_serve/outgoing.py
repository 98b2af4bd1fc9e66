"""What a trace answers: its frames, sent as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nnsight_core.errors import EngineDeadError
from nnsight_core.wire.frames import MEDIA_TYPE, Frame
from nnsight_core.wire.messages import DoneMessage, FinishedMessage
from nnsight_serve.incoming import Trace
from nnsight_serve.refusals import record_of
from nnsight_vllm_worker.async_engine import AsyncEngine


async def frames_of(engine: AsyncEngine, trace: Trace) -> AsyncGenerator[Frame, None]:
    """Run a trace; the frames for its client, in which an invoke's key is its index.

    What the worker sends is passed on unread, but for that key.
    """
    for index, error in trace.refused.items():
        yield _finished(index, error)
    left = set(trace.index_of.values())
    try:
        async with aclosing(engine.run(trace.requests, trace.blobs)) as news:
            async for key, what in news:
                index = trace.index_of[key]
                if isinstance(what, Frame):
                    what.header["key"] = str(index)
                    yield what
                    continue
                left.discard(index)
                if isinstance(what, BaseException):
                    yield _finished(index, what)
                else:
                    yield FinishedMessage(key=str(index), output=what).frame()
    except EngineDeadError as error:
        for index in sorted(left):
            yield _finished(index, error)
    yield DoneMessage().frame()


class FrameResponse(Response):
    """A stream of frames, each sent when it is there; a client that leaves ends their making."""

    media_type = MEDIA_TYPE

    def __init__(self, frames: AsyncGenerator[Frame, None]) -> None:
        super().__init__()
        # The length of what is still to be made is not known.
        del self.headers["content-length"]
        self._frames = frames

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
                body = frame.to_bytes()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _finished(index: int, error: BaseException) -> Frame:
    return FinishedMessage(key=str(index), error=record_of(error)).frame()
