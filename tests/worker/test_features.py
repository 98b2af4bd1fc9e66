"""The engine's own features stay on: chunked prefill, prefix caching, preemption, batching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nnsight_core
from nnsight_core import LocationError, WriteError
from tests.fixtures.ranks import WIDTH

close = torch.testing.assert_close
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def ids(count: int, seed: int = 0) -> list[int]:
    """Some token ids, the same in every run."""
    made = torch.randint(10, 500, (count,), generator=torch.Generator().manual_seed(seed))
    return made.tolist()


@pytest.fixture(autouse=True)
def unharmed(tight: Any) -> Iterator[None]:
    """After each test the worker holds nothing."""
    yield
    tight.generate([ids(3)], max_tokens=1, **GREEDY)
    counts = tight._engine.counts()
    assert counts["live"] == 0 and counts["kept"] == 0


# -- prompts in pieces -------------------------------------------------------------------------


def test_a_reader_sees_a_long_prompt_whole(tight: Any, gpt2: Any) -> None:
    found = []
    for model in (tight, gpt2):
        with model.trace(ids(100), max_tokens=3, **GREEDY) as tracer:
            given = [].save()
            hidden = [].save()
            qkv = [].save()
            logits = [].save()
            for _ in tracer.iter[:3]:
                for layer in model.transformer.h[4:6]:
                    given.append(layer.mlp.input)
                    hidden.append(layer.output)
                attn = model.transformer.h[9].attn
                qkv.append(attn.source.self_c_attn_0.output[0])
                logits.append(model.logits)
            out = tracer.result.save()
        assert [len(h) for h in hidden] == [100, 100, 1, 1, 1, 1]
        found.append((given, hidden, qkv, logits, out.outputs[0].token_ids))
    assert found[0][4] == found[1][4]
    for ours, theirs in zip(found[0][:4], found[1][:4], strict=True):
        for here, there in zip(ours, theirs, strict=True):
            close(here, there, rtol=1e-3, atol=2e-4)


def test_a_reader_may_write_logits_and_samples_after_a_long_prompt(tight: Any) -> None:
    with tight.trace(ids(90), max_tokens=2, **GREEDY) as tracer:
        hidden = tight.transformer.h[3].output.save()
        tight.logits[:, 7] = 1e9
        drawn = tight.samples.item().save()
        out = tracer.result.save()
    assert hidden.shape == (90, WIDTH) and drawn == 7 == out.outputs[0].token_ids[0]


def test_what_the_text_does_not_say_is_refused_not_short(tight: Any) -> None:
    module = {"deep": tight.transformer.h[2]}
    with pytest.raises(WriteError, match="90 tokens.*takes 40"):
        with tight.trace(ids(90), max_tokens=1, **GREEDY):
            hidden = module["deep"].output.save()
    with tight.trace(ids(40), max_tokens=1, **GREEDY):
        hidden = module["deep"].output.save()
    assert hidden.shape == (40, WIDTH)


def test_a_writers_long_prompt_is_refused_before_it_runs(tight: Any) -> None:
    with pytest.raises(WriteError, match=r"90 tokens.*takes 40 \(max_num_batched_tokens\)"):
        with tight.trace(max_tokens=1, **GREEDY) as tracer:
            with tracer.invoke(ids(90)):
                tight.transformer.h[2].output[:] = 0
            with tracer.invoke(ids(90)):
                hidden = tight.transformer.h[2].output.save()
    assert hidden.shape == (90, WIDTH)


def test_a_writers_prompt_waits_until_it_runs_in_one_piece(tight: Any, gpt2: Any) -> None:
    # Prompts that vLLM by itself would cut to fill up its passes of 40 tokens.
    prompts = [ids(30 + i, i) for i in range(6)]
    found = []
    for model in (tight, gpt2):
        with model.trace(max_tokens=2, **GREEDY) as tracer:
            for index, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    model.transformer.h[2].output[:] *= 1 + index / 2
                    logits = model.logits.save()
        found.append(logits)
    for here, there in zip(*found, strict=True):
        close(here, there, rtol=1e-3, atol=2e-4)


def test_a_cache_of_a_long_prompt_is_whole(tight: Any) -> None:
    with tight.trace(ids(70), max_tokens=2, **GREEDY) as tracer:
        cache = tracer.cache(modules=[tight.transformer.h[0], "transformer.h.5.mlp"])
        every = tracer.cache()
    assert [len(v.output) for v in cache["transformer.h.5.mlp"].visits] == [70, 1]
    assert len(every.transformer.h[11].output[0]) == 70


# -- prefix caching ----------------------------------------------------------------------------


@pytest.mark.local
def test_a_trace_sees_its_prompt_whole_though_it_is_cached(tight: Any) -> None:
    prompt = ids(38, 5)
    first = tight.llm.generate([{"prompt_token_ids": prompt}], _params(), use_tqdm=False)
    again = tight.llm.generate([{"prompt_token_ids": prompt}], _params(), use_tqdm=False)
    assert first[0].num_cached_tokens == 0 and again[0].num_cached_tokens >= 16
    with tight.trace(prompt, max_tokens=1, **GREEDY):
        hidden = tight.transformer.h[2].output.save()
    assert hidden.shape == (38, WIDTH)


@pytest.mark.local
@pytest.mark.parametrize("hidden_in_a_function", [True, False])
def test_what_a_block_writes_is_found_by_no_other_request(
    tight: Any, hidden_in_a_function: bool
) -> None:
    def zero(hidden: torch.Tensor) -> None:
        hidden.zero_()

    prompt = ids(38, 6 + hidden_in_a_function)
    with tight.trace(prompt, max_tokens=4, **GREEDY) as tracer:
        for _ in tracer.iter[:4]:
            if hidden_in_a_function:
                zero(tight.transformer.h[0].output)
            else:
                tight.transformer.h[0].output[:] = 0
        changed = tracer.result.save()
    plain = tight.llm.generate([{"prompt_token_ids": prompt}], _params(4), use_tqdm=False)[0]
    assert plain.num_cached_tokens == 0
    with tight.trace(prompt, max_tokens=4, **GREEDY) as tracer:
        out = tracer.result.save()
    assert list(plain.outputs[0].token_ids) == out.outputs[0].token_ids
    assert changed.outputs[0].token_ids != out.outputs[0].token_ids


@pytest.mark.local
def test_what_a_reader_computes_is_found_by_others(tight: Any) -> None:
    prompt = ids(38, 8)
    with tight.trace(prompt, max_tokens=1, **GREEDY):
        hidden = tight.transformer.h[0].output.save()
    plain = tight.llm.generate([{"prompt_token_ids": prompt}], _params(), use_tqdm=False)[0]
    assert plain.num_cached_tokens >= 16 and hidden.shape == (38, WIDTH)


def _params(tokens: int = 1) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, **GREEDY)


# -- preemption, batching ----------------------------------------------------------------------


def _preemptions(model: Any) -> list[int]:
    """Watch the requests that the scheduler preempts."""
    scheduler = model.llm.llm_engine.engine_core.engine_core.scheduler
    seen: list[int] = []
    plain = type(scheduler)._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.num_output_tokens)
        return plain(scheduler, request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return seen


@pytest.mark.local
def test_preempted_requests_read_and_write_as_alone(tight: Any, gpt2: Any) -> None:
    preempted = _preemptions(tight)
    prompts = [ids(20 + i, 20 + i) for i in range(6)]
    found = []
    for model in (tight, gpt2):
        with model.trace(max_tokens=45, **GREEDY) as tracer:
            for index, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    tokens = [].save()
                    logits = [].save()
                    hidden = [].save()
                    for step in tracer.all():
                        if index % 2 and step % 3 == 0:
                            model.transformer.h[2].mlp.output[:] *= -2
                            model.transformer.h[4].ln_2.input[:] *= 0.5
                        if index == 4 and step == 1:
                            model.transformer.h[5].mlp.skip(model.transformer.h[5].mlp.input * 2)
                        hidden.append(model.transformer.h[7].output)
                        logits.append(model.logits)
                        tokens.append(model.samples.item())
        found.append((tokens, hidden, logits))
    assert any(count > 1 for count in preempted)
    assert found[0][0] == found[1][0] and [len(t) for t in found[0][0]] == [45] * 6
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert [len(h) for h in ours] == [len(h) for h in theirs]
    for part in (1, 2):
        for ours, theirs in zip(found[0][part], found[1][part], strict=True):
            for here, there in zip(ours, theirs, strict=True):
                close(here, there, rtol=2e-3, atol=1e-3)


@pytest.mark.local
def test_a_preempted_writer_whose_writes_were_not_kept_is_an_error(tight: Any) -> None:
    preempted = _preemptions(tight)
    tracing = _tracing(tight)
    tracing._allowance.left -= 512 * 2**20
    try:
        with pytest.raises(ExceptionGroup) as caught:
            with tight.trace(max_tokens=60, **GREEDY) as tracer:
                for index in range(6):
                    with tracer.invoke(ids(30, 40 + index)):
                        tokens = [].save()
                        for _ in tracer.all():
                            tight.transformer.h[2].mlp.output[:] *= 1.1
                            tokens.append(tight.samples.item())
    finally:
        tracing._allowance.left += 512 * 2**20
    assert preempted and all("preempted" in str(e) for e in caught.value.exceptions)
    assert any(len(made) == 60 for made in tokens if made is not None)


def _tracing(model: Any) -> Any:
    executor = model.llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker._nnsight.tracing


def test_more_invokes_than_the_engine_takes_at_once(tight: Any) -> None:
    with tight.trace(max_tokens=3, **GREEDY) as tracer:
        for index in range(20):
            with tracer.invoke(ids(4 + index % 5, index)):
                tokens = [].save()
                for _ in tracer.all():
                    tokens.append(tight.samples.item())
    assert [o.outputs[0].token_ids for o in tracer.result] == tokens


def test_a_location_in_pieces_that_was_not_named_says_so(tight: Any) -> None:
    with tight.trace(ids(90), max_tokens=1, **GREEDY):
        one = tight.transformer.h[1].output.shape[0].save()
        two = tight.get("transformer.h.3.mlp").output.shape[0].save()
    assert one == two == 90
    with pytest.raises(LocationError):
        with tight.trace(ids(90), max_tokens=1, **GREEDY):
            tight.transformer.h[1].nothing.output


def test_identical_requests_share_nothing(tight: Any) -> None:
    prompt = ids(33, 77)
    with tight.trace(max_tokens=2, **GREEDY) as tracer:
        for scale in (1.0, 0.0, 1.0):
            with tracer.invoke(prompt):
                tight.transformer.h[6].output[:] *= scale
                logits = nnsight_core.save(tight.logits)
    close(logits[0], logits[2])
    assert not torch.allclose(logits[0], logits[1])
