"""The connection to a server, over httpx: its address, what is trusted, how long is waited."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

# httpx takes as long to import as all the rest, and a model is made without it.
if TYPE_CHECKING:
    import httpx

CONNECT = 10.0
"""Seconds in which a server must be reached. It may then think for as long as it likes."""

Trust = bool | str | os.PathLike[str] | ssl.SSLContext


def check_address(url: str) -> str:
    """A server's address, as it is used.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ValueError(f"{url!r} is no address of a server: {error}.") from None
    if not known:
        raise ValueError(
            f"{url!r} is no address of a server; one looks like http://127.0.0.1:6677."
        )
    return url.rstrip("/")


def connect(url: str, api_key: str | None = None, verify: Trust = True) -> httpx.Client:
    """A client of one server, by the proxies and certificates of the environment, as httpx has it.

    Args:
        verify: what a server's certificate is checked against: a file or folder of authorities, an
            `ssl.SSLContext`, or False for nothing at all.
    """
    import httpx

    hooks = {"request": [_watch]}
    return httpx.Client(**_settings(url, api_key, verify), event_hooks=hooks)


def connect_async(url: str, api_key: str | None = None, verify: Trust = True) -> httpx.AsyncClient:
    """As `connect`, for an event loop."""
    import httpx

    hooks = {"request": [_watch_async]}
    return httpx.AsyncClient(**_settings(url, api_key, verify), event_hooks=hooks)


def _settings(url: str, api_key: str | None, verify: Trust) -> dict[str, Any]:
    import httpx

    return {
        "base_url": check_address(url),
        "headers": {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {},
        "timeout": httpx.Timeout(None, connect=CONNECT),
        "verify": _trusted(verify),
    }


def _trusted(verify: Trust) -> bool | ssl.SSLContext:
    if isinstance(verify, bool | ssl.SSLContext):
        return verify
    path = Path(verify)
    if not path.exists():
        raise ValueError(f"verify={str(path)!r}: there is no such file or folder.")
    place = {"capath": str(path)} if path.is_dir() else {"cafile": str(path)}
    return ssl.create_default_context(**place)


# Without a read timeout, only the kernel's probes tell a server that thinks from a machine that is
# gone. They are set through a trace of the connection's making: a transport of our own would take
# the place of those that httpx makes for the proxies and certificates of the environment.
def _watch(request: httpx.Request) -> None:
    request.extensions["trace"] = _made


async def _watch_async(request: httpx.Request) -> None:
    request.extensions["trace"] = _made_async


def _made(event: str, info: dict[str, Any]) -> None:
    if event == "connection.connect_tcp.complete":
        keep_alive(info["return_value"].get_extra_info("socket"))


async def _made_async(event: str, info: dict[str, Any]) -> None:
    _made(event, info)


def keep_alive(connected: socket.socket) -> None:
    """Notice within a minute that the machine at the other end is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {
        "TCP_KEEPIDLE": 30,
        "TCP_KEEPINTVL": 10,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 60_000,  # of what was sent and nobody has acknowledged
    }
    for name, value in settings.items():
        option = getattr(socket, name, None)
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
