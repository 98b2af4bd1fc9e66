"""Errors on their way to a client: as data that it can raise again, and as answers of HTTP."""

from __future__ import annotations

import builtins
import math
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from nnsight_core import errors
from nnsight_core.errors import BusyError, EngineDeadError
from nnsight_core.wire.data import Encoder
from nnsight_core.wire.errors import ErrorRecord, record_error


class Told(BaseModel):
    """What a refusal says.

    Attributes:
        type: the class of the error that a client raises.
        message: its text.
        code: HTTP's number for it, for clients of OpenAI's.
        record: the error itself, for a client of ours.
        versions: of the protocol, if it was not understood.
        limit: what was gone beyond.
        missing: contents that are not here.
    """

    type: str
    message: str
    code: int
    record: ErrorRecord
    versions: list[int] | None = None
    limit: int | None = None
    missing: list[str] | None = None


class Refusal(BaseModel):
    """The answer to a request that is refused."""

    error: Told


REFUSAL: dict[str, Any] = {"model": Refusal}
"""A refusal, as the description of a route's answers has it."""
_SAYS = {
    400: "The body is not well formed, or asks for what cannot be meant.",
    401: "The key is missing or wrong.",
    403: "What it asks for is another caller's, or not allowed by the server's policy.",
    409: "Contents that it names are not here (any more); send them again.",
    413: "The body, or the number of its requests, is above a limit.",
    429: "The key has as many requests in the engine as it may, or edits.",
    501: "The engine has no tokenizer to hand out.",
    503: "The engine has ended or has too much to do, or the server is shutting down.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The description of a route's refusals, by HTTP's numbers for them."""
    return {status: {**REFUSAL, "description": _SAYS[status]} for status in statuses}


class Refused(HTTPException):
    """A request that is answered with an error instead of a stream.

    Args:
        status: HTTP's number for it.
        error: what the client is to raise.
        **details: what goes into the answer besides.
    """

    def __init__(self, status: int, error: Exception, **details: Any) -> None:
        # Apps inside of ours answer in a shape of their own.
        super().__init__(status, str(error))
        self.status = status
        self.error = error
        self.details = details


async def answer(request: Request, refused: Exception) -> JSONResponse:
    """The answer that a refused request gets, noted in its account."""
    assert isinstance(refused, Refused)
    record = record_of(refused.error)
    dead = isinstance(refused.error, EngineDeadError)
    request.state.account.failed(record.name, record.message, "engine" if dead else "refused")
    content = {
        "type": record.name,
        "message": record.message,
        # What OpenAI clients look for besides.
        "code": refused.status,
        "record": record.model_dump(mode="json"),
        **refused.details,
    }
    headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    if isinstance(refused.error, BusyError) and refused.error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(refused.error.retry_after))
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
        attributes=record.attributes if cls is BusyError else {},
    )


def _everywhere(cls: type) -> bool:
    return any(getattr(module, cls.__name__, None) is cls for module in (builtins, errors))
