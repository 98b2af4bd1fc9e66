"""Whether the server lives, and whether it would serve."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from nnsight_core.errors import BusyError, EngineDeadError
from nnsight_serve.engine import Engine
from nnsight_serve.pulse import WITHIN
from nnsight_serve.refusals import Refused, refusals

routes = APIRouter()


class Well(BaseModel):
    """The server is well."""

    status: Literal["ok"] = "ok"


@routes.get("/health", responses=refusals(503))
async def health(_: Engine) -> Well:
    """Whether the server and its engine live; needs no key."""
    return Well()


@routes.get("/ready", responses=refusals(503))
async def ready(request: Request, engine: Engine) -> Well:
    """Whether a request would be served now; needs no key.

    It would not while the server shuts down, or while the engine answers nothing: it hangs, or a
    block holds it.
    """
    state = request.app.state
    state.limits.refuse_if_closing()
    if not await state.pulse.beats():
        if not engine.alive:
            raise Refused(503, EngineDeadError("The engine has ended."))
        message = f"The engine has not answered for {WITHIN:g} seconds."
        raise Refused(503, BusyError(message, WITHIN))
    return Well()
