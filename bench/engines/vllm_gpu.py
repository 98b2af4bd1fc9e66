"""Plain vLLM on a GPU, with its defaults or eager."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm import LLM, SamplingParams

from bench.workloads.vllm_gpu import (
    ARGUMENTS,
    FIRST,
    GENERATE,
    GRAPHS,
    NEW,
    SAMPLING,
    prompts,
    shape,
)


def cases() -> dict[str, Callable[[], Any]]:
    eager = bool(os.environ.get("BENCH_EAGER"))
    chosen = {"enforce_eager": True} if eager else {"compilation_config": GRAPHS}
    return plain_cases(LLM(shape(), **ARGUMENTS, **chosen))


def plain_cases(llm: LLM) -> dict[str, Callable[[], Any]]:
    """Plain generation by an engine."""

    def generate(count: int, tokens: int = NEW, length: int = 512) -> Any:
        given = [{"prompt_token_ids": ids} for ids in prompts(count, length)]
        return llm.generate(given, SamplingParams(max_tokens=tokens, **SAMPLING), use_tqdm=False)

    found = {case: partial(generate, int(case.split()[-1])) for case in GENERATE}
    found[FIRST[0]] = partial(generate, 1, 1)
    found[FIRST[1]] = partial(generate, 1, 1, 8000)
    return found
