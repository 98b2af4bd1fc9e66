"""A server whose engine dies under it: it says so, and can still be told to end."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from nnsight_client import VLLM
from nnsight_core import EngineDeadError
from tests.fixtures.server import serving

PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture
def dying(gpt2_path, tmp_path):
    with serving(tmp_path, gpt2_path) as server:
        yield server


def test_an_engine_that_dies_is_an_error_of_what_it_was_doing(dying, gpt2_path):
    model = VLLM(gpt2_path, serve=dying.url)
    (engine,) = (p for p in dying.processes() if "EngineCore" in "".join(p.cmdline()))

    def kill() -> None:
        while dying.live() != 1:
            time.sleep(0.02)
        os.kill(engine.pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(EngineDeadError):
        with model.trace(PROMPT, ignore_eos=True, max_tokens=240) as tracer:
            text = tracer.result.outputs[0].text.save()
    killing.join()
    assert httpx.get(f"{dying.url}/health").status_code == 503
    with pytest.raises(EngineDeadError, match="must be restarted"):
        model.generate(PROMPT)
    with pytest.raises(EngineDeadError, match="must be restarted"):
        VLLM(gpt2_path, serve=dying.url).tree


def test_openai_clients_are_told_too_and_the_server_stays_to_say_so(dying):
    client = openai.OpenAI(base_url=f"{dying.url}/v1", api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    asking = {
        "model": name,
        "prompt": PROMPT,
        "max_tokens": 240,
        "extra_body": {"ignore_eos": True},
    }
    (engine,) = (p for p in dying.processes() if "EngineCore" in "".join(p.cmdline()))
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(client.completions.create, **asking)
        with client.completions.create(stream=True, **asking) as parts:
            next(iter(parts))
            while httpx.get(f"{dying.url}/v1/load").json()["requests"] < 2:
                time.sleep(0.02)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="EngineCore"):
                list(parts)
        with pytest.raises(openai.InternalServerError, match="EngineCore"):
            plain.result(60)
    with pytest.raises(openai.InternalServerError, match="must be restarted") as caught:
        client.models.list()
    assert caught.value.status_code == 503


def test_an_engine_that_cannot_be_built_is_said_with_its_cause(tmp_path):
    with pytest.raises(AssertionError) as caught, serving(tmp_path, str(tmp_path)):
        pass
    assert "nnsight-serve: The engine cannot be built." in str(caught.value)
