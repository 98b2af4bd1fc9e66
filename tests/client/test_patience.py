"""What is sent anew, and what never is."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest

from nnsight_client import VLLM, patience
from nnsight_core import BusyError, ProtocolError
from nnsight_core.outputs import RequestOutput
from nnsight_core.wire.frames import MEDIA_TYPE, join
from nnsight_core.wire.messages import DoneMessage, EndedMessage, FinishedMessage

FINISHED = FinishedMessage(key="0", output=RequestOutput(request_id="0", finished=True)).frame()
ANSWER = join([FINISHED, DoneMessage().frame()])
OK = f"HTTP/1.1 200 OK\r\nContent-Type: {MEDIA_TYPE}\r\nContent-Length: {len(ANSWER)}\r\n\r\n"
MODULES = '{"model": "m", "engine": "e", "modules": {"": {"cls": "M"}}}'
TREE = f'{{"protocol": 1, "sampling": [], "tree": {MODULES}}}'


def busy(status: int = 429, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Busy", "Content-Length: 0", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def tree() -> bytes:
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(TREE)}\r\n\r\n{TREE}".encode()


@contextmanager
def saying(*answers: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that gives one answer after the other, each over a connection of its own.

    It reads a request whole before it answers; an empty answer ends the connection without a word.
    """
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer, peer.makefile("rb") as lines:
                    asked.append(lines.readline().decode().split(" H")[0])
                    size = 0
                    while (line := lines.readline().strip()) != b"":
                        if line.lower().startswith(b"content-length:"):
                            size = int(line.split(b":")[1])
                    lines.read(size)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.close()


@pytest.fixture(autouse=True)
def waits(monkeypatch, tmp_path):
    """How long was waited, without waiting."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[float] = []
    monkeypatch.setattr(patience, "sleep", found.append)

    async def noted(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(patience, "sleep_async", noted)
    return found


def test_a_busy_server_is_asked_again_when_it_says(waits):
    answers = [busy(429, "Retry-After: 2"), busy(503, "Retry-After: 0"), OK.encode() + ANSWER]
    with saying(*answers) as (url, asked):
        assert VLLM("unused", serve=url).generate("Hello")[0].finished
    assert asked == ["POST /v1/trace"] * 3 and waits == [2.0, 0.0]


def test_a_date_is_taken_by_the_clock_of_the_server(waits):
    then = formatdate(5_000_000_000, usegmt=True), formatdate(5_000_000_007, usegmt=True)
    first = busy(503, f"Date: {then[0]}", f"Retry-After: {then[1]}")
    with saying(first, OK.encode() + ANSWER) as (url, _):
        assert VLLM("unused", serve=url).generate("Hello")[0].finished
    assert waits == [7.0]


def test_there_is_an_end_to_it(waits):
    with saying(*[busy(429, "Retry-After: 1")] * 3) as (url, asked):
        with pytest.raises(BusyError) as caught:
            VLLM("unused", serve=url, retries=2).generate("Hello")
    assert caught.value.retry_after == 1.0 and len(asked) == 3 and waits == [1.0, 1.0]


@pytest.mark.parametrize("answer", [busy(429, "Retry-After: 3600"), busy(429, "Retry-After: soon")])
def test_nobody_waits_for_an_hour_or_for_what_says_nothing(waits, answer):
    with saying(answer) as (url, asked):
        with pytest.raises(BusyError):
            VLLM("unused", serve=url).generate("Hello")
    assert len(asked) == 1 and waits == []


def test_a_server_that_has_only_ended_is_not_waited_for(waits):
    with saying(busy(503)) as (url, asked), pytest.raises(ProtocolError, match="503"):
        VLLM("unused", serve=url).generate("Hello")
    assert len(asked) == 1 and waits == []


def test_a_trace_that_was_sent_is_never_sent_again(waits):
    with saying(b"", OK.encode() + ANSWER) as (url, asked):
        with pytest.raises(ProtocolError, match="broke"):
            VLLM("unused", serve=url).generate("Hello")
    assert asked == ["POST /v1/trace"] and waits == []


def test_what_only_asks_is_asked_again(waits):
    with saying(b"", tree()) as (url, asked):
        assert VLLM("unused", serve=url).tree.engine == "e"
    assert asked == ["GET /v1/model"] * 2 and len(waits) == 1


def test_a_connection_that_could_not_be_made_is_tried_again(waits, monkeypatch):
    tries: list[float] = []
    monkeypatch.setattr(patience, "sleep", tries.append)
    with pytest.raises(ProtocolError, match="No server answers"):
        VLLM("unused", serve="http://127.0.0.1:1").generate("Hello")
    assert tries == [0.1, 0.2, 0.4]
    with pytest.raises(ProtocolError, match="No server answers"):
        VLLM("unused", serve="http://127.0.0.1:1", retries=0).generate("Hello")
    assert len(tries) == 3


def test_a_server_that_comes_up_meanwhile_is_found(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started = []

    def up(_: float) -> None:
        if not started:
            started.append(socket.create_server(("127.0.0.1", port)))
            threading.Thread(target=lambda: _answer(started[0]), daemon=True).start()

    monkeypatch.setattr(patience, "sleep", up)
    assert VLLM("unused", serve=f"http://127.0.0.1:{port}").generate("Hello")[0].finished
    started[0].close()


def _answer(listening: socket.socket) -> None:
    peer, _ = listening.accept()
    with peer:
        peer.recv(1 << 16)
        peer.sendall(OK.encode() + ANSWER)
        time.sleep(0.1)


def test_the_same_for_asyncio(waits):
    async def ask(url: str) -> list[RequestOutput]:
        model = VLLM("unused", serve=url, mode="async", retries=1)
        try:
            return await model.generate("Hello")
        finally:
            await model.aclose()

    with saying(busy(429, "Retry-After: 2"), OK.encode() + ANSWER) as (url, asked):
        assert asyncio.run(ask(url))[0].finished
    assert len(asked) == 2 and waits == [2.0]
    with saying(b"", OK.encode() + ANSWER) as (url, asked):
        with pytest.raises(ProtocolError, match="broke"):
            asyncio.run(ask(url))
    assert len(asked) == 1


def test_an_answer_that_breaks_off_is_an_error_with_what_had_arrived():
    ended = EndedMessage(key="0", saves={"seen": 7}).frame().to_bytes()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {MEDIA_TYPE}\r\nTransfer-Encoding: chunked\r\n\r\n"
    part = head.encode() + f"{len(ended):x}\r\n".encode() + ended + b"\r\n"
    with saying(part) as (url, asked):
        model = VLLM("unused", serve=url)
        with pytest.raises(ProtocolError, match="broke") as caught:
            with model.trace("Hello"):
                seen = model.logits.shape[0].save()
    assert caught.value.arrived == {"seen": 7} and len(asked) == 1
