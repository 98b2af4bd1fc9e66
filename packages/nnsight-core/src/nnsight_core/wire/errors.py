"""How an error of a block travels, and how it is raised again with the user's own lines.

The class is found again only among what this process already has loaded: nothing is imported
because a peer names it. What the error holds is put into it as it was, so nothing of the class is
run. What an error was raised from travels with it, and so do the errors of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any

from pydantic import BaseModel, ConfigDict, model_serializer

from nnsight_core.errors import BlockError, EncodeError, ProtocolError
from nnsight_core.wire.bounded import BoundedEncoder, Room
from nnsight_core.wire.data import Decoder, Encoder, Json, loaded
from nnsight_core.wire.frames import Buffer
from nnsight_core.wire.tracebacks import FrameRecord, frames_of, traceback_of

MAX_BYTES = 1 << 20
"""About how many bytes the values of an error may have, those of its chain included."""
MAX_ERRORS = 32
"""How many errors travel as one: the chain behind an error, and the members of groups."""
MAX_TEXT = 1 << 16
"""How many characters of an error's text, and of each note, travel."""


class ErrorRecord(BaseModel):
    """An error as data; the entries that came last are not written where they are empty.

    Attributes:
        module, name: its class.
        args: its arguments as typed values, if they are data.
        message: its text, for where the class cannot be found.
        attributes: what it holds besides, as typed values; what is no data is left out.
        members: the errors of a group.
        cause: what it was raised from.
        context: what was being handled when it was raised, if a traceback shows that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    name: str
    args: list[Any] | None = None
    message: str
    notes: tuple[str, ...] = ()
    frames: tuple[FrameRecord, ...] = ()
    attributes: dict[str, Any] = {}
    members: tuple[ErrorRecord, ...] = ()
    cause: ErrorRecord | None = None
    context: ErrorRecord | None = None

    @model_serializer(mode="wrap")
    def _short(self, write: Any) -> dict[str, Any]:
        return {k: v for k, v in write(self).items() if v or k not in _LEFT_OUT}


_LEFT_OUT = ("attributes", "members", "cause", "context")


def record_error(error: BaseException, encoder: Encoder) -> ErrorRecord:
    """An error as data; the buffers of its values are added to those of `encoder`."""
    return _Recorder(encoder.buffers).record(error)


def rebuild_error(
    record: ErrorRecord, buffers: list[Buffer], known: Iterable[type] = ()
) -> BaseException:
    """The error again, ready to be raised.

    Args:
        buffers: the buffers of the frame that the record came in.
        known: classes that are not to be found by module and name (made inside a function).
    """
    return _Rebuilder(buffers, list(known)).rebuild(record)


class _Recorder:
    """Makes the records of an error and of those that come with it."""

    def __init__(self, buffers: list[Buffer]) -> None:
        # Numbered apart from what else is in the frame, since the record is read apart from it.
        self._values = _Bounded(buffers)
        self._seen: set[int] = set()

    def record(self, error: BaseException) -> ErrorRecord:
        self._seen.add(id(error))
        members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        # Values are numbered in the order in which they are read again: own ones first.
        args, attributes = self._arguments(error), self._attributes(error)
        records = tuple(self.record(e) for e in members if self._room())
        notes = _notes(error)
        if len(records) < len(members):
            notes.append(f"{len(members) - len(records)} more errors of this group stay behind.")
        cause, context = error.__cause__, error.__context__
        if cause is not None or error.__suppress_context__:
            context = None
        return ErrorRecord(
            module=str(type(error).__module__),
            name=type(error).__qualname__,
            args=args,
            message=_message(error),
            notes=tuple(notes),
            frames=tuple(frames_of(error.__traceback__)),
            attributes=attributes,
            members=records,
            cause=self._before(cause),
            context=self._before(context),
        )

    def _arguments(self, error: BaseException) -> list[Json] | None:
        given = error.args
        if isinstance(error, BaseExceptionGroup):
            given = (error.message,)
        elif isinstance(error, OSError) and error.filename is not None:
            given = (*given[:2], error.filename)  # which Python leaves out of the arguments
        try:
            return [self._values.encode(a, "an argument of the error") for a in given]
        except EncodeError:
            return None

    def _attributes(self, error: BaseException) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for name, value in _held(error):
            try:
                found[name] = self._values.encode(value, name)
            except EncodeError:
                continue
        return found

    def _before(self, error: BaseException | None) -> ErrorRecord | None:
        new = error is not None and id(error) not in self._seen and self._room()
        return self.record(error) if error is not None and new else None

    def _room(self) -> bool:
        return len(self._seen) < MAX_ERRORS


class _Bounded(BoundedEncoder):
    """Encodes up to `MAX_BYTES`, into the buffers of another encoder.

    What it cannot encode for whatever reason is an `EncodeError`: an error must come home.
    """

    def __init__(self, buffers: list[Buffer]) -> None:
        super().__init__(Room.of(MAX_BYTES))
        self.buffers = buffers

    def encode(self, value: Any, name: str = "") -> Json:
        try:
            return super().encode(value, name)
        except Exception as error:
            raise _refused(error) from error

    def form(self, value: Any) -> dict[str, Json]:
        try:
            return super().form(value)
        except Exception as error:
            raise _refused(error) from error

    def too_large(self) -> EncodeError:
        return EncodeError(f"{self.where()} is too large to come with an error.")


def _refused(error: Exception) -> EncodeError:
    return error if isinstance(error, EncodeError) else EncodeError(type(error).__name__)


class _Rebuilder:
    """Makes errors of records again."""

    def __init__(self, buffers: list[Buffer], known: list[type]) -> None:
        self._decoder = Decoder(buffers)
        self._known = known
        self._left = MAX_ERRORS

    def rebuild(self, record: ErrorRecord) -> BaseException:
        self._left -= 1
        args, attributes = self._arguments(record), self._attributes(record)
        members = [self.rebuild(m) for m in record.members if self._left > 0]
        error, notes = None, list(record.notes)
        cls = _class_of(record, self._known)
        if cls is not None:
            error = _error_of(cls, record, args, attributes, members)
        if error is None:
            text = f"{record.name}: {record.message}"
            error = _made(BaseExceptionGroup, [text, members]) or BlockError(text)
            _give(error, attributes)
        elif _message(error) != record.message:
            notes.insert(0, record.message)  # its text is made of what did not travel
        if notes:
            vars(error)["__notes__"] = notes
        before = self._before(record.cause or record.context)
        if before is not None:
            # As Python does it: what an error was raised from was also being handled.
            BaseException.__setattr__(error, "__context__", before)
            if record.cause is not None:
                BaseException.__setattr__(error, "__cause__", before)
        return error.with_traceback(traceback_of(record.frames))

    def _arguments(self, record: ErrorRecord) -> list[Any] | None:
        try:
            args = record.args
            return None if args is None else [self._decoder.decode(a) for a in args]
        except ProtocolError:
            return None

    def _attributes(self, record: ErrorRecord) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, form in record.attributes.items():
            try:
                found[name] = self._decoder.decode(form)
            except ProtocolError:
                continue
        return found

    def _before(self, record: ErrorRecord | None) -> BaseException | None:
        return self.rebuild(record) if record is not None and self._left > 0 else None


def _error_of(
    cls: type[BaseException],
    record: ErrorRecord,
    args: list[Any] | None,
    attributes: Mapping[str, Any],
    members: list[BaseException],
) -> BaseException | None:
    """An error of a class with the text of the record, or else at least with its arguments."""
    if issubclass(cls, BaseExceptionGroup):
        ways = [[*(args or [record.message]), members]]
    else:
        ways = [way for way in (args, [record.message]) if way is not None]
    made = [error for error in (_made(cls, way) for way in ways) if error is not None]
    for error in made:
        _give(error, attributes)
        if _message(error) == record.message:
            return error
    return made[0] if made else None


def _made(cls: type[BaseException], args: list[Any]) -> BaseException | None:
    """An error of a class with these arguments, without what the class itself does to them."""
    # A class's own __init__ may want what does not travel; that of Python's class below it is run,
    # since some of those keep their text outside `args`.
    base: Any = cls
    while base.__module__ != "builtins":
        base = base.__base__
    try:
        error = base.__new__(cls, *args)
        base.__init__(error, *args)
    except Exception:
        return None
    return error


# What Python's own errors keep besides their arguments.
_BESIDE = ("name", "path", "filename2")


def _held(error: BaseException) -> Iterator[tuple[str, Any]]:
    """What an error holds besides its arguments, by name."""
    for name, slot in _slots(type(error)).items():
        try:
            value = slot.__get__(error)
        except AttributeError:
            continue
        if value is not None or name not in _BESIDE:
            yield name, value
    for name, value in vars(error).items():
        if _may_be_given(name):
            yield name, value


def _give(error: BaseException, attributes: Mapping[str, Any]) -> None:
    """Put attributes where an error holds them; nothing of its class is run."""
    slots = _slots(type(error))
    for name, value in attributes.items():
        if name in slots:
            try:
                slots[name].__set__(error, value)
            except (AttributeError, TypeError):
                continue
        elif _may_be_given(name):
            vars(error)[name] = value


def _may_be_given(name: Any) -> bool:
    own = isinstance(name, str) and not name.startswith("__")
    return own and name not in vars(BaseException)


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    return {
        name: slot
        for base in reversed(cls.__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
        if name in _BESIDE or (base.__module__ != "builtins" and _may_be_given(name))
    }


def _message(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception:
        return "(its text cannot be had)"


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [_cut(n) for n in notes if isinstance(n, str)] if isinstance(notes, list) else []


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()  # as it arrives, where UTF-8 cannot hold it
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _class_of(record: ErrorRecord, known: Iterable[type]) -> type[BaseException] | None:
    found = loaded(record.module or "builtins", record.name)
    for cls in known:
        if (cls.__module__, cls.__qualname__) == (record.module, record.name):
            found = cls
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
