"""What a backend is: something that runs requests with blocks and tells what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

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
    """

    prompt: Any
    sampling: dict[str, Any] = field(default_factory=dict)
    block: Block | None = None
    function: Any = None


@dataclass(slots=True)
class Noted:
    """A warning of a block: its class, text and place."""

    category: type[Warning]
    message: str
    filename: str
    line: int


@dataclass(slots=True)
class Printed:
    """What a block printed, marked with its request."""

    invoke: int
    text: str


@dataclass(slots=True)
class Ended:
    """A block has ended for one sequence of an invoke.

    Attributes:
        saves: what it saved, by name.
        error: what it raised, ready to be raised here.
        ways: how many steps of the request had run in which way.
    """

    invoke: int
    sequence: int = 0
    saves: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    error: BaseException | None = None
    warnings: list[Noted] = field(default_factory=list)
    ways: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Finished:
    """An invoke's generation is over: its output, or why there is none."""

    invoke: int
    output: RequestOutput | None = None
    error: BaseException | None = None


Event = Printed | Ended | Finished


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
