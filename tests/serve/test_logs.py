"""The line that is written for each request."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from nnsight_serve import logs
from nnsight_serve.accounts import Account
from nnsight_serve.bodies import Bodies
from nnsight_serve.limits import Limits
from nnsight_serve.metrics import Metrics


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    found: list[logging.LogRecord] = []
    logger = logging.getLogger("nnsight_serve.requests")
    monkeypatch.setattr(logger, "handle", found.append)
    monkeypatch.setattr(logger, "level", logging.INFO)
    return found


def closed(path: str = "/v1/trace", status: int = 200, **said: Any) -> Account:
    """The account of a request that is over."""
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    metrics = Metrics()
    account = Account(scope, Limits(None, 1), Bodies(1000, 1000), metrics)
    metrics.opened(account)
    account.status, account.over = status, True
    for name, value in said.items():
        setattr(account, name, value)
    account.close()
    return account


def test_text_names_what_there_is_to_say(records: list[logging.LogRecord]) -> None:
    closed(caller="ann", tokens=3, id="abc")
    line = logs._Text().format(records[0])
    assert " INFO trace ok id=abc caller=ann kind=trace method=POST path=/v1/trace" in line
    assert "tokens=3" in line and "saved" not in line and "error" not in line


def test_nothing_that_a_client_sends_makes_a_line(records: list[logging.LogRecord]) -> None:
    closed(path="/v1/x\n2026-01-01 INFO all is well\x1b[2J\u2028", status=404)
    for form in (logs._Text(), logs._Json()):
        line = form.format(records[0])
        assert len(line.splitlines()) == 1 and "\x1b" not in line


def test_json_holds_everything(records: list[logging.LogRecord]) -> None:
    account = closed(error="ValueError: no", status=400)
    said = json.loads(logs._Json().format(records[0]))
    assert said["level"] == "warning" and said["message"] == "trace refused"
    assert said["id"] == account.id and said["error"] == "ValueError: no"
    assert said["caller"] == "" and said["tokens"] == 0


@pytest.mark.parametrize(
    ("status", "over", "failed", "outcome"),
    [
        (200, True, None, "ok"),
        (200, False, None, "aborted"),
        (200, True, "block_error", "block_error"),
        (200, False, "block_error", "aborted"),
        (200, True, "refused", "refused"),
        (200, True, "engine", "engine"),
        (404, True, None, "refused"),
        (503, True, "refused", "refused"),
        (503, True, "engine", "engine"),
        (500, True, None, "engine"),
        (0, False, None, "aborted"),
    ],
)
def test_each_end_has_a_name(
    records: list[logging.LogRecord], status: int, over: bool, failed: str | None, outcome: str
) -> None:
    account = closed(status=status)
    account.over = over
    if failed is not None:
        account.failed("Error", "what happened", failed)
    assert account.outcome == outcome
