"""Several callers with keys of their own, what each may have, and what is told of them."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from nnsight_client import VLLM
from nnsight_core import BlockTimeout, BusyError, Edit, PolicyError, SaveLimitError
from nnsight_core.wire.messages import InvokeData, TraceMessage
from nnsight_serve.bodies import Bodies, Body
from nnsight_serve.refusals import Refused
from nnsight_serve.steps import Steps
from tests.fixtures.server import Server, serving

PROMPT = "The Eiffel Tower is in the city of"
MAX_SAVES = 50_000
MAX_BODY = 2_000_000
LARGE = 1_800_000
EDIT_BYTES = 400_000
OPEN = "nnsight_requests_open"


@pytest.fixture(scope="module")
def limited(gpt2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of three callers, each with four requests, of six in all."""
    folder = tmp_path_factory.mktemp("limited")
    keys = folder / "keys"
    keys.write_text("# for the tests\nann:key of ann\nbob:key of bob\ncarl:key of carl\n")
    flags = ["--api-keys-file", str(keys), "--max-concurrent", "4", "--max-requests", "6"]
    flags += ["--max-saves", str(MAX_SAVES), "--block-timeout", "1", "--log-format", "json"]
    flags += ["--max-body", str(MAX_BODY), "--max-bodies", "3000000"]
    flags += ["--max-edits", "3", "--edit-bytes", str(EDIT_BYTES)]
    with serving(folder, gpt2_path, *flags) as server:
        server.key = "key of carl"
        yield server


def client_of(server: Server, path: str, name: str) -> VLLM:
    return VLLM(path, serve=server.url, api_key=f"key of {name}")


def asking(server: Server, name: str, requests: int, **headers: str) -> httpx.Response:
    """The answer to some plain requests of a caller."""
    return sent(server, body_of(requests), name, **headers)


def sent(server: Server, body: Any, name: str = "carl", **headers: str) -> httpx.Response:
    """The answer to a body."""
    headers = {"Authorization": f"Bearer key of {name}", **headers}
    return httpx.post(f"{server.url}/v1/trace", content=body, headers=headers, timeout=60)


def body_of(requests: int, size: int = 0, compress: bool = False) -> bytes:
    """Plain requests, in a body of a size."""
    invokes = [InvokeData(prompt=PROMPT, sampling={"max_tokens": 2})] * requests
    return TraceMessage(invokes=invokes).frame([bytes(size)]).to_bytes(compress)


def measured(server: Server) -> dict[tuple[str, ...], float]:
    """Every sample of the metrics, by its name and what its labels say."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status().text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *s.labels.values()): s.value for s in samples}


def settled(server: Server) -> dict[tuple[str, ...], float]:
    """The same, once every request is over; that is a little after its answer."""
    while any((found := measured(server)).get((OPEN, kind)) for kind in ("trace", "openai")):
        time.sleep(0.05)
    return found


def logged(server: Server, **about: Any) -> list[dict[str, Any]]:
    """The lines about requests that say this."""
    lines = [json.loads(at) for at in server.log.read_text().splitlines() if at.startswith("{")]
    return [line for line in lines if about.items() <= line.items()]


def line_of(server: Server, **about: Any) -> dict[str, Any]:
    """The line about the one request that this is true of; it comes after the answer."""
    while not (lines := logged(server, **about)):
        time.sleep(0.05)
    (line,) = lines
    return line


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """While the engine stands still, so that what is in it stays."""
    below = server.processes()[1:]
    for process in below:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in below:
            # One that was told to end meanwhile may be gone.
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


@contextmanager
def filled(server: Server, size: int = 0, **requests: int) -> Iterator[list[httpx.Response]]:
    """While so many requests of each are in the engine; gives their answers in the end.

    Args:
        size: how large their bodies are.
    """
    answers: list[httpx.Response] = []

    def ask(name: str, count: int) -> None:
        answers.append(sent(server, body_of(count, size), name))

    asks = [threading.Thread(target=ask, args=pair) for pair in requests.items()]
    with stopped(server):
        for thread in asks:
            thread.start()
        while measured(server)["nnsight_engine_requests",] < sum(requests.values()):
            time.sleep(0.05)
        yield answers
    for thread in asks:
        thread.join()


def test_each_key_has_a_name_and_no_other_is_let_in(limited, gpt2_path):
    for name in ("ann", "bob"):
        assert client_of(limited, gpt2_path, name).generate(PROMPT, max_tokens=1)
    with pytest.raises(PolicyError):
        client_of(limited, gpt2_path, "dora").generate(PROMPT, max_tokens=1)
    for name in ("ann", "bob", ""):
        assert line_of(limited, caller=name, kind="trace")
    assert "key of" not in limited.log.read_text()


def test_a_key_has_so_many_requests_in_the_engine_and_no_more(limited, gpt2_path):
    with filled(limited, ann=3) as answers:
        with pytest.raises(BusyError, match="2 more .* 3 of this key .* may have 4") as caught:
            with client_of(limited, gpt2_path, "ann").trace(max_tokens=1) as tracer:
                for _ in range(2):
                    with tracer.invoke(PROMPT):
                        pass
        assert caught.value.retry_after == 1.0
        refused = asking(limited, "ann", 2)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert [answer.status_code for answer in answers] == [200]
    assert asking(limited, "ann", 4).status_code == 200


def test_the_engine_takes_so_many_requests_of_all_keys(limited):
    with filled(limited, ann=4, bob=2) as answers:
        refused = asking(limited, "carl", 1)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["type"] == "BusyError"
        assert "6 are in the engine" in refused.json()["error"]["message"]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert asking(limited, "carl", 1).status_code == 200


def test_what_could_never_be_taken_is_told_so(limited):
    refused = asking(limited, "ann", 5)
    assert refused.status_code == 413 and "retry-after" not in refused.headers
    assert refused.json()["error"]["limit"] == 4
    assert "several traces" in refused.json()["error"]["message"]


def completed(server: Server, prompt: Any, **options: Any) -> httpx.Response:
    """The answer to a completion that is asked for as OpenAI's clients do."""
    headers = {"Authorization": "Bearer key of ann"}
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **options}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_each_prompt_of_a_completion_counts_and_n_does_not(limited):
    for prompts in (["a"] * 5, [[1, 2]] * 5):
        refused = completed(limited, prompts)
        assert refused.status_code == 413 and refused.json()["error"]["limit"] == 4
    with filled(limited, ann=3):
        refused = completed(limited, ["a", "b"])
        assert refused.status_code == 429 and "3 of this key" in refused.text
    for prompts, count in ((["a"] * 4, 4), ([1, 2, 3, 4, 5], 1)):
        taken = completed(limited, prompts, n=2)
        assert len(taken.json()["choices"]) == 2 * count
        line = line_of(limited, id=taken.headers["x-request-id"])
        assert (line["requests"], line["outcome"]) == (count, "ok")


def test_a_completion_whose_body_is_too_large_is_refused_as_others_are(limited):
    headers = {"Authorization": "Bearer key of ann", "Content-Type": "application/json"}
    parts = [b'{"prompt": "', b"a" * MAX_BODY, b'"}']
    url = f"{limited.url}/v1/completions"
    answer = httpx.post(url, content=iter(parts), headers=headers)
    assert answer.status_code == 413 and answer.json()["error"]["limit"] == MAX_BODY
    line = line_of(limited, id=answer.headers["x-request-id"])
    assert (line["status"], line["outcome"]) == (413, "refused")


@pytest.mark.parametrize("way", ["whole", "chunked", "packed"])
def test_bodies_take_so_much_memory_and_no_more(limited, way):
    body = body_of(1, LARGE, compress=way == "packed")
    assert (len(body) > LARGE) is (way != "packed")
    with filled(limited, LARGE, ann=1) as answers:
        refused = sent(limited, iter([body]) if way == "chunked" else body)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "BusyError"
        assert "--max-bodies" in refused.json()["error"]["message"]
        assert LARGE < measured(limited)["nnsight_body_bytes",] < LARGE + 1000
    assert [answer.status_code for answer in answers] == [200]
    assert sent(limited, body).status_code == 200
    assert settled(limited)["nnsight_body_bytes",] == 0


def test_every_body_is_limited_and_not_only_frames(limited):
    body = b'{"ids": ["' + bytes(MAX_BODY) + b'"]}'
    headers = {"Authorization": "Bearer key of ann", "Content-Type": "application/json"}
    for content in (body, iter([body])):
        answer = httpx.post(f"{limited.url}/v1/kept/free", content=content, headers=headers)
        assert answer.status_code == 413 and answer.json()["error"]["limit"] == MAX_BODY


@pytest.fixture
def editors(limited: Server, gpt2_path: str) -> Iterator[tuple[VLLM, VLLM]]:
    with client_of(limited, gpt2_path, "ann") as ann, client_of(limited, gpt2_path, "bob") as bob:
        yield ann, bob
        ann.clear_edits()
        bob.clear_edits()


def install(model: VLLM, size: int = 0, **about: Any) -> Edit:
    """An edit that uses a tensor of so many bytes."""
    vector = torch.zeros(size // 4)
    with model.edit("probe", **about) as (tracer, edit):
        seen = vector.sum().save()
    return edit


def test_a_key_has_so_many_edits_and_no_more(limited, editors):
    ann, bob = editors
    edits = [install(ann) for _ in range(3)]
    with pytest.raises(BusyError, match=r"3 edits of this key .* 3 \(--max-edits\)") as caught:
        install(ann)
    assert caught.value.retry_after is None
    install(bob)
    # One that was cleared is there for as long as a request needs it.
    with filled(limited, ann=1):
        edits[0].clear()
        with pytest.raises(BusyError, match="requests that go on"):
            install(ann)
    assert limited.empty()
    install(ann, ttl=0.1)
    time.sleep(0.2)
    install(ann)
    assert [info.owner for info in bob.edits].count("ann") == 3


def test_the_edits_of_a_key_take_so_much_memory_and_no_more(editors):
    ann, bob = editors
    edit = install(ann, 300_000)
    assert 300_000 < edit.info.bytes < 310_000
    with pytest.raises(BusyError, match=r"of this key have 30\d+ bytes.*--edit-bytes"):
        install(ann, 100_000)
    with pytest.raises(ValueError, match=f"have {EDIT_BYTES} here"):
        install(ann, EDIT_BYTES)
    install(ann, 50_000)
    install(bob, 300_000)
    edit.clear()
    install(ann, 300_000)


def test_a_request_that_saves_too_much_is_an_error_of_its_own(limited, gpt2_path):
    model = client_of(limited, gpt2_path, "ann")
    rows = len(model.tokenizer(PROMPT)["input_ids"])
    with pytest.raises(SaveLimitError, match=f"large.*does not fit.* {MAX_SAVES} bytes"):
        with model.trace(max_tokens=2, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT):
                small = model.transformer.h[0].output.save()
                large = model.logits.expand(MAX_SAVES, -1).save()
            with tracer.invoke(PROMPT):
                other = model.transformer.h[1].output.save()
                result = tracer.result.save()
    assert small.shape == other.shape == (rows, 96)
    assert len(result.outputs[0].token_ids) == 2 and limited.live() == 0


@pytest.mark.parametrize(("count", "fits"), [(1, True), (3, False)])
def test_sequences_of_a_request_share_what_it_may_bring_home(limited, gpt2_path, count, fits):
    model = client_of(limited, gpt2_path, "ann")
    caught: list[Exception] = []
    try:
        with model.trace(PROMPT, n=count, max_tokens=1):
            values = model.logits.new_zeros(5_000).save()
    except* SaveLimitError as group:
        caught += group.exceptions
    assert bool(caught) is not fits


def test_what_is_streamed_ends_where_it_is_too_much(limited, gpt2_path):
    came: list[Any] = []

    async def watch() -> None:
        model = VLLM(gpt2_path, serve=limited.url, api_key="key of ann", mode="async")
        with model.trace(PROMPT, max_tokens=240, ignore_eos=True) as tracer:
            hidden = [].save()
            for _ in tracer.all():
                hidden.append(model.transformer.h[3].output[-1])
        try:
            async for output in tracer.backend:
                came.extend(output.new_saves.get("hidden", ()))
        finally:
            await model.aclose()

    with pytest.raises(SaveLimitError, match="hidden.*does not fit"):
        asyncio.run(watch())
    size = 96 * 4
    assert MAX_SAVES // size // 2 < len(came) <= MAX_SAVES // size


def test_a_block_that_holds_the_engine_ends_and_the_others_go_on(limited, gpt2_path):
    model = client_of(limited, gpt2_path, "bob")
    with pytest.raises(BlockTimeout):
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                while True:
                    pass
            with tracer.invoke(PROMPT):
                other = model.transformer.h[1].output.save()
    assert other.shape[1] == 96
    line = line_of(limited, kind="trace", outcome="block_error", caller="bob")
    assert line["error"].startswith("BlockTimeout") and line["level"] == "warning"


def test_what_a_request_came_to_is_one_line(limited, gpt2_path):
    answer = asking(limited, "carl", 2, **{"X-Request-Id": "mine/1"})
    assert answer.headers["x-request-id"] == "mine/1"
    line = line_of(limited, id="mine/1")
    assert line["received"] == int(answer.request.headers["content-length"])
    assert line["sent"] == len(answer.content) and line["seconds"] > 0
    said = ("caller", "kind", "method", "path", "status", "outcome", "requests", "tokens")
    expected = ["carl", "trace", "POST", "/v1/trace", 200, "ok", 2, 4]
    assert [line[name] for name in said] == expected
    assert (line["level"], line["error"], line["saved"]) == ("info", None, 0)


@pytest.mark.parametrize("given", ["", "two words", "x" * 200, "a\tb"])
def test_a_name_for_a_request_that_is_none_is_replaced(limited, given):
    answer = asking(limited, "carl", 1, **{"X-Request-Id": given})
    name = answer.headers["x-request-id"]
    assert name != given and len(name) == 32 and line_of(limited, id=name)


def test_the_metrics_tell_what_has_been(limited, gpt2_path):
    model = client_of(limited, gpt2_path, "ann")
    before = measured(limited)
    with model.trace(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        hidden = [].save()
        for _ in tracer.all():
            hidden.append(model.transformer.h[3].output)
    assert asking(limited, "dora", 1).status_code == 401
    after = measured(limited)

    def grown(*name: str) -> float:
        return after[name] - before.get(name, 0.0)

    saved = sum(value.numel() * 4 for value in hidden)
    assert grown("nnsight_requests_total", "ann", "trace", "ok") == 1
    assert grown("nnsight_requests_total", "", "trace", "refused") == 1
    assert grown("nnsight_saved_bytes_total") == saved
    assert grown("nnsight_steps_total", "eager") == 3
    assert grown("nnsight_block_seconds_total") > 0
    assert grown("nnsight_sent_bytes_total", "trace") > saved
    assert grown("nnsight_received_bytes_total", "trace") > 0
    assert grown("nnsight_request_seconds_count", "trace") == 2
    assert after["nnsight_engine_up",] == 1 and after["nnsight_engine_requests",] == 0
    assert after["nnsight_blocks_live",] == after["nnsight_edits_installed",] == 0
    assert after["nnsight_kept_bytes",] == after["nnsight_requests_open", "trace"] == 0
    generated = [n for n in after if n[0] == "vllm:generation_tokens_total"]
    assert sum(after[name] - before[name] for name in generated) == 3


def grown(limited: Server, before: dict[tuple[str, ...], float], *names: str) -> list[float]:
    """By how much metrics have grown since."""
    after = settled(limited)
    places = [next(place for place in after if place[0] == name) for name in names]
    return [after[place] - before.get(place, 0.0) for place in places]


def test_the_metrics_count_a_step_once_and_all_that_is_saved(limited, editors):
    ann, _ = editors
    names = ("nnsight_steps_total", "nnsight_saved_bytes_total", "nnsight_block_seconds_total")
    with ann.edit("probe") as (tracer, edit):
        for _ in tracer.all():
            ann.transformer.h[3].output.norm()
    before = settled(limited)
    with ann.trace(PROMPT, max_tokens=4, ignore_eos=True) as tracer:
        numbers = [float(n) / 3 for n in range(1000)].save()
        for _ in tracer.all():
            ann.transformer.h[3].output
    steps, saved, seconds = grown(limited, before, *names)
    assert (steps, saved) == (4, 8 * len(numbers)) and seconds > 0
    before = settled(limited)
    assert completed(limited, ["Hello", "Bye"], edits=["probe"]).status_code == 200
    steps, saved, seconds = grown(limited, before, *names)
    assert (steps, saved) == (8, 0) and seconds > 0


def test_a_step_ran_as_its_slowest_block_had_it():
    steps = Steps()
    steps.take({"key": "0", "ways": {"plain": 3, "deferred": 1}})
    steps.take({"key": "0", "ways": {"plain": 1, "eager": 2}, "edit": "a"})
    steps.take({"key": "0", "ways": {"plain": 1}, "sequence": 1})
    assert steps.new() == {"eager": 2, "plain": 3} and steps.new() == {}
    steps.take({"key": "0", "ways": {"plain": 6}, "edit": "b"})
    assert steps.new() == {"plain": 2}


def test_an_engine_that_hangs_lives_and_is_not_ready(limited):
    assert httpx.get(f"{limited.url}/ready").status_code == 200
    with stopped(limited):
        assert httpx.get(f"{limited.url}/health").status_code == 200
        refused = httpx.get(f"{limited.url}/ready", timeout=30)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "3"
        assert "has not answered for 3 seconds" in refused.json()["error"]["message"]
    assert httpx.get(f"{limited.url}/ready", timeout=30).status_code == 200


@pytest.mark.parametrize(("of_one", "in_all"), [(10, 5), (5, 10), (5, 5)])
def test_a_body_that_is_too_large_names_the_option_that_says_so(of_one, in_all):
    bodies = Bodies(of_one, in_all)
    with pytest.raises(Refused) as refused:
        Body(bodies).expect(6)
    option = "--max-bodies" if in_all < of_one else "--max-body"
    assert str(refused.value.error).endswith(f"a larger {option}.")
    assert bodies.of_one == 5 and bodies.held == 0
