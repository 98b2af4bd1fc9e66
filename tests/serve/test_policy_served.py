"""A restricted server: what it refuses, and that it serves the rest as a trusted one does."""

# ruff: noqa: E501 - each text stands on the line of its name

from __future__ import annotations

import math
import traceback
import warnings

import httpx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nnsight_core
from nnsight_client import VLLM
from nnsight_core import BlockTimeout, LateWriteError, LocationError, PolicyError, WriteError
from nnsight_core.wire.frames import FrameReader
from nnsight_core.wire.messages import (
    EndedMessage,
    FinishedMessage,
    InvokeData,
    TraceMessage,
    read_message,
)
from tests.fixtures.server import serving
from tests.serve.escapes import ESCAPES, NAMES
from tests.serve.forged_forms import FORMS
from tests.serve.restricted import forged, trace
from tests.serve.test_policy_meaning import helper, same

PROMPT = "The Eiffel Tower is in the city of"
SAMPLING = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
TIMEOUT = "4"
ENDLESS = {name for name, (_, says) in ESCAPES.items() if says == "ran for more than"}


@pytest.fixture(scope="module")
def restricted(gpt2_path, tmp_path_factory):
    flags = ("--policy", "restricted", "--block-timeout", TIMEOUT)
    with serving(tmp_path_factory.mktemp("restricted"), gpt2_path, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def model(restricted, gpt2_path):
    with VLLM(gpt2_path, serve=restricted.url) as model:
        yield model


@pytest.fixture(scope="module")
def trusted(server_url, gpt2_path):
    with VLLM(gpt2_path, serve=server_url) as model:
        yield model


@pytest.fixture
def goes_on(restricted, model):
    """After a test, the server serves, and holds nothing of it."""
    yield
    with model.trace(PROMPT, **SAMPLING) as tracer:
        text = tracer.result.outputs[0].text.save()
    assert text.startswith(" Paris")
    assert restricted.empty()


def test_the_server_says_what_its_policy_means(restricted):
    said = restricted.log.read_text()
    assert "policy restricted: whoever reaches this address can run blocks" in said
    assert "any code" not in said


def ended(body: bytes) -> list[BaseException | None]:
    """What the blocks of an answer ended with."""
    from nnsight_core.wire.errors import rebuild_error

    reader = FrameReader()
    found = []
    for frame in reader.feed(body):
        message = read_message(frame)
        if isinstance(message, EndedMessage | FinishedMessage) and message.error is not None:
            found.append(rebuild_error(message.error, frame.buffers))
    return found


def attempt(url: str, text: str, names: dict) -> BaseException | None:
    """Send a block as no front end would; what became of it."""
    data, encoder = forged(text, **names)
    assert not encoder.blobs
    message = TraceMessage(
        invokes=[InvokeData(prompt=PROMPT, sampling={"max_tokens": 1}, block=0)], blocks=[data]
    )
    content = message.frame(encoder.buffers).to_bytes()
    answer = httpx.post(f"{url}/v1/trace", content=content, timeout=120)
    if answer.status_code != 200:
        assert answer.status_code in (400, 403), answer.text
        error = answer.json()["error"]
        assert (answer.status_code == 403) == (error["type"] == "PolicyError")
        return PolicyError(error["message"])
    found = ended(answer.content)
    return found[0] if found else None


@pytest.mark.parametrize("name", ESCAPES)
def test_a_way_out_is_closed(restricted, model, tmp_path, name):
    text, says = ESCAPES[name]
    canary = tmp_path / "canary"
    layers = model.transformer.h
    parts = {"layer": layers[0].mlp, "other": layers[2].mlp.c_fc, "tracer": TRACER}
    error = attempt(restricted.url, text, {**NAMES, **parts, "model": model, "canary": str(canary)})
    with pytest.raises(type(error) if error else AssertionError, match=says):
        raise error or AssertionError("it ran to its end")
    assert not canary.exists()
    assert httpx.get(f"{restricted.url}/health").status_code == 200
    if name in ENDLESS:
        assert attempt(restricted.url, "x = layer.output.sum()", parts) is None


TRACER = nnsight_core.block_tracer.BLOCK_TRACER


@pytest.mark.parametrize("name", FORMS)
def test_a_forged_name_is_refused_at_once(restricted, name):
    data, _ = forged("x = v")
    data.names["v"] = FORMS[name]
    message = TraceMessage(
        invokes=[InvokeData(prompt=PROMPT, sampling={"max_tokens": 1}, block=0)], blocks=[data]
    )
    content = message.frame([bytes(4)]).to_bytes()
    answer = httpx.post(f"{restricted.url}/v1/trace", content=content, timeout=60)
    assert answer.status_code in (400, 403)
    assert answer.json()["error"]["type"] in ("PolicyError", "CaptureError", "ProtocolError")


def test_after_all_of_them_the_server_holds_nothing(goes_on):
    pass


def test_a_refusal_names_the_line_and_is_raised_before_anything_runs(model, tmp_path, goes_on):
    with pytest.raises(PolicyError) as raised:
        trace(model, "h = model.lm_head\nx = h.__class__", tmp_path, PROMPT)
    assert str(raised.value).startswith(f"{tmp_path / 'script.py'}:3: ")


def test_what_is_found_out_as_it_runs_has_its_line_too(model, tmp_path, goes_on):
    with pytest.raises(PolicyError, match=r"`torch\.load` is not allowed") as raised:
        trace(model, "x = torch\ny = x.load('f')", tmp_path, PROMPT, torch=torch)
    shown = "".join(traceback.format_exception(raised.value))
    assert f'{tmp_path / "script.py"}", line 3' in shown and "guards.py" not in shown


def test_edits_are_held_to_the_same_policy(model, goes_on):
    with pytest.raises(PolicyError), model.edit() as (_, refused):
        model.transformer.h[0].output.numpy
        open("canary", "w")  # noqa: SIM115 - which is what is refused
    assert refused is not None
    with model.edit() as (_, edit):
        model.transformer.h[0].output[0][:] += 0
        seen = model.transformer.h[1].output[0].sum().save()
    try:
        assert "seen" in model.generate(PROMPT, **SAMPLING)[0].saves
    finally:
        edit.clear()


def test_blocks_of_others_go_on_beside_one_that_is_ended(model, restricted, goes_on):
    with pytest.raises(BlockTimeout):
        with model.trace(**SAMPLING) as tracer:
            with tracer.invoke(PROMPT):
                while True:
                    pass
            with tracer.invoke(PROMPT):
                good = model.transformer.h[3].mlp.output.sum().save()
    assert torch.is_tensor(good) or good[-1] is not None


COMMON = {
    "a read": "x = model.transformer.h[6].mlp.output.save()",
    "several reads": "a = model.transformer.h[0].output\nb = model.transformer.h[5].output\n"
    "x = (a, b, model.logits, model.samples)\nx.save()",
    "every layer": "x = [h.output.norm() for h in model.transformer.h].save()",
    "a write by slice": "model.transformer.h[8].mlp.output[:] = 0\nx = model.logits.save()",
    "a write by plus": "model.transformer.h[3].mlp.output += 0.5\nx = model.logits.save()",
    "a write by slice and plus": "model.transformer.h[3].output[-1] += steer\nx = model.logits.save()",
    "a write by assignment": "model.transformer.h[3].mlp.output = model.transformer.h[3].mlp.output * 2\n"
    "x = model.logits.save()",
    "steering in a loop over layers": "for i in (2, 3, 4):\n"
    "    model.transformer.h[i].output[:] += 3 * steer\nx = model.logits.save()",
    "projecting out": "h = model.transformer.h[4].output\nd = steer / steer.norm()\n"
    "model.transformer.h[4].output = h - (h @ d)[:, None] * d\nx = model.logits.save()",
    "an input": "x = (model.transformer.h[1].attn.input, model.lm_head.weight[:3])\nx.save()",
    "logits written": "model.logits[:, 11] = 1e4\nx = tracer.result.save()",
    "a token chosen": "for step in tracer.iter[:2]:\n    model.samples[:] = 262 + step\nx = tracer.result.save()",
    "skip": "h = model.transformer.h[2].output\nmodel.transformer.h[3].mlp.skip(h * 0)\nx = model.logits.save()",
    "a module called": "x = model.logits_processor(model.lm_head, model.transformer.ln_f(model.transformer.h[5].output)).save()",
    "steps": "x = [].save()\nfor step in tracer.iter[:3]:\n    x.append(model.logits.argmax(-1).item())",
    "steps with a stride": "x = []\nfor step in tracer.iter[::2]:\n    x.append((step, model.transformer.h[0].output.sum()))\nx.save()",
    "all steps": "x = 0\nfor step in tracer.all():\n    x += model.logits.max()\nx = x.save()",
    "a stop": "for step in tracer.all():\n    x = step.save()\n    if step == 1:\n        tracer.stop()",
    "the result": "x = tracer.result.outputs[0].text.save()",
    "the result's tokens": "x = len(tracer.result.outputs[0].token_ids).save()",
    "a cache": "c = tracer.cache(modules=[model.transformer.h[0], model.transformer.h[1].mlp])\nx = c.save()",
    "a function of the user's": "x = helper(model.transformer.h[0].output, by=3.0).save()",
    "a function made in the block": "def scaled(h, k=2):\n    return h * k\nx = scaled(model.transformer.h[0].output).save()",
    "PyTorch's functions": "h = model.transformer.h[0].output\n"
    "x = (F.softmax(h, dim=-1), torch.linalg.norm(h), h.topk(3).indices, torch.einsum('ij,kj->ik', h, h))\nx.save()",
    "a module from outside": "x = sae(model.transformer.h[5].output).save()",
    "a module in the forward pass": "h = model.transformer.h[5].output\nmodel.transformer.h[5].output = sae(h)\nx = model.logits.save()",
    "a large tensor from outside": "x = (model.transformer.h[5].output @ large).save()",
    "a tokenizer": "x = model.tokenizer.decode(model.logits.argmax(-1)).save()",
    "operations": "x = model.transformer.h[0].mlp.source.self_act_0.output.save()",
    "numbers": "x = math.sqrt(model.transformer.h[0].output.sum().abs().item()).save()",
    "a condition": "h = model.transformer.h[0].output\nif h.sum() > 0:\n    model.transformer.h[2].output[:] = 0\nx = model.logits.save()",
    "a save by name": "x = nnsight_core.save(model.transformer.h[0].output)",
    "random numbers": "torch.manual_seed(1)\nmodel.transformer.h[0].output += torch.randn(96)\nx = model.logits.save()",
}


def common_names() -> dict:
    torch.manual_seed(0)
    return {
        "torch": torch,
        "F": F,
        "math": math,
        "nnsight_core": nnsight_core,
        "helper": helper,
        "steer": torch.randn(96),
        "large": torch.randn(96, 96),
        "sae": nn.Sequential(nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, 96)),
    }


def data_of(value):
    """What came home, as values that can be compared."""
    if isinstance(value, nnsight_core.cache.Cache):
        return value.data()
    if hasattr(value, "outputs"):
        return [(o.text, o.token_ids, o.finish_reason) for o in value.outputs]
    return value


@pytest.mark.parametrize("name", COMMON)
def test_a_common_block_gives_what_it_gives_on_a_trusted_server(model, trusted, tmp_path, name):
    names = common_names()
    found = [
        trace(served, COMMON[name], tmp_path, PROMPT, sampling=SAMPLING, **names)
        for served in (trusted, model)
    ]
    here, there = (data_of(scope["x"]) for scope in found)
    assert same(here, there)


def test_a_function_runs_instead_of_a_body(model, trusted, goes_on):
    def read(_):
        return model.transformer.h[2].output.sum()

    def fails(_):
        return [][model.transformer.h[2].output.shape[0]]

    values = [served.trace(PROMPT, fn=read, **SAMPLING).value for served in (trusted, model)]
    assert torch.equal(*values)
    shown = []
    for served in (trusted, model):
        with pytest.raises(IndexError) as raised:
            served.trace(PROMPT, fn=fails, **SAMPLING)
        shown.append([f.name for f in traceback.extract_tb(raised.value.__traceback__)])
    assert shown[0] == shown[1] and shown[0][-1] == "fails"


def test_values_stay_on_a_restricted_server(model, goes_on):
    with model.trace(PROMPT, **SAMPLING):
        kept = model.transformer.h[3].output.keep()
    with model.trace(PROMPT, **SAMPLING):
        x = (kept * 2).save()
    with model.trace(PROMPT, **SAMPLING):
        y = model.transformer.h[3].output.save()
    assert torch.equal(x, 2 * y)


def test_prints_and_warnings_come_home(model, capsys, goes_on):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with model.trace(PROMPT, **SAMPLING):
            print("here", model.transformer.h[0].output.shape[1])
            warnings.warn("careful", RuntimeWarning, stacklevel=1)
    assert "here 96" in capsys.readouterr().out
    mine = [w for w in found if w.category is RuntimeWarning]
    assert [(str(w.message), w.filename) for w in mine] == [("careful", __file__)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x = model.transformer.h[0].output\ny = x + torch.ones(7)", RuntimeError),
        ("x = [1]\ny = x[4]", IndexError),
        ("x = model.transformer.h[0].output\nmodel.transformer.h[0].output = x[:, :3]", WriteError),
        ("x = model.transformer.h[0].output\ny = model.transformer.h[0].outptu", LocationError),
    ],
)
def test_an_error_is_the_one_of_a_trusted_server(model, trusted, tmp_path, text, kind):
    said = []
    for served in (trusted, model):
        with pytest.raises(kind) as raised:
            trace(served, text, tmp_path, PROMPT, sampling=SAMPLING, torch=torch)
        said.append("".join(traceback.format_exception(raised.value)).replace("0x", ""))
        assert 'script.py", line 3' in said[-1] or "script.py:3" in said[-1]
    assert str(raised.value)


def test_a_late_write_is_an_error_as_ever(model, goes_on):
    with pytest.raises(LateWriteError), model.trace(PROMPT, **SAMPLING):
        h = model.transformer.h[0].output
        x = model.transformer.h[1].output.sum().save()
        h[:] = 0
    del x


def test_a_plan_is_the_same_under_the_policy(model, trusted):
    def block(served):
        with served.trace(PROMPT, **SAMPLING) as tracer:
            served.transformer.h[3].output[:] += 1.0
            x = served.transformer.h[5].output.save()
            result = tracer.result.save()
        return len(x), result.ways

    assert block(model) == block(trusted)


@pytest.mark.parametrize("token", [10**6, -1, 10**9])
def test_a_token_that_the_model_does_not_have_is_not_written(model, token, goes_on):
    with pytest.raises(WriteError, match=f"the token {token}"), model.trace(PROMPT, **SAMPLING):
        model.samples[:] = token


def test_an_adapter_names_a_file_of_the_server(model, goes_on):
    with pytest.raises(PolicyError, match="names a file"):
        model.generate(PROMPT, **SAMPLING, lora_request={"name": "a", "path": "/etc"})


def test_attention_is_not_called_since_it_holds_the_keys_of_all(model, tmp_path, goes_on):
    text = "h = model.transformer.h[0].attn.input\nx = model.transformer.h[0].attn(h).save()"
    with pytest.raises(PolicyError, match="keys and values of all requests"):
        trace(model, text, tmp_path, PROMPT, sampling=SAMPLING)
    inner = "x = model.transformer.h[0].attn.attn(*[model.transformer.h[0].attn.input] * 3)"
    with pytest.raises(PolicyError, match="keys and values of all requests"):
        trace(model, inner, tmp_path, PROMPT, sampling=SAMPLING)


@pytest.mark.parametrize(
    "text",
    [
        "x = model.transformer.h[0].attn.attn.kv_cache",
        "x = model.transformer.h[0].attn.attn.source",
        "x = model.transformer.h[0].attn.attn.source.whatever.inputs",
        "x = model.logits_processor.inputs[0][0].weight",
        "x = model.logits_processor.inputs[0][0](1)",
    ],
)
def test_what_all_requests_share_is_not_handed_out(model, tmp_path, text, goes_on):
    with pytest.raises(PolicyError):
        trace(model, text, tmp_path, PROMPT, sampling=SAMPLING)


@pytest.mark.parametrize("name", ["config", "load_weights", "vllm_config", "compute_logits"])
def test_nothing_of_the_engine_is_handed_out(model, tmp_path, name):
    data, _ = forged(f"x = model.{name}", model=model)
    assert data.names["model"]["$"] == "node"
    with pytest.raises((PolicyError, LocationError)):
        trace(model, f"m = model\nx = m.{name}.save()", tmp_path, PROMPT, sampling=SAMPLING)
