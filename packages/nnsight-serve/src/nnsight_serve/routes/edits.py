"""Edits on the engine: to install one, to see what is installed, to clear."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from nnsight_core.backend import EditInfo, EditList
from nnsight_core.errors import EngineDeadError, PolicyError
from nnsight_core.wire.frames import MEDIA_TYPE
from nnsight_serve.body import ANSWERED, BODY, decoded, read_frame
from nnsight_serve.engine import Engine, edits_of, served_by, while_alive
from nnsight_serve.incoming import install_of
from nnsight_serve.policy import policy_of
from nnsight_serve.refusals import Refused, refusals
from nnsight_vllm_worker.edits import NotInstalled

routes = APIRouter()

ADMIN = "admin"
"""The name of the key that may clear the edits of others."""


class Installed(EditList):
    """An edit that has been installed, and what is installed with it."""

    edit: EditInfo


@routes.get("/edits")
async def edits(engine: Engine) -> EditList:
    """What is installed, with statistics."""
    return edits_of(engine)


@routes.post(
    "/edits",
    response_model=Installed,
    responses={
        422: {**ANSWERED, "description": "A worker refused it; the frame says why."},
        **refusals(400, 403, 409, 413, 429),
    },
    openapi_extra={"requestBody": BODY},
)
async def install(request: Request, engine: Engine) -> Response:
    """Install the edit that the body is; it belongs to every request from the answer on.

    An edit that a worker refuses is answered with 422 and the worker's own frame, which holds the
    error of the block.
    """
    state = request.app.state
    caller = request.state.caller
    frame = await read_frame(request)
    with decoded():
        owns = state.handles.owned_by(caller)
        asked = await asyncio.to_thread(install_of, frame, policy_of(request), owns)
        blobs = state.uploads.take(asked.needs, asked.blobs)
    request.state.account.take(1)
    await while_alive(engine.sweep())
    room = (caller, engine.edits.held(), asked.carried.size(blobs))
    try:
        with state.edit_limits.installing(*room):
            owner = caller or asked.owner
            info = await engine.install(asked.spec, asked.carried, blobs, owner)
    except NotInstalled as refused:
        return Response(refused.frame.to_bytes(), 422, media_type=MEDIA_TYPE)
    except EngineDeadError as error:
        raise Refused(503, error) from None
    installed = Installed(edit=info, **edits_of(engine).model_dump())
    return JSONResponse(installed.model_dump(mode="json"), headers=served_by(request))


@routes.delete("/edits", responses=refusals(403))
async def clear(
    request: Request, engine: Engine, id: Annotated[list[str] | None, Query()] = None
) -> EditList:
    """Clear some edits, or all of the caller's; gives those that are still installed.

    Where keys have names, an edit is cleared by the key that installed it, or by the one named
    `admin`. Edits that are not installed (any more) are passed over.
    """
    installed = {info.id: info.owner for info in engine.edits.infos()}
    named = len(request.app.state.settings.api_keys) > 1
    caller = request.state.caller
    others = [e for e, owner in installed.items() if named and caller not in (owner, ADMIN)]
    for edit in id or ():
        if edit in others:
            raise Refused(
                403,
                PolicyError(
                    f"The edit {edit} is {installed[edit]}'s; that key clears it, or the one "
                    f"named {ADMIN!r}."
                ),
            )
    gone = [edit for edit in installed if edit not in others and (id is None or edit in id)]
    await while_alive(engine.clear(gone))
    return edits_of(engine)
