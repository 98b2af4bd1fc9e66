"""The server's HTTP, spoken without the client."""

from __future__ import annotations

import itertools
import struct

import httpx
import pytest

from nnsight_core.backend import Invoke
from nnsight_core.errors import ProtocolError
from nnsight_core.wire.frames import MEDIA_TYPE, FrameReader
from nnsight_core.wire.messages import InvokeData, TraceMessage

PROMPT = "The Eiffel Tower is in the city of"


def asking(*invokes: InvokeData) -> bytes:
    return TraceMessage(invokes=list(invokes)).frame().to_bytes()


ASKING = asking(InvokeData(prompt=PROMPT, sampling={"max_tokens": 1}))


@pytest.fixture(scope="module")
def http(server_url):
    with httpx.Client(base_url=server_url, timeout=60) as client:
        yield client


def frames(body: bytes) -> list:
    reader = FrameReader()
    found = list(reader.feed(body))
    reader.end()
    return found


def test_health_says_ok(http):
    answer = http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_model_describes_what_is_served(http, gpt2_path):
    answer = http.get("/v1/model").json()
    assert answer["protocol"] == 1
    assert answer["model"] == gpt2_path == answer["tree"]["model"]
    assert answer["engine"].startswith("vllm ")
    assert {"name", "value", "forced", "reason"} <= answer["settings"][0].keys()
    assert answer["live"] == 0


def test_a_trace_answers_with_frames_and_says_when_it_is_done(http):
    body = asking(*[InvokeData(prompt=PROMPT, sampling={"max_tokens": 1})] * 2)
    answer = http.post("/v1/trace", content=body)
    assert answer.headers["content-type"] == MEDIA_TYPE
    found = [(frame.header["kind"], frame.header.get("key")) for frame in frames(answer.content)]
    assert sorted(found[:-1]) == [("finished", "0"), ("finished", "1")]
    assert found[-1] == ("done", None)


def framed(header: bytes) -> bytes:
    return struct.pack("<4sBBHIQ", b"NNSF", 1, 0, 0, len(header), 0) + header


def edited(at: int, value: int) -> bytes:
    return ASKING[:at] + bytes([value]) + ASKING[at + 1 :]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "0 frames"),
        (b"GET / HTTP/1.1 and so on", "no frame of the nnsight protocol"),
        (bytes(1000), "no frame of the nnsight protocol"),
        (ASKING[:-3], "broke off inside a frame"),
        (ASKING[:7], "broke off inside a frame"),
        (ASKING * 2, "2 frames"),
        (ASKING + b"more", "no frame"),
        (edited(4, 2), "version 2 of the protocol; this side knows 1"),
        (edited(5, 8), "no frame"),
        (ASKING.replace(b'"kind":"trace"', b'"kind":"tracy"'), "kind 'tracy'"),
        (ASKING.replace(b'"kind"', b'"kine"'), "unknown"),
        (framed(b'{"kind":'), "not JSON"),
        (framed(b"[" * 5000), "not JSON"),
        (framed(b"[]"), "does not list its buffers"),
        (framed(b'{"kind":"trace","buffers":[8]}'), "0 bytes where its header says 8"),
        (ASKING.replace(b'"invokes"', b'"involes"'), "not well formed"),
        (asking(), "no invokes"),
        (asking(InvokeData(prompt=PROMPT, block=0)), "block 0 of 0"),
        (
            asking(InvokeData(prompt={"$": "tensor", "dtype": "int64", "shape": [1], "b": 7})),
            "no index of the frame",
        ),
        (
            asking(InvokeData(prompt={"$": "path", "module": "os", "name": "system"})),
            "not accepted",
        ),
    ],
)
def test_what_is_not_well_formed_is_refused(http, body, says):
    answer = http.post("/v1/trace", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == ProtocolError.__name__ and says in error["message"]
    assert error["versions"] == [1]
    assert http.get("/v1/model").json()["live"] == 0


def test_every_cut_of_a_body_is_refused(http):
    for cut in range(0, len(ASKING), 17):
        assert http.post("/v1/trace", content=ASKING[:cut]).status_code == 400


@pytest.mark.parametrize("chunked", [True, False])
def test_a_large_body_is_refused_while_it_is_read(http, chunked):
    size = 5_000_000
    head = struct.pack("<4sBBHIQ", b"NNSF", 1, 0, 0, 1000, size)
    body = itertools.chain([head], itertools.repeat(bytes(100_000), 50))
    content = body if chunked else b"".join(body)
    answer = http.post("/v1/trace", content=content)
    assert answer.status_code == 413
    assert answer.json()["error"]["limit"] == 4_000_000
    assert "4000000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_unpacks_to_more_than_the_limit_is_refused(http):
    frame = TraceMessage(invokes=[InvokeData(prompt=PROMPT)]).frame([bytes(50_000_000)])
    packed = frame.to_bytes(compress=True)
    assert len(packed) < 100_000
    assert http.post("/v1/trace", content=packed).status_code == 413


def test_a_content_under_another_name_is_refused(http):
    from nnsight_client.encoding import TraceEncoder

    encoder = TraceEncoder(lambda: None)
    encoder.add(Invoke(PROMPT, {"max_tokens": 1}))
    encoder.blobs["0" * 40] = bytes(64)
    answer = http.post("/v1/trace", content=encoder.frame().to_bytes())
    assert answer.status_code == 400
    assert "is not the content" in answer.json()["error"]["message"]


def test_an_unknown_sampling_argument_comes_as_an_error_to_raise(http):
    body = asking(InvokeData(prompt=PROMPT, sampling={"max_toknes": 1}))
    answer = http.post("/v1/trace", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "TypeError"
    assert error["record"]["module"] == "builtins" and error["record"]["frames"] == []


def test_a_client_that_leaves_takes_its_requests_along(server, http):
    from nnsight_client import VLLM
    from nnsight_client.encoding import TraceEncoder

    model = VLLM("unused", serve=server.url)
    encoder = TraceEncoder(lambda: None)

    def add(self, invokes):
        for invoke in invokes:
            encoder.add(invoke)
        return iter(())

    model._servers.backend(server.url).submit = add.__get__(model)
    with model.trace(max_tokens=200, ignore_eos=True, temperature=1.0) as tracer:
        for _ in range(24):
            with tracer.invoke(PROMPT, n=2):
                print("begun")
                text = tracer.result.outputs[0].text.save()
    body = encoder.frame().to_bytes()
    with http.stream("POST", "/v1/trace", content=body) as answer:
        chunks = answer.iter_raw()
        first = next(FrameReader().feed(next(chunks)))
        assert first.header["kind"] == "printed"
        assert server.live() > 0
    assert server.empty(within=2)
    assert http.post("/v1/trace", content=ASKING).status_code == 200


def test_what_is_no_route_is_not_found(http):
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/trace").status_code == 405
