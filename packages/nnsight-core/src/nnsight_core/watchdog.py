"""Ends blocks that hold the engine for too long.

A block runs inside the engine's own thread, so nothing but that thread could end it. Python can
raise an error in another thread, between two of its instructions; a thread of ours does that to a
block whose time is up. What it cannot reach is a single call into C that never comes back.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

from nnsight_core.errors import BlockTimeout

_PERIOD = 0.05
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


class Watchdog:
    """Watches the blocks of all threads of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._fired: set[int] = set()
        self._thread: threading.Thread | None = None

    def enter(self, seconds: float) -> None:
        """This thread hands control to a block, which has so many seconds."""
        self._until[threading.get_ident()] = time.monotonic() + seconds
        if self._thread is None:
            self._start()

    def leave(self) -> None:
        """The block has given control back: nothing is raised in this thread any more."""
        thread = threading.get_ident()
        with self._lock:
            self._until.pop(thread, None)
            if thread in self._fired:
                self._fired.discard(thread)
                _raise_in(thread, ctypes.py_object())

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="nnsight", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(_PERIOD)
            now = time.monotonic()
            with self._lock:
                for thread, until in list(self._until.items()):
                    if now >= until:
                        # A block may catch it, so it comes again.
                        self._until[thread] = now + 10 * _PERIOD
                        self._fired.add(thread)
                        _raise_in(thread, ctypes.py_object(BlockTimeout))


WATCHDOG = Watchdog()


def _forked() -> None:
    # A thread does not live on in a forked process, and a lock may have been held.
    WATCHDOG.__init__()


os.register_at_fork(after_in_child=_forked)
