"""Whether the server lives."""

from fastapi import APIRouter

from nnsight_serve.engine import Engine

routes = APIRouter()


@routes.get("/health")
async def health(_: Engine) -> dict[str, str]:
    """Whether the engine runs; needs no key."""
    return {"status": "ok"}
