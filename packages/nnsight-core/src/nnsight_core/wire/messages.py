"""What is said: the messages of the protocol, as the headers of frames.

A client sends one `TraceMessage` (invokes, and the blocks they run); back comes a stream of
`PrintedMessage`, `EndedMessage` and `FinishedMessage` as things happen, with `WentMessage` and
`SavedMessage` before them if those are wanted, and `DoneMessage` last, so that a stream that broke
off is never taken for a whole one. With an `InstallMessage` it has an edit installed. Inside the
engine, each request carries a `BlockMessage`, and each rank answers an edit with an
`InstalledMessage`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from nnsight_core.backend import EditList
from nnsight_core.errors import ProtocolError
from nnsight_core.outputs import Logprob, Number, RequestOutput
from nnsight_core.sparse import Sparse
from nnsight_core.wire.data import loaded
from nnsight_core.wire.errors import ErrorRecord
from nnsight_core.wire.frames import Buffer, Frame


class Message(BaseModel):
    """The header of a frame."""

    model_config = ConfigDict(extra="forbid")

    def frame(self, buffers: list[Buffer] | None = None) -> Frame:
        """The frame that carries this message."""
        return Frame(self.model_dump(mode="json"), buffers or [])


class BlockData(Sparse):
    """A block: its code, and what its names hold as typed values.

    Attributes:
        targets: the names that `as` binds to the tracer.
        lazy: whether annotations in it are not evaluated.
        shared: the names that hold what was saved above the invokes.
        whole: whether its prompt has to run in one piece, because the block may write in the
            forward pass, or because what it reads there is not known beforehand.
        reads: what a block that is not `whole` reads in the forward pass: `path.output` or
            `path.input`, with `*` for one part of a path and `**` for any path.
    """

    model_config = ConfigDict(extra="forbid")
    later = ("shared", "whole", "reads")

    source: str
    filename: str
    line: int
    function: str
    names: dict[str, Any]
    targets: list[str] = Field(default_factory=list)
    lazy: bool = False
    shared: list[str] = Field(default_factory=list)
    whole: bool = True
    reads: list[str] = Field(default_factory=list)


class InvokeData(Sparse):
    """One prompt: itself and its sampling arguments as typed values, and its block's index.

    Attributes:
        edits: names of the installed edits that run besides; None for all of them.
    """

    model_config = ConfigDict(extra="forbid")
    later = ("edits",)

    prompt: Any
    sampling: dict[str, Any] = Field(default_factory=dict)
    block: int | None = None
    edits: list[str] | None = None


class TraceMessage(Message, Sparse):
    """A client asks for invokes to be run together.

    Attributes:
        blobs: the large tensors' buffers, by content; those that the receiver has may be left out.
        streams: whether outputs and saves are wanted as they are made.
        zstd: whether what comes back may be packed.
        freed: the kept values whose handles have ended.
        tells: whether the last message is to say what is installed.
    """

    later = ("streams", "zstd", "freed", "tells")

    kind: Literal["trace"] = "trace"
    invokes: list[InvokeData]
    blocks: list[BlockData] = Field(default_factory=list)
    blobs: dict[str, int] = Field(default_factory=dict)
    streams: bool = False
    zstd: bool = False
    freed: list[str] = Field(default_factory=list)
    tells: bool = False


class InstallMessage(Message):
    """A client asks for an edit to be installed.

    Attributes:
        name: what requests choose it by; None for one that always runs.
        share: which part of the requests it runs in.
        ttl: seconds after which it is cleared.
        owner: who installs it, where the key does not say so.
        blobs: as in `TraceMessage`.
    """

    kind: Literal["install"] = "install"
    block: BlockData
    name: str | None = None
    share: float = Field(1.0, gt=0, le=1)
    ttl: float | None = Field(None, gt=0)
    owner: str = ""
    blobs: dict[str, int] = Field(default_factory=dict)


class BlockMessage(Message):
    """What one request of the engine carries; requests that run the same block carry the same.

    Attributes:
        key: names the invoke, where what carries the block does not; what comes back says it again.
        sequences: how many sequences the request fans out into.
    """

    kind: Literal["block"] = "block"
    key: str = ""
    sequences: int = 1
    block: BlockData


class WarningData(BaseModel):
    """A warning of a block."""

    model_config = ConfigDict(extra="forbid")

    module: str
    name: str
    message: str
    filename: str
    line: int

    def category(self, known: Iterable[type] = ()) -> type[Warning]:
        """Its class here; `UserWarning` if this process does not have it.

        Args:
            known: classes that are not to be found by module and name (made inside a function).
        """
        found = loaded(self.module, self.name)
        for cls in known:
            if (cls.__module__, cls.__qualname__) == (self.module, self.name):
                found = cls
        here = isinstance(found, type) and issubclass(found, Warning)
        return found if here else UserWarning


class PrintedMessage(Message, Sparse):
    """A block printed something; `edit` as in `EndedMessage`."""

    later = ("edit",)

    kind: Literal["printed"] = "printed"
    key: str
    sequence: int = 0
    text: str
    edit: str = ""


class SavedMessage(Message):
    """What a block has saved while its request goes on, for a request whose saves are streamed.

    Attributes:
        made: after how many steps it was saved.
        steps: of how many steps everything has been told by now; -1 for all that may come.
        saves: what is new under each name, as typed values.
        more: what is new at the end of lists, and under new keys of dicts, that were told before.
        gone: the names that hold nothing saved any more.
        edit: as in `EndedMessage`.
    """

    kind: Literal["saved"] = "saved"
    key: str
    sequence: int = 0
    made: int = 0
    steps: int = 0
    saves: dict[str, Any] = Field(default_factory=dict)
    more: dict[str, Any] = Field(default_factory=dict)
    gone: list[str] = Field(default_factory=list)
    edit: str = ""


class EndedMessage(Message, Sparse):
    """A block has ended, or (`waits`) waits for the finished output.

    Attributes:
        saves: what it saved, by name, as typed values; where `SavedMessage`s came before, what has
            changed since then.
        more, gone: as in `SavedMessage`.
        ways: how many steps had run in which way by then.
        edit: the id of the edit whose block it is; empty for the invoke's own.
        seconds: how long the block held the engine.
        made: after how many steps it ended, if its saves are streamed.
    """

    later = ("ways", "more", "gone", "edit", "seconds", "made")

    kind: Literal["ended"] = "ended"
    key: str
    sequence: int = 0
    saves: dict[str, Any] = Field(default_factory=dict)
    error: ErrorRecord | None = None
    warnings: list[WarningData] = Field(default_factory=list)
    waits: bool = False
    ways: dict[str, int] = Field(default_factory=dict)
    more: dict[str, Any] = Field(default_factory=dict)
    gone: list[str] = Field(default_factory=list)
    edit: str = ""
    seconds: float = 0.0
    made: int = 0

    def frame(self, buffers: list[Buffer] | None = None) -> Frame:
        # The saves are JSON already, and may be many.
        said = self.model_copy(update={"saves": {}, "more": {}})
        header = said.model_dump(mode="json")
        header["saves"] = self.saves
        if self.more:
            header["more"] = self.more
        return Frame(header, buffers or [])


class InstalledMessage(Message):
    """An edit was installed on one rank, or why it was not.

    Attributes:
        whole: whether it may change what is in the cache of keys and values, so that prompts have
            to run in one piece for it.
        way: how steps run for it, in words.
    """

    kind: Literal["installed"] = "installed"
    key: str
    whole: bool = True
    way: str = ""
    error: ErrorRecord | None = None


class FinishedMessage(Message):
    """A request is over."""

    kind: Literal["finished"] = "finished"
    key: str
    output: RequestOutput | None = None
    error: ErrorRecord | None = None


class PartData(BaseModel):
    """What is new of one sequence since the last output that was told.

    Attributes:
        start: how many characters of the text that was told stand; `text` follows them.
        token_ids, logprobs: those of the new steps.
    """

    model_config = ConfigDict(extra="forbid")

    index: int
    start: int = Field(ge=0)
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: Number | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class WentMessage(Message):
    """A request has come further: its output as it is, or what is new of the one before."""

    kind: Literal["went"] = "went"
    key: str
    output: RequestOutput | None = None
    parts: list[PartData] = Field(default_factory=list)


class AliveMessage(Message):
    """Nothing has happened for a while, and the server is there."""

    kind: Literal["alive"] = "alive"


class DoneMessage(Message, Sparse):
    """Everything has been said.

    Attributes:
        edits: what is installed by then, if the client wanted to know.
        keep_seconds: how long a kept value stays, if the client wanted to know.
    """

    later = ("edits", "keep_seconds")

    kind: Literal["done"] = "done"
    edits: EditList | None = None
    keep_seconds: float | None = None


_M = TypeVar("_M", bound=Message)
_KINDS: dict[str, type[Message]] = {
    cls.model_fields["kind"].default: cls
    for cls in (
        TraceMessage,
        InstallMessage,
        BlockMessage,
        PrintedMessage,
        SavedMessage,
        EndedMessage,
        InstalledMessage,
        WentMessage,
        AliveMessage,
        FinishedMessage,
        DoneMessage,
    )
}


def read_message(frame: Frame) -> Message:
    """The message that a frame carries.

    Raises:
        ProtocolError: it is none of this version.
    """
    cls = _KINDS.get(str(frame.header.get("kind")))
    if cls is None:
        raise ProtocolError(f"A message of kind {str(frame.header.get('kind'))[:40]!r} is unknown.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls.model_validate(frame.header)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:4])
        raise ProtocolError(
            f"A {cls.__name__} is not well formed: {place}: {first['msg']}."
        ) from None


def expect(frame: Frame, cls: type[_M]) -> _M:
    """The message of a frame, which must be of one kind.

    Raises:
        ProtocolError: it is of another.
    """
    message = read_message(frame)
    if not isinstance(message, cls):
        raise ProtocolError(f"A {type(message).__name__} came where a {cls.__name__} belongs.")
    return message
