"""The engine in processes of its own, as vLLM runs it by default: its start, its end, its death.

These engines compile nothing, which would take most of the time; `test_default.py` has one that
does. Run apart from the other tests (`make test` does): vLLM remembers for as long as a process
lives whether engines run in it, and most other tests have theirs in it.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from nnsight_core import EngineDeadError, EngineError
from nnsight_vllm_worker import VLLM

PROMPT = "The Eiffel Tower is in the city of"
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
if torch.cuda.is_available():
    # Several engines share one GPU in these tests, and how much of it is free changes meanwhile.
    SETTINGS |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}


def children() -> list[psutil.Process]:
    # Of this process itself: other tests have servers with engines of their own.
    return [p for p in psutil.Process().children() if "VLLM" in p.name().upper()]


@pytest.fixture(scope="module")
def model(processes: None, gpt2_path: str) -> Iterator[VLLM]:
    with VLLM(gpt2_path, **SETTINGS) as model:
        yield model


def test_an_undispatched_model_knows_its_names(
    gpt2_path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = VLLM(gpt2_path)
    assert not model.dispatched
    assert "(0-11): GPT2Block" in str(model)
    assert model.tree.provisional and len(model.transformer.h) == 12
    assert model.tree.modules["transformer.h.3.attn"].operations
    # A second time it is read from disk.
    monkeypatch.setattr("nnsight_vllm_worker.model.tree_of", None)
    assert VLLM(gpt2_path).tree == model.tree
    assert not model.dispatched and model.tokenizer.decode([287]) == " Paris"


def test_the_first_trace_builds_the_engine(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
        hidden = model.transformer.h[6].output.save()
        out = tracer.result.save()
    assert model.dispatched and not model.tree.provisional
    assert hidden.shape == (8, 96) and out.outputs[0].text == " Paris"
    assert children()


def test_values_are_those_of_transformers(model: VLLM, hf_gpt2: Any, near: Any) -> None:
    found = []
    for one in (model, hf_gpt2):
        with one.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
            one.transformer.h[3].mlp.output[:, :5] = 0
            hidden = one.transformer.h[9].mlp.output.save()
            length = len(tracer.result.outputs[0].text).save()
        found.append((hidden, length))
    near(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_many_traced_requests_at_once(model: VLLM) -> None:
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        for count in range(1, 41):
            with tracer.invoke([287] * count):
                hidden = model.transformer.h[2].output.save()
    assert [h.shape[0] for h in hidden] == list(range(1, 41))
    assert model._engine is not None and model._engine.counts()["live"] == 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 12, "ignore_eos": True},
        {"max_tokens": 40},
        {"max_tokens": 40, "stop": [" five"]},
        {"max_tokens": 40, "ignore_eos": True, "stop": ["three four"]},
    ],
)
def test_loops_see_the_steps_that_count_though_the_engine_runs_ahead(
    model: VLLM, sampling: dict[str, Any]
) -> None:
    for _ in range(5):
        with model.trace("Count up to ten:", temperature=0.0, **sampling) as tracer:
            tokens = [].save()
            for _step in tracer.all():
                tokens.append(model.samples.item())
            out = tracer.result.save()
        assert tokens == out.outputs[0].token_ids


def test_stop_is_exact_though_the_engine_runs_ahead(model: VLLM) -> None:
    for last in (0, 1, 5):
        with model.trace(PROMPT, temperature=0.0, max_tokens=200, ignore_eos=True) as tracer:
            tokens = [].save()
            for step in tracer.all():
                tokens.append(model.samples.item())
                if step == last:
                    tracer.stop()
        output = tracer.result.outputs[0]
        assert output.token_ids == tokens and len(tokens) == last + 1
        assert output.stop_reason == "tracer.stop"
    assert model._engine is not None and model._engine.counts()["live"] == 0


def test_an_interrupted_trace_leaves_nothing(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = model._dispatched()
    step = engine.llm.llm_engine.step
    calls = 0

    def interrupted() -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine.llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with model.trace(PROMPT, max_tokens=200, ignore_eos=True) as tracer:
            out = len(tracer.result.outputs).save()
    monkeypatch.undo()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        out = tracer.result.save()
    assert out.outputs[0].text == " Paris" and engine.counts()["live"] == 0


def test_a_dead_engine_is_said_to_be_dead(model: VLLM) -> None:
    model._dispatched()
    for child in children():
        child.send_signal(signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"model\.restart\(\)"):
        with model.trace(PROMPT, max_tokens=50, ignore_eos=True):
            hidden = model.transformer.h[6].output.save()
    model.restart()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden = model.transformer.h[6].output.save()
    assert hidden.shape == (8, 96)


def test_closing_ends_the_processes(processes: None, gpt2_path: str) -> None:
    before = children()
    model = VLLM(gpt2_path, dispatch=True, **SETTINGS)
    started = [child for child in children() if child not in before]
    assert started
    model.close()
    gone, alive = psutil.wait_procs(started, timeout=15)
    assert not alive
    with pytest.raises(EngineDeadError, match="closed"):
        with model.trace(PROMPT, max_tokens=1):
            hidden = model.transformer.h[6].output.save()
    model.close()


def test_a_model_that_is_forgotten_takes_its_processes_along(
    processes: None, gpt2_path: str
) -> None:
    before = children()
    model = VLLM(gpt2_path, dispatch=True, **SETTINGS)
    started = [child for child in children() if child not in before]
    assert started
    del model
    gc.collect()
    assert not psutil.wait_procs(started, timeout=15)[1]


def test_a_failing_start_says_its_root_cause(
    processes: None, gpt2_path: str, tmp_path: Path
) -> None:
    shutil.copytree(gpt2_path, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(EngineError, match="Cannot find any model weights"):
        VLLM(str(tmp_path / "empty"), dispatch=True, **SETTINGS)
    with pytest.raises(EngineError, match="not_there"):
        VLLM("/not_there", dispatch=True)
    with pytest.raises(EngineError, match="max_model_length"):
        VLLM(gpt2_path, dispatch=True, max_model_length=256)
    with pytest.raises(EngineError, match=r"max_num_batched_tokens=16 cannot be had.* 17 or more"):
        VLLM(gpt2_path, dispatch=True, max_num_batched_tokens=16, max_num_seqs=2, **SETTINGS)


def test_prompts_that_come_as_embeddings_have_as_many_rows(processes: None, gpt2_path: str) -> None:
    embed = AutoModelForCausalLM.from_pretrained(gpt2_path, dtype="float32").transformer.wte
    ids = [[*range(10, 18)], [*range(20, 33)]]
    embedded = [{"prompt_embeds": embed(torch.tensor(each)).detach()} for each in ids]
    params = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, stop=["never said"], logprobs=1
    )

    def drawn(prompts: list[Any]) -> tuple[list[Any], list[Any]]:
        made = [out.outputs[0] for out in model.llm.generate(prompts, params, use_tqdm=False)]
        return [part.token_ids for part in made], [part.cumulative_logprob for part in made]

    with VLLM(gpt2_path, dispatch=True, enable_prompt_embeds=True, **SETTINGS) as model:
        with model.edit() as (tracer, edit):
            for step in tracer.all():
                if step < 2:
                    model.transformer.h[4].output[-2:] *= 3
        tokens, scores = drawn([{"prompt_token_ids": each} for each in ids])
        # One that has ids beside two that have none.
        mixed = [embedded[0], {"prompt_token_ids": ids[1]}, embedded[1]]
        found, told = drawn(mixed)
        edit.clear()
        plain = drawn(mixed)[1]
    assert found == [tokens[0], tokens[1], tokens[1]]
    assert told == pytest.approx([scores[0], scores[1], scores[1]], abs=1e-3)
    assert all(abs(a - b) > 1e-2 for a, b in zip(told, plain, strict=True))


def test_a_script_without_a_guard_gets_one_sentence(gpt2_path: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from nnsight_vllm_worker import VLLM\n"
        f"VLLM({gpt2_path!r}, dispatch=True, **{SETTINGS!r})\n"
    )
    environment = {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert 'under `if __name__ == "__main__":`' in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "synchronous"}, "'sync' or 'async'"),
        ({"pipeline_parallel_size": 2}, "several stages"),
        ({"speculative_config": {"method": "ngram"}}, "several tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(
    gpt2_path: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        VLLM(gpt2_path, dispatch=True, **arguments)


def test_what_is_forced_is_said_with_its_reason(gpt2_path: str) -> None:
    said = VLLM(gpt2_path).engine_settings()
    assert "scheduler_cls" in said and "forced" in said and "in one piece" in said


def test_a_model_that_draws_no_tokens_is_refused(processes: None, llama_path: str) -> None:
    before = children()
    with pytest.raises(EngineError, match="makes embeddings and draws no tokens"):
        VLLM(llama_path, dispatch=True, runner="pooling", max_model_len=128)
    left = [child for child in children() if child not in before]
    assert not psutil.wait_procs(left, timeout=15)[1]
