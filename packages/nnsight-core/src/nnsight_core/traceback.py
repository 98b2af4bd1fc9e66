"""Tracebacks that begin in the user's block and end before our own code."""

from __future__ import annotations

import linecache
import re
from types import CodeType, FrameType, TracebackType

CALL = "<nnsight fn=>"
"""The file that the call of a function given as `fn=` seems to stand in."""
_OURS = ("nnsight_core", "nnsight_vllm_worker", "nnsight_serve")


def no_file(filename: str) -> str:
    """A user's file as the name of code here, under which no file of this machine is found."""
    return f"<{_ELSEWHERE}{filename}>"


def users_file(filename: str) -> str:
    """The user's file that code here is named by."""
    ours = filename.startswith(f"<{_ELSEWHERE}")
    return filename[len(_ELSEWHERE) + 1 : -1] if ours else filename


_ELSEWHERE = "of the user: "


def user_traceback(traceback: TracebackType | None, block: CodeType) -> TracebackType | None:
    """The part of a traceback from the block's own frame on, without our frames at its end."""
    found = traceback
    while found is not None and found.tb_frame.f_code is not block:
        found = found.tb_next
    if found is None:
        found = traceback
    last, here = found, found
    while here is not None:
        if not is_ours(here):
            last = here
        here = here.tb_next
    if last is None or found is None:
        return None
    last.tb_next = None
    if users_file(block.co_filename) == CALL and found.tb_next is not None:
        return found.tb_next  # the call of a function given as `fn=` is no line of the user's
    return found


def show_user_lines(error: BaseException, block: CodeType) -> None:
    """Leave the user's lines in the tracebacks of an error and of those that come with it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.with_traceback(user_traceback(one.__traceback__, block))
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def traceback_to(frame: FrameType | None, block: CodeType) -> TracebackType | None:
    """The traceback of an error that was raised at a frame; None if no block runs there."""
    made: TracebackType | None = None
    while frame is not None:
        made = TracebackType(made, frame, frame.f_lasti, frame.f_lineno)
        if frame.f_code is block:
            return made
        frame = frame.f_back
    return None


def is_ours(traceback: TracebackType) -> bool:
    """Whether the first frame of a traceback is one of our own code."""
    module = traceback.tb_frame.f_globals.get("__name__")
    return isinstance(module, str) and module.partition(".")[0] in _OURS


def first_line(filename: str, line: int, function: str) -> int:
    """Where the function around a line begins, since what shows a frame's source begins there."""
    if function == "<module>":
        return 1
    if function.isidentifier():
        begins = re.compile(rf"\s*(async\s+)?def\s+{function}\b")
        lines = linecache.getlines(filename)
        for number in range(min(line, len(lines)), 0, -1):
            if begins.match(lines[number - 1]):
                return number
    return line
