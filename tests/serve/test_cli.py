"""The command line: ours and vLLM's flags side by side."""

from __future__ import annotations

import socket

import pytest

from nnsight_serve.cli import _parser, _settings, serve
from nnsight_serve.server import _ready
from nnsight_serve.settings import MAX_BODY
from nnsight_vllm_worker.vllm_ports import arguments


def read(*command: str):
    return _settings(list(command), _parser())


def test_flags_that_are_not_given_stay_vllms_business():
    settings = read("some/model")
    assert settings.model == "some/model" and settings.engine == {}
    assert (settings.host, settings.port) == ("127.0.0.1", 6677)
    assert settings.max_body == MAX_BODY and settings.api_keys == {}


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["--max-model-len", "1k"], {"max_model_len": 1000}),
        (["--max_model_len=256"], {"max_model_len": 256}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no-enforce-eager"], {"enforce_eager": False}),
        (["--hf-overrides", '{"n_layer": 2}'], {"hf_overrides": {"n_layer": 2}}),
        (["--hf-overrides.n_layer", "2"], {"hf_overrides": {"n_layer": 2}}),
    ],
)
def test_vllms_flags_are_read_in_vllms_spelling(flags, engine):
    for command in (["m", "--port", "7000", *flags], [*flags, "--port", "7000", "m"]):
        settings = read(*command)
        assert settings.engine == engine and settings.model == "m" and settings.port == 7000


def test_taps_are_ours_and_may_be_repeated():
    settings = read("m", "--tap", "resid", "--dtype", "float32", "--tap", "model.norm.output")
    assert settings.engine == {"taps": ["resid", "model.norm.output"], "dtype": "float32"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            ["m", "--max-modle-len", "3"],
            "knows the flag --max-modle-len. Did you mean --max-model-len?",
        ),
        (["m", "--prot", "3"], "Did you mean --port?"),
        (["m", "--max-model", "3"], "Did you mean --max-model-len?"),
        (["m", "another"], "'another' is one argument too many"),
        (["m", "--port", "high"], "invalid int value: 'high'"),
        ([], "MODEL"),
    ],
)
def test_what_neither_side_knows_is_refused(capsys, command, says):
    assert serve(command) == 2
    assert says in capsys.readouterr().err


def test_help_begins_with_ours(capsys):
    assert serve(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("--max-body") < shown.index("ModelConfig")
    assert serve(["--help=max-model-len"]) == 0
    assert "--max-model-len" in capsys.readouterr().out


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("NNSIGHT_API_KEY", "secret")
    settings = read("m")
    assert settings.api_keys == {"default": "secret"} and "secret" not in repr(settings)
    assert read("m", "--api-key", "other==").api_keys == {"key1": "other=="}


def test_the_address_may_come_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("NNSIGHT_HOST", "0.0.0.0")
    monkeypatch.setenv("NNSIGHT_PORT", "7001")
    settings = read("m")
    assert (settings.host, settings.port) == ("0.0.0.0", 7001)
    settings = read("m", "--host", "::1", "--port", "7002")
    assert (settings.host, settings.port) == ("::1", 7002)
    monkeypatch.setenv("NNSIGHT_PORT", "high")
    assert serve(["m"]) == 2
    assert "invalid int value: 'high'" in capsys.readouterr().err


def test_keys_have_names():
    keys = read(
        "m", "--api-key", "ann:one", "--api-key", "ben:two:x", "--api-key", "three"
    ).api_keys
    assert keys == {"ann": "one", "ben": "two:x", "key3": "three"}
    for wrong, says in (("ann:", "empty"), (":x", "empty"), ("", "empty"), ("ann:2", "'ann'")):
        with pytest.raises(ValueError, match=says):
            read("m", "--api-key", "ann:one", "--api-key", wrong)


def test_keys_may_come_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# who may\n\n ann:first \nbob:se:cond\n")
    settings = read("m", "--api-keys-file", str(file), "--api-key", "carl:third")
    assert settings.api_keys == {"carl": "third", "ann": "first", "bob": "se:cond"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read from"),
        (b"\xff\xfe", "no UTF-8 text"),
        (b"ann:first\nsecret\n", "line 2 of"),
        (b"# nothing\n", "holds no keys"),
        (b"ann:\n", "neither may be empty"),
        (b"ann:first\nann:second\n", "two keys have the name 'ann'"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_one_clear_error(tmp_path, capsys, content, says):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    assert serve(["m", "--api-keys-file", str(file)]) == 2
    said = capsys.readouterr().err
    assert says in said and "secret" not in said and len(said.splitlines()) == 2


def test_a_port_that_is_taken_is_said_before_the_engine_is_built(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(["no/such-model", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_flag_of_another_vllm_is_an_error(monkeypatch):
    ours = _parser()
    monkeypatch.setattr(arguments.dataclasses, "fields", lambda _: ())
    with pytest.raises(arguments.EngineError, match="its engine does not take"):
        arguments.parse(["m"], ours)


def test_the_first_line_says_what_the_policy_means_and_which_taps_there_are():
    trusted = _ready(read("m", "--port", "1"), 1, 12, True)
    assert "serves m (protocol 1; 12 taps: resid; policy trusted" in trusted
    assert (
        "policy trusted: blocks are code, and whoever reaches this address can run any" in trusted
    )
    flags = ("--policy", "restricted", "--api-key", "k", "--tap", "a.output", "--tap", "resid")
    restricted = _ready(read("m", *flags), 1, 13, True)
    assert "; 13 taps: a.output resid; policy" in restricted
    assert "no taps: every step runs eagerly" in _ready(read("m", *flags), 1, 0, False)
    assert (
        "policy restricted: whoever has a key can run blocks, and these can compute" in restricted
    )
    assert "any code" not in restricted
