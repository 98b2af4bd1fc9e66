"""What is written down: a line for each request when it is over, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nnsight_serve.accounts import Account

Format = Literal["text", "json"]

_requests = logging.getLogger("nnsight_serve.requests")
_LOGGERS = ("nnsight_serve", "uvicorn")


def configure(form: Format) -> None:
    """Write what the server has to say to standard error, in one form. vLLM's log stays as it is.

    Example:
        >>> configure("json")
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    for name, level in zip(_LOGGERS, (logging.INFO, logging.WARNING), strict=True):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def log_request(account: Account) -> None:
    """Write down what a request came to."""
    outcome = account.outcome
    about = {
        "id": account.id,
        "caller": account.caller,
        "kind": account.kind,
        "method": account.method,
        "path": account.path,
        "status": account.status,
        "outcome": outcome,
        "seconds": round(account.seconds, 4),
        "requests": account.requests,
        "tokens": account.tokens,
        "received": account.received,
        "sent": account.sent,
        "saved": account.saved,
        "error": account.error,
    }
    level = logging.INFO if outcome in ("ok", "aborted") else logging.WARNING
    _requests.log(level, "%s %s", account.kind, outcome, extra={"about": about})


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = getattr(record, "about", {})
        # A quoted value holds no line break, so that nothing a client sends makes a line.
        parts = [
            f"{name}={_plain(value)}" for name, value in about.items() if value not in ("", 0, None)
        ]
        line = " ".join([_time(record), record.levelname, record.getMessage(), *parts])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain(value: Any) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and " " not in text and '"' not in text
    return text if plain else json.dumps(text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
