"""A wall in the C stack, beyond which nothing that walks it looks.

PyTorch walks the C stack whenever it raises an error, to note where it happened. A greenlet's part
of that stack ends in the middle of frames that have long been overwritten, so the walk would go on
into garbage, and crash the process. A walk ends at code for which the system has no unwinding
tables, so a greenlet's work is called through a few instructions of ours that have none.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import sys
from collections.abc import Callable

_CALL_ARGUMENT = {
    # sub rsp, 8; call rdi; add rsp, 8; ret
    "x86_64": "4883ec08 ffd7 4883c408 c3",
    # stp x29, x30, [sp, -16]!; blr x0; ldp x29, x30, [sp], 16; ret
    "aarch64": "fd7bbfa9 00003fd6 fd7bc1a8 c0035fd6",
}
_Work = ctypes.PYFUNCTYPE(None)


def behind_wall(work: Callable[[], None]) -> None:
    """Call a function behind a wall; on a machine where none can be built, call it as it is."""
    call = _caller()
    if call is None:
        work()
        return
    raised: list[BaseException] = []

    def guarded() -> None:
        # What is raised cannot pass through the C frames of the call.
        try:
            work()
        except BaseException as error:
            raised.append(error)

    call(_Work(guarded))
    if raised:
        raise raised[0]


@functools.cache
def _caller() -> Callable[[object], None] | None:
    code = _CALL_ARGUMENT.get(platform.machine())
    if code is None or sys.platform != "linux":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a system that gives out no memory for code
        return None
    page.write(bytes.fromhex(code))
    _PAGES.append(page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.PYFUNCTYPE(None, _Work)(address)


_PAGES: list[mmap.mmap] = []
