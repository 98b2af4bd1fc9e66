"""The local backend: a model's traces on an engine in this process's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_core.backend import (
    EditInfo,
    EditSpec,
    Ended,
    Event,
    Finished,
    Invoke,
    Saved,
    Went,
)
from nnsight_core.edits import owner
from nnsight_core.garbage import uncollected
from nnsight_core.kept import KeptValues
from nnsight_core.tree import ModelTree
from nnsight_core.values import map_tensors
from nnsight_core.wire.blocks import decode_event, known_errors, refusal_of
from nnsight_core.wire.frames import Frame
from nnsight_core.wire.messages import read_message
from nnsight_vllm_worker.edits import Edits, NotInstalled
from nnsight_vllm_worker.encoding import BlockEncoder
from nnsight_vllm_worker.engine import Output, SyncEngine
from nnsight_vllm_worker.prompts import sampling_names
from nnsight_vllm_worker.submission import Request


class LocalBackend:
    """Runs invokes on a sync engine. See `nnsight_core.Backend`.

    Args:
        engine: gives the engine, building it when it is first needed.
        tokenizer: gives the model's tokenizer.
        pickle: whether blocks may hold what only cloudpickle ships.
        device: where saved tensors arrive.
    """

    def __init__(
        self,
        engine: Callable[[], SyncEngine],
        tokenizer: Callable[[], Any],
        *,
        pickle: bool = True,
        device: str = "cpu",
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._pickle = pickle
        self._device = device

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        sampling_names().check_invokes(invokes)  # before an engine is built
        engine = self._engine()
        encoder = self._encoder(engine)
        with uncollected():
            requests, index_of, refused = requests_of(invokes, encoder, engine.edits)
        for index, error in refused.items():
            yield Finished(index, None, error)
        for key, what in engine.run(requests, encoder.blobs):
            event = event_of(invokes[index_of[key]], index_of[key], what, engine.kept)
            yield placed(event, self._device)

    def install(self, edit: EditSpec) -> EditInfo:
        engine = self._engine()
        encoder = self._encoder(engine)
        carried = encoder.block(edit.invoke)
        assert carried is not None
        with own_errors(edit.invoke):
            return engine.install(edit, carried, encoder.blobs, owner())

    def clear(self, ids: list[str] | None) -> None:
        self._engine().clear(ids)

    def edits(self) -> list[EditInfo]:
        return self._engine().edits.infos()

    def describe(self) -> ModelTree:
        return self._engine().tree

    @property
    def kept(self) -> KeptValues:
        """What blocks kept on the engine."""
        return self._engine().kept

    def close(self) -> None:
        """Nothing: the engine is the model's, and asking for it here could build one."""

    def _encoder(self, engine: SyncEngine) -> BlockEncoder:
        return BlockEncoder(engine.tree, self._tokenizer(), self._pickle, engine.kept)


def event_of(invoke: Invoke, index: int, what: Frame | Output, kept: KeptValues) -> Event:
    """What an engine says of an invoke, as the front end takes it."""
    if isinstance(what, Frame):
        event = decode_event(read_message(what), what, index, known_errors(invoke))
        if isinstance(event, Ended | Saved):
            kept.adopt({**event.saves, **event.more}, getattr(event, "value", None))
        return event
    if isinstance(what, BaseException):
        return Finished(index, None, what)
    return Finished(index, what) if what.finished else Went(index, what)


def placed(event: Event, device: str) -> Event:
    """The event with what was saved where it is wanted."""
    if isinstance(event, Ended | Saved) and device != "cpu":
        event.saves = map_tensors(event.saves, lambda tensor: tensor.to(device))
        event.more = map_tensors(event.more, lambda tensor: tensor.to(device))
    return event


def requests_of(
    invokes: list[Invoke], encoder: BlockEncoder, edits: Edits
) -> tuple[list[Request], dict[str, int], dict[int, BaseException]]:
    """The requests of a trace's invokes, which invoke each is of, and what is wrong with others.

    Raises:
        TypeError: an invoke cannot be meant as it is written; of a lone one, whatever it raises.
    """
    requests: list[Request] = []
    index_of: dict[str, int] = {}
    refused: dict[int, BaseException] = {}
    for index, invoke in enumerate(invokes):
        try:
            request = encoder.request(invoke)
            edits.chosen(request.names)
        except Exception as error:
            # With one invoke there is nothing that its error could take along.
            if len(invokes) == 1 or isinstance(error, TypeError):
                raise
            refused[index] = error
        else:
            index_of[request.key] = index
            requests.append(request)
    return requests, index_of, refused


@contextmanager
def own_errors(invoke: Invoke) -> Iterator[None]:
    """What a worker says against an edit is raised as it was there."""
    try:
        yield
    except NotInstalled as refused:
        raise refusal_of(refused.said, refused.frame, invoke) from None
