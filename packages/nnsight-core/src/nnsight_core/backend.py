"""What a backend is: something that runs requests with blocks and tells what became of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel

from nnsight_core.capture import Block
from nnsight_core.outputs import RequestOutput
from nnsight_core.tree import ModelTree


@dataclass(slots=True)
class Invoke:
    """One prompt with its block.

    Attributes:
        prompt: what the backend takes as one prompt.
        sampling: the sampling arguments, those of the trace included.
        block: what to run, or None for a plain generation.
        function: what to run instead of a block's text.
        edits: names of the installed edits that run besides; None for all of them.
    """

    prompt: Any
    sampling: dict[str, Any] = field(default_factory=dict)
    block: Block | None = None
    function: Any = None
    edits: list[str] | None = None

    def sign(self) -> Any:
        """What tells its block or function from that of any other invoke, while both are held."""
        return id(self.function) if self.block is None else self.block.sign()


@dataclass(slots=True)
class EditSpec:
    """An edit that is to be installed.

    Attributes:
        invoke: its block or function; it has no prompt.
        name: what `edits=` chooses it by, or None for one that always runs.
        share: which part of the requests it runs in, chosen by the request's id.
        ttl: seconds after which it is cleared.
    """

    invoke: Invoke
    name: str | None = None
    share: float = 1.0
    ttl: float | None = None


class EditInfo(BaseModel):
    """An edit that is installed.

    Attributes:
        id: names it on its engine: `probe#3`.
        owner: who installed it.
        since, until: when it was installed and when it ends, in seconds since 1970.
        way: how its prefill and its later steps run on this engine, as `model.explain` says it.
        requests: how many requests it has run in, or is running in.
        seconds: how long its block has held the engine in requests that are over.
        errors: in how many requests it has raised.
        bytes: how much memory its block takes, and the outside tensors that it uses.
    """

    id: str
    name: str | None = None
    owner: str = ""
    since: float = 0.0
    until: float | None = None
    share: float = 1.0
    way: str = ""
    requests: int = 0
    seconds: float = 0.0
    errors: int = 0
    bytes: int = 0


class EditList(BaseModel):
    """The edits that are installed, in the order of their installation.

    Attributes:
        now: when they were, in seconds since 1970 by the clock of who says it; later lists have
            later ones.
    """

    edits: list[EditInfo]
    now: float


@dataclass(slots=True)
class Noted:
    """A warning of a block: its class, text and place."""

    category: type[Warning]
    message: str
    filename: str
    line: int


@dataclass(slots=True)
class Printed:
    """What a block printed, marked with its request (and the edit, if the block is one's)."""

    invoke: int
    text: str
    edit: str = ""


@dataclass(slots=True)
class Saved:
    """What a block has saved since the last one of these, while its request goes on.

    Attributes:
        steps: of how many steps everything has been told by now.
        saves: what is new under each name.
        more: what is new at the end of the lists, and under new keys of the dicts, that were told.
        gone: the names that hold nothing saved any more.
    """

    invoke: int
    sequence: int = 0
    steps: int = 0
    saves: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    edit: str = ""


@dataclass(slots=True)
class Ended:
    """A block has ended for one sequence of an invoke.

    Attributes:
        saves: what it saved, by name; where `Saved` came before, what has changed since.
        more, gone: as in `Saved`.
        error: what it raised, ready to be raised here.
        ways: how many steps of the request had run in which way.
        edit: the id of the edit whose block it is; empty for the invoke's own.
        seconds: how long the block held the engine.
    """

    invoke: int
    sequence: int = 0
    saves: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    value: Any = None
    error: BaseException | None = None
    warnings: list[Noted] = field(default_factory=list)
    ways: dict[str, int] = field(default_factory=dict)
    edit: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Went:
    """An invoke's generation has come further: its output up to here."""

    invoke: int
    output: RequestOutput


@dataclass(slots=True)
class Finished:
    """An invoke's generation is over: its output, or why there is none."""

    invoke: int
    output: RequestOutput | None = None
    error: BaseException | None = None


Event = Printed | Saved | Ended | Went | Finished


@runtime_checkable
class Backend(Protocol):
    """What a model needs of whatever runs it.

    Example:
        A backend of one's own subclasses `nnsight_core.Model`, passes an object with these methods,
        and yields, per invoke, one `Ended` for each sequence and one `Finished`.
    """

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        """Run the invokes together; events come as they happen.

        Raises:
            TypeError: an unknown sampling argument (before anything runs).
            ProtocolError: the peer that runs them is gone.
        """
        ...

    def describe(self) -> ModelTree:
        """The model's tree."""
        ...

    def close(self) -> None:
        """End what the backend holds."""
        ...


@runtime_checkable
class AsyncBackend(Protocol):
    """What a model for asyncio needs of whatever runs it; see `Backend`."""

    def submit(
        self, invokes: list[Invoke], streams: Callable[[], bool]
    ) -> AsyncGenerator[Event, None]:
        """Run the invokes together; events come as they happen.

        What the invokes hold is taken along before this returns. Closing the iterator, or
        cancelling the task that waits for it, aborts the invokes.

        Args:
            streams: whether `Went` and `Saved` are wanted while requests go on; asked when the
                iterator begins. Of what nobody takes, no more than a bounded number waits.

        Raises:
            TypeError: an unknown sampling argument.
        """
        ...

    async def describe(self) -> ModelTree:
        """The model's tree."""
        ...

    async def install(self, edit: EditSpec) -> EditInfo:
        """Install an edit."""
        ...

    async def clear(self, ids: list[str] | None) -> None:
        """Clear edits, or all of them."""
        ...

    def edits(self) -> list[EditInfo]:
        """The edits that are installed, as far as is known here without waiting.

        Raises:
            NotSupportedError: nothing is known yet.
        """
        ...

    async def aedits(self) -> list[EditInfo]:
        """The edits that are installed, in the order of their installation."""
        ...

    async def aclose(self) -> None:
        """End what the backend holds."""
        ...


@runtime_checkable
class EditBackend(Protocol):
    """What a backend has besides `Backend`'s methods if edits can be installed on it."""

    def install(self, edit: EditSpec) -> EditInfo:
        """Install an edit on every rank, or on none."""
        ...

    def clear(self, ids: list[str] | None) -> None:
        """Clear edits, or all of them; those that are not there are none of its business."""
        ...

    def edits(self) -> list[EditInfo]:
        """The edits that are installed, in the order of their installation."""
        ...
