"""Traces."""

import asyncio

from fastapi import APIRouter, Request

from nnsight_core.errors import CaptureError, NotSupportedError, PolicyError, ProtocolError
from nnsight_serve.body import malformed, read_frame
from nnsight_serve.engine import Engine
from nnsight_serve.incoming import trace_of
from nnsight_serve.outgoing import FrameResponse, frames_of
from nnsight_serve.policy import policy_of
from nnsight_serve.refusals import Refused

routes = APIRouter()


@routes.post("/trace")
async def trace(request: Request, engine: Engine) -> FrameResponse:
    """Run the trace that the body is; what becomes of it is streamed back."""
    frame = await read_frame(request, request.app.state.settings.max_body)
    try:
        # In a thread: to hash what is large would make every other request wait.
        asked = await asyncio.to_thread(trace_of, frame, policy_of(request))
    except ProtocolError as error:
        raise malformed(error) from None
    except PolicyError as error:
        raise Refused(403, error) from None
    except (CaptureError, NotSupportedError, TypeError) as error:
        raise Refused(400, error) from None
    return FrameResponse(frames_of(engine, asked))
