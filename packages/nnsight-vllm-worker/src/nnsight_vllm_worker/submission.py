"""A trace on its way into the engine: each invoke as a request that vLLM can take."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from nnsight_core.wire.frames import Buffer
from nnsight_core.wire.messages import BlockData, BlockMessage
from nnsight_vllm_worker.prompts import prompt_of, sampling_of
from nnsight_vllm_worker.requests import EXTRA, SENT
from nnsight_vllm_worker.vllm_ports.scheduling import WHOLE


@dataclass(slots=True)
class Request:
    """One request of the engine.

    Attributes:
        key: names it between the engine's holder and its workers.
        sequences: how many sequences it fans out into (`n`).
        traced: whether it carries a block, so that frames come for each sequence.
        whole: whether its prompt has to run in one piece.
        blobs: contents of the outside tensors that its block needs.
    """

    key: str
    prompt: Any
    params: Any
    traced: bool
    sequences: int = 1
    whole: bool = False
    lora: Any = None
    blobs: list[str] = field(default_factory=list)


def request_of(
    prompt: Any,
    sampling: dict[str, Any],
    block: BlockData | None,
    buffers: list[Buffer],
    blobs: list[str],
) -> Request:
    """The request of an invoke.

    Raises:
        TypeError: an unknown sampling argument, or a prompt of no known form.
        ValueError: an empty prompt, or a value that vLLM refuses.
    """
    sampling = dict(sampling)
    lora = sampling.pop("lora_request", None)
    params = sampling_of(sampling)
    key = uuid.uuid4().hex
    whole = block is not None and block.whole
    taken = prompt_of(prompt)
    request = Request(key, taken, params, block is not None, params.n, whole, lora, blobs)
    if block is not None:
        message = BlockMessage(key=key, sequences=params.n, block=block)
        extra = dict(params.extra_args or {})
        extra[EXTRA] = message.frame(buffers).to_bytes()
        extra[SENT] = time.monotonic()
        if whole:
            extra[WHOLE] = True
            # What it writes goes into keys and values that no other request may find in the cache.
            request.prompt = {
                **(taken if isinstance(taken, dict) else {"prompt": taken}),
                "cache_salt": key,
            }
        params.extra_args = extra
        # A block sees its whole prompt, so none of it may come from the prefix cache.
        params.skip_reading_prefix_cache = True
    return request
