"""The way to a server: addresses, proxies, time limits, and what goes wrong on it."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from nnsight_core.errors import ProtocolError

CONNECT = 10.0
"""Seconds in which a server must be reached. It may then think for as long as it likes."""
SILENCE = 60.0
"""Seconds in which a server that runs a trace must say something; it says that it is there."""


def connect(url: str, api_key: str | None) -> httpx.Client:
    """A connection to a server, opened when it is first needed.

    Raises:
        ValueError: `url` is no address.
    """
    settings = _settings(url, api_key)
    return httpx.Client(**settings, transport=httpx.HTTPTransport(**_way(url)))


def connect_async(url: str, api_key: str | None) -> httpx.AsyncClient:
    """As `connect`, for an event loop."""
    settings = _settings(url, api_key)
    return httpx.AsyncClient(**settings, transport=httpx.AsyncHTTPTransport(**_way(url)))


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


def _settings(url: str, api_key: str | None) -> dict[str, Any]:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no address of a server: {error}.") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError(
            f"{url!r} is no address of a server; one looks like http://127.0.0.1:6677."
        )
    headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
    timeout = httpx.Timeout(None, connect=CONNECT, read=SILENCE)
    return {"base_url": url, "headers": headers, "timeout": timeout}


def _way(url: str) -> dict[str, Any]:
    address = httpx.URL(url)
    proxies = {} if urllib.request.proxy_bypass(address.host) else urllib.request.getproxies()
    return {
        "proxy": proxies.get(address.scheme) or proxies.get("all"),
        "socket_options": _kept_alive(),
    }


def _kept_alive() -> list[tuple[int, int, int]]:
    """Where a server may be silent, only probes tell thinking from a machine that is gone."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
