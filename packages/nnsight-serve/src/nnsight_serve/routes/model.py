"""What is served."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from nnsight_core.tree import ModelTree
from nnsight_core.wire.frames import VERSION
from nnsight_serve.engine import Engine, served_by, while_alive
from nnsight_vllm_worker.prompts import sampling_names
from nnsight_vllm_worker.settings import SETTINGS

routes = APIRouter()


class Described(BaseModel):
    """What is served.

    Attributes:
        protocol: the version of the protocol.
        model, engine: what runs, and on what.
        tree: the model's locations.
        settings: the engine arguments that are not left to vLLM, each with its reason.
        sampling: the names of the sampling arguments that are known.
        max_body: the most bytes that the body of a request may have.
        live: how many blocks are in the engine.
        counts: what else is.
    """

    protocol: int
    model: str
    engine: str
    tree: ModelTree
    settings: list[dict[str, Any]]
    sampling: list[str]
    max_body: int
    live: int
    counts: dict[str, int]


@routes.get("/model", response_model=Described)
async def model(request: Request, engine: Engine) -> JSONResponse:
    """What is served: the model's tree, the engine and its settings, and what is in it now."""
    counts = await while_alive(engine.counts())
    return JSONResponse(
        {
            "protocol": VERSION,
            "model": engine.tree.model,
            "engine": engine.tree.engine,
            "tree": engine.tree.model_dump(mode="json"),
            "settings": [dataclasses.asdict(setting) for setting in SETTINGS],
            "sampling": sampling_names().names,
            "max_body": request.app.state.bodies.of_one,
            "live": counts["live"],
            "counts": counts,
        },
        headers=served_by(request),
    )
