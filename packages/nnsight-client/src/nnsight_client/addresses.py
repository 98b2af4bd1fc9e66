"""Addresses of servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def check_address(url: str) -> str:
    """A server's address, as it is used.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        more = parts.username or parts.password or parts.query or parts.fragment
    except ValueError as error:
        raise ValueError(f"{url!r} is no address of a server: {error}.") from None
    if not known:
        raise ValueError(
            f"{url!r} is no address of a server; one looks like http://127.0.0.1:6677."
        )
    if more:
        raise ValueError(
            f"The address of {parts.hostname} holds more than an address. Give a key as api_key=."
        )
    return url.rstrip("/")
