"""Steps: loops over them, state across them, how they end; on vLLM against transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nnsight_core
from nnsight_core import LoopOverrunWarning, OutOfOrderError, StepError
from tests.fixtures.ranks import WIDTH

PROMPT = "The Eiffel Tower is in the city of"
COUNT = "Count up to ten:"
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def unharmed(gpt2: Any) -> Iterator[None]:
    """After each test the worker holds nothing, and the engine answers as before."""
    yield
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        out = tracer.result.save()
    assert out.outputs[0].text == " Paris"
    counts = gpt2._engine.counts()
    assert counts["live"] == 0 and counts["kept"] == 0


@pytest.mark.parametrize("layer", [0, 5, 11])
def test_every_step_equals_transformers(gpt2: Any, hf_gpt2: Any, near: Any, layer: int) -> None:
    found = []
    for model in (gpt2, hf_gpt2):
        with model.trace(COUNT, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
            hidden = [].save()
            logits = [].save()
            drawn = [].save()
            steps = [].save()
            for step in tracer.iter[:6]:
                steps.append(step)
                hidden.append(model.transformer.h[layer].mlp.output)
                logits.append(model.logits)
                drawn.append(model.samples.item())
            out = tracer.result.save()
        assert steps == [0, 1, 2, 3, 4, 5] and drawn == out.outputs[0].token_ids
        assert [len(h) for h in hidden] == [len(gpt2.tokenizer(COUNT)["input_ids"]), 1, 1, 1, 1, 1]
        assert all(row.shape[0] == 1 for row in logits)
        found.append((hidden, logits, drawn))
    assert found[0][2] == found[1][2]
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        for here, there in zip(ours, theirs, strict=True):
            near(here, there)


@pytest.mark.parametrize(
    ("which", "seen"),
    [
        (slice(None, 3), [0, 1, 2]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(1, None, 3), [1, 4]),
        (slice(3, 3), []),
        ([0, 3], [0, 3]),
        ((4,), [4]),
        (2, [2]),
        (range(0, 4, 2), [0, 2]),
        (slice(2, None), [2, 3, 4]),
    ],
)
def test_steps_are_chosen_by_number_slice_and_list(gpt2: Any, which: Any, seen: list[int]) -> None:
    with gpt2.trace(COUNT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        steps = [].save()
        tokens = [].save()
        for step in tracer.iter[which]:
            steps.append(step)
            tokens.append(gpt2.samples.item())
        out = tracer.result.save()
    assert steps == seen
    assert tokens == [out.outputs[0].token_ids[step] for step in seen]


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (-1, "negative"),
        (slice(-2, None), "negative"),
        (slice(None, None, -1), "negative"),
        ([2, 1], "ascend"),
        ([1, 1], "ascend"),
        ("x", "no step"),
        (1.5, "no step"),
        (slice(0, 4, 0), "cannot be 0"),
    ],
)
def test_steps_that_cannot_be_are_refused(gpt2: Any, which: Any, words: str) -> None:
    with pytest.raises(StepError, match=words):
        with gpt2.trace(COUNT, temperature=0.0, max_tokens=2) as tracer:
            for _ in tracer.iter[which]:
                gpt2.samples


def test_all_sees_every_step_and_state_is_carried(gpt2: Any) -> None:
    with gpt2.trace(COUNT, temperature=0.0, max_tokens=20) as tracer:
        total = 0
        last = None
        changes = [].save()
        for _ in tracer.all():
            hidden = gpt2.transformer.h[3].output[-1]
            if last is not None:
                changes.append((hidden - last).norm())
            last = hidden
            total += 1
        total.save()
        out = tracer.result.save()
    assert out.outputs[0].finish_reason == "stop"
    assert total == len(out.outputs[0].token_ids) and len(changes) == total - 1


def test_writes_of_every_step_have_the_effect_they_have_in_transformers(
    gpt2: Any, hf_gpt2: Any, near: Any
) -> None:
    found = []
    for model in (gpt2, hf_gpt2):
        with model.trace(COUNT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
            logits = [].save()
            for step in tracer.iter[:5]:
                if step % 2 == 0:
                    model.transformer.h[4].mlp.output[-1] *= 3
                model.transformer.h[7].mlp.output[:] += 0.25
                logits.append(model.logits)
                if step == 1:
                    model.transformer  # naming a module asks for nothing
                    model.logits[:, :5] = 0
            ids = tracer.result.save()
        found.append((logits, ids.outputs[0].token_ids))
    assert found[0][1] == found[1][1]
    for here, there in zip(found[0][0], found[1][0], strict=True):
        near(here, there)


def test_tokens_are_banned_and_forced(gpt2: Any) -> None:
    plain = gpt2.generate(COUNT, temperature=0.0, max_tokens=4, ignore_eos=True)[0].outputs[0]
    banned, wanted = plain.token_ids[1], gpt2.tokenizer(" Tokyo")["input_ids"][0]
    with gpt2.trace(COUNT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for step in tracer.iter[:4]:
            gpt2.logits[:, banned] = float("-inf")
            if step == 2:
                gpt2.samples[:] = wanted
                again = gpt2.samples.item().save()
        out = tracer.result.save()
    ids = out.outputs[0].token_ids
    assert ids[0] == plain.token_ids[0] and banned not in ids
    assert ids[2] == wanted == again and " Tokyo" in out.outputs[0].text
    # What follows a forced token is what follows it as text.
    prompt = gpt2.tokenizer(COUNT)["input_ids"] + ids[:3]
    forced = gpt2.generate(
        [{"prompt_token_ids": prompt}],
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        logit_bias={banned: -100},
    )
    assert forced[0].outputs[0].token_ids == ids[3:]


def test_a_loop_in_a_helper_and_in_a_comprehension(gpt2: Any) -> None:
    def collect(tracer: Any, n: int) -> list[int]:
        return [gpt2.samples.item() for _ in tracer.iter[:n]]

    with gpt2.trace(COUNT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        first = collect(tracer, 2).save()
        rest = [gpt2.samples.item() for _ in tracer.iter[2:5]].save()
        out = tracer.result.save()
    assert first + rest == out.outputs[0].token_ids


def test_loops_that_go_back_are_refused(gpt2: Any) -> None:
    with pytest.raises(OutOfOrderError, match="Step 0 was asked for too late"):
        with gpt2.trace(COUNT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
            for _ in tracer.iter[:3]:
                kept = gpt2.samples.item().save()
            for _ in tracer.iter[:3]:
                gpt2.samples
    assert isinstance(kept, int)


def test_an_order_within_a_step_is_kept_in_every_step(gpt2: Any) -> None:
    with pytest.raises(OutOfOrderError, match="in step 1"):
        with gpt2.trace(COUNT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for step in tracer.iter[:3]:
                gpt2.transformer.h[5].output
                if step == 1:
                    gpt2.transformer.h[2].output


def test_an_overrun_keeps_the_saves_goes_on_and_warns(gpt2: Any) -> None:
    with pytest.warns(LoopOverrunWarning, match=r"asked for 99 steps.*made (\d+)") as caught:
        with gpt2.trace(PROMPT, temperature=0.0, max_tokens=10) as tracer:
            tokens = [].save()
            for _ in tracer.iter[:99]:
                tokens.append(gpt2.samples.item())
            after = len(tokens).save()
            out = tracer.result.save()
    assert tokens == out.outputs[0].token_ids and after == len(tokens) < 10
    [warning] = caught
    assert warning.filename == __file__
    with open(__file__) as file:
        assert "for _ in tracer.iter[:99]:" in file.readlines()[warning.lineno - 1]
    assert f"made {after} (steps 0 to {after - 1})" in str(warning.message)


def test_an_open_loop_that_sees_nothing_warns(gpt2: Any) -> None:
    with pytest.warns(LoopOverrunWarning, match="asked for steps from 7 on"):
        with gpt2.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
            seen = 0
            for _ in tracer.iter[7:]:
                seen += 1
            seen.save()
    assert seen == 0


@pytest.mark.parametrize("cause", ["max_tokens", "eos", "stop", "stop_token_ids"])
def test_whatever_ends_a_request_its_loop_sees_the_steps_that_count(gpt2: Any, cause: str) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": {"max_tokens": 4, "ignore_eos": True},
        "eos": {"max_tokens": 30},
        "stop": {"max_tokens": 30, "stop": [" four"]},
        "stop_token_ids": {
            "max_tokens": 30,
            "stop_token_ids": gpt2.tokenizer(" three")["input_ids"],
        },
    }[cause]
    with gpt2.trace(COUNT, temperature=0.0, **sampling) as tracer:
        tokens = [].save()
        for _ in tracer.all():
            tokens.append(gpt2.samples.item())
        after = "reached".save()
        length = len(tracer.result.outputs[0].token_ids).save()
        out = tracer.result.save()
    assert after == "reached" and 2 <= length < 30
    assert tokens == out.outputs[0].token_ids and length == len(tokens)
    assert out.outputs[0].finish_reason == ("length" if cause == "max_tokens" else "stop")


def test_stop_ends_the_request_at_its_own_step(gpt2: Any) -> None:
    plain = gpt2.generate(COUNT, temperature=0.0, max_tokens=30, ignore_eos=True)[0].outputs[0]
    for when in ("begin", "forward", "logits", "samples"):
        with gpt2.trace(
            COUNT, temperature=0.0, max_tokens=30, ignore_eos=True, min_tokens=20
        ) as tracer:
            seen = [].save()
            for step in tracer.all():
                if step == 3 and when == "begin":
                    tracer.stop()
                seen.append(gpt2.transformer.h[2].output.shape[0])
                if step == 3 and when == "forward":
                    tracer.stop()
                gpt2.logits
                if step == 3 and when == "logits":
                    tracer.stop()
                seen.append(gpt2.samples.item())
                if step == 3:
                    tracer.stop()
            never = (1).save()
            out = tracer.result.save()
        assert "never" not in tracer.saves and "out" not in tracer.saves
        [output] = [tracer.outputs[0].outputs[0]]
        assert output.token_ids == plain.token_ids[:4]
        assert (output.finish_reason, output.stop_reason) == ("stop", "tracer.stop")
        assert output.text == gpt2.tokenizer.decode(output.token_ids)
        assert len(seen) == {"begin": 6, "forward": 7, "logits": 7, "samples": 8}[when]


def test_stop_without_a_loop_and_of_one_request_alone(gpt2: Any) -> None:
    with gpt2.trace(temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        with tracer.invoke(COUNT):
            kept = gpt2.transformer.h[0].output[-1].save()
            tracer.stop()
        with tracer.invoke(COUNT):
            out = tracer.result.save()
    assert [len(o.outputs[0].token_ids) for o in tracer.result] == [1, 6]
    assert tracer.result[0].outputs[0].stop_reason == "tracer.stop" and kept.shape == (WIDTH,)


def test_a_stop_that_is_caught_stops_all_the_same(gpt2: Any) -> None:
    with gpt2.trace(COUNT, temperature=0.0, max_tokens=9, ignore_eos=True) as tracer:
        for step in tracer.all():
            try:
                if step == 2:
                    tracer.stop()
            except BaseException:
                caught = True.save()
            gpt2.samples
    assert caught is True and len(tracer.result.outputs[0].token_ids) == 3


def test_a_save_in_a_loop_is_the_last_one_that_its_name_holds(gpt2: Any) -> None:
    with gpt2.trace(COUNT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        for _ in tracer.iter[:3]:
            token = gpt2.samples.item().save()
        out = tracer.result.save()
    assert token == out.outputs[0].token_ids[-1]
    with pytest.warns(nnsight_core.UnboundSaveWarning, match="append values to a list"):
        with gpt2.trace(COUNT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for _ in tracer.iter[:3]:
                (gpt2.logits + 1).save()


def test_values_of_each_step_are_that_steps(gpt2: Any) -> None:
    with gpt2.trace(COUNT, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        bare = [].save()
        cloned = [].save()
        for _ in tracer.all():
            for layer in gpt2.transformer.h:
                bare.append(layer.output)
                cloned.append(bare[-1].clone())
    assert len(bare) == 72 and all(map(torch.equal, bare, cloned))
    assert not torch.equal(bare[-1], bare[-13])


def test_llama_pairs_in_every_step(llama: Any, hf_llama: Any, near: Any) -> None:
    with llama.trace(COUNT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        ours = [].save()
        for _ in tracer.iter[:4]:
            llama.model.layers[1].output[0][:] *= 1.5
            ours.append(sum(llama.model.layers[4].output))
    with hf_llama.trace(COUNT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        theirs = [].save()
        for _ in tracer.iter[:4]:
            mlp = hf_llama.model.layers[1].mlp.output
            hf_llama.model.layers[1].mlp.output = mlp * 1.5
            theirs.append(hf_llama.model.layers[4].output)
    for here, there in zip(ours, theirs, strict=True):
        near(here, there)


def test_several_sequences_loop_each_on_its_own(gpt2: Any) -> None:
    with gpt2.trace(COUNT, n=3, seed=1, temperature=1.5, max_tokens=5, ignore_eos=True) as tracer:
        tokens = [].save()
        for _ in tracer.all():
            tokens.append(gpt2.samples.item())
            if len(tokens) == 3 and tokens[0] % 2 == 0:
                tracer.stop()
        out = tracer.result.save()
    outputs = tracer.outputs[0].outputs
    assert tokens == [sequence.token_ids for sequence in outputs]
    for sequence in outputs:
        stopped = sequence.token_ids[0] % 2 == 0
        assert len(sequence.token_ids) == (3 if stopped else 5)
        assert sequence.stop_reason == ("tracer.stop" if stopped else None)


def test_a_block_that_ends_before_its_request(gpt2: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpt2.trace(COUNT, temperature=0.0, max_tokens=9, ignore_eos=True) as tracer:
            for _ in tracer.iter[1:3]:
                gpt2.transformer.h[5].output[:] = 0
            out = tracer.result.save()
    assert len(out.outputs[0].token_ids) == 9
