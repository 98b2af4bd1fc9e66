"""Typed values that are code, shipped by source and run on the other side."""

from __future__ import annotations

import functools
import linecache
import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import nnsight_core
from nnsight_core import CaptureError, EncodeError, LocationError, PolicyError, ProtocolError
from nnsight_core.backend import Invoke
from nnsight_core.capture import Block
from nnsight_core.code import compile_block
from nnsight_core.outputs import RequestOutput
from nnsight_core.run import Run
from nnsight_core.scope import BLOCK_TRACER
from nnsight_core.wire.blocks import (
    check_block,
    code_of,
    decode_event,
    decode_run,
    encode_block,
    encode_ended,
    known_errors,
)
from nnsight_core.wire.code import BLOB, CodeDecoder, CodeEncoder, content_of, digest_of
from nnsight_core.wire.data import tensor_of
from nnsight_core.wire.frames import Frame, read_frame
from nnsight_core.wire.messages import BlockData, BlockMessage, EndedMessage, expect, read_message

from . import nets, shipped, wired
from .nets import X

close = torch.testing.assert_close
model = nets.make()
tokenizer = object()


def ship(value: Any, pickle: bool = False, accept: bool | None = None) -> Any:
    """A value as the other side gets it, on which nothing of `shipped` may be reached."""
    encoder = CodeEncoder(pickle=pickle, tokenizer=tokenizer)
    form = encoder.encode(value, "name")
    frame = read_frame(Frame({"x": form}, encoder.buffers).to_bytes())
    assert b'"module": "tests' not in frame.to_bytes()
    decoder = CodeDecoder(
        frame.buffers,
        model,
        blob=lambda h, dtype, shape: tensor_of(encoder.blobs[h], dtype, shape),
        pickle=pickle if accept is None else accept,
    )
    return decoder.decode(frame.header["x"])


class Store:
    """Has methods of these names of its own."""

    saved = kept = 0

    def save(self) -> str:
        self.saved += 1
        return "saved"

    def keep(self) -> str:
        self.kept += 1
        return "kept"


def doubled(value: Any) -> Any:
    both = (value * 2).save()
    return both


class Doubling:
    def __call__(self, value: Any) -> Any:
        return (value * 2).save()


def stored(store: Any) -> tuple[str, str]:
    return store.save(), store.keep()


def test_a_shipped_function_and_a_shipped_class_may_save() -> None:
    made = wired.make()
    with made.trace(wired.X):
        value = made[0].output
        here = doubled(value)
        there = Doubling()(value)
        plain = value.save()
    close(here, plain * 2)
    close(there, plain * 2)


def test_a_function_given_instead_of_a_body_may_save() -> None:
    made = wired.make()
    value = made.trace(wired.X, fn=lambda _: doubled(made[0].output)).value
    with made.trace(wired.X):
        plain = made[0].output.save()
    close(value, plain * 2)


def test_in_a_shipped_function_objects_have_their_own_methods() -> None:
    assert ship(stored)(Store()) == ("saved", "kept")


def test_a_shipped_function_that_saves_outside_a_block_says_so() -> None:
    with pytest.raises(LocationError, match="only inside a block"):
        ship(doubled)(torch.ones(1))


# -- functions -------------------------------------------------------------------------------------


def test_functions_run_with_the_names_that_they_use() -> None:
    assert ship(shipped.scaled)(2) == 6 and ship(shipped.twice)(2) == 18
    assert ship(shipped.factorial)(5) == 120
    assert ship(shipped.even)(8) and not ship(shipped.odd)(8)
    assert ship(shipped.adder)(3)(4) == 7


def test_a_shipped_function_is_made_anew_from_its_text() -> None:
    made = ship(shipped.scaled)
    assert made is not shipped.scaled and made.__globals__ is not shipped.scaled.__globals__
    assert made.__name__ == "scaled" and made.__code__.co_filename == shipped.__file__
    assert made.__code__.co_firstlineno == shipped.scaled.__code__.co_firstlineno


def test_texts_in_a_function_keep_their_indentation() -> None:
    assert ship(shipped.text)() == shipped.text()

    def inner() -> str:
        return """
    four
none"""

    assert ship(inner)() == inner()


def test_closures_take_along_what_they_close_over() -> None:
    assert ship(shipped.adder(5))(1) == 6
    bump = ship(shipped.counter())
    assert [bump(), bump()] == [11, 12]


def test_lambdas_are_told_apart_and_keep_their_defaults() -> None:
    assert [f(2) for f in ship(shipped.powers)] == [1, 2, 4, 8]
    assert ship(shipped.first)(1) == 2 and ship(shipped.second)(1) == 3
    assert ship(shipped.long)(2, 1, 1, extra=4) == 12 and ship(shipped.long)(2, by=1) == 2


def test_defaults_are_those_of_the_time_when_a_function_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shipped, "SCALE", 100)
    assert ship(shipped.defaults)(1) == [1, 3, 2, 4, 5]
    made = ship(shipped.defaults)
    lines = {line for *_, line in made.__code__.co_lines()}
    assert lines == {line for *_, line in shipped.defaults.__code__.co_lines()}


def test_decorators_are_applied_once() -> None:
    for function in (shipped.decorated, shipped.wrapped, shipped.later):
        assert ship(function)(1) == function(1) == 20
    assert ship(shipped.both)(1) == shipped.both(1) == 200
    found: list[str] = []
    with ship(shipped.around)(found) as five:
        assert five == 5
    assert found == ["in", "out"]
    assert ship(shipped.without_grad)() is False


def test_functions_of_libraries_travel_by_name() -> None:
    for function in (
        torch.relu, F.gelu, F.softmax, torch.nn.init.zeros_, math.sqrt, len, np.exp, np.mean,
        functools.reduce, nnsight_core.save, torch.Tensor.norm, nn.Linear, dict, ValueError,
    ):  # fmt: skip
        assert ship(function) is function


def test_modules_of_python_travel_by_name() -> None:
    for module in (torch, F, np, math):
        assert ship(module) is module


def test_methods_and_partials_take_their_object_along() -> None:
    assert ship([1, 2].index)(2) == 1
    assert ship("a-b".split)("-") == ["a", "b"]
    assert ship(shipped.Sae(4).forward)(X).shape == (3, 8)
    assert ship(functools.partial(shipped.defaults, 1, key=2))(made=[]) == [1, 2, 5]
    assert ship(torch.ones(2).mul)(3).tolist() == [3, 3]


def test_annotations_that_cannot_be_shipped_do_not_stand_in_the_way() -> None:
    lock = threading.Lock()

    def f(x: lock, y: Optional[int] = None) -> lock:  # type: ignore[valid-type]  # noqa: UP045
        return x

    assert ship(f)(3) == 3
    assert ship({"o": Optional})["o"] is Optional


# -- classes and objects ---------------------------------------------------------------------------


def test_classes_travel_with_what_they_derive_from() -> None:
    base, derived = ship((shipped.Base, shipped.Derived))
    assert derived().apply(2) == 7 and base.make().apply(2) == 4
    assert issubclass(derived, base) and derived is not shipped.Derived
    assert derived.__qualname__ == "Derived"


def test_dataclasses_and_enums_travel_with_their_class() -> None:
    one = shipped.Config(4, shipped.Color.BLUE, [torch.ones(1)])
    made, color, cls = ship((one, shipped.Color.BLUE, shipped.Config))
    assert type(made) is cls and made.double == 24 and made.color is color
    assert color.value == "b" and made.parts[0].item() == 1
    assert cls(3) == cls(3) and cls(3).color.name == "RED"


def test_several_flags_together_travel_by_value() -> None:
    for flags in (re.I | re.M, re.RegexFlag(0), re.I):
        assert ship(flags) == flags and type(ship(flags)) is re.RegexFlag
    both, left = ship((shipped.Side.LEFT | shipped.Side.RIGHT, shipped.Side.LEFT))
    assert both.value == 3 and left in both and type(left) is type(both)


def test_a_dataclass_that_is_a_dict_travels_with_its_items() -> None:
    out = ship(CausalLMOutput(logits=torch.ones(3)))
    assert type(out) is CausalLMOutput and list(out) == ["logits"] and out.loss is None
    assert out[0] is out.logits is out["logits"]
    back = ship(shipped.Table(2, {"b": 1, "a": 2}))
    assert list(back.items()) == [("b", 1), ("a", 2)] and back.width == 2


def test_a_dataclass_that_is_more_than_its_fields_is_refused() -> None:
    with pytest.raises(EncodeError, match="name is a .*Refused, which cannot be shipped"):
        ship(shipped.Refused(3))


def test_an_object_that_a_part_of_it_holds_comes_back() -> None:
    outer = nn.Sequential(nn.Linear(2, 2))
    vars(outer[0])["owner"] = outer
    back = ship(outer)
    assert back[0].owner is back
    link = shipped.Link()
    link.other = [link]
    assert (made := ship(link)).other[0] is made
    outer.act = outer.forward
    with pytest.raises(EncodeError, match="holds itself"):
        ship(outer.act)


def test_a_name_that_cannot_be_made_there_is_named() -> None:
    data = BlockData(
        source="    pass\n", filename="f", line=1, function="f", names={"bad": {"$": "dtype"}}
    )
    with pytest.raises(ProtocolError, match="What the block uses as 'bad' cannot be made"):
        decode_run(data, CodeDecoder([], model), "k", {})


def test_a_module_of_torch_travels_as_class_and_state() -> None:
    sae = shipped.Sae(4)
    made = ship(sae)
    close(made(X), sae(X))
    assert made.tied is made.inner[0] and isinstance(made.tied.weight, nn.Parameter)
    assert dict(made.named_buffers()).keys() == {"mean"} and made.training
    assert made.config.width == 4 and list(made.state_dict()) == list(sae.state_dict())
    made.register_forward_hook(lambda m, a, o: o * 0)
    assert made(X).eq(0).all()
    frozen = nn.Linear(2, 2).requires_grad_(False).eval()
    made = ship(frozen)
    assert not made.weight.requires_grad and not made.training


def test_what_names_a_place_travels_by_name() -> None:
    places = (model, model.layers[1].mlp, model.layers[0].source)
    root, node, source = ship(places)
    assert root is model and node is model.layers[1].mlp
    assert dir(source) == dir(model.layers[0].source)
    operation = ship(model.layers[0].source.self_mlp_0)
    assert operation._path == "layers.0.source.self_mlp_0"
    assert ship(model.trace(X)) is BLOCK_TRACER
    encoder = CodeEncoder(tokenizer=tokenizer)
    assert encoder.encode(tokenizer)["$"] == "tokenizer"


def test_a_place_that_is_not_there_is_refused_with_the_nearest() -> None:
    form = {"$": "node", "path": "layers.0.mpl"}
    with pytest.raises(LocationError, match=r"Nearest: layers\.0\.mlp"):
        CodeDecoder([], model).decode(form)


def test_a_library_that_is_missing_there_is_named() -> None:
    with pytest.raises(LocationError, match="'nowhere', which the engine's side does not have"):
        CodeDecoder([], model).decode({"$": "pymodule", "name": "nowhere"})


# -- what cannot be shipped ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (threading.Lock(), r"name is a _thread\.lock"),
        ({"lock": [threading.Lock()]}, r"name\['lock'\]\[0\] is a _thread\.lock"),
        (functools.partial(len, threading.Lock()), r"name → partial\[0\] is a _thread\.lock"),
        (shipped.Config(1, parts=[sys.stdout]), r"name → parts\[0\] is a "),
        (iter([1]), "name is a builtins.list_iterator"),
    ],
)
def test_what_cannot_be_shipped_is_named_by_its_path_with_what_to_do(value: Any, path: str) -> None:
    with pytest.raises(EncodeError, match=path + ".*cannot be shipped.*Use tensors"):
        ship(value)


def test_a_function_that_closes_over_a_lock_is_named_down_to_it() -> None:
    lock = threading.Lock()
    config = {"lock": lock}

    def inner() -> Any:
        return config

    def outer() -> Any:
        return inner()

    with pytest.raises(EncodeError, match=r"name → inner → config\['lock'\] is a _thread\.lock"):
        ship(outer)


def test_a_function_without_source_says_so() -> None:
    scope: dict[str, Any] = {"__name__": "user"}
    exec("def f(): pass", scope)
    with pytest.raises(EncodeError, match="name is a .*its source cannot be had"):
        ship(scope["f"])


def test_a_function_whose_file_was_changed_says_so(tmp_path: Path) -> None:
    path = tmp_path / "user_file.py"
    path.write_text("def f():\n    return 1\n")
    scope: dict[str, Any] = {"__name__": "user_file"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    assert ship(scope["f"])() == 1
    path.write_text("def g():\n    return 1\ndef f():\n    return 1\n")
    linecache.checkcache(str(path))
    with pytest.raises(EncodeError, match="changed since it was imported"):
        ship(scope["f"])


def test_pickle_is_refused_unless_both_sides_allow_it() -> None:
    value = iter([1, 2])
    with pytest.raises(EncodeError):
        ship(value)
    with pytest.raises(PolicyError, match="does not take"):
        ship(value, pickle=True, accept=False)
    assert list(ship(value, pickle=True)) == [1, 2]


def test_a_pickled_value_names_places_instead_of_holding_them() -> None:
    scope: dict[str, Any] = {"__name__": "user"}
    exec("class Holder: pass", scope)  # has no source, so it is pickled whole
    holder = scope["Holder"]()
    holder.node, holder.tok = model.layers[0], 3
    made = ship(holder, pickle=True)
    assert made.node is model.layers[0] and made.tok == 3
    with pytest.raises(EncodeError):
        ship(threading.Lock(), pickle=True)


# -- large tensors ---------------------------------------------------------------------------------


def test_large_tensors_travel_once_by_content() -> None:
    big, same = torch.ones(BLOB), torch.ones(BLOB)
    encoder = CodeEncoder()
    forms = [encoder.encode(t) for t in (big, same, big[: BLOB // 8])]
    assert forms[0]["h"] == forms[1]["h"] and len(encoder.blobs) == 1
    assert "b" in forms[2] and len(encoder.buffers) == 1
    digest, data = content_of(big)
    assert digest == digest_of(data) == forms[0]["h"] and digest in encoder.blobs
    close(ship(nn.Parameter(big)), nn.Parameter(big))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t.__setitem__(3, 5),
        lambda t: t.view(-1)[5:].mul_(3),
        lambda t: t.data.add_(1),
        lambda t: t.detach().add_(1),
        lambda t: t.data.copy_(t.flip(0)),
        lambda t: t.data.copy_(t.view(-1, 2).flip(0).view(-1)),
        lambda t: np.random.shuffle(t.numpy().reshape(-1, 64)),
        lambda t: t.numpy()[-1:].fill(0),
    ],
    ids=["add_", "item", "view", "data", "detach", "flip", "pairs", "shuffle", "last"],
)
def test_a_tensor_that_was_changed_in_place_has_a_new_content(change: Any) -> None:
    tensor = torch.arange(float(BLOB))
    before, _ = content_of(tensor)
    assert content_of(tensor)[0] == before
    change(tensor)
    after, data = content_of(tensor)
    assert after != before and after == digest_of(data)


def test_tensors_without_versions_are_hashed_each_time() -> None:
    with torch.inference_mode():
        tensor = torch.ones(BLOB)
        before, _ = content_of(tensor)
        tensor.add_(1)
        assert content_of(tensor)[0] != before


def test_a_digest_is_not_given_to_another_tensor_under_the_same_id() -> None:
    found = set()
    for value in range(5):
        tensor = torch.full((BLOB,), float(value))
        found.add(content_of(tensor)[0])
        del tensor
    assert len(found) == 5


# -- blocks ----------------------------------------------------------------------------------------


def block(text: str, **names: Any) -> Invoke:
    code = compile_block("".join(f"    {t}\n" for t in text.split("\n")), "user.py", 7, "f")
    return Invoke(X, block=Block(code, names))


def test_a_block_comes_back_as_the_run_it_is() -> None:
    invoke = block("x = (scaled(k) + len([tracer])).save()", scaled=shipped.scaled, k=2)
    encoder = CodeEncoder()
    data = encode_block(invoke, encoder)
    assert data is not None
    message = BlockMessage(key="k", block=data)
    frame = read_frame(message.frame(encoder.buffers).to_bytes())
    back = expect(frame, BlockMessage).block
    back.targets.append("tracer")
    run = decode_run(back, CodeDecoder(frame.buffers, model), "k", {})
    assert run.resume() is None and run.error is None
    ended = encode_ended(run, "k", 0, [])
    event = decode_event(read_message(ended), read_frame(ended.to_bytes()), 4, [])
    assert event.saves == {"x": 7} and event.invoke == 4  # type: ignore[union-attr]


def test_a_name_that_cannot_be_shipped_is_named_with_its_line() -> None:
    invoke = block("x = 1\ny = config['lock']", config={"lock": threading.Lock()})
    with pytest.raises(EncodeError, match=r"^user\.py:8: config\['lock'\] is a _thread\.lock"):
        encode_block(invoke, CodeEncoder())
    with pytest.raises(EncodeError, match="^the function given as `fn=`: "):
        refused = functools.partial(len, threading.Lock())
        encode_block(Invoke(X, function=refused), CodeEncoder())


def test_a_trace_with_such_a_name_runs_locally_all_the_same() -> None:
    config = {"lock": threading.Lock()}
    with model.trace(X):
        locked = config["lock"].locked().save()
    assert locked is False


def test_a_block_that_names_what_is_not_there_is_refused_before_it_is_sent() -> None:
    with pytest.raises(LocationError, match=r"user\.py:7: Net has no module 'heda'"):
        check_block(block("model.heda.output", model=model), model.tree)
    assert check_block(Invoke(X), model.tree) is None
    found = check_block(block("model.heda.output", model=model), None)
    assert found is not None and found.reads[0].path == "heda"


def test_a_block_whose_text_cannot_be_compiled_is_refused_there() -> None:
    data = BlockData(source=" return 1\n", filename="u", line=1, function="f", names={})
    with pytest.raises(CaptureError):
        code_of(data)


def test_what_cannot_come_home_is_the_error_and_the_rest_comes() -> None:
    invoke = block("a = b = None\na = [1].save()\nb = {'l': [a, lock]}.save()\nc = [a].save()",
                   lock=threading.Lock())  # fmt: skip
    assert invoke.block is not None
    run = Run(invoke.block.code, dict(invoke.block.names), "k")
    run.resume()
    frame = read_frame(encode_ended(run, "k", 0, []).to_bytes())
    event: Any = decode_event(expect(frame, EndedMessage), frame, 0, [])
    assert event.saves == {"a": [1], "c": [[1]]}
    assert isinstance(event.error, EncodeError) and "b['l'][1]" in str(event.error)


def test_error_classes_that_a_block_holds_are_known() -> None:
    assert known_errors(block("raise E", E=KeyError, x=int, y=3)) == [KeyError]
    assert known_errors(Invoke(X)) == []


def test_the_results_decoder_takes_no_code() -> None:
    saves = {"x": CodeEncoder().encode(shipped.scaled)}
    frame = EndedMessage(key="k", saves=saves).frame()
    with pytest.raises(ProtocolError, match="of type 'function' is not accepted"):
        decode_event(read_message(frame), frame, 0, [])


def test_outputs_are_the_same_class_everywhere() -> None:
    output = RequestOutput(request_id="1")
    assert RequestOutput.model_validate_json(output.model_dump_json()) == output


OTHER_SIDE = """
import sys
from nnsight_core import TorchModel
from nnsight_core.wire.blocks import decode_run, encode_ended
from nnsight_core.wire.code import CodeDecoder
from nnsight_core.wire.frames import read_frame
from nnsight_core.wire.messages import BlockMessage, expect
frame = read_frame(sys.stdin.buffer.read())
message = expect(frame, BlockMessage)
run = decode_run(message.block, CodeDecoder(frame.buffers, None), message.key, {})
run.resume()
assert "shipped" not in " ".join(sys.modules)
sys.stdout.buffer.write(encode_ended(run, message.key, 0, []).to_bytes())
"""


def test_a_block_runs_in_a_process_that_has_nothing_of_the_users(tmp_path: Path) -> None:
    sae = shipped.Sae(2).requires_grad_(False)
    names = {"sae": sae, "f": shipped.both, "config": shipped.Config(4), "x": torch.ones(1, 2)}
    invoke = block("y = sae(x).save()\nz = f(config.double).save()\n1 / 0", **names)
    encoder = CodeEncoder()
    data = encode_block(invoke, encoder)
    assert data is not None
    sent = BlockMessage(key="k", block=data).frame(encoder.buffers).to_bytes()
    done = subprocess.run([sys.executable, "-c", OTHER_SIDE], input=sent, capture_output=True,
                          cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    frame = read_frame(done.stdout)
    event: Any = decode_event(read_message(frame), frame, 0, [])
    close(event.saves["y"], sae(torch.ones(1, 2)))
    assert event.saves["z"] == shipped.both(24)
    assert type(event.error) is ZeroDivisionError
