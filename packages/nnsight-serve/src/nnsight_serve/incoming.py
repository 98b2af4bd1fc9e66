"""What clients ask for, as requests and edits that an engine can take.

The values of a block's names stay as they came, since the worker alone decodes them: what a block
holds is code, and this process runs none of it.
"""

from __future__ import annotations

from collections.abc import Callable
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


Owns = Callable[[str], bool]
"""Whether a kept value, by its id, is the caller's."""
_NOTHING = ""
"""The id of no kept value."""


def trace_of(
    frame: Frame,
    policy: Policy = TRUSTED,
    fit: Callable[[int], None] = lambda _: None,
    owns: Owns = lambda _: True,
) -> Trace:
    """The trace that a client's frame asks for.

    Args:
        fit: refuses a number of invokes that is never taken at once, before anything is made of
            them.

    Raises:
        PolicyError: the policy does not allow one of its blocks.
        ProtocolError: the frame is not well formed.
        TypeError: an unknown sampling argument, or a prompt of no known form.
    """
    message = expect(frame, TraceMessage)
    if not message.invokes:
        raise ProtocolError("The trace has no invokes.")
    fit(len(message.invokes))
    if len(message.blocks) > len(message.invokes):
        raise ProtocolError(
            f"The trace has {len(message.blocks)} blocks for {len(message.invokes)} invokes, of "
            "which each names one at most."
        )
    for data in message.blocks:
        policy.check(data)
    for invoke in message.invokes:
        policy.check_sampling(invoke.sampling)
    blobs = _blobs(message.blobs, frame)
    buffers = _Buffers(frame)
    blocks = [_carried(data, buffers, owns) for data in message.blocks]
    needs = [digest for block in blocks for digest in block.blobs]
    about = {"zstd": message.zstd, "freed": message.freed, "tells": message.tells}
    trace = Trace(needs=needs, blobs=blobs, **about)
    for index, invoke in enumerate(message.invokes):
        if invoke.block is not None and not 0 <= invoke.block < len(blocks):
            raise ProtocolError(f"Invoke {index} names block {invoke.block} of {len(blocks)}.")
        block = None if invoke.block is None else blocks[invoke.block]
        try:
            request = _request(invoke, block, buffers)
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


def install_of(frame: Frame, policy: Policy = TRUSTED, owns: Owns = lambda _: True) -> Install:
    """The edit that a client's frame asks for.

    Raises:
        PolicyError: the policy does not allow its block.
        ProtocolError: the frame is not well formed.
    """
    message = expect(frame, InstallMessage)
    policy.check(message.block)
    spec = EditSpec(Invoke(None), message.name, message.share, message.ttl)
    carried = _carried(message.block, _Buffers(frame), owns)
    needs = list(carried.blobs)
    return Install(spec, carried, message.owner, needs, _blobs(message.blobs, frame))


class _Buffers:
    """The buffers of a frame, each of which belongs to one block or value.

    Else a few bytes would have one copied as often as it is named.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._taken: set[int] = set()

    def of(self, forms: Any) -> list[Buffer]:
        """Those that some typed values name, which from now on name them by their places in it.

        Raises:
            ProtocolError: another block or value has named one.
        """
        places: dict[int, int] = {}
        for form in tagged(forms):
            if "b" in form:
                form["b"] = places.setdefault(_index(form["b"], self._frame), len(places))
        for index in self._taken & places.keys():
            raise ProtocolError(f"Buffer {index} is named by two blocks or values; send it twice.")
        self._taken |= places.keys()
        return [self._frame.buffers[index] for index in places]


def _carried(data: BlockData, buffers: _Buffers, owns: Owns) -> Carried:
    """A block with what it needs of the frame that it came in."""
    contents: dict[str, None] = {}
    for form in tagged(data.names):
        if "h" in form:
            contents[_text(form["h"], "content")] = None
        if form["$"] == "kept" and not owns(_text(form.get("id"), "kept value")):
            # What the engine says of it is then what it says of a value that is gone.
            form["name"], form["id"] = form.get("name") or form["id"], _NOTHING
    return Carried.of(data, buffers.of(data.names), contents)


def _request(invoke: InvokeData, block: Carried | None, buffers: _Buffers) -> Request:
    prompt = _said(invoke.prompt, buffers)
    sampling = {name: _said(value, buffers) for name, value in invoke.sampling.items()}
    return request_of(prompt, sampling, block, invoke.edits)


def _said(form: Any, buffers: _Buffers) -> Any:
    """A prompt or a sampling argument, which is no longer than what came.

    Raises:
        ProtocolError: a few bytes of it would stand for more than memory holds.
    """
    for part in tagged(form):
        if part["$"] in ("range", "ref"):
            raise ProtocolError(
                "A prompt or sampling argument holds a range, or one list twice. Send the numbers."
            )
    return Decoder(buffers.of(form)).decode(form)


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


def _text(name: Any, what: str) -> str:
    if not isinstance(name, str):
        raise ProtocolError(f"A {what} is named by a text, not by {str(name)[:40]!r}.")
    return name


def _index(value: Any, frame: Frame) -> int:
    if type(value) is not int or not 0 <= value < len(frame.buffers):
        raise ProtocolError(
            f"{str(value)[:40]!r} is no index of the frame's {len(frame.buffers)} buffers."
        )
    return value
