"""Large tensors go to a server once."""

from __future__ import annotations

import httpx
import pytest
import torch

from nnsight_client import VLLM
from nnsight_core import ProtocolError
from nnsight_core.wire.code import digest_of
from nnsight_core.wire.frames import MEDIA_TYPE

PROMPT = "The Eiffel Tower is in the city of"
ONE = {"temperature": 0.0, "max_tokens": 1}


@pytest.fixture
def model(server_url, gpt2_path):
    with VLLM(gpt2_path, serve=server_url) as model:
        yield model


@pytest.fixture
def sent(monkeypatch):
    """How many bytes each trace has sent."""
    sizes: list[int] = []
    plain = httpx.Client.send

    def counted(self, request, **how):
        if request.headers.get("content-type") == MEDIA_TYPE:
            sizes.append(int(request.headers["content-length"]))
        return plain(self, request, **how)

    monkeypatch.setattr(httpx.Client, "send", counted)
    return sizes


def shifted(model, vector):
    with model.trace(PROMPT, **ONE):
        hidden = model.transformer.h[3].output
        home = (hidden + vector.sum(0)).save()
        plain = hidden.save()
    return torch.allclose(home, plain + vector.sum(0), atol=1e-3)


def test_a_large_tensor_is_sent_once(model, sent):
    vector = torch.randn(500, 96)
    assert shifted(model, vector) and shifted(model, vector)
    assert len(sent) == 2 and sent[0] > vector.numel() * 4 > 10 * sent[1]
    # Changed, it is another one.
    vector += 1
    assert shifted(model, vector)
    assert len(sent) == 3 and sent[2] > vector.numel() * 4


def test_what_the_server_has_not_any_more_is_sent_again(model, sent):
    vector = torch.randn(500, 96)
    # A server that was started anew knows nothing of what this process believes.
    digest = digest_of(vector.numpy().tobytes())
    model._servers.backend(model._serve).held.add(digest)
    assert shifted(model, vector)
    assert len(sent) == 2 and sent[0] * 10 < vector.numel() * 4 < sent[1]
    assert shifted(model, vector) and sent[2] == sent[0]


def test_another_client_need_not_have_sent_it(model, sent, server_url, gpt2_path):
    vector = torch.randn(500, 96)
    assert shifted(model, vector)
    with VLLM(gpt2_path, serve=server_url) as other:
        other._servers.backend(server_url).held |= model._servers.backend(server_url).held
        assert shifted(other, vector)
    assert len(sent) == 2 and sent[1] * 10 < sent[0]


def test_the_vector_of_an_edit_is_sent_once(model, sent):
    vector = torch.randn(500, 96)
    for _ in range(2):
        with model.edit() as (_tracer, edit):
            model.transformer.h[3].output[:] += vector.sum(0)
        model.generate(PROMPT, **ONE)
        edit.clear()
    assert sent[0] > vector.numel() * 4 > 10 * sent[2]


def test_traces_share_a_connection_and_freed_handles_are_not_forgotten(model, server_url):
    backend = model._servers.backend(server_url)
    for _ in range(3):
        with model.trace(PROMPT, **ONE):
            hidden = model.transformer.h[3].output.keep()
    assert len(backend._http._transport_for_url(httpx.URL(server_url)).idle) == 1
    del hidden
    backend.kept.disown(["one"])
    backend.url, url = "http://127.0.0.1:9", backend.url
    backend._http.base_url = backend.url
    with pytest.raises(ProtocolError, match="No server answers"):
        model.generate(PROMPT, **ONE)
    backend.url, backend._http.base_url = url, url
    assert "one" in backend.kept.ended()
