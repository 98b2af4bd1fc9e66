"""The two tracers: the one a user's `with` statement binds, and the one its block sees."""

from __future__ import annotations

import sys
import weakref
from types import FrameType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from nnsight_core.async_run import AsyncRun, Home
from nnsight_core.backend import AsyncBackend, Backend, EditBackend, Invoke
from nnsight_core.block_tracer import BARRIER
from nnsight_core.capture import Block, Skip, Skipped, bind_target, capture, push
from nnsight_core.current import current_run
from nnsight_core.errors import (
    EngineDeadError,
    LocationError,
    NotSupportedError,
    ProtocolError,
)
from nnsight_core.node import Node
from nnsight_core.outcome import (
    Outcome,
    by_name,
    one_error,
    one_or_all,
    put_together,
    reraise,
)
from nnsight_core.outputs import RequestOutput
from nnsight_core.progress import Bar
from nnsight_core.prompts import NO_PROMPT
from nnsight_core.sampling import merge
from nnsight_core.shared import close_shared, open_shared
from nnsight_core.snapshots import Along, Snapshots

if TYPE_CHECKING:
    from nnsight_core.model import Model


class Captured:
    """A `with` statement whose body is taken along instead of being run."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._block: Block | None = None
        self._skip: Skip | None = None

    def _enter(self, frame: FrameType) -> None:
        self._capture(frame)
        self._skip = Skip(frame)

    def _capture(self, frame: FrameType) -> None:
        self._block = capture(frame)
        self._frame = frame

    def _leave(self, kind: type[BaseException] | None) -> bool:
        """Whether the body was skipped, as it should have been."""
        if self._skip is not None:
            self._skip.undo()
            self._skip = None
        return kind is not None and issubclass(kind, Skipped)


class Tracer(Captured):
    """One trace: its invokes, and what came home.

    Attributes:
        saves: what was saved, by name, as it was also bound in the user's frame.
        outputs: the finished outputs, one per invoke.
        backend: with `mode="async"`, what is iterated over or awaited once the body is over.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend | AsyncBackend,
        prompt: Any,
        sampling: dict[str, Any],
        only_taps: bool = False,
        edits: list[str] | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__()
        self._model = model
        self._progress = progress
        self._only_taps = only_taps
        self._edits = check_edits(edits, backend)
        self._texts: list[Any] = []
        self._backend = backend
        self._prompt = prompt
        self._sampling = sampling
        self._invokes: list[Invoke] = []
        self._frames: list[FrameType] = []
        self._open = False
        self._shared: list[Any] = []
        self._snapshots = Snapshots()
        self._along: list[tuple[Invoke, Along]] = []
        self._bar: Bar | None = None
        self.saves: dict[str, Any] = {}
        self.outputs: list[RequestOutput | None] = []
        self.value: Any = None

    @property
    def result(self) -> Any:
        """The finished output; a list of them if the trace had several invokes."""
        if not self.outputs:
            raise AttributeError  # which `__getattr__` explains
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def invoke(
        self, prompt: Any = NO_PROMPT, *, edits: list[str] | None = None, **sampling: Any
    ) -> InvokeContext:
        """Add one prompt to the trace, with a block of its own.

        Args:
            prompt: a text, token ids, a tokenizer's output, or a prompt dict of vLLM's.
            edits: names of the installed edits that run besides; they win over the trace's.
            **sampling: sampling arguments of this prompt; they win over the trace's.

        Raises:
            ValueError: no prompt was given.

        Example:
            >>> with model.trace(temperature=0.0) as tracer:
            ...     for prompt in prompts:
            ...         with tracer.invoke(prompt):
            ...             hidden = model.transformer.h[6].output.save()
        """
        if not self._open:
            raise LocationError("tracer.invoke belongs inside the body of its own trace.")
        if prompt is NO_PROMPT:
            raise ValueError("An invoke needs a prompt: `with tracer.invoke(prompt):`.")
        chosen = self._edits if edits is None else check_edits(edits, self._backend)
        return InvokeContext(self, prompt, merge(self._sampling, sampling), chosen)

    def barrier(self, *_: Any, **__: Any) -> NoReturn:
        raise NotSupportedError(BARRIER)

    def __getattr__(self, name: str) -> Any:
        if name in ("all", "cache", "iter", "stop"):
            raise LocationError(
                f"tracer.{name} belongs inside a block: the body of a trace with a prompt or of an "
                "invoke."
            )
        if name == "result":
            raise LocationError("tracer.result is there once the trace has ended.")
        if name == "backend":
            raise LocationError(
                "tracer.backend is there once the body is over, of a model in mode='async'."
            )
        raise AttributeError(f"A tracer has no attribute {name!r}.")

    def __enter__(self) -> Tracer:
        if current_run() is not None:
            raise LocationError("A trace cannot be opened inside the block of another.")
        self._open = True
        if self._prompt is not NO_PROMPT:
            self._enter(sys._getframe(1))
        else:
            self._shared = open_shared()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._open = False
        close_shared(self._shared)
        skipped = self._leave(kind)
        if error is not None and not skipped:
            self._forget()
            return False
        if skipped:
            assert self._frame is not None and self._block is not None
            bind_target(self._frame, self._block.target, self)
            invoke = Invoke(self._prompt, self._sampling, self._block, edits=self._edits)
            self._add(invoke, self._frame)
        if not self._invokes:
            self._forget()
            raise ValueError(
                "The trace has no prompt: give it one (`model.trace(prompt)`) or open invokes in "
                "it (`with tracer.invoke(prompt):`)."
            )
        try:
            failure = self._run()
        except BaseException as raised:
            forget_skip(raised)
            raise
        reraise(failure)
        return True

    def _add(self, invoke: Invoke, frame: FrameType) -> None:
        if invoke.block is not None:
            check_nodes(invoke.block, self._model)
            above = {id(value) for value in self._shared}
            held = invoke.block.names.items()
            invoke.block.shared = [name for name, value in held if id(value) in above]
        self._invokes.append(invoke)
        self._frames.append(frame)

    def _add_now(self, invoke: Invoke, frame: FrameType) -> None:
        """Add an invoke with what it names and is given as that is now."""
        assert invoke.block is not None
        values = [invoke.prompt, invoke.sampling, *invoke.block.names.values()]
        self._along.append((invoke, self._snapshots.take(values, self._shared)))
        self._add(invoke, frame)

    def _forget(self) -> None:
        # A frame that is held keeps everything in it alive.
        self._frames = []
        self._frame = self._block = None
        self._invokes = []
        self._shared = []
        self._snapshots = Snapshots()
        self._along = []

    def _run(self) -> Exception | None:
        """Run the invokes, and bind what comes home; gives the error to be raised after that.

        On a backend for asyncio they are begun, and `backend` brings them to their end.
        """
        invokes, frames = self._invokes, self._frames
        for invoke, along in self._along:
            assert invoke.block is not None
            invoke.prompt, invoke.sampling, *held = along.as_it_was()
            invoke.block.names = dict(zip(invoke.block.names, held, strict=True))
        try:
            self._texts = self._model._read(invokes, self._backend, self._only_taps)
            if self._progress:
                self._bar = Bar(len(invokes))
            if isinstance(self._backend, AsyncBackend):
                frame = frames[0] if frames else None
                home = _home_of(weakref.ref(self))
                self.backend = AsyncRun(self._backend, invokes, home, frame, self._bar)
                return None
            outcomes = [Outcome(index, invoke) for index, invoke in enumerate(invokes)]
            failure: BaseException | None = None
            try:
                for event in self._backend.submit(invokes):
                    outcomes[event.invoke].take(event)
                    if self._bar is not None:
                        self._bar.take(event)
            except (ProtocolError, EngineDeadError) as error:
                failure = error
            return _bring_home(self, frames, outcomes, failure, None)
        finally:
            self._forget()
            if self._bar is not None and not isinstance(self._backend, AsyncBackend):
                self._bar.close()


class InvokeContext(Captured):
    """One `with tracer.invoke(prompt):`."""

    def __init__(
        self,
        tracer: Tracer,
        prompt: Any,
        sampling: dict[str, Any],
        edits: list[str] | None = None,
    ) -> None:
        super().__init__()
        self._tracer = tracer
        self._prompt = prompt
        self._sampling = sampling
        self._edits = edits

    def __enter__(self) -> InvokeContext:
        if self._tracer._prompt is not NO_PROMPT:
            raise LocationError("A trace that was given a prompt has no invokes.")
        self._enter(sys._getframe(1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not self._leave(kind):
            return False
        assert self._frame is not None and self._block is not None
        bind_target(self._frame, self._block.target, self)
        invoke = Invoke(self._prompt, self._sampling, self._block, edits=self._edits)
        self._tracer._add_now(invoke, self._frame)
        self._frame = self._block = None
        return True


def _bring_home(
    trace: Any,
    frames: list[FrameType],
    outcomes: list[Outcome],
    failure: BaseException | None,
    frame: FrameType | None,
) -> Exception | None:
    """Bind what has come home; gives the error to be raised after that.

    Args:
        trace: gets the outputs, the saves and the value.
        frames: where each invoke was written, as far as that is held.
        frame: where all were, if that is known otherwise.
    """
    for outcome in outcomes:
        outcome.finished = True
    invokes = [outcome.invoke for outcome in outcomes]
    trace.outputs = [o.output for o in outcomes]
    shared = put_together(invokes, outcomes)
    trace.saves = {**by_name(invokes, outcomes), **shared}
    trace.value = one_or_all([o.value() for o in outcomes])
    _bind(trace.saves, frames or [frame] * len(invokes), outcomes)
    for outcome in outcomes:
        outcome.show()
    errors = [e for outcome in outcomes for e in outcome.errors]
    if failure is not None:
        if isinstance(failure, ProtocolError):
            failure.arrived = dict(trace.saves)
        raise failure
    return one_error(errors, len(invokes))


def _bind(saves: dict[str, Any], frames: list[Any], outcomes: list[Outcome]) -> None:
    """Bind what has come home in every frame where a block was to save it."""
    places: dict[int, tuple[FrameType, dict[str, Any]]] = {}
    for place, outcome in zip(frames, outcomes, strict=False):
        if place is None:
            continue
        _, values = places.setdefault(id(place), (place, {}))
        for name, value in saves.items():
            if name not in values and _was_to_save(outcome, name):
                values[name] = value
    for place, values in places.values():
        push(place, values)


def _was_to_save(outcome: Outcome, name: str) -> bool:
    """Whether the name is one that the block itself binds or saves, or has saved all the same.

    A name that the block only reads is left alone in its frame.
    """
    block = outcome.invoke.block
    if block is None:
        return False
    names = block.code.names
    if name in names.binds or name in names.saved or name in block.shared:
        return True
    return any(name in ended.saves for ended in outcome.sequences.values())


def _home_of(trace: weakref.ref[Tracer]) -> Home:
    """What brings a trace home that may be let go of, which ends its requests."""

    def home(
        outcomes: list[Outcome], failure: BaseException | None, frame: FrameType | None
    ) -> Exception | None:
        return _bring_home(trace() or SimpleNamespace(), [], outcomes, failure, frame)

    return home


def check_edits(names: Any, backend: Any) -> list[str] | None:
    """The names of edits that a request asks for.

    Raises:
        TypeError: they are no list of names.
        NotSupportedError: there can be none on this backend.
    """
    if names is None:
        return None
    if not isinstance(backend, EditBackend | AsyncBackend):
        raise NotSupportedError(f"edits={names!r}: a {type(backend).__name__} has no edits (yet).")
    several = isinstance(names, list | tuple | set)
    if not several or not all(isinstance(name, str) for name in names):
        raise TypeError(f"edits={names!r}: it takes a list of edit names.")
    return list(names)


def check_nodes(block: Block, model: Model) -> None:
    """Refuse the nodes of another model, whose paths would name this one's modules."""
    for name, value in block.names.items():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Node) and part._places is not model._places:
                raise LocationError(
                    f"{block.code.filename}:{block.code.names.needs.get(name, block.code.line)}: "
                    f"{name!r} names {part!r} of another model than the one that is traced."
                )


def forget_skip(error: BaseException) -> None:
    """Python would show how the body was skipped as what led to the error."""
    while error.__context__ is not None:
        if isinstance(error.__context__, Skipped):
            error.__context__ = None
            return
        error = error.__context__
