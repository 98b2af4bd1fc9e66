"""What any OpenAI client asks of a server, answered by vLLM's own code."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from nnsight_serve.engine import Engine
from nnsight_serve.openai import Passed, prompts_in
from nnsight_serve.refusals import refusals

_BODY = {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "vLLM refuses it.", "content": {"application/json": {}}},
    "5XX": {"description": "vLLM failed.", "content": {"application/json": {}}},
    **refusals(401, 413, 429, 503),
}

routes = APIRouter()


@routes.post("/completions", responses=_ANSWERS, openapi_extra={"requestBody": _BODY})
@routes.post("/chat/completions", responses=_ANSWERS, openapi_extra={"requestBody": _BODY})
async def generate(request: Request, _: Engine) -> Passed:
    """As vLLM has it, on this engine; `edits` in the body chooses among the installed edits."""
    body = await request.body()
    # It is read as vLLM reads it, so that both see the same prompts.
    request.state.account.take(await asyncio.to_thread(prompts_in, body))
    return Passed(request.app.state.openai, body)


@routes.get("/models", responses=_ANSWERS)
async def models(request: Request, _: Engine) -> Passed:
    """As vLLM has it."""
    return Passed(request.app.state.openai)
