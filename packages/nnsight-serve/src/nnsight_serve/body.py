"""The body of a request: read as it comes, within the limit, into what it is.

A route reads it itself: what a route is given ready was read before its caller was known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from nnsight_core.errors import CaptureError, NotSupportedError, PolicyError, ProtocolError
from nnsight_core.wire.frames import MEDIA_TYPE, VERSION, Frame, FrameReader, FrameTooLarge
from nnsight_serve.bodies import too_large
from nnsight_serve.refusals import Refused
from nnsight_serve.uploads import Missing

_FRAMES = {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
BODY = {**_FRAMES, "required": True, "description": "One frame of the nnsight protocol."}
"""A body of frames, as the description of a route has it."""
ANSWERED = {**_FRAMES, "description": "Frames of the nnsight protocol, as they are made."}
"""An answer of frames, as the description of a route has it."""
MAX_JSON = 1 << 22
"""The most bytes of a body that is JSON, which is taken apart while every other request waits."""
_M = TypeVar("_M", bound=BaseModel)


async def read_frame(request: Request) -> Frame:
    """The frame that a request's body is.

    Raises:
        Refused: it is none, none of this version, or larger than one may be now, or ever.
    """
    bodies = request.app.state.bodies
    reader = FrameReader(bodies.of_one, request.state.account.body.unpack)
    frames: list[Frame] = []
    try:
        async for chunk in request.stream():
            if reader.packed:
                # To unpack much would make every other request wait.
                frames += await asyncio.to_thread(lambda chunk=chunk: list(reader.feed(chunk)))
            else:
                frames += reader.feed(chunk)
        reader.end()
    except FrameTooLarge:
        raise too_large(bodies) from None
    except ProtocolError as error:
        raise malformed(error) from None
    if len(frames) != 1:
        raise malformed(ProtocolError(f"The body holds {len(frames)} frames; it takes one."))
    return frames[0]


def json_body(cls: type[BaseModel]) -> dict[str, Any]:
    """A body that `read_json` takes, as the description of a route has it."""
    return {"content": {"application/json": {"schema": cls.model_json_schema()}}, "required": True}


async def read_json(request: Request, cls: type[_M]) -> _M:
    """The JSON that a request's body is.

    Raises:
        Refused: it is none, not of this form, or larger than such a body may be.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON:
            error = ValueError(f"The body is larger than the {MAX_JSON} bytes of JSON taken here.")
            raise Refused(413, error, limit=MAX_JSON)
    try:
        return cls.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        said = f"The body is not the JSON that belongs here: {place}: {first['msg']}."
        raise malformed(ProtocolError(said)) from None


@contextmanager
def decoded() -> Iterator[None]:
    """What is wrong with what a frame says is a refusal.

    Raises:
        Refused: it is not well formed, names contents that are not here, cannot be meant, or is
            not allowed.
    """
    try:
        yield
    except Missing as error:
        raise Refused(409, error, missing=error.digests) from None
    except ProtocolError as error:
        raise malformed(error) from None
    except PolicyError as error:
        raise Refused(403, error) from None
    except (CaptureError, NotSupportedError, TypeError) as error:
        raise Refused(400, error) from None


def malformed(error: ProtocolError) -> Refused:
    """The refusal of what is not well formed, with the versions of the protocol known here."""
    return Refused(400, error, versions=[VERSION])
