"""Ends blocks that hold the engine for too long.

A block runs inside the engine's own thread, so nothing but that thread could end it. Python can
raise an error in another thread, between two of its instructions; a thread of ours does that to a
block whose time is up. A block may catch it, so it comes again; and one that goes on all the same
is left where it is: an error is made in the thread that it is raised in, so the third one runs code
of ours there, which sees to it that the block gives control back before its next instruction.

What none of this reaches is a single call into C that never comes back.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from nnsight_core.errors import BlockTimeout
from nnsight_core.leaving import keep, leave_at
from nnsight_core.wall import behind_wall

_T = TypeVar("_T")
Leave = Callable[[FrameType], None]
_PERIOD = 0.05
_AGAIN = 0.5
_GENTLE = 2
"""How often an error is raised in a block before it is left where it is."""
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


def _take(thread: int) -> None:
    """Let an error that may be on its way to this thread come up here.

    Python could be told to forget it, but up to 3.11 it then looks for it for ever, which makes it
    slow, and has it stand still as soon as something traces.
    """
    try:
        _raise_in(thread, ctypes.py_object(BlockTimeout))
        while True:
            pass
    except BlockTimeout:
        return


class _Left(BlockTimeout):
    """Raised in a block that goes on though its time was up."""

    def __init__(self) -> None:
        super().__init__()
        WATCHDOG.leave_block(sys._getframe(1))


class _Watched:
    """A thread that blocks run in: until when the present one may, and how often it was told so."""

    __slots__ = ("fired", "leave", "until")

    def __init__(self) -> None:
        self.until = math.inf
        self.leave: Leave | None = None
        self.fired = 0


class Watchdog:
    """Watches the blocks of all threads of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, _Watched] = {}
        self._watcher: threading.Thread | None = None

    def enter(self, seconds: float, leave: Leave | None = None) -> _Watched:
        """This thread hands control to a block, which has so many seconds.

        Args:
            leave: called in the block, with its innermost frame, if it goes on though its time was
                up.
        """
        watched = self._threads.get(threading.get_ident()) or self._add()
        watched.leave = leave
        watched.until = time.monotonic() + seconds
        return watched

    def leave(self) -> None:
        """The block has given control back: nothing is raised in this thread any more.

        An error that was on its way may come up in this very call, which is to be made again then.
        """
        thread = threading.get_ident()
        with self._lock:
            watched = self._threads.get(thread)
            if watched is None:
                return
            watched.until = math.inf
            watched.leave = None
            fired, watched.fired = watched.fired, 0
        if fired:
            _take(thread)

    def call(self, seconds: float | None, function: Callable[..., _T], *args: Any) -> _T:
        """Call what may run code of a user's outside of a block.

        Raises:
            BlockTimeout: it took longer than so many seconds.
        """
        if seconds is None:
            return function(*args)
        made: list[_T] = []
        here = getcurrent()
        # In a greenlet, so that it can be left where it is.
        there = greenlet(lambda: behind_wall(lambda: made.append(function(*args))))
        watched = ended = None

        def leave(frame: FrameType) -> None:
            if getcurrent() is not here:
                leave_at(frame, here.switch)

        try:
            watched = self.enter(seconds, leave)
            ended = there.switch()
        except BaseException as error:
            # What was called may have made another error of it.
            if not isinstance(error, BlockTimeout) and not (watched and watched.fired):
                raise
        finally:
            # Not a context manager: the error may come up anywhere in between.
            try:
                self.leave()
            except BlockTimeout:
                self.leave()
        if made:
            return made[0]
        if isinstance(ended, GreenletExit):  # which is what a greenlet makes of one that is raised
            raise ended
        keep(there)
        raise BlockTimeout(
            f"Code that came with the block ran for more than {seconds:g} s while its names were "
            "made or its values were taken (block_timeout=)."
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, the block that runs here is not interrupted; its time goes on.

        Raises:
            BlockTimeout: its time was up when it began.
        """
        watched = self._threads.get(threading.get_ident())
        if watched is None or watched.until == math.inf:
            yield
            return
        until, leave = watched.until, watched.leave
        self.leave()
        try:
            yield
        finally:
            with self._lock:
                watched.until, watched.leave = until, leave

    def leave_block(self, frame: FrameType) -> None:
        """Called in the thread of a block that is to be left where it is."""
        watched = self._threads.get(threading.get_ident())
        if watched is not None and watched.leave is not None:
            watched.leave(frame)

    def _add(self) -> _Watched:
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="nnsight", daemon=True)
                self._watcher.start()
            return self._threads.setdefault(threading.get_ident(), _Watched())

    def _watch(self) -> None:
        while True:
            time.sleep(_PERIOD)
            now = time.monotonic()
            with self._lock:
                for thread, watched in self._threads.items():
                    if now >= watched.until:
                        watched.until = now + _AGAIN
                        watched.fired += 1
                        gentle = watched.fired <= _GENTLE
                        _raise_in(thread, ctypes.py_object(BlockTimeout if gentle else _Left))


WATCHDOG = Watchdog()


def _forked() -> None:
    # A thread does not live on in a forked process, and a lock may have been held.
    WATCHDOG.__init__()


os.register_at_fork(after_in_child=_forked)
