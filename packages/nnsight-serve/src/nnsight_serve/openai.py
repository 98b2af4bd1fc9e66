"""vLLM's OpenAI routes as an app of their own, on the server's engine.

They are apart, since they answer with errors of another shape and read a state of their own.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import Receive, Scope, Send

from nnsight_serve.settings import Settings
from nnsight_vllm_worker.async_engine import AsyncEngine
from nnsight_vllm_worker.vllm_ports import openai


def arguments_of(settings: Settings) -> Namespace:
    """The routes' arguments, judged before an engine is built for them.

    Raises:
        ValueError: an unknown argument, or one that vLLM refuses.
    """
    return openai.arguments_of(settings.model, settings.engine, settings.openai)


async def openai_app(engine: AsyncEngine, arguments: Namespace) -> FastAPI:
    """The app; whoever calls it has checked the key.

    Raises:
        EngineError: this vLLM lacks what the routes rely on.
    """
    app = FastAPI(openapi_url=None)
    for router in openai.routers():
        app.include_router(router)
    for kind, handler in openai.error_handlers().items():
        app.add_exception_handler(kind, handler)
    await openai.start(app.state, engine.llm, arguments, engine.edits.ask)
    return app


class Passed(Response):
    """The answer of another app to the same request.

    Args:
        app: what answers.
    """

    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(dict(scope), receive, send)
