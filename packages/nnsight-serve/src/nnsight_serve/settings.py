"""What a server is told when it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

API_KEY = "NNSIGHT_API_KEY"
"""Environment variable: the key, for those who want it on no command line."""
MAX_BODY = 1 << 29


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one server.

    Attributes:
        model: the model's name or folder, as vLLM takes it.
        engine: vLLM's engine arguments.
        host, port: where it listens; port 0 takes any that is free.
        api_key: what clients must send; None lets everyone in.
        max_body: the most bytes that the body of a request may have, packed or unpacked.

    Example:
        >>> Settings("openai-community/gpt2", {"max_model_len": 256}, api_key="secret")
    """

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 6677
    api_key: str | None = field(default=None, repr=False)
    max_body: int = MAX_BODY


def key_of_environment() -> str | None:
    """The key that the environment holds, if it does."""
    return os.environ.get(API_KEY) or None
