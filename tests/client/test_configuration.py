"""The user's own server: `remote=True`, the environment and the file."""

from __future__ import annotations

import os
import warnings

import pytest

import nnsight_client
from nnsight_client import VLLM, configuration
from nnsight_client.configuration import configured
from nnsight_core import NNsightWarning
from tests.client.test_model import answering

URL = "https://models.example.org"


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("NNSIGHT_SERVER", "NNSIGHT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(configuration, "_warned", set())
    return tmp_path / "nnsight" / "config.toml"


def written(file, text):
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o600)


def test_without_one_it_says_how_to_set_it(file):
    for use in (
        lambda: VLLM("unused", remote=True),
        lambda: VLLM("unused").generate("Hello", remote=True),
        lambda: VLLM("unused").chat([{"role": "user", "content": "Hi"}], remote=True),
        lambda: VLLM("unused").trace("Hello", remote=True),
        lambda: VLLM("unused").edit(remote=True),
    ):
        with pytest.raises(
            ValueError, match=r"NNSIGHT_SERVER.*nnsight_client\.configure\("
        ) as told:
            use()
        assert str(file) in str(told.value)


def test_what_is_written_down_is_found_and_nobody_else_reads_it(file):
    assert nnsight_client.configure(f"{URL}/", 'a "key"\\') == file
    assert file.stat().st_mode & 0o777 == 0o600
    found = configured()
    assert (found.server, found.api_key) == (URL, 'a "key"\\') and "key" not in repr(found)
    # A key belongs to its server.
    nnsight_client.configure("http://127.0.0.1:1")
    assert (configured().server, configured().api_key) == ("http://127.0.0.1:1", None)
    assert os.listdir(file.parent) == ["config.toml"]


def test_the_environment_wins(file, monkeypatch):
    nnsight_client.configure(URL, "of the file")
    monkeypatch.setenv("NNSIGHT_API_KEY", "of the environment\n")
    assert configured().api_key == "of the environment"
    monkeypatch.setenv("NNSIGHT_SERVER", "http://other:1")
    assert configured().server == "http://other:1"
    # The key of the file is shown to the server of the file alone.
    monkeypatch.delenv("NNSIGHT_API_KEY")
    assert configured().api_key is None
    monkeypatch.setenv("NNSIGHT_SERVER", f"{URL}/")
    assert configured().api_key == "of the file"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('sever = "http://a"', r"'sever', which is unknown\. Did you mean 'server'"),
        ('nonsense = "http://a"', "It takes server and api_key"),
        ("server = 7", "server is a text"),
        ("server =", r"config\.toml cannot be read"),
        ('api_key = "x"', "remote=True needs a server"),
    ],
)
def test_a_file_that_is_not_well_formed_is_named(file, text, says):
    written(file, text)
    with pytest.raises(ValueError, match=says):
        configured()


def test_a_key_that_others_can_read_is_warned_of_once(file):
    written(file, f'server = "{URL}"\napi_key = "x"')
    file.chmod(0o644)
    with pytest.warns(NNsightWarning, match="chmod 600"):
        assert configured().api_key == "x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configured()
        written(file, f'server = "{URL}"')
        file.chmod(0o644)
        configured()


@pytest.mark.parametrize(
    ("server", "key"), [("models.example.org", None), (URL, "two\nlines"), (URL, "schlüssel")]
)
def test_what_cannot_be_used_is_not_written_down(file, server, key):
    with pytest.raises(ValueError):
        nnsight_client.configure(server, key)
    assert not file.exists()


def test_a_model_runs_in_one_place(file):
    nnsight_client.configure(URL)
    for use in (
        lambda: VLLM("unused", serve="http://127.0.0.1:1", remote=True),
        lambda: VLLM("unused").generate("Hello", serve="http://127.0.0.1:1", remote=True),
        lambda: VLLM("unused", dispatch=True, remote=True),
    ):
        with pytest.raises(ValueError, match="remote="):
            use()


def test_the_key_goes_to_the_configured_server_and_no_other():
    with answering(b"{}", "application/json", seen=(seen := [])) as url:
        nnsight_client.configure(url, "mine")
        for model, where in (
            (VLLM("unused", remote=True), {}),
            (VLLM("unused"), {"remote": True}),
            (VLLM("unused", serve="http://127.0.0.1:1"), {"remote": True}),
            (VLLM("unused", remote=True), {"serve": url.replace("127.0.0.1", "localhost")}),
        ):
            with pytest.raises(ConnectionError):
                model.generate("Hello", **where)
    assert seen == ["Bearer mine"] * 3 + [None]


def test_a_trace_on_the_configured_server(server_url, gpt2_path):
    nnsight_client.configure(server_url)
    with VLLM(gpt2_path, remote=True) as model:
        with model.trace("The capital of France is", temperature=0.0, max_tokens=1):
            token = model.logits.argmax(-1).save()
    assert model.tokenizer.decode(token) == " Paris"
    from nnsight_vllm_worker import VLLM as Local

    for model, where in ((VLLM(gpt2_path), {"remote": True}), (Local(gpt2_path, remote=True), {})):
        with model:
            (out,) = model.generate(
                "The capital of France is", temperature=0.0, max_tokens=1, **where
            )
            assert out.outputs[0].text == " Paris"
