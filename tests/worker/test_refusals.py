"""What cannot be right is refused by name, before it runs, with what to do instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, ParallelConfig

from nnsight_core import CaptureError, EngineError, LocationError, NotSupportedError
from nnsight_core.taps import resolve
from nnsight_vllm_worker import VLLM
from nnsight_vllm_worker.vllm_ports import parallel

PROMPT = "The Eiffel Tower is in the city of"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("enable_dbo", True),
        ("kv_transfer_config", {"kv_connector": "x"}),
        ("kv_sharing_fast_prefill", True),
        ("scheduler_cls", "mine.Scheduler"),
        ("worker_extension_cls", "mine.Extension"),
    ],
)
def test_an_engine_setting_that_cannot_be_had(gpt2_path: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.* cannot be had.*: .*"):
        VLLM(gpt2_path, dispatch=True, **{name: value})


@pytest.mark.local
def test_tokens_cannot_be_dealt_out_over_ranks() -> None:
    for name in ("enable_sp", "fuse_gemm_comms"):
        settings = CompilationConfig(pass_config={name: True})
        config = SimpleNamespace(compilation_config=settings, parallel_config=ParallelConfig())
        with pytest.raises(EngineError, match=f"pass_config.{name}=True cannot be had yet: .*"):
            parallel.check(config)


@pytest.mark.local
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's kernels for the CPU are at fault")
def test_experts_cannot_be_dealt_out_on_the_cpu() -> None:
    config = SimpleNamespace(
        compilation_config=CompilationConfig(),
        parallel_config=ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True),
        model_config=SimpleNamespace(is_moe=False),
    )
    parallel.check(config)
    config.model_config.is_moe = True
    with pytest.raises(EngineError, match="enable_expert_parallel=True cannot be had on the CPU"):
        parallel.check(config)


def test_a_pattern_that_names_no_tap(
    gpt2: Any, gpt2_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no tree is kept there
    with pytest.raises(ValueError, match=r"no module.*Nearest: transformer\.h\.\*\.mlp\.output"):
        VLLM(gpt2_path, dispatch=True, taps="transformer.h.*.mpl.output")
    for pattern in ("transformer.h.*.mlp", "transformer.h.3.source.self_mlp_0.output"):
        with pytest.raises(ValueError, match="does not name a side"):
            resolve(gpt2.tree, ["resid", pattern])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "'multi_modal_data'.*Give text"),
        ({"encoder_prompt": "x", "decoder_prompt": "y"}, "'encoder_prompt'.*encoder"),
        ({"prompt_embeds": torch.zeros(2, 96)}, "'prompt_embeds'.*no token ids"),
    ],
)
def test_a_prompt_of_another_kind(gpt2: Any, prompt: Any, words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        with gpt2.trace(prompt, max_tokens=1):
            logits = gpt2.logits.save()


def test_a_barrier(gpt2: Any) -> None:
    with pytest.raises(NotSupportedError, match="two traces"):
        with gpt2.trace(max_tokens=1) as tracer:
            tracer.barrier(2)
    with pytest.raises(NotSupportedError, match="two traces"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            tracer.barrier(2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scan", r"model\.tree"),
        ("session", "one trace after the other"),
        ("backward", "no gradients"),
        ("all", r"tracer\.all"),
        ("iter", r"tracer\.iter"),
    ],
)
def test_a_method_of_the_model_that_is_not_there(gpt2: Any, name: str, words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        getattr(gpt2, name)


def test_gradients(gpt2: Any) -> None:
    with pytest.raises(NotSupportedError, match=r"test_refusals.py:\d+: `.backward`.*gradients"):
        with gpt2.trace(PROMPT, max_tokens=1):
            gpt2.logits.sum().backward()
    with pytest.raises(NotSupportedError, match=r"`.grad`"):
        with gpt2.trace(PROMPT, max_tokens=1):
            grad = gpt2.transformer.h[3].output.grad.save()
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden = gpt2.transformer.h[3].output
        with torch.enable_grad():
            own = hidden.clone().requires_grad_()
            own.square().sum().backward()
        grad = own.grad.save()
        held = hidden.save()
    torch.testing.assert_close(grad, 2 * held)


@pytest.mark.parametrize("name", ["iter", "all", "stop", "cache"])
def test_what_belongs_inside_a_block(gpt2: Any, name: str) -> None:
    with pytest.raises(LocationError, match=rf"tracer\.{name} belongs inside a block"):
        with gpt2.trace(max_tokens=1) as tracer:
            getattr(tracer, name)


def test_older_ways_to_loop(gpt2: Any) -> None:
    with pytest.raises(NotSupportedError, match=r"for step in tracer\.iter"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            with tracer.iter[:2]:
                gpt2.logits
    with pytest.raises(NotSupportedError, match=r"for step in tracer\.iter"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            tracer.next()
    with pytest.raises(LocationError, match="all, cache, iter, result, stop"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            tracer.nothing


def test_what_cannot_stand_in_a_block(gpt2: Any) -> None:
    def generator() -> Any:
        with gpt2.trace(PROMPT, max_tokens=1):
            yield 1

    with pytest.raises(CaptureError, match="`yield` cannot stand in a block"):
        next(generator())
    with pytest.raises(LocationError, match="trace: a block runs inside one request"):
        with gpt2.trace(PROMPT, max_tokens=1):
            with gpt2.trace(PROMPT, max_tokens=1):
                pass


def test_what_is_to_come_says_so(gpt2: Any) -> None:
    with pytest.raises(LocationError, match="not there yet"):
        gpt2.std
