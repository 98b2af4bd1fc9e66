"""The server's process: it says when it is ready, and ends in order.

Told to end, it takes nothing new, lets what is running end within the grace that it has, and tells
what is left then that it is shutting down. Told again, it waits no longer. Told before it is ready,
it ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from nnsight_core.taps import RESID
from nnsight_core.wire.frames import VERSION
from nnsight_serve.settings import Settings

SHUTTING_DOWN = "The server is shutting down."
_TELLING = 3.0
"""Seconds in which what is left is told, and connections are closed."""
_ENGINE = 5.0
"""Seconds that the engine takes to end."""
_TICK = 0.05
_KEPT_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients keep theirs, so that none sends a
request into one that is just being closed."""


class Server(uvicorn.Server):
    """A server of one app.

    Args:
        app: what `create_app` has made of the settings.
        say: is told in a line that it is ready.

    Attributes:
        stopped: whether it was told to end before it was ready.
    """

    def __init__(self, app: Any, settings: Settings, say: Callable[[str], None]) -> None:
        config = uvicorn.Config(
            app,
            settings.host,
            settings.port,
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEPT_ALIVE,
            timeout_graceful_shutdown=int(_TELLING),
        )
        super().__init__(config)
        self.stopped = False
        self._state = app.state
        self._settings = settings
        self._say = say
        self._at_once = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            tree = self._state.engine.tree
            self._say(_ready(self._settings, port, len(tree.taps), tree.compiled))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            # Building an engine holds the loop for as long as it takes, so it is left from here.
            self.stopped = True
            # Where it was left is nothing that went wrong.
            logging.getLogger("uvicorn.error").disabled = True
            raise SystemExit(0)
        if self.should_exit:
            self._at_once = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state, grace = self._state, self._settings.grace
        state.limits.closing = time.monotonic() + grace + 2 * _TELLING + _ENGINE
        await self._until(lambda: self._at_once or not state.metrics.open, grace)
        # What has just been taken may come to the engine only now.
        await self._until(self._told, _TELLING)
        await super().shutdown(sockets)

    def _told(self) -> bool:
        self._state.engine.cut(SHUTTING_DOWN)
        return not self._state.metrics.open

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not done() and loop.time() < deadline:
            await asyncio.sleep(_TICK)


def _ready(settings: Settings, port: int, taps: int, compiled: bool) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    who = "whoever has a key" if settings.api_keys else "whoever reaches this address"
    may = f"blocks are code, and {who} can run any code here"
    if settings.policy == "restricted":
        may = f"{who} can run blocks, and these can compute with the model and nothing else"
    given = settings.engine.get("taps", RESID)
    patterns = given if isinstance(given, str) else " ".join(given)
    reached = f"{taps} taps: {patterns}" if compiled else "no taps: every step runs eagerly"
    return (
        f"nnsight-serve: http://{host}:{port} serves {settings.model} (protocol {VERSION}; "
        f"{reached}; policy {settings.policy}: {may})"
    )
