"""The client's model, and servers that are none."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nnsight_client import VLLM
from nnsight_client import model as client_model
from nnsight_core import ProtocolError
from nnsight_core.wire.frames import MEDIA_TYPE
from nnsight_core.wire.messages import DoneMessage, PrintedMessage

DONE = DoneMessage().frame().to_bytes()


@contextmanager
def answering(
    body: bytes, kind: str = MEDIA_TYPE, status: int = 200, seen: list[str | None] | None = None
) -> Iterator[str]:
    """An HTTP server that always answers the same, and notes the keys that it sees."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if seen is not None:
                seen.append(self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def ask(url: str) -> None:
    model = VLLM("unused", serve=url)
    with model.trace("Hello"):
        logits = model.logits.save()


def test_without_a_server_it_says_what_to_do():
    model = VLLM("unused")
    with pytest.raises(ValueError, match=r"serve=URL.*dispatch=True"):
        with model.trace("Hello"):
            logits = model.logits.save()
    with pytest.raises(ValueError, match="No server is named"):
        model.tree


@pytest.mark.parametrize("url", ["127.0.0.1:6677", "ftp://host", "", "http://", "http://[::"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="no address|No server is named"):
        VLLM("unused", serve=url).generate("Hello")


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ProtocolError, match=r"No server answers at http://127\.0\.0\.1:1 "):
        ask("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((b"<html>", "text/html"), "no nnsight server: it answers a trace with text/html"),
        ((b"nothing here", "text/plain", 404), "no nnsight server: it answered 404"),
        ((b'{"error": "no"}', "application/json", 500), "no nnsight server: it answered 500"),
        ((b"",), "stopped before it had said everything"),
        ((PrintedMessage(key="0", text="Hi\n").frame().to_bytes(),), "stopped before"),
        ((DONE[:-4],), "broke off inside a frame"),
        ((DONE[:4] + b"\x07" + DONE[5:],), "version 7 of the protocol; this side knows 1"),
        ((b"garbage" * 9,), "no frame of the nnsight protocol"),
        ((PrintedMessage(key="9", text="Hi\n").frame().to_bytes(),), "speaks of an invoke '9'"),
    ],
)
def test_a_peer_that_speaks_otherwise_is_a_protocol_error(answer, says):
    with answering(*answer) as url, pytest.raises(ProtocolError, match=says):
        ask(url)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"protocol": 2, "tree": {}}', "speaks version 2 of the protocol; this client knows 1"),
        (b'{"status": "ok"}', "no nnsight server"),
        (b"[1]", "no nnsight server"),
        (b"<html>", "no nnsight server"),
    ],
)
def test_a_peer_of_another_kind_has_no_tree(body, says):
    with answering(body, "application/json") as url, pytest.raises(ProtocolError, match=says):
        VLLM("unused", serve=url).tree


def test_what_speaks_no_http_is_a_protocol_error():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ProtocolError, match="no nnsight server"):
            ask(f"http://127.0.0.1:{listening.getsockname()[1]}")


def test_an_engine_here_needs_the_worker(monkeypatch):
    monkeypatch.setattr(client_model, "WORKER", "nnsight_no_such_worker")
    with pytest.raises(ImportError, match=r"pip install 'nnsight-vllm-worker"):
        VLLM("unused", dispatch=True)


def test_a_model_runs_in_one_place():
    with pytest.raises(ValueError, match="dispatch=True"):
        VLLM("unused", serve="http://127.0.0.1:1", dispatch=True)


def test_an_engine_here_is_the_workers(monkeypatch, gpt2):
    import nnsight_vllm_worker

    monkeypatch.setattr(nnsight_vllm_worker, "VLLM", lambda *_, **__: gpt2)
    model = VLLM("unused", dispatch=True)
    with model.trace("The Eiffel Tower is in the city of", temperature=0.0, max_tokens=1):
        token = model.logits.argmax(-1).save()
    assert model.tokenizer.decode(token) == " Paris"
    assert model.tree is gpt2.tree
    assert model.generate("Hello", max_tokens=1)[0].finished


def test_importing_it_brings_neither_an_engine_nor_the_web():
    script = (
        "import sys, nnsight_client\n"
        "for name in ('vllm', 'nnsight_vllm_worker', 'fastapi', 'httpx'):\n"
        "    assert name not in sys.modules, name"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_misspelt_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="'server'.*'serve'"):
        VLLM("model", server="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="'sync' or 'async'"):
        VLLM("model", mode="asink")
