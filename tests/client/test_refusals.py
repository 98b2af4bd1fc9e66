"""What a client makes of answers that are no success."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from nnsight_client.refusals import error_of
from nnsight_core import BusyError, ProtocolError
from nnsight_serve.refusals import Refused, answer

URL = "http://127.0.0.1:6677"


def received(refused: Refused) -> httpx.Response:
    state = SimpleNamespace(account=SimpleNamespace(failed=lambda *_: None))
    sent = asyncio.run(answer(SimpleNamespace(state=state), refused))  # type: ignore[arg-type]
    return httpx.Response(sent.status_code, headers=dict(sent.headers), content=bytes(sent.body))


@pytest.mark.parametrize(("after", "header"), [(0.2, "1"), (3.0, "3"), (None, None)])
def test_a_server_that_is_busy_says_when_to_come_again(after, header):
    response = received(Refused(429, BusyError("Too much at once.", after)))
    assert response.headers.get("retry-after") == header
    error = error_of(response, URL)
    assert type(error) is BusyError and error.retry_after == after
    assert str(error) == "Too much at once." and URL in error.__notes__[0]


@pytest.mark.parametrize(("header", "after"), [("7", 7.0), ("Mon, 30 Nov 2026 07:00:00 GMT", None)])
def test_a_gateway_may_be_busy_in_its_stead(header, after):
    error = error_of(httpx.Response(503, headers={"Retry-After": header}, text="<html>"), URL)
    assert isinstance(error, BusyError) and error.retry_after == after and "503" in str(error)


def test_a_refusal_of_something_else_is_no_server():
    assert isinstance(error_of(httpx.Response(503, text="<html>"), URL), ProtocolError)
