"""Attacks that end the engine's process: one clear error, what had come home stays, a new engine.

And what many traces leave in that process. (`tests/worker` has the attacks that end only their own
request.)
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from nnsight_core import EngineDeadError
from nnsight_vllm_worker import VLLM
from tests.processes.test_engine import PROMPT, SETTINGS, children

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(processes: None, gpt2_path: str) -> Iterator[VLLM]:
    with VLLM(gpt2_path, dispatch=True, **SETTINGS) as model:
        yield model


def answers(model: VLLM) -> bool:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        hidden = model.transformer.h[6].output.save()
        out = tracer.result.save()
    return hidden.shape == (8, 96) and out.outputs[0].text == " Paris"


def trace(model: VLLM, index: int, steer: torch.Tensor) -> None:
    """Several kinds of invokes in one trace, one of which fails now and then."""
    try:
        with model.trace(max_tokens=2, **GREEDY) as tracer:
            with tracer.invoke(PROMPT):
                cache = tracer.cache(modules=[model.transformer.h[0]])
            with tracer.invoke(PROMPT):
                kept = [].save()
                for _ in tracer.all():
                    model.transformer.h[4].output[:] += steer[0]
                    kept.append({"hidden": model.transformer.h[8].output, "index": index})
            with tracer.invoke(PROMPT):
                out = tracer.result.save()
                1 / (index % 3)
    except ZeroDivisionError:
        assert index % 3 == 0
    assert len(kept) == 2 and len(cache["transformer.h.0"]) == 2


def test_many_traces_leave_nothing_in_the_engines_process(model: VLLM) -> None:
    engines = children()
    steer = torch.zeros(64, 96)  # large enough to be kept on the engine, once

    def held() -> tuple[int, int, int]:
        tree = [p for engine in engines for p in (engine, *engine.children(recursive=True))]
        return (
            sum(p.memory_info().rss for p in tree),
            sum(p.num_fds() for p in tree),
            sum(p.num_threads() for p in tree),
        )

    for index in range(100):
        trace(model, index, steer)
    gc.collect()
    before, own = held(), psutil.Process().memory_info().rss
    for index in range(100, 300):
        trace(model, index, steer)
    gc.collect()
    after = held()
    # A leak of 50 KiB in each of these 200 traces would be seen, here or there.
    assert after[0] - before[0] < 10 * MIB, f"{(after[0] - before[0]) / MIB:.1f} MiB"
    assert psutil.Process().memory_info().rss - own < 10 * MIB
    assert after[1] <= before[1] + 2 and after[2] <= before[2] + 2
    assert model._engine is not None
    counts = model._engine.counts()
    assert counts["live"] == 0 and counts["blob_bytes"] == steer.numel() * 4


def exits() -> None:
    os._exit(3)


def crashes() -> None:
    ctypes.string_at(0)


@pytest.mark.parametrize(("end", "anew"), [(exits, "restart"), (crashes, "build")])
def test_a_block_that_ends_the_engine(model: VLLM, gpt2_path: str, end: Any, anew: str) -> None:
    assert answers(model)
    engines = children()
    threads = threading.active_count()
    start = time.monotonic()
    early = late = never = None
    with pytest.raises(EngineDeadError, match=r"ended while it was needed.*restart"):
        with model.trace(max_tokens=40, **GREEDY) as tracer:
            with tracer.invoke(PROMPT):
                early = model.transformer.h[6].output.save()
            with tracer.invoke(PROMPT):
                late = model.transformer.h[6].output.save()
                for step in tracer.iter[1:]:
                    model.transformer.h[3].output
                    if step == 8:
                        end()
            with tracer.invoke(PROMPT):
                never = tracer.result.save()
    assert time.monotonic() - start < 15
    # What had come home before is there: of a block that ended in the first step, its values.
    assert early.shape == (8, 96) and tracer.saves["early"] is early
    assert late is None and never is None
    assert tracer.outputs == [None, None, None]
    assert not psutil.wait_procs(engines, timeout=15)[1]
    # It says so again, at once, until there is a new one.
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        answers(model)
    assert type(caught.value).__name__ == "EngineDeadError" and time.monotonic() - start < 5
    if anew == "restart":
        model.restart()
        assert answers(model) and children()
    else:
        with VLLM(gpt2_path, dispatch=True, **SETTINGS) as other:
            assert answers(other)
        model.close()
    assert threading.active_count() <= threads + 1
