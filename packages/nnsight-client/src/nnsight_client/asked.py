"""One trace that a server is asked for: what is sent, and what its answer means here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_client.encoding import TraceEncoder
from nnsight_client.told import Told
from nnsight_core.backend import Ended, Event, Finished, Invoke, Saved, Went
from nnsight_core.errors import ProtocolError
from nnsight_core.kept import KeptValues
from nnsight_core.wire.blocks import decode_event, known_errors
from nnsight_core.wire.frames import Frame
from nnsight_core.wire.messages import AliveMessage, DoneMessage, WentMessage, read_message
from nnsight_core.wire.went import WentReader


class Asked:
    """The invokes of one trace, encoded; nothing of them is looked at after that.

    Args:
        url: the server's address, for messages.
        tokenizer: gives the model's tokenizer if this process has loaded it.
        check: refuses a block that names what is not there.
        kept: the values that stay on the server's engine.
        told: takes what the answer says of the server's state.

    Attributes:
        encoder: holds what is to be sent.
        refused: what is wrong with invokes that are not sent, as events.
        sent: which invokes are sent, by their index on the server.
        begun: whether the server has begun to answer.
        done: whether the server has said everything.

    Raises:
        Exception: what is wrong with a lone invoke, or how any invoke is written.
    """

    def __init__(
        self,
        invokes: list[Invoke],
        url: str,
        tokenizer: Callable[[], Any],
        check: Callable[[Invoke], None],
        kept: KeptValues,
        told: Told,
    ) -> None:
        self.encoder = TraceEncoder(tokenizer, kept)
        self.refused: list[Event] = []
        self.sent: list[int] = []
        self.begun = self.done = False
        self._invokes = invokes
        self._url = url
        self._kept = kept
        self._told = told
        self._went: dict[int, WentReader] = {}
        for index, invoke in enumerate(invokes):
            try:
                check(invoke)
                self.encoder.add(invoke)
            except Exception as error:
                # With one invoke there is nothing that its error could take along.
                if len(invokes) == 1 or isinstance(error, TypeError):
                    raise
                self.refused.append(Finished(index, None, error))
            else:
                self.sent.append(index)

    def events(self, frame: Frame) -> Iterator[Event]:
        """What a frame of the answer says.

        Raises:
            ProtocolError: no such frame belongs into an answer.
        """
        self.begun = True
        message = read_message(frame)
        if isinstance(message, AliveMessage):
            return
        if isinstance(message, DoneMessage):
            self.done = True
            if message.edits is not None:
                self._told.take(message.edits)
                self._told.keep_seconds = message.keep_seconds
            return
        index = self._index(getattr(message, "key", ""))
        if isinstance(message, WentMessage):
            reader = self._went.setdefault(index, WentReader())
            # Each is an object of its own, since what was saved by then is put into it.
            yield Went(index, reader.output(message).model_copy())
            return
        event = decode_event(message, frame, index, known_errors(self._invokes[index]))
        if isinstance(event, Ended | Saved):
            self._kept.adopt({**event.saves, **event.more}, getattr(event, "value", None))
        yield event

    @contextmanager
    def answered(self, freed: list[str]) -> Iterator[None]:
        """The answer is read within this.

        Args:
            freed: the ended handles that the server is told of with it; if it never begins to
                answer, they are told of later.

        Raises:
            ProtocolError: it was over before everything was said.
        """
        try:
            yield
        except ProtocolError:
            # What was to be said was said; the rest keeps the connection for the next trace.
            if not self.done:
                raise
        finally:
            if not self.begun:
                self._kept.disown(freed)
        if not self.done:
            raise ProtocolError(
                f"The server at {self._url} stopped before it had said everything. Its log says "
                "why."
            )

    def _index(self, key: str) -> int:
        if key.isdecimal() and int(key) < len(self.sent):
            return self.sent[int(key)]
        raise ProtocolError(f"The server at {self._url} speaks of an invoke {key[:40]!r}.")
