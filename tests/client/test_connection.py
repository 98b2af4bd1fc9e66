"""Ways to a server: certificates and proxies as httpx has them, and connections that are probed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn
from cryptography import x509

from nnsight_client import VLLM, configure
from nnsight_client.connection import connect, connect_async
from nnsight_core import ProtocolError
from nnsight_core.wire.frames import VERSION

TREE = {"model": "m", "engine": "of a server", "modules": {"": {"cls": "M"}}}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No proxies and no authorities but a test's own, and nothing known from earlier."""
    for name in (*PROXIES, "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


async def app(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    body = json.dumps({"protocol": VERSION, "sampling": [], "tree": TREE}).encode()
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


class Uvicorn(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass  # they belong to the main thread

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def serving(**ssl: Any) -> Iterator[str]:
    """A real server, over TLS if a certificate is given."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Uvicorn(uvicorn.Config(app, log_level="error", lifespan="off", **ssl))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        yield f"{'https' if ssl else 'http'}://localhost:{port}"
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def secure(authority, tmp_path_factory) -> Iterator[str]:
    """A server whose certificate only our own authority vouches for."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    issued = authority.issue_cert("localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(str(file))
    with serving(ssl_certfile=str(file)) as url:
        yield url


@pytest.fixture
def trusted(authority, tmp_path) -> str:
    file = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(file))
    return str(file)


@contextmanager
def proxying() -> Iterator[tuple[str, list[str]]]:
    """A forward proxy, and the addresses that it was asked for."""
    asked: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ports: list[int] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                writer.write(part)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target = head.split(b" ")[:2]
        asked.append(target.decode())
        place = target.split(b"://")[-1].split(b"/")[0].decode()
        there, thence = await asyncio.open_connection(*place.rsplit(":", 1))
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            thence.write(head)
        await asyncio.gather(copy(reader, thence), copy(there, writer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        async with server:
            await server.serve_forever()

    def begin() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(run())

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    ready.wait(10)
    yield f"http://127.0.0.1:{ports[0]}", asked
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    thread.join(10)


def reached(url: str, **how: Any) -> bool:
    with VLLM("unused", serve=url, **how) as model:
        return model.tree.engine == "of a server"


def test_a_certificate_that_nobody_vouches_for_is_refused(secure):
    with pytest.raises(ProtocolError, match="(?i)certificate"):
        reached(secure)


def test_the_authorities_are_those_of_the_environment(secure, trusted, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    assert reached(secure)


def subject_hash(file: str) -> str:
    """The name under which OpenSSL looks for an authority in a folder."""
    subject = x509.load_pem_x509_certificate(Path(file).read_bytes()).subject
    parts = [x509.NameAttribute(part.oid, str(part.value).lower()) for part in subject]
    inside = x509.Name(parts).public_bytes()[2:]  # without the header of the sequence
    return hashlib.sha1(inside).digest()[:4][::-1].hex()


def test_a_folder_of_authorities(secure, trusted, monkeypatch, tmp_path):
    folder = tmp_path / "authorities"
    folder.mkdir()
    os.symlink(trusted, folder / f"{subject_hash(trusted)}.0")
    with monkeypatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(folder))
        assert reached(secure)
    assert reached(secure, verify=folder)


def test_an_authority_may_be_named(secure, trusted):
    assert reached(secure, verify=trusted) and reached(secure, verify=False)
    with pytest.raises(ValueError, match="no such file"):
        reached(secure, verify="/no/such/authority.pem")
    with pytest.raises(ProtocolError, match="(?i)certificate"):
        reached(secure)


def test_a_proxy_is_used_where_the_environment_says_so(secure, trusted, monkeypatch):
    with proxying() as (proxy, asked), serving() as plain:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        assert reached(plain) and asked == [f"{plain}/v1/model"]
        assert reached(secure, verify=trusted) and len(asked) == 1
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        assert reached(secure, verify=trusted)
        assert asked[1:] == [secure.removeprefix("https://")]


@pytest.mark.parametrize("exempt", ["localhost", "*", "example.org,localhost"])
def test_some_hosts_are_reached_without_it(secure, trusted, monkeypatch, exempt):
    with proxying() as (proxy, asked):
        monkeypatch.setenv("ALL_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", exempt)
        assert reached(secure, verify=trusted) and asked == []
        monkeypatch.setenv("NO_PROXY", "example.org")
        assert reached(secure, verify=trusted) and len(asked) == 1


def test_a_proxy_that_is_not_there_is_an_error(secure, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with pytest.raises(ProtocolError, match="No server answers"):
        reached(secure)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("sekret-key\n", "ends with a line break"),
        ("sekret-key\r\n", "ends with a line break"),
        ("sekret-key ", "begins or ends with a space"),
        ("sekret\nkey", r"holds U\+000A as its character 7"),
        ("sekret\0key", r"holds U\+0000"),
        ("sekret\u200bkey", r"holds U\+200B"),
        ("sekret\udcffkey", r"holds U\+DCFF"),
    ],
)
def test_a_key_that_no_header_holds_is_refused_and_not_shown(key, says):
    url = "http://localhost:1"
    for use in (
        lambda: VLLM("unused", serve=url, api_key=key),
        lambda: VLLM("unused").generate("Hello", serve=url, api_key=key),
        lambda: configure(url, key),
        lambda: connect(url, key),
        lambda: connect_async(url, key),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            use()
        assert "sekret" not in str(caught.value)


def test_no_answer_is_asked_for_packed():
    for made in (connect("http://localhost:1", None), connect_async("http://localhost:1", "key")):
        assert made.headers["accept-encoding"] == "identity"


def probed(stream: Any) -> bool:
    connected = stream.get_extra_info("socket")
    return bool(connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_every_connection_is_probed(secure, trusted, monkeypatch):
    """A machine that is gone sends nothing, as does one that thinks: only probes tell."""
    with proxying() as (proxy, asked):
        for way in ({}, {"HTTPS_PROXY": proxy}):
            for name, value in way.items():
                monkeypatch.setenv(name, value)
            with connect(secure, None, trusted) as http:
                with http.stream("GET", "/v1/model") as answer:
                    assert probed(answer.extensions["network_stream"])
        assert len(asked) == 1


def test_so_is_one_for_asyncio(secure, trusted):
    async def ask() -> bool:
        async with connect_async(secure, None, trusted) as http:
            async with http.stream("GET", "/v1/model") as answer:
                return probed(answer.extensions["network_stream"])

    assert asyncio.run(ask())
