"""The routes. Each decodes, submits and answers; what it decides is decided elsewhere."""

from fastapi import APIRouter, Depends

from nnsight_serve.access import check_key
from nnsight_serve.refusals import refusals
from nnsight_serve.routes import (
    edits,
    health,
    kept,
    load,
    metrics,
    model,
    openai,
    page,
    tokenizer,
    trace,
)

open_routes = APIRouter()
for part in (health, metrics, page):
    open_routes.include_router(part.routes)

keyed_routes = APIRouter(
    prefix="/v1", dependencies=[Depends(check_key)], responses=refusals(401, 503)
)
for part in (model, tokenizer, trace, edits, kept, load, openai):
    keyed_routes.include_router(part.routes)

__all__ = ["keyed_routes", "open_routes"]
