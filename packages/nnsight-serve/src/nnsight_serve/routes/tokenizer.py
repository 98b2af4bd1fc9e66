"""The model's tokenizer, for clients that cannot load it themselves."""

import asyncio

from fastapi import APIRouter, Request, Response

from nnsight_core.errors import NotSupportedError
from nnsight_core.wire.frames import MEDIA_TYPE
from nnsight_core.wire.tokenizer import digest_of, files_of, frame_of
from nnsight_serve.body import ANSWERED
from nnsight_serve.engine import Engine
from nnsight_serve.refusals import Refused, refusals

routes = APIRouter()


@routes.get(
    "/tokenizer",
    response_class=Response,
    responses={200: ANSWERED, 304: {"description": "It is the one known."}, **refusals(501)},
)
async def tokenizer(request: Request, engine: Engine) -> Response:
    """The files of the model's tokenizer, as one frame; 304 to whoever has them."""
    state = request.app.state
    if not hasattr(state, "tokenizer"):
        try:
            # In a thread: it may have a hundred thousand words.
            state.tokenizer = await asyncio.to_thread(lambda: frame_of(engine.tokenizer_files()))
        except NotSupportedError as error:
            raise Refused(501, error) from None
    tag = f'"{digest_of(files_of(state.tokenizer))}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(state.tokenizer.to_bytes(), media_type=MEDIA_TYPE, headers=headers)
