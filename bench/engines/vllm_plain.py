"""Plain vLLM, eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

from bench.workloads.vllm_cpu import ARGUMENTS, LOADS, SAMPLING, model_path


def cases() -> dict[str, Callable[[], Any]]:
    llm = LLM(model_path(), enforce_eager=True, **ARGUMENTS)

    def generate(prompts: list[str], tokens: int) -> Any:
        # A progress bar where our `generate` shows one.
        several = len(prompts) > 1
        params = SamplingParams(max_tokens=tokens, **SAMPLING)
        return llm.generate(prompts, params, use_tqdm=several)

    return {name: lambda load=load: generate(*load) for name, load in LOADS.items()}
