"""Plain HTTP straight to a server of this machine: what comes is put where it stays at once.

Between machines the network is what a large answer waits for. On one machine it is the copying in
between, of which httpx's own transport does the most, and that it is done in small pieces. So here
the standard library's client carries httpx's requests: it can read a body into given memory.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx

from nnsight_core.wire.frames import Frame, FrameReader

INTO = "read_into"
"""The extension of a response that puts what comes into given memory, and says how much."""
_PIECE = 1 << 16
_MOST = 1 << 24
_What = TypeVar("_What")
_Got = TypeVar("_Got")
_IDLE = 5.0
"""Seconds that an unused connection is kept, as long as httpx keeps its own."""


class DirectTransport(httpx.BaseTransport):
    """Carries requests over connections of its own, without TLS and without proxies.

    Args:
        probe: is given each new connection.

    Attributes:
        idle: the connections that wait for the next request, with the time since they do.

    Example:
        >>> client = httpx.Client(mounts={"http://127.0.0.1:6677": DirectTransport(keep_alive)})
    """

    def __init__(self, probe: Callable[[socket.socket], None] = lambda _: None) -> None:
        self.idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._probe = probe

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions.get("timeout", {})
        connection = self._unused() or self._connected(request.url, limits.get("connect"))
        try:
            sent = _send(connection, request, limits.get("write"))
            connection.sock.settimeout(limits.get("read"))
            with _reading():
                answer = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        body = _Body(answer, connection, self.idle if sent else None)
        headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.getheaders()]
        about = {"http_version": b"HTTP/1.1", INTO: body.read_into}
        return httpx.Response(answer.status, headers=headers, stream=body, extensions=about)

    def close(self) -> None:
        while self.idle:
            self.idle.pop()[0].close()

    def _unused(self) -> http.client.HTTPConnection | None:
        """A connection that the server has not closed meanwhile."""
        while self.idle:
            connection, since = self.idle.pop()
            if time.monotonic() - since < _IDLE and _silent(connection.sock):
                return connection
            connection.close()
        return None

    def _connected(self, url: httpx.URL, limit: float | None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=limit)
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        self._probe(connection.sock)
        return connection


class _Body(httpx.SyncByteStream):
    """The body of an answer; once all of it was read, its connection takes another request."""

    def __init__(
        self,
        answer: http.client.HTTPResponse,
        connection: http.client.HTTPConnection,
        idle: list[tuple[http.client.HTTPConnection, float]] | None,
    ) -> None:
        self._answer = answer
        self._connection = connection
        self._idle = idle

    def __iter__(self) -> Iterator[bytes]:
        # Of a body whose length is known, `read1` would not tell the end.
        read = self._answer.read1 if self._answer.chunked else self._answer.read
        while piece := self._taken(read, _PIECE):
            yield piece

    def read_into(self, room: memoryview) -> int:
        """Put what comes into some memory; gives how much that was, 0 at the end."""
        return self._taken(self._answer.readinto, room[:_MOST])

    def _taken(self, read: Callable[[_What], _Got], what: _What) -> _Got:
        # After an error, the connection is in the middle of something.
        idle, self._idle = self._idle, None
        with _reading():
            got = read(what)
            if not got and self._answer.length:
                raise http.client.IncompleteRead(b"", self._answer.length)
        self._idle = idle
        return got

    def close(self) -> None:
        idle, self._idle = self._idle, None
        whole = self._answer.isclosed() and not self._answer.will_close
        self._answer.close()
        if whole and idle is not None:
            idle.append((self._connection, time.monotonic()))
        else:
            self._connection.close()


def frames_in(response: httpx.Response, reader: FrameReader) -> Iterator[Frame]:
    """The frames of an answer, as they come.

    Raises:
        ProtocolError: it is no stream of frames, or breaks off inside one.
    """
    into = response.extensions.get(INTO)
    for chunk in response.iter_raw():
        yield from reader.feed(chunk)
        while into is not None and reader.room and (count := into(reader.room)):
            frame = reader.filled(count)
            if frame is not None:
                yield frame
    reader.end()


def _send(
    connection: http.client.HTTPConnection, request: httpx.Request, limit: float | None
) -> bool:
    """Send a request; gives whether all of it was taken."""
    connection.sock.settimeout(limit)
    connection.putrequest(
        request.method,
        request.url.raw_path.decode("ascii"),
        skip_host=True,
        skip_accept_encoding=True,
    )
    for name, value in request.headers.raw:
        connection.putheader(name, value)
    try:
        connection.endheaders()
        assert isinstance(request.stream, httpx.SyncByteStream)
        for part in request.stream:
            connection.send(part)
    except TimeoutError as error:
        raise httpx.WriteTimeout(str(error)) from error
    except ConnectionError:
        # A server that refuses a body before it has all of it has said why.
        return False
    except OSError as error:
        raise httpx.WriteError(str(error)) from error
    return True


@contextmanager
def _reading() -> Iterator[None]:
    """What goes wrong while an answer is read, as httpx has it."""
    try:
        yield
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except http.client.HTTPException as error:
        raise httpx.RemoteProtocolError(str(error) or type(error).__name__) from error
    except OSError as error:
        raise httpx.ReadError(str(error)) from error


def _silent(connected: socket.socket) -> bool:
    """Whether nothing has come that nobody asked for, such as the connection's end."""
    connected.setblocking(False)
    try:
        connected.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
