"""What one request of HTTP came to: counted, and written in one line when it is over."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nnsight_core.errors import EngineDeadError
from nnsight_core.wire.frames import Frame
from nnsight_serve.bodies import Bodies, Body
from nnsight_serve.limits import Limits
from nnsight_serve.logs import log_request
from nnsight_serve.metrics import Metrics
from nnsight_serve.refusals import Refused, answer
from nnsight_serve.steps import Steps

ID = "X-Request-Id"
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_KINDS = {
    "/v1/trace": "trace",
    "/v1/edits": "edit",
    "/v1/completions": "openai",
    "/v1/chat/completions": "openai",
}
PROBES = ("/health", "/ready", "/metrics")
"""What is asked all the time: neither counted nor written down, and answered to the last."""


class Account:
    """What becomes of one request of HTTP.

    Attributes:
        id: the client's own name for it, or ours.
        kind: what it asks for: `trace`, `edit`, `openai` or `other`.
        caller: the name of the key that it came with.
        status: HTTP's number for its answer.
        requests: how many requests of the engine it is.
        tokens: how many were drawn for it.
        received, sent: bytes of its body, and of its answer's.
        saved: bytes of what its blocks saved.
        error: the first error that was told to the client, as `Type: message`.
        body: counts what its body has in memory.
    """

    def __init__(self, scope: Scope, limits: Limits, bodies: Bodies, metrics: Metrics) -> None:
        given = Headers(scope=scope).get(ID, "")
        self.id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.kind = _KINDS.get(self.path, "other")
        self.caller = ""
        self.status = 0
        self.requests = self.tokens = 0
        self.received = self.sent = self.saved = 0
        self.error: str | None = None
        self.over = False
        self.body = Body(bodies)
        self._closed = False
        self._steps = Steps()
        self._worst = "ok"
        self._began = perf_counter()
        self._limits = limits
        self._metrics = metrics

    @property
    def outcome(self) -> str:
        """How it ended: `ok`, `block_error`, `refused`, `aborted` or `engine`."""
        if self._worst == "engine" or (self.status >= 500 and self._worst == "ok"):
            return "engine"
        if not self.over:
            return "aborted"
        return self._worst if self.status < 400 else "refused"

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return perf_counter() - self._began

    def take(self, requests: int) -> None:
        """Have the limits count the requests of the engine that it is, until it is over.

        Raises:
            Refused: they are too many.
        """
        if requests:
            self._limits.take(self.caller, requests)
            self.requests += requests

    def close(self) -> None:
        """It is over."""
        self.body.close()
        if self.requests:
            self._limits.leave(self.caller, self.requests)
        self._metrics.closed(self)
        self._metrics.ran(0.0, self._steps.new())
        self._closed = True
        log_request(self)

    async def watch(self, frames: AsyncGenerator[Frame, None]) -> AsyncGenerator[Frame, None]:
        """The frames of its answer as they come, looked at in passing."""
        async with aclosing(frames):
            async for frame in frames:
                self._note(frame)
                yield frame

    def ran(self, header: dict[str, Any]) -> None:
        """A block has ended that ran in one of its requests of the engine."""
        self._steps.take(header)
        # That of an edit may end a little after the answer to a request that does not wait for it.
        steps = self._steps.new() if self._closed else {}
        self._metrics.ran(header.get("seconds", 0.0), steps)

    def failed(self, name: str, message: str, outcome: str = "refused") -> None:
        """An error is told to the client."""
        if self.error is None:
            self.error = f"{name}: {message}"
        if _ORDER.index(outcome) > _ORDER.index(self._worst):
            self._worst = outcome

    def _note(self, frame: Frame) -> None:
        header = frame.header
        kind, error = header["kind"], header.get("error")
        if kind in ("ended", "saved"):
            saved = sum(frame.sizes) + _size([header.get("saves", {}), header.get("more", {})])
            self.saved += saved
            self._metrics.saved(saved)
        if kind == "ended":
            self.ran(header)
        elif kind == "finished" and header.get("output"):
            self.tokens += sum(len(part["token_ids"]) for part in header["output"]["outputs"])
        if error:
            dead = error["name"] == EngineDeadError.__name__
            worst = "engine" if dead else "block_error" if kind == "ended" else "refused"
            self.failed(error["name"], error["message"], worst)


def _size(forms: Any) -> int:
    """How much typed values hold beside buffers: eight bytes a number, one a character."""
    size, left = 0, [forms]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            parts = [value.get("k"), value.get("v")] if "$" in value else [*value.values()]
            left += [part for part in parts if part is not None]
        elif not isinstance(value, list):
            size += len(value) if isinstance(value, str) else 8
        elif _NUMBERS.issuperset(map(type, value)):
            size += 8 * len(value)  # there may be millions
        else:
            left += value
    return size


_NUMBERS = {int, float, bool}
_ORDER = ("ok", "refused", "block_error", "engine")


class Accounts:
    """Middleware that keeps an account of each request, as `request.state.account`."""

    def __init__(self, app: ASGIApp, limits: Limits, bodies: Bodies, metrics: Metrics) -> None:
        self._app = app
        self._limits = limits
        self._bodies = bodies
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = Account(scope, self._limits, self._bodies, self._metrics)
        scope.setdefault("state", {})["account"] = account

        async def received() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            account.received += size
            account.body.take(size)
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                account.status = message["status"]
                MutableHeaders(scope=message)[ID] = account.id
            await send(message)
            if message["type"] == "http.response.body":
                account.sent += len(message.get("body", b""))
                account.over = not message.get("more_body", False)

        if account.path in PROBES:
            await self._app(scope, receive, sent)
            return
        self._metrics.opened(account)
        try:
            await self._answer(account, scope, received, sent)
        except ClientDisconnect:
            # It left before it had sent its body, and there is nobody to answer.
            return
        except Exception as error:
            account.status = account.status or 500
            account.failed(type(error).__name__, str(error), "engine")
            raise
        finally:
            account.close()

    async def _answer(self, account: Account, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._limits.refuse_if_closing()
            account.body.expect(int(Headers(scope=scope).get("content-length", 0)))
        except Refused as refused:
            response = await answer(Request(scope), refused)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)
