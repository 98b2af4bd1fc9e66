"""The engine of an app, as its routes ask for it."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Annotated, TypeVar
from urllib.parse import quote

from fastapi import Depends, Request

from nnsight_core.backend import EditList
from nnsight_core.errors import EngineDeadError
from nnsight_serve.refusals import Refused
from nnsight_vllm_worker.async_engine import AsyncEngine

MODEL = "X-Nnsight-Model"
_T = TypeVar("_T")
_STARTED = time.time() - time.monotonic()
"""By a clock that is never put back, so that later lists are known by what it says."""


async def engine_of(request: Request) -> AsyncEngine:
    """The app's engine.

    Raises:
        Refused: it has ended.
    """
    engine: AsyncEngine = request.app.state.engine
    if not engine.alive:
        raise Refused(503, EngineDeadError("The engine has ended; the server must be restarted."))
    return engine


Engine = Annotated[AsyncEngine, Depends(engine_of)]


def served_by(request: Request) -> dict[str, str]:
    """The header that says which model answers, by each name that it has here."""
    settings, tree = request.app.state.settings, request.app.state.engine.tree
    given = settings.engine.get("served_model_name") or []
    given = [given] if isinstance(given, str) else given
    names = dict.fromkeys([settings.model, tree.model, *given])
    return {MODEL: ",".join(quote(name) for name in names)}


def edits_of(engine: AsyncEngine) -> EditList:
    """What is installed on an engine now."""
    return EditList(edits=engine.edits.infos(), now=_STARTED + time.monotonic())


async def while_alive(answer: Awaitable[_T]) -> _T:
    """What an engine answers.

    Raises:
        Refused: it ended meanwhile.
    """
    try:
        return await answer
    except EngineDeadError as error:
        raise Refused(503, error) from None
