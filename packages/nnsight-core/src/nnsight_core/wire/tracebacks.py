"""Tracebacks on the wire: each frame as file, line, function and text, and frames made of that.

A rebuilt traceback reads like one of this process: its frames are real ones, made by code that
raises on the line in question.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from types import CodeType, TracebackType

from pydantic import BaseModel, ConfigDict

from nnsight_core.traceback import first_line, is_ours, users_file

MAX_FRAMES = 1000
"""How many frames of a traceback travel; of a longer one its two ends."""


class FrameRecord(BaseModel):
    """One frame of a traceback."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    filename: str
    line: int
    function: str
    text: str = ""


def frames_of(traceback: TracebackType | None) -> Iterator[FrameRecord]:
    """The frames of a traceback, without our own at its end."""
    frames: list[TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    count = len(frames)
    while count and is_ours(frames[count - 1]):
        count -= 1
    frames = frames[: count or None]
    if len(frames) > MAX_FRAMES:
        frames = [*frames[: MAX_FRAMES // 2], *frames[-MAX_FRAMES // 2 :]]
    for frame in frames:
        code = frame.tb_frame.f_code
        line = frame.tb_lineno or 0
        yield FrameRecord(
            filename=users_file(code.co_filename),
            line=line,
            function=code.co_name,
            text=linecache.getline(code.co_filename, line).strip()[:200],
        )


def traceback_of(frames: Iterable[FrameRecord]) -> TracebackType | None:
    """A traceback with one real frame per record, each made by code that raises on that line."""
    made: TracebackType | None = None
    for record in reversed(list(frames)[:MAX_FRAMES]):
        inner = _raised_at(record)
        if inner is not None:
            made = TracebackType(made, inner.tb_frame, inner.tb_lasti, inner.tb_lineno)
    return made


def _raised_at(record: FrameRecord) -> TracebackType | None:
    if "\0" in record.filename or record.line >= 1 << 31:  # no file or line that Python could have
        return None
    text = linecache.getline(record.filename, record.line).rstrip()
    line = max(record.line, 1)
    raised = ast.Name("_", ast.Load())
    raising = ast.Raise(raised, None)
    function = ast.FunctionDef("_", _NO_ARGUMENTS, [raising], [])
    first = first_line(record.filename, line, record.function)
    function.lineno = function.end_lineno = first
    function.col_offset = function.end_col_offset = 0
    for node in (raising, raised):
        # The whole line, so that a traceback underlines no part of it.
        node.lineno = node.end_lineno = line
        node.col_offset = len(text) - len(text.lstrip())
        node.end_col_offset = len(text)
    module = record.function == "<module>"
    tree = ast.Module([raising if module else function], [])
    code = compile(tree, record.filename, "exec")
    if not module:
        code = next(c for c in code.co_consts if isinstance(c, CodeType))
    try:
        exec(code.replace(co_name=record.function, co_qualname=record.function), {"_": _Marker()})
    except _Marker as marker:
        traceback = marker.__traceback__
        return traceback.tb_next if traceback else None
    return None


_NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])


class _Marker(Exception):
    pass
