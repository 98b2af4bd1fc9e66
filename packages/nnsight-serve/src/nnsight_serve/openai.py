"""vLLM's OpenAI routes as an app of their own, on the server's engine.

They are apart, since they answer with errors of another shape and read a state of their own.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import Message, Receive, Scope, Send

from nnsight_serve.accounts import Account
from nnsight_serve.settings import Settings
from nnsight_vllm_worker.asked import Asked
from nnsight_vllm_worker.async_engine import AsyncEngine
from nnsight_vllm_worker.vllm_ports import openai

_account: ContextVar[Account] = ContextVar("account")
"""That of the request which is being answered; the routes choose edits without naming it."""


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
    await openai.start(app.state, engine.llm, arguments, _noted(engine.edits.ask))
    return app


def prompts_in(body: bytes) -> int:
    """How many requests of the engine a body asks for: one for each prompt, whatever its `n`.

    A body that cannot be read counts as one, and is for the routes to refuse.
    """
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return 1
    given = said if isinstance(said, dict) else {}
    return max(sum(_count(given.get(name)) for name in ("prompt", "prompt_embeds")), 1)


def _count(prompts: Any) -> int:
    """How many prompts there are; a list of numbers is one, of tokens."""
    if not isinstance(prompts, list):
        return int(prompts is not None)
    return 1 if prompts and all(isinstance(part, int) for part in prompts) else len(prompts)


def _noted(ask: Callable[[list[str] | None], Asked]) -> Callable[[list[str] | None], Asked]:
    """What chooses the edits of a request; how these ran is noted in the request's account."""

    def asking(names: list[str] | None) -> Asked:
        asked = ask(names)
        note, account = asked.note, _account.get()

        def noted(header: dict[str, Any]) -> None:
            account.ran(header)
            note(header)

        asked.note = noted
        return asked

    return asking


class Passed(Response):
    """The answer of another app to the same request.

    Args:
        app: what answers.
        body: that of the request, if it has been read.
    """

    def __init__(self, app: Any, body: bytes | None = None) -> None:
        super().__init__()
        self._app = app
        self._read = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            body, self._read = self._read, None
            return await receive() if body is None else {"type": "http.request", "body": body}

        _account.set(scope["state"]["account"])
        await self._app(dict(scope), received, send)
