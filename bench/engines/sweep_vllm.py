"""Plain vLLM, for the sweep."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

from bench.workloads.sweep import GENERATE, SAMPLING, arguments, prompts


def cases() -> dict[str, Callable[[], Any]]:
    way = os.environ["BENCH_WAY"]
    model, how = arguments(way == "eager")
    llm = LLM(model, **how)
    given: Any = [{"prompt_token_ids": ids} for ids in prompts()]
    params = SamplingParams(**SAMPLING)
    return {f"{GENERATE}, {way}": lambda: llm.generate(given, params, use_tqdm=False)}
