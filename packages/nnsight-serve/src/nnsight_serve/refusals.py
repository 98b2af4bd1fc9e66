"""Errors on their way to a client: as data that it can raise again, and as answers of HTTP."""

from __future__ import annotations

import builtins
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from nnsight_core import errors
from nnsight_core.wire.data import Encoder
from nnsight_core.wire.errors import ErrorRecord, record_error


class Refused(Exception):
    """A request that is answered with an error instead of a stream.

    Args:
        status: HTTP's number for it.
        error: what the client is to raise.
        **details: what goes into the answer besides.
    """

    def __init__(self, status: int, error: Exception, **details: Any) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error
        self.details = details


async def answer(_: Request, refused: Exception) -> JSONResponse:
    """The answer that a refused request gets."""
    assert isinstance(refused, Refused)
    record = record_of(refused.error)
    content = {
        "type": record.name,
        "message": record.message,
        # What OpenAI clients look for besides.
        "code": refused.status,
        "record": record.model_dump(mode="json"),
        **refused.details,
    }
    headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else None
    return JSONResponse({"error": content}, refused.status, headers)


def record_of(error: BaseException) -> ErrorRecord:
    """An error of this side as data, under a class that every client has.

    Where in the server it was raised, and from what, stays here.
    """
    record = record_error(error, Encoder())
    cls = next(c for c in type(error).__mro__ if _everywhere(c))
    return ErrorRecord(
        module=cls.__module__,
        name=cls.__qualname__,
        args=[record.message],
        message=record.message,
        notes=record.notes,
    )


def _everywhere(cls: type) -> bool:
    return any(getattr(module, cls.__name__, None) is cls for module in (builtins, errors))
