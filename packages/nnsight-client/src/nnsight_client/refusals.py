"""What a server's refusal means here."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import ValidationError

from nnsight_core.backend import Invoke
from nnsight_core.errors import BlockError, BusyError, ProtocolError
from nnsight_core.wire.blocks import refusal_of
from nnsight_core.wire.errors import ErrorRecord, rebuild_error
from nnsight_core.wire.frames import MEDIA_TYPE, VERSION, read_frame
from nnsight_core.wire.messages import InstalledMessage, expect


def error_of(response: httpx.Response, url: str) -> BaseException:
    """The error to raise for an answer that is no success; its body has been read."""
    try:
        details: dict[str, Any] = response.json()["error"]
        error = rebuild_error(ErrorRecord.model_validate(details["record"]), [])
    except (ValueError, TypeError, KeyError, ValidationError):
        if response.status_code in (429, 503) and "retry-after" in response.headers:
            return _busy(response, url)
        return no_server(url, f"it answered {response.status_code} {response.reason_phrase}")
    if isinstance(error, ProtocolError):
        versions = details.get("versions")
        known = f" It knows version {_listed(versions)}, this client {VERSION}." if versions else ""
        return ProtocolError(f"The server at {url} did not understand: {error}{known}")
    if not isinstance(error, Exception):  # one that would end this process
        error = BlockError(f"{type(error).__name__}: {error}")
    error.add_note(f"Refused by the server at {url}.")
    return error


def _busy(response: httpx.Response, url: str) -> BusyError:
    """What stands before a server (a gateway) refuses in its stead."""
    seconds = response.headers["retry-after"]
    said = f"{response.status_code} {response.reason_phrase}"
    # It may be a date as well, which says little to a clock that is set otherwise.
    after = float(seconds) if seconds.isdecimal() else None
    return BusyError(f"What listens at {url} takes no more at the moment: {said}.", after)


def no_server(url: str, seen: str) -> ProtocolError:
    """The error for a peer that is something else."""
    return ProtocolError(
        f"What listens at {url} is no nnsight server: {seen}. Give the address that "
        "`nnsight-serve` printed when it was ready."
    )


def other_version(url: str, version: Any) -> ProtocolError:
    """The error for a server of another protocol."""
    return ProtocolError(
        f"The server at {url} speaks version {version} of the protocol; this client knows "
        f"{VERSION}. Install the same release of nnsight on both sides."
    )


def _listed(versions: Any) -> str:
    return ", ".join(str(v) for v in versions) if isinstance(versions, list) else str(versions)


def missing_in(response: httpx.Response) -> list[str] | None:
    """The contents that a server says it has not; its body has been read."""
    if response.status_code != 409:
        return None
    try:
        return list(response.json()["error"]["missing"])
    except (ValueError, TypeError, KeyError):
        return None


def refusal_in(response: httpx.Response, invoke: Invoke) -> BaseException | None:
    """The error for which an engine refused an edit, if that is what the answer is."""
    if response.status_code != 422 or response.headers.get("content-type") != MEDIA_TYPE:
        return None
    frame = read_frame(response.content)
    return refusal_of(expect(frame, InstalledMessage), frame, invoke)
