"""A server that wants a key, and that is killed in the end."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import pytest

from nnsight_client import VLLM
from nnsight_core import PolicyError, ProtocolError
from tests.fixtures.server import KEY

PROMPT = "The capital of France is"


@pytest.fixture
def client(keyed_server, llama_path):
    with VLLM(llama_path, serve=keyed_server.url, api_key=KEY) as model:
        yield model


def test_layers_that_return_a_pair_are_read_and_written(client, keyed_server):
    with client.trace(PROMPT, temperature=0.0, max_tokens=8) as tracer:
        client.model.layers[2].output[0][:] = 0
        resid = sum(client.model.layers[4].output).save()
        out = tracer.result.save()
    assert resid.shape == (len(client.tokenizer(PROMPT)["input_ids"]), 128)
    assert len(out.outputs[0].token_ids) <= 8
    assert keyed_server.live() == 0


@pytest.mark.parametrize("key", [None, "another", KEY[:-1], KEY + "x", "kéy"])
def test_without_the_key_nothing_runs(keyed_server, llama_path, key):
    stranger = VLLM(llama_path, serve=keyed_server.url, api_key=key)
    with pytest.raises(PolicyError, match="Authorization: Bearer"):
        with stranger.trace(PROMPT):
            logits = stranger.logits.save()
    with pytest.raises(PolicyError):
        stranger.tree


def test_health_needs_no_key_and_every_other_route_does(keyed_server):
    with httpx.Client(base_url=keyed_server.url) as http:
        assert http.get("/health").status_code == 200
        answer = http.get("/v1/model")
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert http.post("/v1/trace", content=b"x").status_code == 401
        other = {"Authorization": f"Basic {KEY}"}
        assert http.get("/v1/model", headers=other).status_code == 401


@pytest.mark.parametrize("path", ["trace", "edits", "kept/free", "completions", "chat/completions"])
def test_no_body_is_waited_for_before_the_key_is_known(keyed_server, path):
    host, port = keyed_server.url.removeprefix("http://").split(":")
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert stranger.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
    # Nor is it read what has come.
    answer = httpx.post(f"{keyed_server.url}/v1/{path}", content=b"{bad")
    assert answer.status_code == 401


def test_a_models_key_is_shown_to_no_other_server(client, keyed_server):
    other = keyed_server.url.replace("127.0.0.1", "localhost")
    with pytest.raises(PolicyError, match="A key is needed"):
        client.generate(PROMPT, serve=other)
    assert client.generate(PROMPT, serve=other, api_key=KEY, max_tokens=1)


def test_the_key_is_written_nowhere(keyed_server):
    log = keyed_server.log.read_text()
    assert keyed_server.url in log and KEY not in log
    assert "whoever has a key can run any code here" in log


def test_a_server_that_dies_is_an_error_at_once_with_what_had_arrived(client, keyed_server):

    def kill() -> None:
        while keyed_server.live() != 1:
            time.sleep(0.02)
        keyed_server.process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(ProtocolError, match="broke") as caught:
        with client.trace(temperature=0.0, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT, max_tokens=1):
                first = client.model.layers[0].output[0].save()
            with tracer.invoke(PROMPT, max_tokens=250):
                last = len(tracer.result.outputs[0].text).save()
    killing.join()
    # Until the killed process is gone, its port still takes connections and resets them.
    keyed_server.process.wait(30)
    assert isinstance(caught.value, ConnectionError)
    assert list(caught.value.arrived) == ["first"]
    assert caught.value.arrived["first"].shape[1] == 128
    with pytest.raises(ProtocolError, match="No server answers"):
        client.generate(PROMPT)
