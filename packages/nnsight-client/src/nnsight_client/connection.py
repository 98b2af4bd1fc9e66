"""The way to a server: addresses, proxies, time limits, and what goes wrong on it."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import httpx

from nnsight_client.addresses import check_address
from nnsight_client.direct import DirectTransport
from nnsight_client.keys import check_key
from nnsight_core.errors import ProtocolError

CONNECT = 10.0
"""Seconds in which a server must be reached. It may then think for as long as it likes."""
SILENCE = 60.0
"""Seconds in which a server that runs a trace must say something; it says that it is there."""

Trust = bool | str | os.PathLike[str] | ssl.SSLContext


def connect(url: str, api_key: str | None, verify: Trust = True) -> httpx.Client:
    """A connection to a server, opened when it is first needed.

    Proxies, and certificates where `verify` is True, are those of the environment, as httpx has it.

    Args:
        verify: what a server's certificate is checked against: a file or folder of authorities, an
            `ssl.SSLContext`, or False for nothing at all.

    Raises:
        ValueError: `url` is no address, no header can hold the key, or there is no such file.
    """
    mounts = {url: DirectTransport(keep_alive)} if near(url) and _straight(url) else None
    hooks = {"request": [_watch]}
    return httpx.Client(**_settings(url, api_key, verify), event_hooks=hooks, mounts=mounts)


def connect_async(url: str, api_key: str | None, verify: Trust = True) -> httpx.AsyncClient:
    """As `connect`, for an event loop."""
    hooks = {"request": [_watch_async]}
    return httpx.AsyncClient(**_settings(url, api_key, verify), event_hooks=hooks)


@contextmanager
def speaking(url: str) -> Iterator[None]:
    """What goes wrong between here and a server is a `ProtocolError`."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ProtocolError(
            f"No server answers at {url} ({error}). Start one with `nnsight-serve MODEL`, "
            "or correct the address."
        ) from error
    except httpx.ReadTimeout as error:
        raise ProtocolError(
            f"The server at {url} has said nothing for {SILENCE:.0f} s, not even that it is there."
        ) from error
    except httpx.TransportError as error:
        raise ProtocolError(
            f"The connection to {url} broke: {error or type(error).__name__}. Either the "
            "server ended, or it is no nnsight server."
        ) from error


def thinking() -> httpx.Timeout:
    """For what a server may think about in silence."""
    return httpx.Timeout(None, connect=CONNECT)


def near(url: str) -> bool:
    """Whether a server is on this machine, where packing takes longer than sending."""
    return httpx.URL(url).host in ("127.0.0.1", "::1", "localhost")


def _straight(url: str) -> bool:
    """Whether nothing is on the way to a server: neither TLS nor, as httpx finds it, a proxy."""
    return httpx.URL(url).scheme == "http" and not getproxies()


def _settings(url: str, api_key: str | None, verify: Trust) -> dict[str, Any]:
    # Frames say themselves whether they are packed, and are read as they come.
    headers = {b"Accept-Encoding": b"identity"}
    if check_key(api_key):
        headers[b"Authorization"] = f"Bearer {api_key}".encode()
    return {
        "base_url": check_address(url),
        "headers": headers,
        "timeout": httpx.Timeout(None, connect=CONNECT, read=SILENCE),
        "verify": _trusted(verify),
    }


def _trusted(verify: Trust) -> bool | ssl.SSLContext:
    if isinstance(verify, bool | ssl.SSLContext):
        return verify
    path = Path(verify)
    if not path.exists():
        raise ValueError(f"verify={str(path)!r}: there is no such file or folder.")
    if path.is_dir():
        return ssl.create_default_context(capath=str(path))
    return ssl.create_default_context(cafile=str(path))


# Where a server may be silent, only probes tell thinking from a machine that is gone. They are set
# when a connection is made: a transport of our own, which could be given them, would take the place
# of those that httpx makes for the proxies and certificates of the environment.
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
