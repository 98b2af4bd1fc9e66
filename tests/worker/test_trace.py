"""The tutorial, and what a block reads and writes, on real vLLM against transformers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import nnsight_core
from nnsight_core import LocationError
from tests.fixtures.ranks import WIDTH

PROMPT = "The Eiffel Tower is in the city of"
close = torch.testing.assert_close


def test_the_tutorial(gpt2: Any) -> None:
    model = gpt2
    prompt = "The Eiffel Tower is in the city of"

    with model.trace(prompt, temperature=0.0, max_tokens=1) as tracer:
        mlp = model.transformer.h[6].mlp.output.save()
        logits = model.logits.save()
        result = tracer.result.save()
    n = len(model.tokenizer(prompt)["input_ids"])
    assert mlp.shape[0] == n and logits.shape[0] == 1
    assert model.tokenizer.decode(logits.argmax(-1)) == " Paris" == result.outputs[0].text

    with model.trace(prompt, temperature=0.0, max_tokens=1):
        model.transformer.h[8].output[:] = 0
        zeroed = model.logits.argmax(-1).save()
    assert model.tokenizer.decode(zeroed) != " Paris"

    prompts = ["The Eiffel Tower is in", "The capital of Japan is the city of", "Water boils at"]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for p in prompts:
            with tracer.invoke(p):
                hidden = model.transformer.h[6].output.save()
    assert [h.shape[0] for h in hidden] == [len(model.tokenizer(p)["input_ids"]) for p in prompts]


def test_pairs_of_a_llama_layer(llama: Any) -> None:
    with llama.trace("The capital of France is", temperature=0.0, max_tokens=8) as tracer:
        llama.model.layers[2].output[0][:] = 0
        resid = sum(llama.model.layers[4].output).save()
        out = tracer.result.save()
    assert resid.shape == (len(llama.tokenizer("The capital of France is")["input_ids"]), 128)
    with llama.trace("The capital of France is", temperature=0.0, max_tokens=1):
        untouched = sum(llama.model.layers[4].output).save()
    assert out.finished and not torch.allclose(resid, untouched, atol=0.1)


@pytest.mark.parametrize("layer", [0, 6, 11])
def test_gpt2_equals_transformers(gpt2: Any, hf_gpt2: Any, near: Any, layer: int) -> None:
    ours: dict[str, Any] = {}
    for name, model in (("vllm", gpt2), ("hf", hf_gpt2)):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            block = model.transformer.h[layer]
            attn = block.attn.output.save()
            mlp = block.mlp.output.save()
            hidden = block.output.save()
            logits = model.logits.save()
        attn = attn[0] if isinstance(attn, tuple) else attn
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        ours[name] = (attn, mlp, hidden, logits)
    for here, there in zip(ours["vllm"], ours["hf"], strict=True):
        near(here, there)


@pytest.mark.parametrize("layer", [0, 3, 5])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_pair_models_equal_transformers(
    family: str, layer: int, near: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)
    oracle = request.getfixturevalue(f"hf_{family}")
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        block = model.model.layers[layer]
        attn = block.self_attn.output.save()
        mlp = block.mlp.output.save()
        resid = sum(block.output).save()
        logits = model.logits.save()
    with oracle.trace(PROMPT, temperature=0.0, max_tokens=1):
        block = oracle.model.layers[layer]
        hf_attn = block.self_attn.output[0].save()
        hf_mlp = block.mlp.output.save()
        hf_resid = block.output.save()
        hf_logits = oracle.logits.save()
    hf_attn = hf_attn if hf_attn.dim() == 2 else hf_attn[0]
    for here, there in ((attn, hf_attn), (mlp, hf_mlp), (resid, hf_resid), (logits, hf_logits)):
        near(here, there)


def test_a_write_has_the_effect_it_has_in_transformers(gpt2: Any, hf_gpt2: Any, near: Any) -> None:
    found = []
    for model in (gpt2, hf_gpt2):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            model.transformer.h[3].mlp.output[-1] *= 2.5
            later = model.transformer.h[9].mlp.output.save()
            logits = model.logits.save()
        found.append((later, logits))
    near(found[0][0], found[1][0])
    near(found[0][1], found[1][1])


def test_an_input_write_reaches_that_module_alone(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        before = gpt2.transformer.h[4].output.save()
        gpt2.transformer.h[5].ln_1.input[:] = 0
        normed = gpt2.transformer.h[5].ln_1.output.save()
        attn = gpt2.transformer.h[5].attn.output.save()
        mid = gpt2.transformer.h[5].ln_2.input.save()
    assert normed.std(0).max() < 1e-5
    # The residual stream, which lies in the same memory as the input, is as it was.
    close(mid, before + attn)


def test_assignment_replaces_and_later_reads_see_it(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        out = gpt2.transformer.h[2].mlp.output
        gpt2.transformer.h[2].mlp.output = out * 0 + 1
        seen = gpt2.transformer.h[2].mlp.output.save()
        plus = (gpt2.transformer.h[2].output - gpt2.transformer.h[2].ln_1.weight * 0).save()
    assert seen.eq(1).all() and plus.shape == seen.shape


def test_logits_and_samples_can_be_forced(gpt2: Any) -> None:
    want = gpt2.tokenizer(" Tokyo")["input_ids"][0]
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        gpt2.logits[:, want] = 1e9
        drawn = gpt2.samples.save()
        out = tracer.result.save()
    assert drawn.shape == (1, 1) and drawn.item() == want == out.outputs[0].token_ids[0]
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        gpt2.samples[:] = want
        again = gpt2.samples.save()
        out = tracer.result.save()
    assert again.item() == want == out.outputs[0].token_ids[0]
    assert out.outputs[0].text.startswith(" Tokyo")


@pytest.mark.parametrize("logprobs", [0, 2])
def test_logprobs_are_those_of_the_token_that_was_written(gpt2: Any, logprobs: int) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "logprobs": logprobs}
    want = [gpt2.tokenizer(name)["input_ids"][0] for name in (" Tokyo", " Paris", " Rome")]
    with gpt2.trace(**sampling) as tracer:
        with tracer.invoke(PROMPT):
            by_step = [].save()
            for step in tracer.all():
                by_step.append(gpt2.logits[0].log_softmax(-1))
                gpt2.samples[:] = want[step]
            out = tracer.result.save()
        with tracer.invoke(PROMPT):
            beside = tracer.result.save()
    with gpt2.trace(PROMPT, **sampling) as tracer:
        alone = tracer.result.save()
    made, total = out.outputs[0], 0.0
    assert made.token_ids == want
    for token, told, scores in zip(want, made.logprobs, by_step, strict=True):
        assert told[token].logprob == pytest.approx(scores[token].item(), abs=1e-4)
        assert told[token].rank == (scores >= scores[token]).sum()
        assert {*scores.topk(logprobs).indices.tolist()} <= {*told}
        total += told[token].logprob
    assert made.cumulative_logprob == pytest.approx(total)
    told = [[{*each} for each in of.outputs[0].logprobs] for of in (beside, alone)]
    assert told[0] == told[1]


def test_result_may_be_looked_into_and_more_may_follow(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        out = tracer.result.save()
        hidden = gpt2.transformer.h[1].output.save()
        length = len(tracer.result.outputs[0].text).save()
        after = (hidden.sum() + length).save()
    assert out.outputs[0].text == " Paris" and length == len(" Paris")
    close(after, hidden.sum() + length)
    assert gpt2._engine.counts()["live"] == 0


def test_skip_replaces_one_requests_rows(gpt2: Any) -> None:
    with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            gpt2.transformer.h[5].mlp.skip(gpt2.transformer.h[5].mlp.input * 0 + 3)
            mlp = gpt2.transformer.h[5].mlp.output.save()
            logits = gpt2.logits.save()
        with tracer.invoke(PROMPT):
            mlp = gpt2.transformer.h[5].mlp.output.save()
            logits = gpt2.logits.save()
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        alone = gpt2.transformer.h[5].mlp.output.save()
        alone_logits = gpt2.logits.save()
    assert mlp[0].eq(3).all()
    close(mlp[1], alone)
    close(logits[1], alone_logits)
    assert not torch.allclose(logits[0], alone_logits, atol=1e-2)


def test_source_operations_are_read_and_written(gpt2: Any) -> None:
    assert "self_c_attn_0" in dir(gpt2.transformer.h[3].attn.source)
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        attn = gpt2.transformer.h[3].attn
        qkv = attn.source.self_c_attn_0.output[0].save()
        q, k, v = attn.source.qkv_chunk_0.output
        q = q.save()
        direct = attn.output.save()
    assert qkv.shape[1] == 3 * q.shape[1]
    close(q, qkv[:, : q.shape[1]])
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        gpt2.transformer.h[3].attn.source.self_attn_0.output[:] = 0
        changed = gpt2.transformer.h[3].attn.output.save()
    assert not torch.allclose(changed, direct)
    bias = torch.tensor(0.0)
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        bias = gpt2.transformer.h[3].attn.c_proj.bias.save()
    close(changed, bias.expand_as(changed))


def test_a_module_runs_on_the_blocks_own_values(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        last = gpt2.transformer.h[11].output[-1:]
        normed = gpt2.transformer.ln_f(last)
        lens = gpt2.logits_processor(gpt2.lm_head, normed).save()
        logits = gpt2.logits.save()
    close(lens, logits)


def _called(model: Any, path: str) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        entering = model.transformer.h[1].output
        model.get(path)(entering)


@pytest.mark.parametrize("path", ["transformer.h.2", "transformer.h.2.attn.attn", "transformer"])
def test_a_module_that_keeps_keys_and_values_is_not_called(gpt2: Any, path: str) -> None:
    with pytest.raises(LocationError, match=rf"{path}\b.* cannot be called .*h\.\d+\.attn\.attn"):
        _called(gpt2, path)
    _called(gpt2, "transformer.h.2.mlp")


def test_every_value_of_a_block_equals_its_clone(llama: Any) -> None:
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        bare = nnsight_core.save([])
        cloned = nnsight_core.save([])
        for layer in llama.model.layers:
            bare.append(layer.input_layernorm.output)
            cloned.append(_clones(bare[-1]))
            bare.append(layer.output)
            cloned.append(_clones(bare[-1]))
    assert len(bare) == 12
    for one, other in zip(bare, cloned, strict=True):
        pairs = zip(_tuple(one), _tuple(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _clones(value: Any) -> Any:
    return tuple(v.clone() for v in value) if isinstance(value, tuple) else value.clone()


def test_a_save_is_what_it_was_then(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        before = gpt2.transformer.h[2].output.save()
        before[:] = 0
        last = gpt2.transformer.h[3].ln_1.input.save()
    assert before.abs().sum() > 0
    assert last.abs().sum() == 0


def test_saved_views_are_no_larger_than_their_data(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        one = gpt2.transformer.h[2].output[-1, :4].save()
    assert one.untyped_storage().nbytes() == one.numel() * one.element_size()


def test_many_invokes_and_missing_saves(gpt2: Any) -> None:
    with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
        for index, prompt in enumerate([PROMPT, "Water boils at", PROMPT]):
            with tracer.invoke(prompt):
                hidden = gpt2.transformer.h[1].output
                if index != 1:
                    norm = hidden.norm().save()
    assert norm[1] is None and torch.equal(norm[0], norm[2])


def test_a_writer_changes_its_own_rows_alone(gpt2: Any) -> None:
    prompts = ["Water boils at", PROMPT, "The capital of Japan is the city of"]
    found = []
    for writer in (None, 1):
        with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
            for index, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    if index == writer:
                        gpt2.transformer.h[3].output[:] = 0
                    hidden = gpt2.transformer.h[8].output.save()
                    logits = gpt2.logits.save()
        found.append((hidden, logits))
    for index in range(3):
        same = torch.equal(found[0][0][index], found[1][0][index])
        assert same == torch.equal(found[0][1][index], found[1][1][index]) == (index != 1)


@pytest.mark.local
def test_a_request_in_traffic_has_the_values_it_has_alone(gpt2: Any, near: Any) -> None:
    prompts = ["Water boils at", PROMPT, [287] * 60, "The capital of Japan is the city of"]
    engine = gpt2.llm.llm_engine
    for count in range(1, 6):
        params = gpt2.llm.get_default_sampling_params()
        params.max_tokens = 30
        params.ignore_eos = True
        prompt = gpt2.llm._preprocess_cmpl_one({"prompt_token_ids": [287] * count})
        engine.add_request(f"foreign-{count}", prompt, params)
    engine.step()
    with gpt2.trace(temperature=0.0, max_tokens=3) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                hidden = gpt2.transformer.h[8].output.save()
                logits = gpt2.logits.save()
    while engine.has_unfinished_requests():
        engine.step()
    for index, prompt in enumerate(prompts):
        with gpt2.trace(prompt, temperature=0.0, max_tokens=1):
            alone = gpt2.transformer.h[8].output.save()
            alone_logits = gpt2.logits.save()
        near(hidden[index], alone)
        near(logits[index], alone_logits)


def test_sequences_of_one_prompt_are_lists(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, n=3, seed=1, max_tokens=1) as tracer:
        hidden = gpt2.transformer.h[1].output.save()
        drawn = gpt2.samples.item().save()
        out = tracer.result.save()
    assert len(hidden) == 3 and torch.equal(hidden[0], hidden[2])
    assert [o.token_ids[0] for o in out.outputs] == drawn


def test_prompt_forms(gpt2: Any) -> None:
    ids = gpt2.tokenizer(PROMPT)["input_ids"]
    forms = [
        PROMPT,
        ids,
        tuple(ids),
        torch.tensor([ids]),
        gpt2.tokenizer(PROMPT, return_tensors="pt"),
        {"input_ids": [*ids, 5], "attention_mask": [1] * len(ids) + [0]},
        {"prompt_token_ids": ids},
        {"prompt": PROMPT},
    ]
    with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
        for form in forms:
            with tracer.invoke(form):
                hidden = gpt2.transformer.h[11].output.save()
    for one in hidden[1:]:
        close(one, hidden[0])


def test_outside_tensors_and_modules_are_sent_once(gpt2: Any, near: Any) -> None:
    vector = torch.randn(WIDTH)
    big = torch.randn(WIDTH, WIDTH)

    class Probe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(WIDTH, 64)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.lin(hidden).relu()

    probe = Probe()
    for _ in range(2):
        with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
            for _ in range(3):
                with tracer.invoke(PROMPT):
                    hidden = gpt2.transformer.h[4].output.save()
                    moved = (hidden @ big + vector).save()
                    probed = probe(hidden).save()
    near(moved[0], hidden[0] @ big + vector)
    with torch.no_grad():
        near(probed[2], probe(hidden[2]))
    held = gpt2._engine.counts()["blob_bytes"]
    assert held >= big.numel() * 4
    big.mul_(2)
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        moved = (gpt2.transformer.h[4].output @ big).save()
    near(moved, hidden[0] @ big)
    assert gpt2._engine.counts()["blob_bytes"] == held + big.numel() * 4


def test_a_block_that_changes_an_outside_tensor_changes_its_own(gpt2: Any) -> None:
    big = torch.ones(WIDTH, WIDTH)
    with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
        for _ in range(2):
            with tracer.invoke(PROMPT):
                big += 1
                total = (big.sum() + 0 * gpt2.transformer.h[0].output.sum()).save()
    assert [t.item() for t in total] == [WIDTH * WIDTH * 2] * 2 and big.sum() == WIDTH * WIDTH


def test_plain_generation(gpt2: Any) -> None:
    outs = gpt2.generate([PROMPT, "The capital of Japan is the city of"], temperature=0.0)
    assert [o.outputs[0].text for o in outs] == [" Paris", " Tokyo"]
    assert gpt2.generate(PROMPT, temperature=0.0, max_new_tokens=1)[0].outputs[0].text == " Paris"


def test_traces_and_plain_generations_take_turns(gpt2: Any) -> None:
    found: dict[str, list[Any]] = {"plain": [], "traced": []}

    def plain() -> None:
        for _ in range(4):
            outputs = gpt2.generate([PROMPT, "Hello"], use_tqdm=False, max_tokens=8)
            found["plain"].append([output.prompt for output in outputs])

    def traced() -> None:
        for _ in range(4):
            with gpt2.trace(PROMPT, max_tokens=8, ignore_eos=True) as tracer:
                result = tracer.result.save()
            found["traced"].append(len(result.outputs[0].token_ids))
            assert gpt2._engine.counts()["live"] >= 0

    threads = [threading.Thread(target=work, daemon=True) for work in (plain, traced)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"plain": [[PROMPT, "Hello"]] * 4, "traced": [8] * 4}


def test_a_function_instead_of_a_body(gpt2: Any) -> None:
    def block(tracer: Any) -> Any:
        return gpt2.transformer.h[2].output * 2

    tracer = gpt2.trace(PROMPT, fn=block, temperature=0.0, max_tokens=1)
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden = gpt2.transformer.h[2].output.save()
    close(tracer.value, hidden * 2)


@pytest.mark.local
def test_a_function_without_a_source(gpt2: Any) -> None:
    scope: dict[str, Any] = {"gpt2": gpt2}
    exec(
        "def block(tracer):\n    hidden = gpt2.transformer.h[2].output\n    return hidden * 2",
        scope,
    )
    tracer = gpt2.trace(PROMPT, fn=scope["block"], temperature=0.0, max_tokens=1)
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        hidden = gpt2.transformer.h[2].output.save()
    close(tracer.value, hidden * 2)


def test_the_tree_says_what_a_block_finds(qwen3: Any) -> None:
    tree = qwen3.tree
    assert tree.modules["model.layers.3.mlp"].output[0].shape == ("tokens", 128)
    assert tree.modules["model.layers.3"].output[1].at == "[1]"
    assert tree.modules["logits_processor"].output[0].shape[0] == "1"
    assert tree == type(tree).model_validate_json(tree.model_dump_json())
    assert "tokens × 128" in str(qwen3) and "(1-5)" in str(qwen3)
    with qwen3.trace(PROMPT, temperature=0.0, max_tokens=1):
        q = qwen3.model.layers[1].self_attn.qkv_proj.output[0].save()
    info = tree.modules["model.layers.1.self_attn.qkv_proj"].output[0]
    assert q.shape[1] == info.shape[1] and str(q.dtype).endswith(info.dtype)


@pytest.mark.local
def test_saves_may_arrive_on_another_device(gpt2: Any) -> None:
    gpt2._backend._device = "meta"
    try:
        with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
            hidden = gpt2.transformer.h[6].output.save()
    finally:
        gpt2._backend._device = "cpu"
    assert hidden.device == torch.device("meta")


def test_operations_inside_a_function_that_a_forward_calls(gpt2: Any) -> None:
    assert "self_embed_input_ids_0" in dir(gpt2.transformer.source)
    for _ in range(2):
        with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
            for prompt in (PROMPT, "Water boils at"):
                with tracer.invoke(prompt):
                    embed = gpt2.transformer.source.self_embed_input_ids_0
                    inner = embed.source.self_wte_0.output.save()
                    whole = embed.output.save()
        assert [len(rows) for rows in inner] == [8, 6]
        assert all(map(torch.equal, inner, whole))
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        gpt2.transformer.source.self_embed_input_ids_0.source.self_wte_0.output[:] = 0
        zeroed = gpt2.transformer.source.hidden_states_0.output.save()
        position = gpt2.transformer.wpe.weight.shape.save()
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        plain = gpt2.transformer.source.hidden_states_0.output.save()
    close(plain - zeroed, whole[0])
    assert position[1] == WIDTH


def test_a_nested_source_that_is_none_is_refused(gpt2: Any) -> None:
    with pytest.raises(nnsight_core.LocationError, match=r"own\s+`.source`"):
        with gpt2.trace(PROMPT, max_tokens=1):
            found = gpt2.transformer.h[2].attn.source.self_attn_0.source.x_0.output.save()
    with pytest.raises(nnsight_core.LocationError, match="nothing_0"):
        with gpt2.trace(PROMPT, max_tokens=1):
            embed = gpt2.transformer.source.self_embed_input_ids_0
            found = embed.source.nothing_0.output.save()


def test_operations_of_a_layer_that_a_variable_chooses(gpt2: Any) -> None:
    for layer in (2, 7):
        with gpt2.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            found = [].save()
            for _ in tracer.all():
                attn = gpt2.transformer.h[layer].attn
                found.append(attn.source.self_c_proj_0.output[0])
                found.append(attn.output)
        close(found[0], found[1])
        close(found[2], found[3])
