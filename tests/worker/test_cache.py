"""Activation caches: every visit of chosen modules, after the block's own writes, to the end."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from nnsight_core import Cache, LocationError, NotSupportedError, OutOfOrderError
from tests.fixtures.ranks import WIDTH

PROMPT = "The Eiffel Tower is in the city of"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
close = torch.testing.assert_close


def test_every_module_in_every_step_equals_what_a_block_reads(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        cache = tracer.cache()
    with gpt2.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        read = [].save()
        for _ in tracer.all():
            read.append([(layer.mlp.output, layer.output) for layer in gpt2.transformer.h])
    assert isinstance(cache, Cache)
    ran = [path for path, info in gpt2.tree.modules.items() if info.output is not None]
    assert set(ran) - set(cache) == set(cache.missing) & set(ran) and len(cache) > 100
    with pytest.raises(KeyError, match=r"same module object as transformer\.h\.0\.mlp\.act"):
        cache["transformer.h.3.mlp.act"]
    for index in range(12):
        mlp, layer = cache[f"transformer.h.{index}.mlp"], cache.transformer.h[index]
        assert len(mlp) == 3 == len(layer)
        for step in range(3):
            assert torch.equal(mlp[step].output, read[step][index][0])
            assert torch.equal(layer.output[step], read[step][index][1])
        assert mlp.inputs == [None] * 3


def test_what_is_not_waited_for_is_whole_all_the_same(gpt2: Any) -> None:
    caches = []
    for at_once in (True, False):
        with gpt2.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
            cache = tracer.cache([*gpt2.transformer.h], non_blocking=at_once)
        caches.append(cache)
    for path, entry in caches[0].items():
        for visit, other in zip(entry.visits, caches[1][path].visits, strict=True):
            close(visit.output, other.output)


def test_modules_are_given_as_nodes_or_paths(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        cache = tracer.cache(
            modules=[gpt2.transformer.h[0], "transformer.h.3.mlp", "model.transformer.h.5.attn"],
            dtype=torch.float64,
            include_inputs=True,
        )
        one = tracer.cache(modules=gpt2.transformer.h[0].attn)
        hidden = gpt2.transformer.h[0].output.save()
    assert list(cache) == ["transformer.h.0", "transformer.h.3.mlp", "transformer.h.5.attn"]
    assert cache["model.transformer.h.0"].output.dtype == torch.float64
    close(cache["transformer.h.0"].output, hidden.double())
    args, kwargs = cache.transformer.h[3].mlp.inputs
    assert args[0].shape == (8, WIDTH) and torch.equal(cache.transformer.h[3].mlp.input, args[0])
    assert list(one) == ["transformer.h.0.attn"]


def test_inputs_alone(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        cache = tracer.cache([gpt2.transformer.h[4].mlp], include_inputs=True, include_output=False)
    visits = cache["transformer.h.4.mlp"].visits
    assert [v.input.shape[0] for v in visits] == [8, 1] and visits[0].output is None


def test_a_cache_holds_what_the_model_went_on_with(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        cache = tracer.cache([gpt2.transformer.h[2].mlp, gpt2.transformer.h[3].mlp])
        for _ in tracer.iter[:2]:
            gpt2.transformer.h[2].mlp.output[:] = 7
            gpt2.transformer.h[3].mlp.skip(gpt2.transformer.h[3].mlp.input * 0 + 5)
    assert all(v.eq(7).all() for v in cache.transformer.h[2].mlp.output)
    assert all(v.eq(5).all() for v in cache.transformer.h[3].mlp.output)


def test_each_request_has_its_own_rows_and_steps(gpt2: Any) -> None:
    with gpt2.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT, max_tokens=4):
            cache = tracer.cache([gpt2.transformer.h[6]])
        with tracer.invoke("Water boils at", max_tokens=2):
            cache = tracer.cache([gpt2.transformer.h[6]])
        with tracer.invoke("Water boils at", max_tokens=2):
            pass
    lengths = [len(gpt2.tokenizer(p)["input_ids"]) for p in (PROMPT, "Water boils at")]
    assert cache[2] is None
    assert [v.shape[0] for v in cache[0].transformer.h[6].output] == [lengths[0], 1, 1, 1]
    assert [v.shape[0] for v in cache[1].transformer.h[6].output] == [lengths[1], 1]
    with gpt2.trace(PROMPT, n=2, seed=3, temperature=1.0, max_tokens=3, ignore_eos=True) as tracer:
        pair = tracer.cache([gpt2.transformer.h[6]])
    assert [len(c.transformer.h[6]) for c in pair] == [3, 3]
    assert torch.equal(pair[0].transformer.h[6].output[0], pair[1].transformer.h[6].output[0])


def test_a_cache_may_be_read_in_the_block_and_after_a_stop(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, max_tokens=9, **GREEDY) as tracer:
        cache = tracer.cache([gpt2.transformer.h[1]])
        for step in tracer.all():
            gpt2.logits
            seen = len(cache["transformer.h.1"]).save()
            if step == 2:
                tracer.stop()
    assert seen == 3 == len(cache.transformer.h[1])


def test_a_cache_comes_too_late(gpt2: Any) -> None:
    with pytest.raises(OutOfOrderError, match="stands before the block's first"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            gpt2.transformer.h[0].output
            tracer.cache()


def test_what_cannot_be_cached_is_refused_or_said_to_be_missing(gpt2: Any) -> None:
    with pytest.raises(LocationError, match=r"transformer\.hh"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            tracer.cache(["transformer.hh.3"])
    with pytest.raises(LocationError, match="modules or their paths"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            tracer.cache([3])
    with pytest.raises(NotSupportedError, match="gradients"):
        with gpt2.trace(PROMPT, max_tokens=1) as tracer:
            tracer.cache(detach=False)
    with gpt2.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        cache = tracer.cache([gpt2.transformer.h[0]])
    with pytest.raises(KeyError, match=r"transformer\.h\.1 is not in the cache"):
        cache["transformer.h.1"]
    with pytest.raises(AttributeError, match="not in the cache"):
        cache.transformer.h[1]


def test_a_module_whose_rows_cannot_be_told_apart_fails_its_request_alone(llama: Any) -> None:
    shared = next(p for p, i in llama.tree.modules.items() if i.same_as is not None)
    with pytest.raises(ExceptionGroup) as caught:
        with llama.trace(**GREEDY, max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                tracer.cache([shared])
            with tracer.invoke(PROMPT):
                tracer.cache([shared])
            with tracer.invoke(PROMPT):
                good = tracer.cache()
    assert all("same module object" in str(e) for e in caught.value.exceptions)
    assert "model.layers.0" in good


def test_an_unused_cache_is_no_unbound_save(gpt2: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpt2.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
            cache = tracer.cache()
            for _ in tracer.all():
                last = cache["transformer.h.0"] if cache else None
    assert len(cache.transformer.h[0]) == 2
