"""How much is going on."""

from fastapi import APIRouter

from nnsight_serve.engine import Engine, while_alive

routes = APIRouter()


@routes.get("/load")
async def load(engine: Engine) -> dict[str, int]:
    """What is in the engine now: requests, blocks, edits, and the bytes that it holds for them."""
    counts = await while_alive(engine.counts())
    return {
        "requests": engine.under_way,
        "blocks": counts["live"],
        "edits": len(engine.edits.infos()),
        "kept_bytes": counts["keep_bytes"],
        "outside_bytes": counts["blob_bytes"],
    }
