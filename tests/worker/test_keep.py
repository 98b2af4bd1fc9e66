"""Values that stay on a real engine: used by later blocks, and let go when they should be."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_core import (
    KeptError,
    LateWriteError,
    NotSupportedError,
    UnboundSaveWarning,
)
from nnsight_vllm_worker.submission import Request
from tests.fixtures.ranks import WIDTH

PARIS = "The Eiffel Tower is in the city of"
ROME = "The Colosseum is in the city of"
ONE = {"temperature": 0.0, "max_tokens": 1}
equal = torch.testing.assert_close


def held(model: Any) -> int:
    """The bytes that the worker keeps, once what was freed has left."""
    model._engine.kept.flush()
    return model._engine.counts()["keep_bytes"]


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is kept before a test, nor after it."""
    names = {"gpt2", "compiled_gpt2"} & {*request.fixturenames}
    models = [request.getfixturevalue(name) for name in names]
    assert all(held(model) == 0 for model in models)
    yield
    gc.collect()
    assert all(held(model) == 0 for model in models)
    assert all(model._engine.counts()["live"] == 0 for model in models)


def test_a_kept_value_is_used_by_a_later_trace(gpt2: Any) -> None:
    model = gpt2
    with model.trace(PARIS, **ONE):
        there = model.transformer.h[6].output.keep()
        here = model.transformer.h[6].output.clone().save()
    assert there.shape == here.shape and there.dtype == here.dtype
    assert there.bytes == here.numel() * 4 == held(model)
    assert "float32 [10, 8]" in repr(there).replace(str(list(here.shape)), "[10, 8]")
    logits = []
    for source in (here, there):
        with model.trace(ROME, **ONE):
            model.transformer.h[6].output[-1] = source[-1]
            patched = model.logits.save()
        logits.append(patched)
    with model.trace(ROME, **ONE):
        plain = model.logits.save()
    assert torch.equal(*logits) and not torch.allclose(logits[0], plain)
    with model.trace(ROME, **ONE):
        home = there.save()
    assert torch.equal(home, here) and not isinstance(there, torch.Tensor)


def test_inside_the_block_the_name_holds_the_value(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        hidden = gpt2.transformer.h[2].output.keep()
        total = hidden.sum().save()
    with gpt2.trace(PARIS, **ONE):
        again = hidden.sum().save()
    equal(again, total)


def test_what_is_kept_is_as_it_was_at_the_call(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        value = gpt2.transformer.h[2].output
        before = value.clone().save()
        kept = value.keep()
        value[:] = 0
    with gpt2.trace(PARIS, **ONE):
        home = (kept * 1).save()
    assert torch.equal(home, before) and before.abs().sum() > 0


def test_several_invokes_give_a_list_of_handles(gpt2: Any) -> None:
    prompts = [PARIS, ROME, "Water boils at"]
    with gpt2.trace(**ONE) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                hidden = gpt2.transformer.h[4].output.keep()
                here = gpt2.transformer.h[4].output.clone().save()
    with gpt2.trace(PARIS, **ONE):
        home = [part.clone() for part in hidden].save()
    assert all(map(torch.equal, home, here)) and len({h.id for h in hidden}) == 3


def test_sequences_give_a_list_of_handles(gpt2: Any) -> None:
    with gpt2.trace(PARIS, n=2, temperature=2.0, seed=1, max_tokens=9, ignore_eos=True) as tracer:
        for _ in tracer.iter[:8]:
            logits = gpt2.logits.keep()
            here = gpt2.logits.clone().save()
    assert len(logits) == 2 and held(gpt2) == 2 * logits[0].bytes
    assert not torch.equal(*here)
    with gpt2.trace(PARIS, **ONE):
        home = [part.clone() for part in logits].save()
    assert all(map(torch.equal, home, here))


def test_a_pair_and_its_parts(llama: Any) -> None:
    layer = llama.model.layers[2]
    with llama.trace(PARIS, **ONE):
        pair = layer.output.keep()
        here = [part.clone() for part in layer.output].save()
        mixed = {"sum": layer.output[0].sum(), "n": 3, "of": [layer.output[1]]}.keep()
    with llama.trace(PARIS, **ONE):
        hidden, residual = layer.output.keep()
    assert pair.shape is None and "float32" in pair.what
    with llama.trace(PARIS, **ONE):
        found = [pair[0] - hidden, pair[1] - residual, mixed["of"][0] - residual, mixed["n"]].save()
        first = pair[0].clone().save()
    assert torch.equal(first, here[0]) and found[3] == 3
    assert all(part.eq(0).all() for part in found[:3])
    del pair, mixed, hidden, residual
    assert held(llama) == 0


def test_a_list_of_what_was_kept_holds_handles(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        hidden = [layer.output.keep() for layer in gpt2.transformer.h].save()
        last = gpt2.transformer.h[11].output.save()
    assert len(hidden) == 12 and held(gpt2) == sum(handle.bytes for handle in hidden)
    assert hidden[0].bytes == last.numel() * 4
    with gpt2.trace(PARIS, **ONE):
        home = (hidden[11] * 1).save()
    assert torch.equal(home, last)


def test_a_value_leaves_with_its_handle(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        hidden = gpt2.transformer.h[4].output.keep()
    assert gpt2._engine.counts()["keep_bytes"] == hidden.bytes > 0
    del hidden
    with gpt2.trace(PARIS, **ONE):
        logits = gpt2.logits.save()
    assert gpt2._engine.counts()["keep_bytes"] == 0 and logits.shape[0] == 1


def test_a_name_that_is_bound_anew_lets_the_last_value_go(gpt2: Any) -> None:
    for _ in range(3):
        with gpt2.trace(PARIS, **ONE):
            hidden = gpt2.transformer.h[4].output.keep()
    assert held(gpt2) == hidden.bytes


@pytest.mark.local
def test_a_request_holds_the_handles_that_it_uses(gpt2: Any, monkeypatch: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        hidden = [gpt2.transformer.h[4].output.keep()].save()
    engine, whole = gpt2._engine, type(gpt2._engine).run

    def run(requests: list[Request], blobs: Any) -> Any:
        hidden.clear()  # as another thread of the user's may, after the block was taken along
        gc.collect()
        engine.kept.flush()
        return whole(engine, requests, blobs)

    monkeypatch.setattr(engine, "run", run)
    with gpt2.trace(PARIS, **ONE):
        norm = hidden[0].norm().save()
    assert norm > 0
    monkeypatch.undo()


def test_the_model_lists_and_clears_what_is_kept(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        first = gpt2.transformer.h[4].output.keep()
        second = gpt2.logits.keep()
    kept = {info.name: info for info in gpt2.kept}
    assert len(gpt2.kept) == 2 and kept["first"].id == first.id
    assert kept["second"].bytes == second.bytes and 0 <= kept["first"].age < 60
    assert gpt2.kept.bytes == held(gpt2) == first.bytes + second.bytes
    gpt2.kept.clear()
    assert len(gpt2.kept) == 0 == held(gpt2)
    with pytest.raises(KeptError, match=r"'first' cannot be had: model.kept.clear\(\) was called"):
        with gpt2.trace(PARIS, **ONE):
            first.save()
    assert "clear" in repr(second)


def test_a_value_that_is_gone_is_an_error_of_its_request_alone(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        hidden = gpt2.transformer.h[4].output.keep()
    gpt2._engine.let_go([hidden.id], "the test took it")
    with pytest.raises(KeptError, match="cannot be had: the test took it. Keep it again"):
        with gpt2.trace(**ONE) as tracer:
            with tracer.invoke(PARIS):
                more = (hidden + 1).save()
            with tracer.invoke(ROME):
                logits = gpt2.logits.save()
    assert logits.shape[0] == 1


def test_a_block_that_writes_into_a_kept_value_changes_its_own_copy(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        hidden = gpt2.transformer.h[4].output.keep()
        before = gpt2.transformer.h[4].output.save()
    with gpt2.trace(**ONE) as tracer:
        with tracer.invoke(PARIS):
            hidden.zero_()
            mine = hidden.sum().save()
        with tracer.invoke(PARIS):
            theirs = (hidden * 1).save()
    with gpt2.trace(PARIS, **ONE):
        later = (hidden * 1).save()
    assert mine == 0 and torch.equal(theirs, before) and torch.equal(later, before)


def test_a_hidden_write_into_a_kept_value_is_an_error(gpt2: Any) -> None:
    with gpt2.trace(PARIS, **ONE):
        hidden = gpt2.transformer.h[4].output.keep()
    with pytest.raises(LateWriteError, match="changed it in place through a call that its text"):
        with gpt2.trace(PARIS, **ONE):
            # Not known as a call that writes, so the block gets the tensor itself.
            first = sorted([hidden], key=_zeroes)
    with pytest.raises(KeptError, match="'hidden' cannot be had: a block changed it"):
        with gpt2.trace(PARIS, **ONE):
            seen = (hidden * 1).save()


def _zeroes(tensor: torch.Tensor) -> float:
    return float(tensor.zero_().sum())


def test_a_block_that_raises_leaves_nothing(gpt2: Any) -> None:
    hidden = None
    with pytest.raises(ZeroDivisionError):
        with gpt2.trace(PARIS, **ONE):
            hidden = gpt2.transformer.h[4].output.keep()
            count = (1).save()
            1 / 0
    assert gpt2._engine.counts()["keep_bytes"] == 0 and hidden is None and count == 1


def test_a_sequence_that_raises_takes_what_its_request_kept_along(gpt2: Any) -> None:
    with pytest.raises((ZeroDivisionError, ExceptionGroup)):
        with gpt2.trace(PARIS, n=3, temperature=1.0, max_tokens=4, ignore_eos=True) as tracer:
            first = gpt2.logits.keep()
            for step in tracer.iter[:4]:
                if step == 2:
                    1 / 0
    assert gpt2._engine.counts()["keep_bytes"] == 0


@pytest.mark.local
def test_a_trace_that_is_left_keeps_nothing(gpt2: Any, monkeypatch: Any) -> None:
    def interrupted(event: Any, device: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("nnsight_vllm_worker.backend.placed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with gpt2.trace(PARIS, n=2, temperature=1.0, max_tokens=4):
            hidden = gpt2.transformer.h[4].output.keep()
    monkeypatch.undo()
    gc.collect()
    assert held(gpt2) == 0


@pytest.mark.local
def test_a_handle_that_comes_home_to_nobody_is_let_go(gpt2: Any, monkeypatch: Any) -> None:
    engine = gpt2._engine
    monkeypatch.setattr(engine._receiver, "take", lambda wait=0.0: (_ for _ in ()).throw(OSError()))
    with pytest.raises(OSError):
        with gpt2.trace(PARIS, **ONE):
            hidden = gpt2.transformer.h[4].output.keep()
    monkeypatch.undo()
    with gpt2.trace(ROME, **ONE):
        logits = gpt2.logits.save()
    assert held(gpt2) == 0


def test_an_unbound_keep_warns_and_leaves_nothing(gpt2: Any) -> None:
    with pytest.warns(UnboundSaveWarning, match="was kept, but no name holds it"):
        with gpt2.trace(PARIS, **ONE):
            (gpt2.logits + 1).keep()
    assert gpt2._engine.counts()["keep_bytes"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpt2.trace(PARIS, **ONE) as tracer:
            for _ in tracer.iter[:1]:
                logits = gpt2.logits.keep()
    assert held(gpt2) == logits.bytes


def test_a_name_cannot_be_saved_and_kept(gpt2: Any) -> None:
    with pytest.raises(NotSupportedError, match="'logits' was both saved and kept"):
        with gpt2.trace(PARIS, **ONE):
            logits = gpt2.logits.save()
            logits.keep()
    assert gpt2._engine.counts()["keep_bytes"] == 0
    with gpt2.trace(PARIS, **ONE):
        value = gpt2.logits
        here = value.save()
        there = value.keep()
    assert torch.equal(value, here) and there.shape == here.shape


def test_a_kept_value_is_written_by_taps(compiled_gpt2: Any) -> None:
    model = compiled_gpt2
    with model.trace(PARIS, **ONE):
        last = model.transformer.h[6].output[-1].keep()
        here = model.transformer.h[6].output[-1].clone().save()
    logits = []
    for vector in (here, last):
        with model.trace(ROME, **ONE) as tracer:
            model.transformer.h[6].output += vector
            steered = model.logits.save()
        logits.append(steered)
        told = str(model.explain(tracer))
        assert "written by taps: line" in told and f"a tensor of {WIDTH} added" in told
        assert tracer.result.ways == {"tables": 1}
    assert torch.equal(*logits)
    del vector, last
    gc.collect()
    assert held(model) == 0  # a finished tracer holds no handle


def test_what_is_kept_in_a_container_is_explained_without_it(compiled_gpt2: Any) -> None:
    model = compiled_gpt2
    with model.trace(PARIS, **ONE):
        found = {"v": model.transformer.h[6].output[-1]}.keep()
    with model.trace(ROME, **ONE) as tracer:
        model.transformer.h[6].output += found["v"]
        logits = model.logits.save()
    assert "not written by taps: line" in str(model.explain(tracer)) and logits.shape[0] == 1
    assert tracer.result.ways == {"tables": 1}
