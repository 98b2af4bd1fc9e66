"""The backend that runs traces on a server, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import httpx

from nnsight_client.encoding import TraceEncoder
from nnsight_client.network import Trust, check_address, connect
from nnsight_client.patience import RETRIES, sending
from nnsight_client.refusals import error_of, no_server, other_version
from nnsight_core.backend import Event, Finished, Invoke
from nnsight_core.errors import ProtocolError
from nnsight_core.tree import ModelTree
from nnsight_core.wire.blocks import check_block, decode_event, known_errors
from nnsight_core.wire.frames import MEDIA_TYPE, VERSION, Frame, FrameReader
from nnsight_core.wire.messages import DoneMessage, read_message


class HttpBackend:
    """Runs invokes on an nnsight server. See `nnsight_core.Backend`.

    Args:
        url: the server's address, such as `http://127.0.0.1:6677`.
        api_key: the key that it wants, if it wants one.
        tokenizer: gives the model's tokenizer if this process has loaded it.
        tree: gives the model's tree if it is known here.
        verify: what the server's certificate is checked against; see `connect`.
        retries: how often what surely has not run is sent anew.

    Raises:
        ValueError: `url` is no address.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        tokenizer: Callable[[], Any] = lambda: None,
        tree: Callable[[], ModelTree | None] = lambda: None,
        verify: Trust = True,
        retries: int = RETRIES,
    ) -> None:
        self.url = check_address(url)
        self._tokenizer = tokenizer
        self._tree = tree
        self._retries = retries
        self._http = connect(self.url, api_key, verify)

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        encoder = TraceEncoder(self._tokenizer)
        sent: list[int] = []
        for index, invoke in enumerate(invokes):
            try:
                check_block(invoke, self._tree())
                encoder.add(invoke)
            except Exception as error:
                # With one invoke there is nothing that its error could take along.
                if len(invokes) == 1 or isinstance(error, TypeError):
                    raise
                yield Finished(index, None, error)
            else:
                sent.append(index)
        if not sent:
            return
        for frame in self._frames(encoder.frame()):
            message = read_message(frame)
            if isinstance(message, DoneMessage):
                return
            index = self._index(getattr(message, "key", ""), sent)
            yield decode_event(message, frame, index, known_errors(invokes[index]))
        raise ProtocolError(
            f"The server at {self.url} stopped before it had said everything. Its log says why."
        )

    def describe(self) -> ModelTree:
        """The tree of the model that is served.

        Raises:
            ProtocolError: no nnsight server answers, or one of another version.
        """
        with self._speaking():
            ask = partial(self._http.stream, "GET", "/v1/model")
            with sending(ask, self._retries, harmless=True) as response:
                response.read()
        if not response.is_success:
            raise error_of(response, self.url)
        try:
            answer = response.json()
            version = answer["protocol"]
        except (ValueError, TypeError, KeyError):
            raise no_server(self.url, "what it says of its model is no such thing") from None
        if version != VERSION:
            raise other_version(self.url, version)
        return ModelTree.model_validate(answer["tree"])

    def close(self) -> None:
        self._http.close()

    def _frames(self, frame: Frame) -> Iterator[Frame]:
        """Send a frame; the frames that come back, as they come."""
        parts = frame.parts()
        headers = {
            "Content-Type": MEDIA_TYPE,
            "Content-Length": str(sum(memoryview(part).nbytes for part in parts)),
        }
        reader = FrameReader()
        with self._speaking():

            def send() -> AbstractContextManager[httpx.Response]:
                content = (bytes(part) for part in parts)
                return self._http.stream("POST", "/v1/trace", content=content, headers=headers)

            with sending(send, self._retries) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response, self.url)
                kind = response.headers.get("content-type", "")
                if kind != MEDIA_TYPE:
                    raise no_server(self.url, f"it answers a trace with {kind or 'nothing'}")
                for chunk in response.iter_raw():
                    yield from reader.feed(chunk)
                reader.end()

    def _index(self, key: str, sent: list[int]) -> int:
        if key.isdecimal() and int(key) < len(sent):
            return sent[int(key)]
        raise ProtocolError(f"The server at {self.url} speaks of an invoke {key[:40]!r}.")

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """What goes wrong between here and the server is a `ProtocolError`."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ProtocolError(
                f"No server answers at {self.url} ({error}). Start one with `nnsight-serve MODEL`, "
                "or correct the address."
            ) from error
        except httpx.TransportError as error:
            raise ProtocolError(
                f"The connection to {self.url} broke: {error or type(error).__name__}. Either the "
                "server ended, or it is no nnsight server."
            ) from error
