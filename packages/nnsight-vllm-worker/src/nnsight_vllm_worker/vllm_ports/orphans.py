"""No engine outlives the process that started it, however that ends.

vLLM ends its processes when their holder exits, which one that is killed does not do: its engine
would live on, with the model and the device's memory. So each process of an engine ends itself as
soon as its parent is gone. It watches the parent in a thread; and where the kernel can be asked to
do it, it does: that also ends a process which is stopped, or hangs in a call that holds Python.

Interrupts are the holder's business. Ctrl-C in a terminal, or in a notebook, goes to every process
of the group, and an engine that took it would end under requests that its holder still wants.

Relies on (vLLM 0.26.0 and 0.27.1):
- the processes of an engine are started by `multiprocessing`, by the one that builds it or by each
  other, and inherit its environment; the first is started in the thread that builds it, the
  others in the main threads of their parents.
- workers import the extension class, and the engine core makes its scheduler, in these processes.
- `EngineCoreProc.run_engine_core` sets handlers of signals when it has made the engine core, and
  calls `run_busy_loop` of that next; workers set theirs before they take the first call, and take
  calls in their main threads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_vllm_worker.vllm_ports.checks import check_methods

HOLDER = "NNSIGHT_ENGINE_HOLDER"
"""Environment variable: who builds an engine, and whether in its main thread: `PID:1`."""
_PR_SET_PDEATHSIG = 1
_POLL = 0.5

# Which process watches its parent: one that is forked has what this holds, but not the thread.
_watching: int | None = None


@contextmanager
def holding() -> Iterator[None]:
    """While an engine is being built: its processes know whose they are."""
    before = os.environ.get(HOLDER)
    main = threading.current_thread() is threading.main_thread()
    os.environ[HOLDER] = f"{os.getpid()}:{int(main)}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[HOLDER]
        else:
            os.environ[HOLDER] = before


def end_with_parent() -> None:
    """In a process of an engine: end when the parent does. In the holder itself, do nothing."""
    global _watching
    parent, main = _parent()
    if parent is None or _watching == os.getpid():
        return
    _watching = os.getpid()
    if main:
        _ask_kernel()
    watched = _opened(parent)
    if os.getppid() != parent:
        _end()
    threading.Thread(
        target=_wait, args=(parent, watched), name="nnsight-orphan", daemon=True
    ).start()


def core_ignores_interrupts() -> None:
    """While an engine core is being made: have it leave Ctrl-C to the holder when it runs.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    from vllm.v1.engine.core import EngineCoreProc

    check_methods(EngineCoreProc, {"run_busy_loop": ()})
    if _parent()[0] is None:
        return
    plain = EngineCoreProc.run_busy_loop

    def run_busy_loop(self: Any) -> Any:
        ignore_interrupts()
        return plain(self)

    EngineCoreProc.run_busy_loop = run_busy_loop  # type: ignore[method-assign]


def ignore_interrupts() -> None:
    """In the main thread of a process of an engine: leave Ctrl-C to the holder."""
    if _parent()[0] is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _parent() -> tuple[int | None, bool]:
    """The parent of this process, and whether the kernel may be asked; None in the holder itself.

    The kernel's word for a parent is the thread that started the process, and only a main thread
    ends no sooner than its process does. Engine cores start their workers in theirs.
    """
    holder, _, main = os.environ.get(HOLDER, "").partition(":")
    if not holder or int(holder) == os.getpid():
        return None, False
    started_by = multiprocessing.parent_process()
    # Who has adopted this process meanwhile is not its parent.
    parent = os.getppid() if started_by is None or started_by.pid is None else started_by.pid
    return parent, main == "1" or parent != int(holder)


def _ask_kernel() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _opened(parent: int) -> int | None:
    """A descriptor that becomes readable when the parent ends; None where none can be had."""
    try:
        return os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None


def _wait(parent: int, watched: int | None) -> None:
    poll = select.poll()
    if watched is not None:
        poll.register(watched, select.POLLIN)
    while os.getppid() == parent:
        poll.poll(None if watched is not None else 1000 * _POLL)
    _end()


def _end() -> None:
    # Nothing is left that an orderly end would be of use to, and it might not come to an end.
    os.kill(os.getpid(), signal.SIGKILL)
