"""Leaves code where it is: control goes to another greenlet and never comes back.

This is done from inside the making of an error (`nnsight_core.watchdog`), and up to 3.11 Python
counts how deep it is in that: were it not let out, it would abort the process at the next recursion
that goes too deep. So there control goes as soon as Python traces the instruction that comes next.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from greenlet import greenlet

_thread_state = ctypes.pythonapi.PyThreadState_Get
_thread_state.restype = ctypes.c_void_p
_leave_tracing = ctypes.pythonapi.PyThreadState_LeaveTracing
_leave_tracing.argtypes = (ctypes.c_void_p,)
_leave_tracing.restype = None


def leave_at(frame: FrameType, away: Callable[[], object]) -> None:
    """Called while an error is made for a frame: `away` is called before it goes on.

    Args:
        away: does not come back.
    """
    if sys.version_info >= (3, 12):
        away()
        return

    def traced(*_: Any) -> None:
        sys.settrace(None)
        # Python would go on to count this call as one that it is in.
        _leave_tracing(_thread_state())
        away()

    frame.f_trace = traced
    frame.f_trace_opcodes = True
    sys.settrace(lambda *_: None)


def keep(left: greenlet) -> None:
    """See to it that a greenlet is never forgotten: Python would raise an error there."""
    if not left.dead:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
