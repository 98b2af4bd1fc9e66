"""What clients ask for, as requests and edits that an engine can take.

The values of a block's names stay as they came, since the worker alone decodes them: what a block
holds is code, and this process runs none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nnsight_core.backend import EditSpec, Invoke
from nnsight_core.errors import ProtocolError
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.wire.code import digest_of
from nnsight_core.wire.data import Decoder
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_core.wire.messages import (
    BlockData,
    InstallMessage,
    InvokeData,
    TraceMessage,
    expect,
)
from nnsight_vllm_worker.submission import Carried, Request, request_of


@dataclass(slots=True)
class Trace:
    """A trace, ready for the engine.

    Attributes:
        requests: one for each invoke that can be run.
        index_of: which invoke the request of a key is.
        refused: what is wrong with the other invokes, by index.
        needs: contents of the outside tensors that its blocks name.
        blobs: the bytes of those that came.
        zstd: whether the answer may be packed.
        freed: the kept values whose handles have ended.
        tells: whether its client wants to know in the end what is installed.
    """

    requests: list[Request] = field(default_factory=list)
    index_of: dict[str, int] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    blobs: dict[str, Buffer] = field(default_factory=dict)
    zstd: bool = False
    freed: list[str] = field(default_factory=list)
    tells: bool = False


@dataclass(slots=True)
class Install:
    """An edit, ready for the engine; `needs` and `blobs` as in `Trace`."""

    spec: EditSpec
    carried: Carried
    owner: str
    needs: list[str]
    blobs: dict[str, Buffer]


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
    for data in message.blocks:
        policy.check(data)
    for invoke in message.invokes:
        policy.check_sampling(invoke.sampling)
    blobs = _blobs(message.blobs, frame)
    blocks = [_carried(data, frame) for data in message.blocks]
    needs = [digest for block in blocks for digest in block.blobs]
    about = {"zstd": message.zstd, "freed": message.freed, "tells": message.tells}
    trace = Trace(needs=needs, blobs=blobs, **about)
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
            if message.streams:
                request.stream()
            trace.index_of[request.key] = index
            trace.requests.append(request)
    return trace


def install_of(frame: Frame, policy: Policy = TRUSTED) -> Install:
    """The edit that a client's frame asks for.

    Raises:
        PolicyError: the policy does not allow its block.
        ProtocolError: the frame is not well formed.
    """
    message = expect(frame, InstallMessage)
    policy.check(message.block)
    spec = EditSpec(Invoke(None), message.name, message.share, message.ttl)
    carried = _carried(message.block, frame)
    needs = list(carried.blobs)
    return Install(spec, carried, message.owner, needs, _blobs(message.blobs, frame))


def _carried(data: BlockData, frame: Frame) -> Carried:
    """A block with what it needs of the frame that it came in."""
    contents: dict[str, None] = {}
    used: set[int] = set()
    for form in tagged(data.names):
        if "h" in form:
            contents[_content(form["h"])] = None
        elif "b" in form:
            used.add(_index(form["b"], frame))
    # Indices stay what they are, and the buffers of other blocks stay behind.
    buffers = [b if i in used else b"" for i, b in enumerate(frame.buffers)]
    return Carried.of(data, buffers, contents)


def _request(invoke: InvokeData, block: Carried | None, frame: Frame) -> Request:
    prompt = _said(invoke.prompt, frame)
    sampling = {name: _said(value, frame) for name, value in invoke.sampling.items()}
    return request_of(prompt, sampling, block, invoke.edits)


def _said(form: Any, frame: Frame) -> Any:
    """A prompt or a sampling argument, which is no longer than what came.

    Raises:
        ProtocolError: a few bytes of it would stand for more than memory holds.
    """
    for part in tagged(form):
        if part["$"] in ("range", "ref"):
            raise ProtocolError(
                "A prompt or sampling argument holds a range, or one list twice. Send the numbers."
            )
    return Decoder(frame.buffers).decode(form)


def _blobs(named: dict[str, int], frame: Frame) -> dict[str, Buffer]:
    """The outside tensors' bytes; what is not the content that it is called is refused.

    The engine keeps them by content for everyone, so a wrong name would be another's wrong value.
    """
    blobs: dict[str, Buffer] = {}
    for digest, index in named.items():
        data = frame.buffers[_index(index, frame)]
        if digest_of(data) != digest:
            raise ProtocolError(f"Buffer {index} is not the content {digest[:40]!r}.")
        blobs[digest] = data
    return blobs


def _content(digest: Any) -> str:
    if not isinstance(digest, str):
        raise ProtocolError(f"A content is named by a text, not by {str(digest)[:40]!r}.")
    return digest


def _index(value: Any, frame: Frame) -> int:
    if type(value) is not int or not 0 <= value < len(frame.buffers):
        raise ProtocolError(
            f"{str(value)[:40]!r} is no index of the frame's {len(frame.buffers)} buffers."
        )
    return value
