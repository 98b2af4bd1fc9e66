"""A trace on its way into the engine: each invoke as a request that vLLM can take."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nnsight_core.kept import Kept
from nnsight_core.wire.frames import Buffer
from nnsight_core.wire.messages import BlockData, BlockMessage
from nnsight_vllm_worker.prompts import Samplings, lora_of, prompt_of
from nnsight_vllm_worker.requests import EXTRA, SENT, SEQUENCES, STREAMS
from nnsight_vllm_worker.vllm_ports.scheduling import KEY, WHOLE

if TYPE_CHECKING:
    from nnsight_vllm_worker.edits import Installed


@dataclass(frozen=True, slots=True)
class Carried:
    """A block as requests carry it; those that run the same one share it.

    Attributes:
        data: its frame.
        whole: whether a prompt has to run in one piece for it.
        blobs: contents of the outside tensors that it needs.
        handles: the kept values that it uses, which stay as long as this does.
    """

    data: bytes
    whole: bool
    blobs: tuple[str, ...] = ()
    handles: tuple[Kept, ...] = ()

    @classmethod
    def of(
        cls,
        block: BlockData,
        buffers: list[Buffer],
        blobs: Mapping[str, Any],
        handles: Iterable[Kept] = (),
    ) -> Carried:
        """A block with the buffers that it names and what it needs."""
        data = BlockMessage(block=block).frame(buffers).to_bytes()
        return cls(data, block.whole, tuple(blobs), tuple(handles))

    def size(self, blobs: Mapping[str, Buffer]) -> int:
        """How many bytes it has, with those of the outside tensors that it needs."""
        return len(self.data) + sum(memoryview(blobs[digest]).nbytes for digest in self.blobs)


@dataclass(slots=True)
class Request:
    """One request of the engine.

    Attributes:
        key: names it between the engine's holder and its workers.
        traced: whether it carries a block of its own.
        sequences: how many sequences it fans out into (`n`).
        whole: whether its block needs its prompt in one piece.
        blobs: contents of the outside tensors that its block needs.
        names: the edits that it asks for; None for all.
        edits: those that it has, once it has begun.
        streams: whether its outputs and saves are wanted as they are made.
    """

    key: str
    prompt: Any
    params: Any
    traced: bool
    sequences: int = 1
    whole: bool = False
    lora: Any = None
    blobs: tuple[str, ...] = ()
    names: list[str] | None = None
    edits: list[Installed] = field(default_factory=list)
    streams: bool = False

    def stream(self) -> None:
        """Have its outputs and saves sent as they are made."""
        self.streams = True
        self.params.extra_args[STREAMS] = True


def request_of(
    prompt: Any,
    sampling: dict[str, Any],
    carried: Carried | None = None,
    edits: list[str] | None = None,
    samplings: Samplings | None = None,
) -> Request:
    """The request of an invoke.

    Args:
        samplings: the sampling arguments of other invokes of its trace.

    Raises:
        TypeError: an unknown sampling argument, or a prompt of no known form.
        ValueError: an empty prompt, or a value that vLLM refuses.
    """
    lora = lora_of(sampling.get("lora_request"))
    params = (samplings or Samplings()).of(sampling)
    key = uuid.uuid4().hex
    traced = carried is not None
    request = Request(key, prompt_of(prompt), params, traced, params.n, lora=lora, names=edits)
    extra = {**(params.extra_args or {}), KEY: key, SENT: time.monotonic()}
    if carried is not None:
        request.whole, request.blobs = carried.whole, carried.blobs
        extra[EXTRA] = carried.data
        if carried.whole:
            extra[WHOLE] = True
    if params.n > 1:
        extra[SEQUENCES] = params.n
    params.extra_args = extra
    return request
