"""What the tests of engines in processes of their own share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """vLLM's default: the engine runs in processes of its own."""
    before = os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    yield
    if before is not None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before
