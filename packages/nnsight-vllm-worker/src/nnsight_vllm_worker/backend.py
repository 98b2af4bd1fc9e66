"""The local backend: a model's traces on an engine in this process's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nnsight_core.backend import Ended, Event, Finished, Invoke
from nnsight_core.kept import Kept, KeptValues
from nnsight_core.sampling import normalise
from nnsight_core.tree import ModelTree
from nnsight_core.values import map_tensors
from nnsight_core.wire.blocks import check_block, decode_event, encode_block, known_errors
from nnsight_core.wire.code import CodeEncoder
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_core.wire.messages import read_message
from nnsight_vllm_worker.engine import SyncEngine
from nnsight_vllm_worker.prompts import sampling_names
from nnsight_vllm_worker.submission import Request, request_of


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
        for invoke in invokes:
            # Before an engine is built: a misspelt argument is known at once.
            named = normalise(invoke.sampling)
            named.pop("lora_request", None)
            sampling_names().check(named)
        engine = self._engine()
        requests: list[Request] = []
        blobs: dict[str, Buffer] = {}
        refused: dict[int, BaseException] = {}
        index_of: dict[str, int] = {}
        # What the blocks use has to stay, whatever becomes of the user's own names meanwhile.
        handles: list[Kept] = []
        for index, invoke in enumerate(invokes):
            try:
                request = self._request(engine, invoke, blobs, handles)
            except Exception as error:
                # With one invoke there is nothing that its error could take along.
                if len(invokes) == 1 or isinstance(error, TypeError):
                    raise
                refused[index] = error
            else:
                index_of[request.key] = index
                requests.append(request)
        for index, error in refused.items():
            yield Finished(index, None, error)
        for key, what in engine.run(requests, blobs):
            index = index_of[key]
            if isinstance(what, Frame):
                known = known_errors(invokes[index])
                event = decode_event(read_message(what), what, index, known)
                if isinstance(event, Ended):
                    engine.kept.adopt(event.saves, event.value)
                yield self._placed(event)
            elif isinstance(what, BaseException):
                yield Finished(index, None, what)
            else:
                yield Finished(index, what)

    def describe(self) -> ModelTree:
        return self._engine().tree

    @property
    def kept(self) -> KeptValues:
        """What blocks kept on the engine."""
        return self._engine().kept

    def close(self) -> None:
        """Nothing: the engine is the model's, and asking for it here could build one."""

    def _placed(self, event: Event) -> Event:
        if isinstance(event, Ended) and self._device != "cpu":
            event.saves = map_tensors(event.saves, lambda tensor: tensor.to(self._device))
        return event

    def _request(
        self, engine: SyncEngine, invoke: Invoke, blobs: dict[str, Buffer], handles: list[Kept]
    ) -> Request:
        check_block(invoke, engine.tree)
        encoder = CodeEncoder(self._pickle, self._tokenizer())
        block = encode_block(invoke, encoder)
        engine.kept.check(encoder.handles)
        handles += encoder.handles
        blobs.update(encoder.blobs)
        return request_of(
            invoke.prompt, invoke.sampling, block, encoder.buffers, list(encoder.blobs)
        )
