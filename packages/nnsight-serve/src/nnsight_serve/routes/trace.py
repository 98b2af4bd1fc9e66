"""Traces."""

import asyncio

from fastapi import APIRouter, Request

from nnsight_core.errors import ProtocolError
from nnsight_serve.body import ANSWERED, BODY, malformed, read_frame
from nnsight_serve.engine import Engine
from nnsight_serve.incoming import trace_of
from nnsight_serve.outgoing import FrameResponse, frames_of
from nnsight_serve.refusals import Refused, refusals

routes = APIRouter()


@routes.post(
    "/trace",
    response_class=FrameResponse,
    responses={200: ANSWERED, **refusals(400, 413, 429)},
    openapi_extra={"requestBody": BODY},
)
async def trace(request: Request, engine: Engine) -> FrameResponse:
    """Run the trace that the body is; what becomes of it is streamed back."""
    frame = await read_frame(request, request.app.state.settings.max_body)
    try:
        # In a thread: to hash what is large would make every other request wait.
        asked = await asyncio.to_thread(trace_of, frame)
    except ProtocolError as error:
        raise malformed(error) from None
    except TypeError as error:
        raise Refused(400, error) from None
    account = request.state.account
    account.take(len(asked.requests))
    return FrameResponse(account.watch(frames_of(engine, asked)))
