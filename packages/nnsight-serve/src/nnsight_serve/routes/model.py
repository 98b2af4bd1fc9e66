"""What is served."""

import dataclasses

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from nnsight_core.wire.frames import VERSION
from nnsight_serve.engine import Engine, while_alive
from nnsight_vllm_worker.prompts import sampling_names
from nnsight_vllm_worker.settings import SETTINGS

routes = APIRouter()


@routes.get("/model")
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
            "max_body": request.app.state.settings.max_body,
            "live": counts["live"],
            "counts": counts,
        }
    )
