"""Straight connections to a server of this machine: as httpx's own, but for where bodies go."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import httpx
import pytest

from nnsight_client.connection import connect, speaking
from nnsight_client.direct import DirectTransport, frames_in
from nnsight_core import ProtocolError
from nnsight_core.wire.frames import Frame, FrameReader, join

PATIENCE = 20
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
FRAMES = [
    Frame({"n": 0}),
    Frame({"n": 1}, [os.urandom(3_000_001), b"", b"x"]),
    Frame({"n": 2}, [b"y" * 5]),
    Frame({"n": 3}, [os.urandom(1 << 25)]),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


Answer = Callable[[socket.socket, BinaryIO], None]


@contextmanager
def answering(*connections: list[Answer]) -> Iterator[str]:
    """A server that answers so on its first connection, its second and so on, and then closes it.

    What answers is given the connection once the head of a request was read from the stream.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answers in connections:
                peer, _ = listening.accept()
                with peer, peer.makefile("rb") as lines:
                    for answer in answers:
                        while lines.readline().strip():
                            pass
                        answer(peer, lines)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(PATIENCE)
        assert not thread.is_alive()


def sends(*parts: bytes) -> Answer:
    def send(peer: socket.socket, _: BinaryIO) -> None:
        for part in parts:
            peer.sendall(part)

    return send


def sized(body: bytes, length: int | None = None, status: str = "200 OK") -> Answer:
    length = len(body) if length is None else length
    return sends(f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body)


def chunked(body: bytes, size: int, end: bytes = b"0\r\n\r\n") -> Answer:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    return sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks, end)


def direct(client: httpx.Client, url: str) -> DirectTransport:
    found = client._transport_for_url(httpx.URL(url))
    assert isinstance(found, DirectTransport)
    return found


@pytest.mark.parametrize("size", [70_001, 1 << 19, 1 << 26])
def test_frames_are_read_whole_and_the_connection_serves_again(size: int) -> None:
    body = join(FRAMES)
    with (
        answering([chunked(body, size), sized(body), sized(b"", status="204 Empty")]) as url,
        connect(url, None) as client,
    ):
        for _ in range(2):
            with client.stream("GET", "/") as response:
                found = list(frames_in(response, FrameReader()))
            assert [frame.header for frame in found] == [frame.header for frame in FRAMES]
            for frame, sent in zip(found, FRAMES, strict=True):
                assert [bytes(b) for b in frame.buffers] == sent.buffers
        assert client.get("/").status_code == 204
        assert len(direct(client, url).idle) == 1


def test_a_frame_is_there_before_the_next_one_is_sent() -> None:
    first, second = (frame.to_bytes() for frame in FRAMES[1:3])
    read = threading.Event()

    def send(peer: socket.socket, lines: BinaryIO) -> None:
        chunked(first, 1 << 16, b"")(peer, lines)
        assert read.wait(PATIENCE)
        peer.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(second), second))

    with answering([send]) as url, connect(url, None) as client:
        with client.stream("GET", "/") as response:
            frames = frames_in(response, FrameReader())
            assert next(frames).header == {"n": 1}
            read.set()
            assert [frame.header for frame in frames] == [{"n": 2}]


@pytest.mark.parametrize("at", [0, 1, 10, 100_000])
def test_an_answer_that_breaks_off_is_an_error(at: int) -> None:
    body = FRAMES[1].to_bytes()[:at]
    for answer in (chunked(body, 1 << 20, b""), sized(body, length=at + 1)):
        with answering([answer]) as url, connect(url, None) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                with client.stream("GET", "/") as response:
                    list(frames_in(response, FrameReader()))
            assert not direct(client, url).idle


def test_a_stream_that_ends_inside_a_frame_is_an_error() -> None:
    body = FRAMES[1].to_bytes()[:100_000]
    with answering([chunked(body, 1 << 20)]) as url, connect(url, None) as client:
        with client.stream("GET", "/") as response:
            with pytest.raises(ProtocolError, match="broke off inside a frame"):
                list(frames_in(response, FrameReader()))


@pytest.mark.parametrize("answer", [sends(), sends(b"nonsense\r\n\r\n"), sends(b"HTTP/1.1 2")])
def test_what_is_no_answer_is_an_error(answer: Answer) -> None:
    with answering([answer]) as url, connect(url, None) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/")


def test_silence_is_an_error_of_its_own() -> None:
    over = threading.Event()

    def say_nothing(_: socket.socket, _lines: BinaryIO) -> None:
        over.wait(PATIENCE)

    with answering([say_nothing]) as url, connect(url, None) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.get("/", timeout=0.05)
        over.set()
        assert not direct(client, url).idle


def test_nobody_there_is_an_error_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with connect(url, None) as client, pytest.raises(httpx.ConnectError, match="refused"):
        client.get("/")


def test_an_idle_connection_that_was_closed_is_not_used_again() -> None:
    with answering([sized(b"one")], [sized(b"two")]) as url, connect(url, None) as client:
        assert client.get("/").text == "one"
        [(waiting, _)] = direct(client, url).idle
        # It is closed once its end can be read.
        waiting.sock.settimeout(PATIENCE)
        assert waiting.sock.recv(1, socket.MSG_PEEK) == b""
        assert client.get("/").text == "two"


def test_a_refusal_is_read_though_not_all_of_the_body_was_taken() -> None:
    def refuse(peer: socket.socket, lines: BinaryIO) -> None:
        sized(b"too large", status="413 Too Large")(peer, lines)
        peer.shutdown(socket.SHUT_WR)
        while lines.read(1 << 20):
            pass

    parts = [bytes(1 << 20)] * 8
    headers = {"Content-Length": str(1 << 23)}
    with answering([refuse]) as url, connect(url, None) as client:
        response = client.post("/", content=parts, headers=headers)
        assert response.status_code == 413 and response.text == "too large"


def test_leaving_an_answer_closes_its_connection() -> None:
    left = threading.Event()

    def send(peer: socket.socket, lines: BinaryIO) -> None:
        chunked(FRAMES[0].to_bytes(), 1 << 20, b"")(peer, lines)
        assert lines.read(1) == b""
        left.set()

    with answering([send]) as url, connect(url, None) as client:
        with client.stream("GET", "/") as response:
            assert next(frames_in(response, FrameReader())).header == {"n": 0}
        assert left.wait(PATIENCE) and not direct(client, url).idle


def test_what_is_sent_is_what_httpx_sends() -> None:
    heard: list[bytes] = []

    def hear(peer: socket.socket, lines: BinaryIO) -> None:
        heard.append(lines.read(5))
        sized(b"")(peer, lines)

    body = {"content": [b"he", b"llo"], "headers": {"Content-Length": "5"}}
    with answering([hear]) as url, connect(url, "a key") as client:
        with speaking(url):
            assert client.post("/v1/x?a=%20b", **body).status_code == 200
    assert heard == [b"hello"]


@pytest.mark.parametrize(
    "url, proxy, straight",
    [
        ("http://127.0.0.1:1", None, True),
        ("http://localhost:1", None, True),
        ("http://[::1]:1", None, True),
        ("https://127.0.0.1:1", None, False),
        ("http://example.test:1", None, False),
        ("http://127.0.0.1:1", "HTTP_PROXY", False),
        ("http://127.0.0.1:1", "ALL_PROXY", False),
    ],
)
def test_only_what_nothing_is_in_between_goes_straight(url, proxy, straight, monkeypatch) -> None:
    if proxy:
        monkeypatch.setenv(proxy, "http://127.0.0.1:2")
    with connect(url, None) as client:
        found = client._transport_for_url(httpx.URL(url))
        assert isinstance(found, DirectTransport) == straight
        elsewhere = client._transport_for_url(httpx.URL("http://127.0.0.1:3"))
        assert isinstance(elsewhere, httpx.HTTPTransport)
