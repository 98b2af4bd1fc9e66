"""Limits of what stays on an engine, and what becomes of it when the engine ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_core import KeepLimitError, KeptError
from nnsight_vllm_worker import VLLM

ONE = {"temperature": 0.0, "max_tokens": 1}
SETTINGS: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "max_model_len": 64}
if torch.cuda.is_available():
    SETTINGS["gpu_memory_utilization"] = 0.1
    # A process that has had one engine cannot fork another onto the GPU.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def held(model: Any) -> int:
    """The bytes that the worker keeps, once what was freed has left."""
    model._engine.kept.flush()
    return model._engine.counts()["keep_bytes"]


@pytest.fixture(scope="module")
def small(processes: None, gpt2_path: str) -> Iterator[VLLM]:
    """An engine on which little may be kept."""
    limits = {"keep_bytes": 10_000, "keep_seconds": 3.0}
    with VLLM(gpt2_path, dispatch=True, **limits, **SETTINGS) as model:
        yield model


@pytest.fixture(scope="module")
def other(processes: None, gpt2_path: str) -> Iterator[VLLM]:
    with VLLM(gpt2_path, dispatch=True, **SETTINGS) as model:
        yield model


def test_a_handle_of_another_engine_is_refused(small: Any, other: Any) -> None:
    with other.trace("Hello", **ONE):
        hidden = other.transformer.h[4].output.keep()
    with pytest.raises(KeptError, match="'hidden' cannot be had: it is on another engine"):
        with small.trace("Hello", **ONE):
            seen = (hidden + 1).save()


def test_a_handle_of_an_engine_that_was_restarted_is_refused(small: Any) -> None:
    with small.trace("Hello", **ONE):
        hidden = small.transformer.h[4].output.keep()
    small.restart()
    with pytest.raises(KeptError, match="closed or restarted"):
        with small.trace("Hello", **ONE):
            seen = (hidden + 1).save()


def test_values_leave_after_a_time(small: Any) -> None:
    with small.trace("Hello", **ONE):
        hidden = small.transformer.h[4].output.keep()
    with small.trace("Hello", **ONE):
        seen = (hidden + 1).save()
    assert seen.shape == hidden.shape
    time.sleep(3.1)
    with pytest.raises(
        KeptError, match="'hidden' cannot be had: it was kept for more than keep_seconds=3"
    ):
        with small.trace("Hello", **ONE):
            seen = (hidden + 1).save()
    assert len(small.kept) == 0


def test_a_limit_in_bytes_is_an_error_of_the_block(small: Any) -> None:
    with small.trace([5] * 20, **ONE):
        first = small.transformer.h[1].output.keep()
    assert first.bytes == 7680
    told = r"7680 bytes cannot be kept: 7680 of the 10000 .*`model.kept.clear\(\)`.*keep_bytes="
    with pytest.raises(KeepLimitError, match=told):
        with small.trace(**ONE) as tracer:
            with tracer.invoke([5] * 20):
                small.transformer.h[1].output.keep()
            with tracer.invoke("Hello"):
                logits = small.logits.save()
    assert logits.shape[0] == 1 and held(small) == 7680
    with small.trace("Hello", **ONE):
        norm = first.norm().save()
    assert norm > 0
    del first
    with small.trace([5] * 20, **ONE):
        again = small.transformer.h[1].output.keep()
    assert again.bytes == 7680
