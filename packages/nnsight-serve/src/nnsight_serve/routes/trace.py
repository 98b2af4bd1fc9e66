"""Traces."""

import asyncio

from fastapi import APIRouter, Request, Response

from nnsight_serve.body import ANSWERED, BODY, decoded, read_frame
from nnsight_serve.engine import Engine, served_by
from nnsight_serve.incoming import Trace, trace_of
from nnsight_serve.outgoing import FrameResponse, frames_of
from nnsight_serve.policy import policy_of
from nnsight_serve.refusals import refusals

routes = APIRouter()


@routes.post(
    "/trace",
    response_class=Response,
    responses={200: ANSWERED, **refusals(400, 403, 409, 413, 429)},
    openapi_extra={"requestBody": BODY},
)
async def trace(request: Request, engine: Engine) -> FrameResponse:
    """Run the trace that the body is; what becomes of it is streamed back."""
    state = request.app.state
    caller = request.state.caller
    frame = await read_frame(request)
    about = policy_of(request), state.limits.fit, state.handles.owned_by(caller)
    with decoded():
        # In a thread: to hash what is large would make every other request wait.
        asked = await asyncio.to_thread(trace_of, frame, *about)
        asked.blobs = state.uploads.take(asked.needs, asked.blobs)
    _choose(engine, asked)
    freed = state.handles.of(caller, asked.freed)
    if freed:
        state.handles.freed(freed)
        engine.let_go(freed, "its handle was freed")
    account = request.state.account
    account.take(len(asked.requests))
    frames = account.watch(frames_of(engine, asked, state.handles, caller))
    return FrameResponse(frames, asked.zstd, served_by(request))


def _choose(engine: Engine, asked: Trace) -> None:
    """Refuse the requests that ask for edits which are not installed."""
    for request in list(asked.requests):
        try:
            engine.edits.chosen(request.names)
        except ValueError as error:
            asked.requests.remove(request)
            asked.refused[asked.index_of.pop(request.key)] = error
