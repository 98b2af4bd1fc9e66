"""What Prometheus asks for."""

from fastapi import APIRouter, Request, Response

routes = APIRouter()

_WITHIN = 1.0


@routes.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Metrics of the server and of vLLM, in Prometheus's form; needs no key."""
    state = request.app.state
    # What an engine that hangs said last is told, rather than nothing.
    await state.pulse.beats(_WITHIN)
    content, media_type = state.metrics.expose(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": media_type})
