"""Tracebacks that begin in the user's block and end before our own code."""

from __future__ import annotations

import os
from types import CodeType, TracebackType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def user_traceback(traceback: TracebackType | None, block: CodeType) -> TracebackType | None:
    """The part of a traceback from the block's own frame on, without our frames at its end."""
    found = traceback
    while found is not None and found.tb_frame.f_code is not block:
        found = found.tb_next
    if found is None:
        return traceback
    last, here = found, found
    while here is not None:
        if not here.tb_frame.f_code.co_filename.startswith(_OURS):
            last = here
        here = here.tb_next
    last.tb_next = None
    return found
