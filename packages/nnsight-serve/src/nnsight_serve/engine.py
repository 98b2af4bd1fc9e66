"""The engine of an app, as its routes ask for it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from nnsight_core.errors import EngineDeadError
from nnsight_serve.refusals import Refused
from nnsight_vllm_worker.async_engine import AsyncEngine

_T = TypeVar("_T")


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


async def while_alive(answer: Awaitable[_T]) -> _T:
    """What an engine answers.

    Raises:
        Refused: it ended meanwhile.
    """
    try:
        return await answer
    except EngineDeadError as error:
        raise Refused(503, error) from None
