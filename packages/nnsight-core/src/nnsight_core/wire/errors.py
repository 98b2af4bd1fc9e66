"""How an error of a block travels, and how it is raised again with the user's own lines.

The class is found again only among what this process already has loaded: nothing is imported
because a peer names it. The traceback is rebuilt from file, line and function of each frame, so
that it reads like one of this process.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from types import CodeType, TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict

from nnsight_core.errors import BlockError, EncodeError, ProtocolError
from nnsight_core.wire.data import Decoder, Encoder, loaded
from nnsight_core.wire.frames import Buffer


class FrameRecord(BaseModel):
    """One frame of a traceback."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    filename: str
    line: int
    function: str
    text: str = ""


class ErrorRecord(BaseModel):
    """An error as data.

    Attributes:
        module, name: its class.
        args: its arguments as typed values, if they are data.
        message: its text, for where the class cannot be found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    name: str
    args: list[Any] | None = None
    message: str
    notes: tuple[str, ...] = ()
    frames: tuple[FrameRecord, ...] = ()


def record_error(error: BaseException, encoder: Encoder) -> ErrorRecord:
    """An error as data; its arguments go through `encoder`."""
    args: list[Any] | None
    try:
        given = error.args
        if isinstance(error, OSError) and error.filename is not None:
            given = (*given[:2], error.filename)  # which Python leaves out of the arguments
        args = [encoder.encode(a, "an argument of the error") for a in given]
    except EncodeError:
        args = None
    return ErrorRecord(
        module=type(error).__module__,
        name=type(error).__qualname__,
        args=args,
        message=_message(error),
        notes=tuple(getattr(error, "__notes__", ())),
        frames=tuple(_frames(error.__traceback__)),
    )


def rebuild_error(
    record: ErrorRecord, buffers: list[Buffer], known: Iterable[type] = ()
) -> BaseException:
    """The error again, ready to be raised.

    Args:
        buffers: the buffers of the frame that the record came in.
        known: classes that are not to be found by module and name (made inside a function).
    """
    cls = _class_of(record, known)
    error: BaseException | None = None
    if cls is not None:
        error = _made(cls, _arguments(record, buffers))
        if error is None or _message(error) != record.message:
            error = _made(cls, [record.message]) or error
        if error is not None and _message(error) != record.message:
            error.add_note(record.message)  # a class whose text is made of more than its arguments
    if error is None:
        error = BlockError(f"{record.name}: {record.message}")
    for note in record.notes:
        error.add_note(note)
    return error.with_traceback(_traceback(record.frames))


def _arguments(record: ErrorRecord, buffers: list[Buffer]) -> list[Any]:
    decoder = Decoder(buffers)
    try:
        return [decoder.decode(a) for a in record.args or ()]
    except ProtocolError:
        return [record.message]


def _made(cls: type[BaseException], args: list[Any]) -> BaseException | None:
    """An error of a class with these arguments, without what the class itself does to them."""
    # A class's own __init__ may want what does not travel; that of Python's class below it is run,
    # since some of those keep their text outside `args`.
    base = next(b for b in cls.__mro__ if b.__module__ == "builtins")
    try:
        error = cls.__new__(cls, *args)
        base.__init__(error, *args)
    except Exception:
        return None
    return error


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be had)"


def _frames(traceback: TracebackType | None) -> Iterable[FrameRecord]:
    while traceback is not None:
        code = traceback.tb_frame.f_code
        line = traceback.tb_lineno or 0
        yield FrameRecord(
            filename=code.co_filename,
            line=line,
            function=code.co_name,
            text=linecache.getline(code.co_filename, line).strip()[:200],
        )
        traceback = traceback.tb_next


def _class_of(record: ErrorRecord, known: Iterable[type]) -> type[BaseException] | None:
    found = loaded(record.module or "builtins", record.name)
    for cls in known:
        if (cls.__module__, cls.__qualname__) == (record.module, record.name):
            found = cls
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _traceback(frames: Iterable[FrameRecord]) -> TracebackType | None:
    """A traceback with one real frame per record, each made by code that raises on that line."""
    made: TracebackType | None = None
    for record in reversed(list(frames)):
        inner = _raised_at(record)
        if inner is not None:
            made = TracebackType(made, inner.tb_frame, inner.tb_lasti, inner.tb_lineno)
    return made


def _raised_at(record: FrameRecord) -> TracebackType | None:
    text = linecache.getline(record.filename, record.line).rstrip()
    line = max(record.line, 1)
    raising = ast.Raise(ast.Name("_", ast.Load()), None)
    for node in ast.walk(raising):
        # The whole line, so that a traceback underlines no part of it.
        if isinstance(node, ast.Raise | ast.Name):
            node.lineno = node.end_lineno = line
            node.col_offset = len(text) - len(text.lstrip())
            node.end_col_offset = len(text)
    module = compile(ast.Module([raising], []), record.filename, "exec")
    code: CodeType = module.replace(co_name=record.function, co_qualname=record.function)
    try:
        exec(code, {"_": _Marker()})
    except _Marker as marker:
        traceback = marker.__traceback__
        return traceback.tb_next if traceback else None
    return None


class _Marker(Exception):
    pass
