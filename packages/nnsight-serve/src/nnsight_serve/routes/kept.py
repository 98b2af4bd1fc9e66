"""Values that blocks keep on the engine."""

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from nnsight_serve.body import json_body, read_json
from nnsight_serve.engine import Engine, while_alive
from nnsight_serve.refusals import refusals

routes = APIRouter()


class KeptData(BaseModel):
    """One value: its id, how much memory it takes, and its age in seconds."""

    id: str
    bytes: int
    age: float


class KeptList(BaseModel):
    """The values that the caller keeps."""

    kept: list[KeptData]


class Freed(BaseModel):
    """Values to let go, and why, for whoever asks for them later."""

    ids: list[str]
    why: str = Field("its handle was freed", max_length=200)


@routes.get("/kept")
async def kept(request: Request, engine: Engine) -> KeptList:
    """What the caller keeps."""
    found = await while_alive(engine.all_kept())
    mine = set(request.app.state.handles.of(request.state.caller, [id for id, _, _ in found]))
    rows = [KeptData(id=id, bytes=size, age=age) for id, size, age in found if id in mine]
    return KeptList(kept=rows)


@routes.post(
    "/kept/free", responses=refusals(400, 413), openapi_extra={"requestBody": json_body(Freed)}
)
async def free(request: Request, engine: Engine) -> KeptList:
    """Let values of the caller's go; those that are not there are passed over."""
    freed = await read_json(request, Freed)
    ids = request.app.state.handles.of(request.state.caller, freed.ids)
    request.app.state.handles.freed(ids)
    await while_alive(engine.rpc("nnsight_let_go", ids, freed.why))
    return await kept(request, engine)
