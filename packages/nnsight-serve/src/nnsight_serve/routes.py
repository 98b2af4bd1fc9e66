"""The routes. Each decodes, submits and answers; what it decides is decided elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse

from nnsight_core.errors import EngineDeadError, PolicyError, ProtocolError
from nnsight_core.wire.frames import VERSION
from nnsight_serve.body import malformed, read_frame
from nnsight_serve.incoming import trace_of
from nnsight_serve.outgoing import FrameResponse, frames_of
from nnsight_serve.refusals import Refused
from nnsight_serve.settings import Settings
from nnsight_vllm_worker.async_engine import AsyncEngine
from nnsight_vllm_worker.settings import SETTINGS


def check_key(request: Request, authorization: Annotated[str, Header()] = "") -> None:
    """Let in who sends the server's key.

    Raises:
        Refused: another key came, or none.
    """
    key = _settings(request).api_key
    if key is None:
        return
    scheme, _, given = authorization.partition(" ")
    # A header arrives as Latin-1, whatever its bytes mean.
    right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    if scheme.lower() != "bearer" or not right:
        seen = "The key is wrong" if authorization else "A key is needed"
        raise Refused(401, PolicyError(f"{seen}: this server takes `Authorization: Bearer KEY`."))


def engine_of(request: Request) -> AsyncEngine:
    """The app's engine.

    Raises:
        Refused: it has ended.
    """
    engine: AsyncEngine = request.app.state.engine
    if not engine.alive:
        raise Refused(503, EngineDeadError("The engine has ended; the server must be restarted."))
    return engine


Engine = Annotated[AsyncEngine, Depends(engine_of)]

open_routes = APIRouter()
routes = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])


@open_routes.get("/health")
async def health(_: Engine) -> dict[str, str]:
    """Whether the engine runs; needs no key."""
    return {"status": "ok"}


@routes.get("/model")
async def model(request: Request, engine: Engine) -> JSONResponse:
    """What is served: the model's tree, the engine and its settings, and the blocks in it now."""
    live = await _while_alive(engine.counts())
    return JSONResponse(
        {
            "protocol": VERSION,
            "model": engine.tree.model,
            "engine": engine.tree.engine,
            "tree": engine.tree.model_dump(mode="json"),
            "settings": [dataclasses.asdict(setting) for setting in SETTINGS],
            "max_body": _settings(request).max_body,
            "live": live["live"],
        }
    )


@routes.post("/trace")
async def trace(request: Request, engine: Engine) -> FrameResponse:
    """Run the trace that the body is; what becomes of it is streamed back."""
    frame = await read_frame(request, _settings(request).max_body)
    try:
        # In a thread: to hash what is large would make every other request wait.
        asked = await asyncio.to_thread(trace_of, frame)
    except ProtocolError as error:
        raise malformed(error) from None
    except TypeError as error:
        raise Refused(400, error) from None
    return FrameResponse(frames_of(engine, asked))


async def _while_alive(answer: Any) -> Any:
    try:
        return await answer
    except EngineDeadError as error:
        raise Refused(503, error) from None


def _settings(request: Request) -> Settings:
    return request.app.state.settings
