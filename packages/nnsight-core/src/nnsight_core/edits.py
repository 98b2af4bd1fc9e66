"""Edits: blocks that are installed on an engine and run in every request that it serves."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from nnsight_core.backend import AsyncBackend, EditInfo, EditSpec, Invoke
from nnsight_core.block_tracer import BARRIER
from nnsight_core.capture import Skip, bind_target
from nnsight_core.current import current_run
from nnsight_core.errors import LocationError, NotSupportedError
from nnsight_core.explain import Explanation, explain, read_invoke, refuse_untapped
from nnsight_core.tracer import Captured, check_nodes, forget_skip

if TYPE_CHECKING:
    from nnsight_core.model import Model

_AWAIT = "This model is in mode='async': write `{}`."


class Edit:
    """An edit as the one who installed it holds it.

    Attributes:
        name: what `edits=` chooses it by.
        id: names it on its engine; empty until it is installed.
        cleared: whether it was cleared through this handle.

    Example:
        >>> with model.edit("probe") as (tracer, edit):
        ...     norm = model.transformer.h[6].output.norm().save()
        >>> model.generate("Hello")[0].saves["norm"]
        >>> edit.clear()
    """

    def __init__(self, model: Model, name: str | None) -> None:
        self.name = name
        self.id = ""
        self.cleared = False
        self._model = model
        self._backend: Any = None
        self._read: Any = None

    @property
    def info(self) -> EditInfo | None:
        """What the engine says of it; None once it is cleared."""
        found = [info for info in self._backend.edits() if info.id == self.id] if self.id else []
        return found[0] if found else None

    def explain(self) -> Explanation:
        """How the steps run in which it takes part, and why."""
        return explain(self._read, self._model.tree)

    def clear(self) -> None:
        """Take it off the engine; requests that have begun with it end with it."""
        if isinstance(self._backend, AsyncBackend):
            raise NotSupportedError(_AWAIT.format("await edit.aclear()"))
        if self.id and not self.cleared:
            self._backend.clear([self.id])
            self.cleared = True

    async def aclear(self) -> None:
        """As `clear`, for a model in `mode="async"`."""
        if not isinstance(self._backend, AsyncBackend):
            self.clear()
        elif self.id and not self.cleared:
            await self._backend.clear([self.id])
            self.cleared = True

    def __repr__(self) -> str:
        state = "cleared" if self.cleared else "installed" if self.id else "not installed"
        return f"<Edit {self.id or repr(self.name)}, {state}>"


class EditContext(Captured):
    """`with model.edit(...) as (tracer, edit):`, whose body is the edit's block."""

    def __init__(
        self,
        model: Model,
        backend: Any,
        name: str | None,
        share: float,
        ttl: float | None,
        only_taps: bool = False,
    ) -> None:
        super().__init__()
        self._model = model
        self._backend = backend
        self._spec = EditSpec(Invoke(None), name, share, ttl)
        self._only_taps = only_taps
        self.edit = Edit(model, name)

    def install(self, function: Any) -> Edit:
        """Install a function as the edit."""
        self._spec.invoke.function = function
        self._refuse_async()
        self._installed(self._backend.install(self._ready()))
        return self.edit

    def __enter__(self) -> tuple[EditContext, Edit]:
        self._refuse_async()
        self._outside()
        self._enter(sys._getframe(1))
        return self, self.edit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not self._leave(kind):
            return False
        with self._over():
            self._installed(self._backend.install(self._ready()))
        return True

    def __aenter__(self) -> _Entering:
        if not isinstance(self._backend, AsyncBackend):
            raise NotSupportedError(
                "This model is not in mode='async': write `with model.edit() as (tracer, edit):`."
            )
        self._outside()
        frame = sys._getframe(1)
        self._capture(frame)
        return _Entering(self, frame)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not self._leave(kind):
            return False
        with self._over():
            self._installed(await self._backend.install(self._ready()))
        return True

    @contextmanager
    def _over(self) -> Iterator[None]:
        """The body is over, and is installed within this."""
        assert self._frame is not None and self._block is not None
        try:
            bind_target(self._frame, self._block.target, (self, self.edit))
            yield
        except BaseException as raised:
            forget_skip(raised)
            raise
        finally:
            self._frame = self._block = None

    def _refuse_async(self) -> None:
        if isinstance(self._backend, AsyncBackend):
            raise NotSupportedError(_AWAIT.format("async with model.edit() as (tracer, edit):"))

    def _outside(self) -> None:
        if current_run() is not None:
            raise LocationError("An edit cannot be installed inside a block.")

    def _ready(self) -> EditSpec:
        invoke = self._spec.invoke
        invoke.block = self._block
        if invoke.block is not None:
            check_nodes(invoke.block, self._model)
        self.edit._read = read_invoke(invoke)
        if self._only_taps:
            refuse_untapped([self.edit._read], self._model.tree)
        return self._spec

    def _installed(self, info: EditInfo) -> None:
        self.edit.id = info.id
        self.edit._backend = self._backend

    def barrier(self, *_: Any, **__: Any) -> None:
        raise NotSupportedError(BARRIER)

    def invoke(self, *_: Any, **__: Any) -> None:
        raise LocationError("An edit has no invokes: its body runs in every request.")

    def __getattr__(self, name: str) -> Any:
        if name in ("all", "cache", "iter", "result", "stop"):
            raise LocationError(f"tracer.{name} belongs inside the edit's body.")
        raise AttributeError(f"The tracer of an edit has no attribute {name!r}.")


class _Entering:
    """What `async with` awaits; the body may only be skipped once it has been awaited."""

    def __init__(self, context: EditContext, frame: FrameType) -> None:
        self._context = context
        self._frame = frame

    def __await__(self) -> Generator[Any, None, tuple[EditContext, Edit]]:
        self._context._skip = Skip(self._frame)
        return (self._context, self._context.edit)
        yield  # makes this a generator, which is what awaiting takes


def owner() -> str:
    """Who installs an edit here."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return ""


def check_edit(name: Any, share: Any, ttl: Any, inplace: Any) -> None:
    """Refuse what no edit can have.

    Raises:
        TypeError, ValueError: with what was given.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r}: an edit's name is a text.")
    if not inplace:
        raise ValueError("inplace=False: an edit is always installed on the engine itself.")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"share={share!r}: it is a part of all requests, above 0 and up to 1.")
    if ttl is not None and not (isinstance(ttl, int | float) and ttl > 0):
        raise ValueError(f"ttl={ttl!r}: it is a number of seconds above 0, or None.")
