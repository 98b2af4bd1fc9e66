"""When things go wrong: one clear error, and the engine answers the next request."""

from __future__ import annotations

import re
import threading
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import nnsight_core
from nnsight_core import (
    BlockError,
    CaptureError,
    EncodeError,
    LateWriteError,
    LocationError,
    OutOfOrderError,
    ProtocolError,
    SaveLimitError,
    WriteError,
)
from nnsight_core.wire import frames
from tests.fixtures.ranks import WIDTH

PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(autouse=True)
def unharmed(gpt2: Any) -> Iterator[None]:
    """After each test no run is left, and the engine answers as before."""
    yield
    assert gpt2._engine.counts()["live"] == 0
    with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        out = tracer.result.save()
    assert out.outputs[0].text == " Paris"


class OwnError(Exception):
    """An error of the user's own, with arguments of its own."""

    def __init__(self, code: int, *, hint: str = "none") -> None:
        super().__init__(code)
        self.hint = hint


class Once:
    """Can be unpickled nowhere."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


def helper(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, 7)  # the line that fails


def lines_of(error: BaseException) -> list[str]:
    return [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]


def test_a_body_without_source_is_refused(gpt2: Any) -> None:
    code = "with model.trace('x') as tracer:\n    h = model.logits.save()"
    with pytest.raises(CaptureError, match=r"source .* cannot be had.*fn="):
        exec(code, {"model": gpt2})


def test_what_cannot_be_shipped_is_named(gpt2: Any) -> None:
    config = {"lock": threading.Lock()}
    with pytest.raises(EncodeError, match=r"config\['lock'\].*_thread.lock.*cannot be shipped"):
        with gpt2.trace(PROMPT, max_tokens=1):
            held = len(config).save()
    del config


@pytest.mark.parametrize("early", [True, False])
def test_a_wrong_location_names_the_nearest(gpt2: Any, early: bool) -> None:
    name = "layer"
    with pytest.raises(LocationError, match=r"transformer\.h"):
        if early:
            with gpt2.trace(PROMPT, max_tokens=1):
                found = gpt2.transformer.hh[6].output.save()
        else:
            with gpt2.trace(PROMPT, max_tokens=1):
                found = gpt2.transformer.hh[6].output.save()
    assert name


def test_a_layer_that_does_not_exist_says_how_many_there_are(gpt2: Any) -> None:
    for index in (12, -13):
        with pytest.raises(LocationError, match=r"12"):
            with gpt2.trace(PROMPT, max_tokens=1):
                found = gpt2.transformer.h[index].output.save()


def test_reads_out_of_order_are_refused_at_once(gpt2: Any) -> None:
    with pytest.raises(OutOfOrderError, match=r"transformer\.h\.2\.output") as caught:
        with gpt2.trace(PROMPT, max_tokens=1):
            later = gpt2.transformer.h[5].output.save()
            earlier = gpt2.transformer.h[2].output.save()
            never = gpt2.transformer.h[9].output.save()
    assert lines_of(caught.value)[-1] == "earlier = gpt2.transformer.h[2].output.save()"
    assert later.shape[1] == WIDTH


def test_a_forward_location_after_the_logits_is_too_late(gpt2: Any) -> None:
    with pytest.raises(OutOfOrderError):
        with gpt2.trace(PROMPT, max_tokens=1):
            logits = gpt2.logits.save()
            hidden = gpt2.transformer.h[2].output.save()
    assert logits.shape[0] == 1


def test_a_location_that_never_runs_is_an_error(gpt2: Any) -> None:
    with pytest.raises(LocationError, match=r"lm_head\.output was not reached"):
        with gpt2.trace(PROMPT, max_tokens=1):
            found = gpt2.lm_head.output.save()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h[:-1], rf"\[8, {WIDTH}\].*\[7, {WIDTH}\]"),
        (lambda h: h[:, :5], rf"\[8, {WIDTH}\].*\[8, 5\]"),
        (lambda h: h.double(), r"float32.*float64.*\.to\(torch\.float32\)"),
        (lambda h: (h, h), r"built otherwise"),
        (lambda h: 0, r"built otherwise"),
    ],
)
def test_a_replacement_must_fit(gpt2: Any, change: Any, words: str) -> None:
    with pytest.raises(WriteError, match=words):
        with gpt2.trace(PROMPT, max_tokens=1):
            gpt2.transformer.h[3].output = change(gpt2.transformer.h[3].output)


def test_a_late_write_is_an_error(gpt2: Any) -> None:
    with pytest.raises(LateWriteError, match=r"transformer\.h\.3\.output.*after its visit"):
        with gpt2.trace(PROMPT, max_tokens=1):
            early = gpt2.transformer.h[3].output
            later = gpt2.transformer.h[4].output.save()
            early[:] = 0
            logits = gpt2.logits.save()


def test_an_error_has_its_own_class_line_and_note(gpt2: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with gpt2.trace(PROMPT, max_tokens=1):
            hidden = gpt2.transformer.h[2].output.save()
            ratio = 1 / 0
    assert lines_of(caught.value)[-1] == "ratio = 1 / 0"
    assert any("invoke 0" in note for note in caught.value.__notes__)
    assert hidden.shape == (8, WIDTH)
    assert caught.value.__context__ is None


def test_an_error_before_the_first_read(gpt2: Any) -> None:
    with pytest.raises(NameError, match="undefined_name"):
        with gpt2.trace(PROMPT, max_tokens=1):
            undefined_name  # noqa: F821


def test_an_error_in_a_helper_shows_the_helpers_line(gpt2: Any) -> None:
    with pytest.raises(RuntimeError, match="shape") as caught:
        with gpt2.trace(PROMPT, max_tokens=1):
            hidden = helper(gpt2.transformer.h[2].output)
    assert lines_of(caught.value)[-1] == "return hidden.reshape(-1, 7)  # the line that fails"


def test_an_error_of_the_users_own_class(gpt2: Any) -> None:
    with pytest.raises(OwnError) as caught:
        with gpt2.trace(PROMPT, max_tokens=1):
            raise OwnError(7, hint="x")
    assert caught.value.args == (7,)


def test_a_class_that_is_not_here_is_a_block_error(gpt2: Any) -> None:
    with pytest.raises(BlockError, match="Inside: gone"):
        with gpt2.trace(PROMPT, max_tokens=1):

            class Inside(Exception):
                pass

            raise Inside("gone")


@pytest.mark.parametrize("way", ["exit", "interrupt", "base"])
def test_a_block_cannot_end_this_process(gpt2: Any, way: str) -> None:
    with pytest.raises(BlockError, match="SystemExit|KeyboardInterrupt|BaseException"):
        with gpt2.trace(PROMPT, max_tokens=1):
            hidden = gpt2.transformer.h[2].output
            if way == "exit":
                raise SystemExit(3)
            if way == "interrupt":
                raise KeyboardInterrupt
            raise BaseException("base")


def test_one_bad_invoke_does_not_lose_the_others(gpt2: Any) -> None:
    with pytest.raises(ValueError, match="second"):
        with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
            for index in range(3):
                with tracer.invoke(PROMPT):
                    hidden = gpt2.transformer.h[2].output.save()
                    if index == 1:
                        raise ValueError("second")
                    logits = gpt2.logits.save()
    assert len(hidden) == 3 and torch.equal(hidden[0], hidden[1])
    assert logits[1] is None and torch.equal(logits[0], logits[2])
    assert [o and o.outputs[0].text for o in tracer.outputs] == [" Paris", None, " Paris"]


def test_several_bad_invokes_are_an_exception_group(gpt2: Any) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
            for index in range(3):
                with tracer.invoke(PROMPT if index else " ".join(["Paris"] * 300)):
                    if index == 2:
                        raise KeyError("third")
                    logits = gpt2.logits.save()
    kinds = sorted(type(e).__name__ for e in caught.value.exceptions)
    assert kinds[0] == "KeyError" and len(kinds) == 2
    assert logits[0] is None and logits[1] is not None


def test_an_unknown_sampling_argument_suggests_the_right_one(gpt2: Any) -> None:
    with pytest.raises(TypeError, match=r"'temperatur'.*'temperature'"):
        with gpt2.trace(PROMPT, temperatur=0.0):
            logits = gpt2.logits.save()
    with pytest.raises(TypeError, match=r"'max_tokes'.*'max_tokens'"):
        with gpt2.trace(max_tokes=3) as tracer, tracer.invoke(PROMPT):
            logits = gpt2.logits.save()


@pytest.mark.parametrize("prompt", ["", [], {"input_ids": []}])
def test_an_empty_prompt_is_refused(gpt2: Any, prompt: Any) -> None:
    with pytest.raises(ValueError, match="Empty prompt"):
        with gpt2.trace(prompt, max_tokens=1):
            logits = gpt2.logits.save()


@pytest.mark.parametrize(
    "prompt",
    [[1, -1, 3], [1, 10**6], torch.tensor([1, -5]), {"prompt_token_ids": [2, -(10**6)]}],
    ids=["negative", "large", "tensor", "dict"],
)
def test_ids_of_no_token_are_refused(gpt2: Any, prompt: Any) -> None:
    with pytest.raises(ValueError, match="Token id -?[0-9]+"):
        with gpt2.trace(prompt, max_tokens=1, detokenize=False):
            logits = gpt2.logits.save()
    with pytest.raises(ValueError, match="Token id -?[0-9]+"):
        gpt2.generate(prompt, max_tokens=1, detokenize=False)


@pytest.mark.parametrize("prompt", [torch.tensor([1.0, 2.0]), {"prompt_token_ids": [1, 2.5]}])
def test_ids_that_are_no_whole_numbers_are_refused(gpt2: Any, prompt: Any) -> None:
    with pytest.raises(TypeError, match="Token ids of a prompt are whole numbers"):
        with gpt2.trace(prompt, max_tokens=1):
            logits = gpt2.logits.save()


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop_token_ids": [10**9], "min_tokens": 3},
        {"stop_token_ids": [-(10**6)], "min_tokens": 3},
        {"allowed_token_ids": [10**6]},
        {"logit_bias": {10**6: 1.0}},
        {"logprob_token_ids": [10**6], "logprobs": 1},
    ],
)
def test_sampling_arguments_with_ids_of_no_token_are_refused(gpt2: Any, sampling: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(sampling))):
        with gpt2.trace(max_tokens=4) as tracer:
            with tracer.invoke(PROMPT):
                logits = gpt2.logits.save()
            with tracer.invoke(PROMPT, **sampling):
                pass
    assert logits.shape[0] == 1


@pytest.mark.parametrize(
    "sampling",
    [{"max_tokens": 1.5}, {"seed": 2**70}, {"temperature": True}, {"allowed_token_ids": [1.5]}],
)
def test_sampling_arguments_that_the_engine_cannot_read_are_refused(
    gpt2: Any, sampling: dict[str, Any]
) -> None:
    (name, _), *_ = sampling.items()
    with pytest.raises(TypeError, match=f"{name}=.* is of the wrong kind"):
        with gpt2.trace(PROMPT, **sampling):
            logits = gpt2.logits.save()


def test_numbers_of_numpy_are_sampling_arguments(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, temperature=numpy.float32(0), max_tokens=numpy.int64(1)) as tracer:
        out = tracer.result.save()
    assert out.outputs[0].text == " Paris"


def test_several_prompts_want_several_invokes(gpt2: Any) -> None:
    with pytest.raises(ValueError, match="one invoke per prompt"):
        with gpt2.trace(["a", "b"], max_tokens=1):
            logits = gpt2.logits.save()


def test_a_prompt_longer_than_the_model_allows(gpt2: Any) -> None:
    with pytest.raises(ValueError, match="256"):
        with gpt2.trace([5] * 300, max_tokens=1):
            logits = gpt2.logits.save()


def test_a_trace_without_a_prompt_says_what_to_do(gpt2: Any) -> None:
    with pytest.raises(ValueError, match=r"no prompt.*tracer\.invoke"):
        with gpt2.trace(max_tokens=1):
            pass


def test_what_cannot_come_home_is_named(gpt2: Any) -> None:
    with pytest.raises(EncodeError, match=r"layer.*cannot come home"):
        with gpt2.trace(PROMPT, max_tokens=1):
            layer = nnsight_core.save(gpt2.transformer.h[2])


def test_large_numbers_come_home(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, max_tokens=1):
        large = range(2**70, 2**70 + 3).save()
    assert large == range(2**70, 2**70 + 3)


@pytest.mark.local
def test_a_message_that_cannot_be_written_is_its_blocks_error(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = frames._json

    def refuses(header: dict[str, Any]) -> bytes:
        if header.get("saves"):
            raise TypeError("no such number")
        return write(header)

    monkeypatch.setattr(frames, "_json", refuses)
    with pytest.raises(EncodeError, match="cannot be written as JSON: no such number"):
        with gpt2.trace(PROMPT, max_tokens=1):
            good = [1].save()


@pytest.mark.local
def test_a_list_beyond_what_a_message_holds_is_its_blocks_error(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_MAX_HEADER", 10_000)
    with pytest.raises(SaveLimitError, match="tensor or an array instead of a list"):
        with gpt2.trace(PROMPT, max_tokens=1):
            large = [0.5] * 10_000
            large.save()


@pytest.mark.local
def test_a_name_that_the_engine_cannot_make_is_its_blocks_error(gpt2: Any) -> None:
    flags, broken = re.I | re.M, Once()
    with gpt2.trace(PROMPT, max_tokens=1):
        found = bool(re.match("h", "H", flags)).save()
    assert found
    with pytest.raises(ProtocolError, match="'broken' cannot be made where the block runs"):
        with gpt2.trace(max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                logits = gpt2.logits.save()
            with tracer.invoke(PROMPT):
                broken.save()
    assert logits.shape[0] == 1


def test_values_have_no_meaning_outside_a_block(gpt2: Any) -> None:
    with pytest.raises(LocationError, match="only inside a block"):
        gpt2.transformer.h[2].output
    with pytest.raises(LocationError, match="only inside a block"):
        gpt2.logits = torch.ones(1)


def test_warnings_and_prints_come_home(gpt2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
            print("shape", gpt2.transformer.h[2].output.shape)
            warnings.warn("look here", RuntimeWarning, stacklevel=1)
            print("second")
    assert (
        capsys.readouterr().out == f"[invoke 0] shape torch.Size([8, {WIDTH}])\n[invoke 0] second\n"
    )
    (own,) = [w for w in caught if "look here" in str(w.message)]
    assert own.category is RuntimeWarning and own.filename == __file__


def test_a_save_that_no_name_holds_warns(gpt2: Any) -> None:
    with pytest.warns(nnsight_core.UnboundSaveWarning, match="no name holds it"):
        with gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
            gpt2.transformer.h[2].output.save()


def test_a_container_that_holds_itself_comes_home_so(gpt2: Any) -> None:
    with pytest.warns(nnsight_core.UnboundSaveWarning):
        with gpt2.trace(PROMPT, max_tokens=1):
            held = nnsight_core.save([1])
            held.append(held)
            nnsight_core.save([2])
    assert held[0] == 1 and held[1] is held


@pytest.mark.local
def test_what_is_no_block_of_ours_leaves_the_engine_alone(gpt2: Any) -> None:
    with pytest.raises(ValueError, match="take another name"):
        gpt2.generate(PROMPT, max_tokens=1, extra_args={"nnsight": b"garbage"})
    params = gpt2.llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 1, 0.0
    params.extra_args = {"nnsight": b"garbage"}
    (out,) = gpt2.llm.generate([PROMPT], params, use_tqdm=False)
    assert out.outputs[0].text == " Paris"
