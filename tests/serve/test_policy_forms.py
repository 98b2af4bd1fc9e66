"""Names that were forged are refused: where a request arrives, and again where they are decoded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nnsight_core.errors import CaptureError, PolicyError, ProtocolError
from nnsight_core.wire.code import CodeDecoder, CodeEncoder
from nnsight_core.wire.messages import BlockData
from nnsight_serve.policy import RESTRICTED
from nnsight_serve.policy.allowed import LAYERS, PATHS
from nnsight_serve.policy.values import OUTSIDE, attribute
from tests.serve.forged_forms import FORMS, NAMES, PARAMETER, TENSOR, function, layer, path
from tests.serve.restricted import small_model

REFUSED = (PolicyError, CaptureError)


@pytest.fixture(scope="module")
def root():
    return small_model()


def block(source="    x = v\n", filename="forged.py", **fields):
    return BlockData(source=source, filename=filename, line=1, function="f", names={}, **fields)


def decode(form, root, buffers=None):
    data = buffers or [bytes(torch.ones(1).numpy().data)]
    extra = RESTRICTED.scope({})
    return CodeDecoder(data, root, extra=extra, policy=RESTRICTED).decode(form)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_forged_is_refused_where_it_arrives(name):
    data = block()
    data.names["v"] = FORMS[name]
    with pytest.raises(REFUSED, match=r"^(forged\.py|The block at forged\.py)"):
        RESTRICTED.check(data)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_forged_is_refused_where_it_is_decoded(name, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        made = decode(FORMS[name], root)
    except (PolicyError, CaptureError, ProtocolError, RecursionError, MemoryError):
        made = None
    if made is not None:  # a function may be made; what it does is refused when it is called
        with pytest.raises(PolicyError):
            eval("_call_(v)()", {**RESTRICTED.scope({}), "v": made})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["names", "targets", "shared"])
def test_a_block_has_no_names_like_the_guards(name, field):
    data = block()
    if field == "names":
        data.names[name] = 1
    else:
        getattr(data, field).append(name)
    with pytest.raises(PolicyError, match="underscore"):
        RESTRICTED.check(data)


@pytest.mark.parametrize(
    "source",
    [
        "    " + "#" * (1 << 19) + "\n",
        "    x = " + "-" * 20000 + "1\n",
        "    x = \0\n",
        "    x = (\n",
    ]
    + ["    x = " + "[" * 3000 + "]" * 3000 + "\n", "    x = '\ud800'\n", "    return 1\n"],
)
def test_a_text_that_cannot_be_read_is_refused(source):
    with pytest.raises(REFUSED):
        RESTRICTED.check(block(source))


@pytest.mark.parametrize("line", [-5, 0, 2**31, 2**40, 10**30])
def test_a_text_on_an_odd_line_is_taken_or_refused(line):
    data = block("    x = 1\n    y = 2\n").model_copy(update={"line": line})
    try:
        RESTRICTED.check(data)
    except REFUSED as error:
        assert "forged.py" in str(error)


def test_many_functions_are_as_long_as_one():
    data = block()
    text = "def f():\n    pass\n" + "#" * (1 << 17)
    data.names["v"] = {"$": "list", "v": [function(text, **{"#": n}) for n in range(3)]}
    with pytest.raises(PolicyError, match="functions of more than"):
        RESTRICTED.check(data)


def test_what_is_on_the_list_is_taken(root):
    for module, name in [("torch", "exp"), ("torch.nn.functional", "relu"), ("math", "sqrt")]:
        assert decode(path(module, name), root) is PATHS[module, name]
    made = decode(function("def f(x):\n    return x + 1\n"), root)
    assert made(1) == 2


@pytest.mark.parametrize("cls", sorted(LAYERS, key=str), ids=lambda cls: cls.__name__)
def test_every_layer_on_the_list_travels(cls, root):
    made = {
        "Linear": lambda: nn.Linear(2, 3),
        "Sequential": lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU()),
        "Embedding": lambda: nn.Embedding(4, 2),
        "LayerNorm": lambda: nn.LayerNorm(2),
        "RMSNorm": lambda: nn.RMSNorm(2),
        "Threshold": lambda: nn.Threshold(0.1, 2.0),
        "ModuleList": lambda: nn.ModuleList([nn.Linear(2, 2)]),
        "ParameterList": lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
        "LogSoftmax": lambda: nn.LogSoftmax(-1),
        "Softmax": lambda: nn.Softmax(-1),
    }.get(cls.__name__, cls)()
    encoder = CodeEncoder()
    data = block()
    data.names["v"] = form = encoder.encode(made)
    RESTRICTED.check(data)
    again = decode(form, root, encoder.buffers)
    assert type(again) is cls
    if cls.__name__ not in ("ModuleList", "ParameterList"):
        given = torch.tensor([[1, 3]]) if cls is nn.Embedding else torch.tensor([[0.5, -2.0]])
        made, again = made.eval(), again.eval()
        assert torch.equal(made(given), again(given))


def test_what_a_module_holds_is_what_it_gives():
    linear = nn.Linear(2, 2)
    OUTSIDE.add(linear)
    linear._parameters["register_forward_hook"] = nn.Parameter(torch.ones(1))
    for name in ("weight", "register_forward_hook"):
        assert attribute(linear, name) is linear._parameters[name]
    assert attribute(linear, "in_features") == 2
    with pytest.raises(PolicyError):
        attribute(linear, "forward")


@pytest.mark.parametrize(
    "state",
    [{"_compiled_call_impl": path("torch", "relu")}, {"_call_impl": 1}, {"__class__": 1}]
    + [{"forward": path("torch", "zeros")}, {"_modules": {"$": "dict", "k": ["a"], "v": [1]}}]
    + [
        {"_parameters": {"$": "dict", "k": ["a"], "v": ["b"]}},
        {"_parameters": 1},
        {"_modules": None},
    ]
    + [
        {name: {"$": "dict", "k": ["register_forward_hook"], "v": [part]}}
        for name, part in [("_parameters", PARAMETER), ("_buffers", TENSOR), ("_modules", None)]
    ]
    + [{"in_features": {"$": "list", "v": [path("torch", "relu")]}}],
    ids=str,
)
def test_a_layer_holds_nothing_that_it_would_not_hold(state, root):
    with pytest.raises((PolicyError, ProtocolError)):
        decode(layer(**state), root)


def test_a_file_that_a_block_names_is_not_read(root, tmp_path):
    from nnsight_core.wire.data import Encoder
    from nnsight_core.wire.errors import record_error
    from tests.serve.restricted import run_of

    secret = tmp_path / "secret"
    secret.write_text("the password\n" * 9)
    run = run_of(block("    1 / 0\n", filename=str(secret)), root)
    run.execute()
    record = record_error(run.error, Encoder())
    assert [frame.filename for frame in record.frames][-1] == str(secret)
    assert "password" not in record.model_dump_json()
    # An endless file would keep whoever reads it for ever.
    run_of(block("    1 / 0\n", filename="/dev/zero"), root).execute()
