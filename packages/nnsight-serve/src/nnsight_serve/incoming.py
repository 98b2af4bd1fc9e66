"""From a trace as a client sends it to requests for the engine.

Prompts and sampling arguments are decoded as plain data. Blocks are passed on as they came: what
runs them decodes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nnsight_core.errors import ProtocolError
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.wire.code import digest_of
from nnsight_core.wire.data import Decoder
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_core.wire.messages import BlockData, InvokeData, TraceMessage, expect
from nnsight_vllm_worker.requests import EXTRA
from nnsight_vllm_worker.submission import Carried, Request, request_of


@dataclass(slots=True)
class Trace:
    """A trace, ready for the engine.

    Attributes:
        requests: one for each invoke that can be run.
        index_of: which invoke the request of a key is.
        refused: what is wrong with the other invokes, by index.
        blobs: the outside tensors' bytes, by content.
    """

    requests: list[Request] = field(default_factory=list)
    index_of: dict[str, int] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)
    blobs: dict[str, Buffer] = field(default_factory=dict)


def trace_of(frame: Frame, policy: Policy = TRUSTED) -> Trace:
    """The trace that a client's frame asks for.

    Raises:
        PolicyError: the policy does not allow one of its blocks.
        ProtocolError: the frame is not well formed.
        TypeError: an unknown sampling argument, or a prompt of no known form.
    """
    message = expect(frame, TraceMessage)
    if not message.invokes:
        raise ProtocolError("The trace has no invokes.")
    trace = Trace(blobs=_blobs(message, frame))
    for data in message.blocks:
        policy.check(data)
    blocks = [_carried(data, frame, trace.blobs) for data in message.blocks]
    for index, invoke in enumerate(message.invokes):
        if invoke.block is not None and not 0 <= invoke.block < len(blocks):
            raise ProtocolError(f"Invoke {index} names block {invoke.block} of {len(blocks)}.")
        block = None if invoke.block is None else blocks[invoke.block]
        try:
            request = _request(invoke, block, frame)
        except (ProtocolError, TypeError):
            raise
        except Exception as error:
            trace.refused[index] = error
        else:
            trace.index_of[request.key] = index
            trace.requests.append(request)
    return trace


def _carried(data: BlockData, frame: Frame, blobs: dict[str, Buffer]) -> Carried:
    """A block with what it needs of the frame that it came in."""
    contents: dict[str, None] = {}
    used: set[int] = set()
    for form in tagged(data.names):
        if "h" in form:
            contents[_known(form["h"], blobs)] = None
        elif "b" in form:
            used.add(_index(form["b"], frame))
    # Indices stay what they are, and the buffers of other blocks stay behind.
    buffers = [b if i in used else b"" for i, b in enumerate(frame.buffers)]
    return Carried.of(data, buffers, contents)


def _request(invoke: InvokeData, block: Carried | None, frame: Frame) -> Request:
    prompt = Decoder(frame.buffers).decode(invoke.prompt)
    sampling = {n: Decoder(frame.buffers).decode(v) for n, v in invoke.sampling.items()}
    if "lora_request" in sampling:
        raise TypeError("lora_request cannot be had from a server yet; use a local engine.")
    if EXTRA in (sampling.get("extra_args") or ()):
        raise ProtocolError(f"extra_args[{EXTRA!r}] is where the server itself puts a block.")
    return request_of(prompt, sampling, block)


def _blobs(message: TraceMessage, frame: Frame) -> dict[str, Buffer]:
    """The outside tensors' bytes; what is not the content that it is called is refused.

    The engine keeps them by content for everyone, so a wrong name would be another's wrong value.
    """
    blobs: dict[str, Buffer] = {}
    for digest, index in message.blobs.items():
        data = frame.buffers[_index(index, frame)]
        if digest_of(data) != digest:
            raise ProtocolError(f"Buffer {index} is not the content {digest[:40]!r}.")
        blobs[digest] = data
    return blobs


def _known(digest: Any, blobs: dict[str, Buffer]) -> str:
    if not isinstance(digest, str) or digest not in blobs:
        raise ProtocolError(f"A block names a content that did not come: {str(digest)[:40]!r}.")
    return digest


def _index(value: Any, frame: Frame) -> int:
    if type(value) is not int or not 0 <= value < len(frame.buffers):
        raise ProtocolError(
            f"{str(value)[:40]!r} is no index of the frame's {len(frame.buffers)} buffers."
        )
    return value
