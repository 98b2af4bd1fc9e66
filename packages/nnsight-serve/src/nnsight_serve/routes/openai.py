"""What any OpenAI client asks of a server, answered by vLLM's own code."""

from fastapi import APIRouter, Request

from nnsight_serve.engine import Engine
from nnsight_serve.openai import Passed

routes = APIRouter()


@routes.post("/completions")
@routes.post("/chat/completions")
@routes.get("/models")
async def openai(request: Request, _: Engine) -> Passed:
    """As vLLM has it, on this engine; `edits` in the body chooses among the installed edits."""
    state = request.app.state
    return Passed(state.openai, state.settings.max_body)
