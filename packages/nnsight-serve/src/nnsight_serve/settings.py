"""What a server is told when it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nnsight_core.keeps import LIMIT, SECONDS
from nnsight_serve.logs import Format
from nnsight_vllm_worker.engine import BLOCK_TIMEOUT

API_KEY = "NNSIGHT_API_KEY"
"""Environment variable: the key, for those who want it on no command line."""
HOST = "NNSIGHT_HOST"
"""Environment variable: where the server listens unless `--host` says otherwise; images set it."""
PORT = "NNSIGHT_PORT"
"""Environment variable: the same for `--port`."""
MAX_BODY = 1 << 29
MAX_BODIES = 1 << 33
MAX_UPLOADS = 1 << 31
MAX_SAVES = 1 << 34
MAX_REQUESTS = 10_000
MAX_EDITS = 1000
EDIT_BYTES = 1 << 33
GRACE = 10.0
"""Seconds that running requests get when the server is told to end."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one server.

    Attributes:
        model: the model's name or folder, as vLLM takes it.
        engine: vLLM's engine arguments.
        openai: vLLM's arguments of its OpenAI routes.
        host, port: where it listens; port 0 takes any that is free.
        api_keys: what clients must send, by the name of who has it; none lets everyone in.
        policy: what blocks may do: `trusted` ones anything, `restricted` ones what a list allows.
        max_body: the most bytes that the body of a request may have, packed or unpacked.
        max_bodies: how many bytes the bodies of all requests may have in memory at once.
        max_uploads: how many bytes of tensors that clients sent stay here, for them to name again.
        max_saves: the most bytes that one request may bring home.
        max_concurrent: how many requests of one key may be in the engine at once; None for any.
        max_requests: how many of all keys may be in it, those that wait included.
        max_edits: how many edits one key may have installed.
        edit_bytes: how much memory these may take together.
        block_timeout: seconds that a block may hold the engine before it gives control back.
        keep_bytes: how much memory the values may take that blocks keep on the engine.
        keep_seconds: how long they stay.
        grace: seconds that running requests get when the server is told to end.
        log_format: how the line looks that is written for each request.

    Example:
        >>> Settings("openai-community/gpt2", {"max_model_len": 256}, api_keys={"ann": "secret"})
    """

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 6677
    api_keys: dict[str, str] = field(default_factory=dict, repr=False)
    policy: Literal["trusted", "restricted"] = "trusted"
    max_body: int = MAX_BODY
    max_bodies: int = MAX_BODIES
    max_uploads: int = MAX_UPLOADS
    max_saves: int = MAX_SAVES
    max_concurrent: int | None = None
    max_requests: int = MAX_REQUESTS
    max_edits: int = MAX_EDITS
    edit_bytes: int = EDIT_BYTES
    block_timeout: float | None = BLOCK_TIMEOUT
    keep_bytes: int = LIMIT
    keep_seconds: float = SECONDS
    openai: dict[str, Any] = field(default_factory=dict)
    grace: float = GRACE
    log_format: Format = "text"


def keys_of(given: list[str]) -> dict[str, str]:
    """Keys by the names of those who have them, from `NAME:KEY` or a `KEY` alone.

    Raises:
        ValueError: a name that stands twice, or a key that is empty.
    """
    keys: dict[str, str] = {}
    for number, part in enumerate(given, 1):
        name, colon, key = part.partition(":")
        if not colon:
            name, key = f"key{number}", part
        if not name or not key:
            raise ValueError("a key is given as NAME:KEY or KEY, and neither may be empty")
        if name in keys:
            raise ValueError(f"two keys have the name {name!r}")
        keys[name] = key
    return keys


def keys_of_file(path: str) -> list[str]:
    """The `NAME:KEY`s that a file holds, one a line.

    Raises:
        ValueError: it cannot be read, or a line of it has no name.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ValueError(f"the keys cannot be read from {path}: {reason}") from None
    keys: list[str] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if ":" not in line:
            # The line itself is not shown: it may be a key.
            raise ValueError(f"line {number} of {path} has no name: it takes NAME:KEY")
        keys.append(line)
    if not keys:
        raise ValueError(f"{path} holds no keys, and a server without any lets everyone in")
    return keys


def key_of_environment() -> dict[str, str]:
    """The key that the environment holds, if it does; all of it is the key."""
    key = os.environ.get(API_KEY)
    return {"default": key} if key else {}
