"""The backend that runs traces on a server, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import httpx

from nnsight_client.addresses import check_address
from nnsight_client.asked import Asked
from nnsight_client.connection import Trust, connect, near, speaking, thinking
from nnsight_client.direct import frames_in
from nnsight_client.encoding import TraceEncoder
from nnsight_client.patience import RETRIES, sending
from nnsight_client.refusals import error_of, missing_in, no_server, other_version, refusal_in
from nnsight_client.served import Served
from nnsight_client.told import Told
from nnsight_core.backend import EditInfo, EditList, EditSpec, Event, Invoke
from nnsight_core.edits import owner
from nnsight_core.errors import LocationError, NNsightError
from nnsight_core.kept import Kept, KeptValues
from nnsight_core.sampling import SamplingNames
from nnsight_core.tree import ModelTree
from nnsight_core.wire.blocks import check_block
from nnsight_core.wire.frames import MEDIA_TYPE, VERSION, Frame, FrameReader, read_frame
from nnsight_core.wire.tokenizer import LIMIT, files_of


class HttpBackend:
    """Runs invokes on an nnsight server. See `nnsight_core.Backend` and `EditBackend`.

    Args:
        url: the server's address, such as `http://127.0.0.1:6677`.
        api_key: the key that it wants, if it wants one.
        tokenizer: gives the model's tokenizer if this process has loaded it.
        tree: gives the model's tree if it is known here.
        verify: what the server's certificate is checked against; see `connect`.
        retries: how often what surely has not run is sent anew.
        repo: the name or folder of the model that is asked for; None for any.

    Attributes:
        served: the model that it runs.
        url, verify, retries: as given.
        kept: what blocks kept on the server's engine for this process.
        told: what its answers have said of its state.
        held: contents of large tensors that the server has, as far as is known.

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
        repo: str | None = None,
    ) -> None:
        self.url = check_address(url)
        self.verify = verify
        self.retries = retries
        self.served = Served(repo, self.url)
        self.kept = KeptValues(self)
        self.told = Told()
        self.held: set[str] = set()
        self._tokenizer = tokenizer
        self._tree = tree
        self._http = connect(self.url, api_key, verify)
        self._names: SamplingNames | None = None
        # What edits use stays as long as they do.
        self._of_edits: dict[str, list[Kept]] = {}

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        asked = self.asked(invokes)
        yield from asked.refused
        if not asked.sent:
            return
        about = self.about()
        contents = set(asked.encoder.blobs)
        with asked.answered(about["freed"]):
            for frame in self._frames(lambda held: asked.encoder.frame(held, **about), contents):
                yield from asked.events(frame)

    def install(self, edit: EditSpec) -> EditInfo:
        encoder = self.encoded(edit)

        def ask(without: Collection[str]) -> httpx.Response:
            content = encoder.install(edit, owner(), without).to_bytes()
            how = {"headers": {"Content-Type": MEDIA_TYPE}, "timeout": thinking()}
            return self._send("POST", "/v1/edits", content=content, **how)

        with speaking(self.url):
            answer = ask(self.held)
            if missing_in(answer) is not None:
                self.held -= set(encoder.blobs)
                answer = ask(())
        return self.installed(answer, edit, encoder)

    def clear(self, ids: list[str] | None) -> None:
        if ids == []:
            return  # which the address cannot say
        params = {} if ids is None else {"id": ids}
        self._ask("DELETE", "/v1/edits", params=params)
        self.cleared(ids)

    def edits(self) -> list[EditInfo]:
        return EditList.model_validate(self._ask("GET", "/v1/edits").json()).edits

    def describe(self) -> ModelTree:
        """The tree of the model that is served.

        Raises:
            ProtocolError: no nnsight server answers, or one of another version.
        """
        response = self._ask("GET", "/v1/model")
        try:
            answer = response.json()
            version = answer["protocol"]
        except (ValueError, TypeError, KeyError):
            raise no_server(self.url, "what it says of its model is no such thing") from None
        if version != VERSION:
            raise other_version(self.url, version)
        self.served.take(response.headers)
        self._names = SamplingNames(answer["sampling"])
        return ModelTree.model_validate(answer["tree"])

    def tokenizer(self, known: str | None = None) -> dict[str, bytes] | None:
        """The files of the server's tokenizer, by name.

        Args:
            known: the digest of those that are here; if the server has the same, it gives none.

        Raises:
            NotSupportedError: it has none to hand out.
        """
        headers = {"If-None-Match": f'"{known}"'} if known else {}
        with speaking(self.url):
            response = self._send("GET", "/v1/tokenizer", headers=headers, timeout=thinking())
        if response.status_code == 304:
            return None
        check(response, self.url)
        return files_of(read_frame(response.content, LIMIT))

    def let_go(self, ids: list[str], why: str) -> None:
        """Let kept values go. See `nnsight_core.kept.Holder`."""
        self._ask("POST", "/v1/kept/free", json={"ids": ids, "why": why})

    def list_kept(self) -> list[tuple[str, int, float]]:
        """The kept values of this process that are there. See `nnsight_core.kept.Holder`."""
        known = {handle.id for handle in self.kept.handles()}
        rows = self._ask("GET", "/v1/kept").json()["kept"]
        return [(row["id"], row["bytes"], row["age"]) for row in rows if row["id"] in known]

    def close(self) -> None:
        try:
            self.kept.flush()
        except NNsightError:
            pass  # a server that is gone keeps nothing
        self.kept.close()
        self._http.close()

    # -- shared with the backend for asyncio -------------------------------------------------------

    def asked(self, invokes: list[Invoke], later: bool = False) -> Asked:
        """Some invokes, encoded for this server.

        Args:
            later: whether what they name is left for the server to check.

        Raises:
            TypeError: an unknown sampling argument, if the server has said which it knows.
        """
        if self._names is not None:
            self._names.check_invokes(invokes)
        check = _anything if later else self._check
        return Asked(invokes, self.url, self._tokenizer, check, self.kept, self.told)

    def about(self) -> dict[str, Any]:
        """What a trace tells the server besides its invokes."""
        return {"freed": self.kept.ended(), "zstd": not near(self.url)}

    def encoded(self, edit: EditSpec, later: bool = False) -> TraceEncoder:
        """The block of an edit, encoded for this server; `later` as in `asked`."""
        if not later:
            self._check(edit.invoke)
        encoder = TraceEncoder(self._tokenizer, self.kept)
        encoder.block(edit.invoke)
        return encoder

    def installed(self, answer: httpx.Response, edit: EditSpec, encoder: TraceEncoder) -> EditInfo:
        """The edit that a server has installed.

        Raises:
            Exception: it was refused.
        """
        refusal = refusal_in(answer, edit.invoke)
        if refusal is not None:
            raise refusal
        if not answer.is_success:
            raise error_of(answer, self.url)
        self.served.take(answer.headers)
        self.told.take(EditList.model_validate(answer.json()))
        info = EditInfo.model_validate(answer.json()["edit"])
        self.held |= set(encoder.blobs)
        self._of_edits[info.id] = encoder.handles
        return info

    def cleared(self, ids: list[str] | None) -> None:
        """Edits were cleared, or all."""
        for id in list(self._of_edits) if ids is None else ids:
            self._of_edits.pop(id, None)

    def _ask(self, method: str, path: str, **what: Any) -> httpx.Response:
        with speaking(self.url):
            response = self._send(method, path, **what)
        if not response.is_success:
            raise error_of(response, self.url)
        return response

    def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        send = partial(self._http.stream, method, path, **what)
        with sending(send, self.retries, harmless=method == "GET") as response:
            response.read()
        return response

    def _check(self, invoke: Invoke) -> None:
        """Refuse a block that names what is not there."""
        try:
            check_block(invoke, self._tree())
        except LocationError:
            # What was known may be out of date, or of another server.
            check_block(invoke, self.describe())

    def _frames(self, make: Callable[[Collection[str]], Frame], blobs: set[str]) -> Iterator[Frame]:
        """Send what is made; the frames that come back, as they come.

        Args:
            make: gives the frame to send, without the contents that the server has.
            blobs: the contents that it needs.
        """
        reader = FrameReader()
        for left_out in (self.held & blobs, set()):
            parts, headers = sendable(make(left_out), near(self.url))
            with speaking(self.url):
                how = {"content": parts, "headers": headers}
                send = partial(self._http.stream, "POST", "/v1/trace", **how)
                with sending(send, self.retries) as response:
                    if not response.is_success:
                        response.read()
                        if missing_in(response) is not None and left_out:
                            self.held -= blobs
                            continue
                    check(response, self.url)
                    self.served.take(response.headers)
                    self.held |= blobs
                    yield from frames_in(response, reader)
                    return


def _anything(_: Invoke) -> None:
    pass


def sendable(frame: Frame, near: bool) -> tuple[list[bytes], dict[str, str]]:
    """A frame as the pieces of a body, and its headers."""
    parts = [bytes(part) for part in frame.parts(compress=not near)]
    headers = {"Content-Type": MEDIA_TYPE, "Content-Length": str(sum(map(len, parts)))}
    return parts, headers


def check(response: httpx.Response, url: str) -> None:
    """Refuse an answer that is no stream of frames; its body has been read if it is a refusal.

    Raises:
        Exception: what the server says is wrong, or that it is none.
    """
    if not response.is_success:
        raise error_of(response, url)
    kind = response.headers.get("content-type", "")
    if kind != MEDIA_TYPE:
        raise no_server(url, f"it answers a trace with {kind or 'nothing'}")
