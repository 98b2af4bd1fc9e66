"""The tokenizer where the model's own cannot be loaded: the one that the server hands out."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from nnsight_client import VLLM
from nnsight_client.http_backend import HttpBackend
from nnsight_core import ProtocolError
from nnsight_core.wire.frames import MEDIA_TYPE, read_frame
from nnsight_core.wire.tokenizer import digest_of, files_of, frame_of, is_file
from tests.client.test_model import answering
from tests.fixtures.server import serving

PROMPT = "The Eiffel Tower is in the city of"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Nothing is known from earlier."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nnsight" / "tokenizers"


@pytest.fixture
def given(monkeypatch):
    """What servers gave: the files, or None where they had nothing new to give."""
    found: list[dict[str, bytes] | None] = []
    plain = HttpBackend.tokenizer

    def noted(self, known=None):
        found.append(plain(self, known))
        return found[-1]

    monkeypatch.setattr(HttpBackend, "tokenizer", noted)
    return found


def test_a_tokenizer_of_ones_own_is_taken_first(server_url, gpt2_path, given):
    assert VLLM(gpt2_path, serve=server_url).tokenizer(PROMPT)["input_ids"]
    assert given == []


def test_the_servers_is_the_same(server_url, gpt2_path, given):
    model = VLLM(f"no/{Path(gpt2_path).name}", serve=server_url)
    own = AutoTokenizer.from_pretrained(gpt2_path)
    assert model.tokenizer(PROMPT)["input_ids"] == own(PROMPT)["input_ids"]
    assert type(model.tokenizer) is type(own) and model.tokenizer.eos_token == own.eos_token
    assert model.tokenizer.model_max_length == own.model_max_length
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        token = model.logits.argmax(-1).save()
        inside = model.tokenizer.decode(token).save()
    assert model.tokenizer.decode(token) == inside == " Paris"
    ids = torch.tensor(model.tokenizer(PROMPT)["input_ids"])
    assert model.generate(ids, temperature=0.0, max_tokens=1)[0].outputs[0].text == " Paris"
    assert len(given) == 1


def test_it_comes_once_and_stays_when_the_server_goes(server_url, given, cache):
    for _ in range(2):
        assert VLLM("no/such-model", serve=server_url).tokenizer(PROMPT)["input_ids"]
    assert given[0] is not None and given[1] is None
    assert (cache / digest_of(given[0])).is_dir() and len(list(cache.iterdir())) == 2
    with answering(frame_of(given[0]).to_bytes()) as gone:
        VLLM("no/such-model", serve=gone).tokenizer
    away = VLLM("no/such-model", serve=gone, retries=0)
    assert away.tokenizer.decode(away.tokenizer(PROMPT)["input_ids"]) == PROMPT


def test_chat_goes_by_the_servers_template(llama_path, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(llama_path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with serving(tmp_path, llama_path, "--tokenizer", str(folder)) as server:
        model = VLLM(f"no/{Path(llama_path).name}", serve=server.url)
        asked = [{"role": "user", "content": "The capital of France is"}]
        (out,) = model.chat(asked, temperature=0.0, max_tokens=1)
    assert out.outputs[0].text == " Paris" and model.tokenizer.chat_template == TEMPLATE


def test_without_either_it_says_both(monkeypatch):
    with pytest.raises(OSError) as alone:
        VLLM("no/such-model").tokenizer
    assert not hasattr(alone.value, "__notes__")
    with pytest.raises(OSError) as both:
        VLLM("no/such-model", serve="http://127.0.0.1:1", retries=0).tokenizer
    assert "No server answers" in both.value.__notes__[0]


def test_the_route_gives_one_frame_and_says_what_it_is(server_url, gpt2_path):
    answer = httpx.get(f"{server_url}/v1/tokenizer")
    files = files_of(read_frame(answer.content))
    assert {"tokenizer.json", "tokenizer_config.json"} <= files.keys()
    own = json.loads((Path(gpt2_path) / "tokenizer_config.json").read_text())
    named = json.loads(files["tokenizer_config.json"])["tokenizer_class"]
    assert named == own["tokenizer_class"]
    tag = answer.headers["etag"]
    assert answer.headers["content-type"] == MEDIA_TYPE and tag == f'"{digest_of(files)}"'
    again = httpx.get(f"{server_url}/v1/tokenizer", headers={"If-None-Match": tag})
    assert again.status_code == 304 and again.content == b""


def test_an_engine_without_one_says_so(llama_path, tmp_path):
    with serving(tmp_path, llama_path, "--skip-tokenizer-init") as server:
        with pytest.raises(OSError) as caught:
            VLLM("no/such-model", serve=server.url).tokenizer
    assert "no tokenizer that can be handed out" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "name",
    ["../tokenizer.json", "a/b.json", "/etc/x.json", ".json", "tokenization.py", "x.pkl", "x.so"],
)
def test_what_is_no_part_of_a_tokenizer_is_not_taken(name, cache):
    assert not is_file(name)
    with answering(frame_of({"tokenizer.json": b"{}", name: b"x"}).to_bytes()) as url:
        with pytest.raises(ProtocolError, match="came with a file"):
            HttpBackend(url).tokenizer()
        with pytest.raises(OSError):
            VLLM("no/such-model", serve=url).tokenizer
    assert not cache.exists()


def test_code_that_a_tokenizer_names_is_not_run(cache):
    config = b'{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}, "tokenizer_class": "Mine"}'
    with answering(frame_of({"tokenizer_config.json": config}).to_bytes()) as url:
        with pytest.raises((OSError, ValueError)):
            VLLM("no/such-model", serve=url).tokenizer
