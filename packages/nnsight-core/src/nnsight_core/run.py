"""A run: one block executing for one request, as a greenlet.

The block's code runs until it asks for a location, parks there, and goes on when the interleaver
brings the value. What a run is handed is a private copy of its own rows, made where PyTorch counts
versions, so that a write in place is seen when the block gives control back, and a write that comes
too late to land is an error instead of a loss.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Iterable
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from greenlet import GreenletExit, getcurrent
from torch import Tensor

from nnsight_core.checks import check_replacement
from nnsight_core.code import KEEP, SAVE, Code
from nnsight_core.current import Worker, current_run, need_run
from nnsight_core.errors import (
    BlockTimeout,
    LocationError,
    NotSupportedError,
    OutOfOrderError,
)
from nnsight_core.isolation import Isolation
from nnsight_core.leaving import keep as never_forget
from nnsight_core.leaving import leave_at
from nnsight_core.locations import STEP, Location
from nnsight_core.past import RECENT, Past
from nnsight_core.saves import Saves
from nnsight_core.shared import offer
from nnsight_core.traceback import traceback_to
from nnsight_core.values import all_plain, flat, map_tensors, refilled
from nnsight_core.wall import behind_wall
from nnsight_core.watchdog import WATCHDOG

if TYPE_CHECKING:
    from nnsight_core.cache import Recorder
    from nnsight_core.interleaver import Interleaver
    from nnsight_core.keeps import Keeper
    from nnsight_core.visit import Look


class Stopped(BaseException):
    """Leaves a block that has called `tracer.stop()`."""


class _Worker(Worker):
    """A greenlet that executes runs, one after the other.

    Starting a greenlet costs several times what most runs do, so that one which has finished a run
    waits for the next; see `Run.resume`.
    """

    def run(self, *_: Any) -> None:  # type: ignore[override]
        behind_wall(self._work)

    def _work(self) -> None:
        while self.executing is not None:
            self.executing.execute()
            self.executing = None
            # Else what a block sets (decimal's precision, NumPy's errors) is there for the next.
            self.gr_context = None
            _idle.workers.append(self)
            assert self.parent is not None
            self.parent.switch(None)


class _Idle(threading.local):
    """The workers of this thread that wait for a run (a greenlet cannot leave its thread)."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []


_idle = _Idle()


class Run:
    """One block executing for one request.

    Attributes:
        key: what the backend knows the request by.
        step: which step of the request is running, 0 being its prefill.
        over: whether the request makes no further step.
        known: up to which step there is nothing to wait for, since the block looks at none of them.
        started: whether the block has begun.
        dead: whether the block has ended.
        asked: whether the block has asked for a location or a step.
        stopping: whether the block has called `tracer.stop()`.
        error: what the block raised, if it did.
        saves: what it saved.
        keeper: keeps what is to stay; None where nothing can be kept.
        recorders: what fills the activation caches of the block.
        notes: warnings about the block: their class, text and line.
        waits_for: where the block is parked; None while it is not.
        reader: whether the block was read as one that changes nothing in the forward pass.
        limit: how many seconds it may run before it gives control back; None for as long as it
            likes.
        rank: its place among the runs of one request, which see a location in this order.
        seconds: how long it has run so far.
    """

    def __init__(self, code: Code, scope: dict[str, Any], key: Any = None) -> None:
        self.code = code
        self.scope = scope
        self.key = key
        self.step = 0
        self.over = False
        self.known = -1
        self.started = False
        self.dead = False
        self.asked = False
        self.stopping = False
        self.error: BaseException | None = None
        self.saves = Saves(code)
        self.keeper: Keeper | None = None
        self.recorders: list[Recorder] = []
        self.notes: list[tuple[type[Warning], str, int]] = []
        self.reader = False
        self.limit: float | None = None
        self.rank = 0
        self.seconds = 0.0
        self.open: Location | None = None
        self.look: Look | None = None
        self.value: Any = None
        self.skipped: list[str] = []
        self.interleaver: Interleaver | None = None
        self.waits_for: Location | None = None
        self._until = 0
        self._past = Past(code.filename, code.unseen)
        self._frame: FrameType | None = None
        self._line = code.line
        self._worker: _Worker | None = None
        self._killed = False
        self._isolation = Isolation()
        scope[SAVE] = self._save_method
        scope[KEEP] = self._keep_method
        scope.setdefault("__builtins__", builtins)

    # -- for the interleaver ---------------------------------------------------------------------

    def draw_apart(self, seed: int) -> None:
        """Give the block random numbers of its own, so that the engine's are left as they are."""
        self._isolation.draw_apart(seed)

    @property
    def awaits(self) -> int:
        """The step that it waits for, if it waits for one."""
        return self._until

    def ready(self, step: int | None = None) -> bool:
        """Whether the block goes on when a step begins (this one if none is given)."""
        if self.dead:
            return False
        step = self.step if step is None else step
        return not self.started or (self.waits_for is STEP and self._until <= step)

    def resume(self, value: Any = None, error: BaseException | None = None) -> Location | None:
        """Let the block go on; where it parks next, or None if it has ended."""
        self.started = True
        worker = self._worker
        if worker is None:
            worker = self._worker = _idle_worker()
            worker.executing = self
        current = getcurrent()
        if worker.parent is not current:
            worker.parent = current
        self._switch(worker, value, error)
        if self.waits_for is None and not self.dead:
            self._astray()
        return None if self.dead else self.waits_for

    def _switch(self, worker: _Worker, value: Any, error: BaseException | None) -> None:
        """Hand control to the block, until it parks, ends, is left, or goes astray."""
        self.waits_for = None
        began = perf_counter()
        self._isolation.enter()
        try:
            if self.limit is None:
                worker.switch(value) if error is None else worker.throw(error)
                return
            try:
                WATCHDOG.enter(self.limit, self._leave)
                worker.switch(value) if error is None else worker.throw(error)
            finally:
                WATCHDOG.leave()
        except BlockTimeout as late:
            # It came up in our own code about the block. It no longer matters if the block has
            # parked or ended, though what that had still to do may be undone.
            WATCHDOG.leave()
            if self.dead:
                self._close()
            elif self.waits_for is None:
                self.error = self._timeout(late)
        except BaseException as thrown:
            if self.dead or self.waits_for is not None:
                raise
            self.error = thrown  # by the block, at the greenlet that it runs under
        finally:
            self._isolation.leave()
            self.seconds += perf_counter() - began

    def _astray(self) -> None:
        """End a block that has given control back without having parked or ended."""
        error = self.error
        if error is None and self._worker is not None and not self._worker.dead:
            error = NotSupportedError("A block cannot switch greenlets itself.")
        self.kill()
        # A greenlet that has ended without a word was ended by the time limit, in our own code.
        self.error = error or self._timeout(BlockTimeout())

    def kill(self) -> None:
        """End the block where it is parked, if it is; it cannot park again."""
        self._killed = True
        worker = self._worker
        if worker is not None and not worker.dead:
            self._switch(worker, None, GreenletExit())
        if not self.dead and self.started:
            self._abandon(GreenletExit())

    def _leave(self, frame: FrameType) -> None:
        """Called in the block, which caught what should have ended it: it goes no further."""
        worker, here = self._worker, getcurrent()
        if worker is None or here is worker.parent:
            return
        traceback = traceback_to(frame, self.code.compiled)
        if here is worker and traceback is None:
            return  # the block itself has ended, and what runs is our own code

        def away() -> None:
            self._abandon(self._timeout(BlockTimeout().with_traceback(traceback)))
            assert worker.parent is not None
            worker.parent.switch()

        leave_at(frame, away)

    def _abandon(self, error: BaseException) -> None:
        """Never let the block go on from where it is."""
        if self._worker is not None:
            never_forget(self._worker)
        self.error = error
        self._close()

    def close(self, tensors: Iterable[Tensor] | None = None) -> None:
        """End a visit: what its value holds from here on is no longer looked at.

        Args:
            tensors: those of the value, if they are known.
        """
        assert self.open is not None
        self._past.close(self.open, flat(self.value) if tensors is None else tensors, self._line)
        self.open = self.value = None

    # -- for the block ---------------------------------------------------------------------------

    def read(self, location: Location) -> Any:
        """The value at a location; parks until the forward pass reaches it."""
        if location is self.open:
            return self.value
        self._check_past()
        self._line = self.line()
        interleaver = self.interleaver
        assert interleaver is not None
        interleaver.check(self, location)
        if location in interleaver.shown:
            return interleaver.look(self, location)
        return self._park(location)

    def reach(self, step: int) -> bool:
        """Wait until a step of the request begins; False if it makes no such step."""
        self._check_past()
        if step < self.step or (step == self.step and self.over):
            raise OutOfOrderError(
                f"Step {step} was asked for too late: the request is past it, in step {self.step}. "
                "Loops over steps follow each other in ascending order."
            )
        if self.step < step <= self.known:
            self.step = step
        elif step > self.step and not self.over:
            self._until = step
            self._park(STEP)
        self.asked = True
        return step <= self.step

    def _check_past(self) -> None:
        late = self._past.check(RECENT)
        if late is not None:
            raise late

    def _park(self, location: Location) -> Any:
        if self.stopping or self._killed:
            raise Stopped
        assert self._worker is not None and self._worker.parent is not None
        self.asked = True
        self.waits_for = location
        return self._worker.parent.switch()

    def stop(self) -> NoReturn:
        """End the block here, and its request after this step."""
        self.stopping = True
        raise Stopped

    def note(self, category: type[Warning], message: str, line: int) -> None:
        """Keep a warning about the block for the user."""
        self.notes.append((category, message, line))

    def line(self) -> int:
        """The line of the block that is executing."""
        if self._frame is None:
            self._frame = _frame_of(self.code)
        return self._line if self._frame is None else self._frame.f_lineno

    def lend(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the model itself (a weight), which the block may read and not write.

        Raises:
            LocationError: the engine has let it go.
        """
        if not tensor.numel():
            raise LocationError(
                f"{name} is empty: the engine has packed it into a form of its own and let the "
                "original go (vLLM's CPU kernels do). Call the module instead."
            )
        if self.code.snapshots:
            tensor = tensor.detach().clone()
        self._past.lend(name, tensor)
        return tensor

    def write(self, location: Location, value: Any) -> None:
        """Replace the value at a location by one of the same rows, width and dtype."""
        old = self.read(location)
        check_replacement(location, old, value)
        self.value = self._taken(location, refilled(old, value), old)

    def skip(self, path: str, entry: Location, output: Location, value: Any) -> None:
        """Replace what a module will give back by `value`, which may not depend on what it does."""
        self.read(entry)
        assert self.interleaver is not None
        taken = self._taken(output, all_plain(value))
        self.interleaver.skips.setdefault(output, []).append((self, taken))
        self.skipped.append(path + ".")

    def _taken(self, location: Location, value: Any, old: Any = None) -> Any:
        """What a location is set to, in tensors that the block has not got."""
        if value is old or not self.code.snapshots:
            return value
        own = set(map(id, flat(old)))

        def take(tensor: Tensor) -> Tensor:
            if id(tensor) in own:
                return tensor
            self._past.give(location, tensor)
            return tensor.clone()

        return map_tensors(value, take)

    def save(self, value: Any, place: tuple[int, int] | None = None) -> Any:
        """Mark a value to come home under the names that hold it when the block ends."""
        self.saves.add(value, place or self._place())
        return value

    def _save_method(self, value: Any) -> Any:
        own = own_method(value, "save")
        return self.save(value, self._place(sys._getframe(1))) if own is None else own(value)

    def _place(self, frame: FrameType | None = None) -> tuple[int, int]:
        """The line and column of the block that is executing, maybe in this frame."""
        if frame is None or frame.f_code is not self.code.compiled:
            frame = _frame_of(self.code)
        if frame is None:
            return self.code.line, 0
        line, column = self.code.places[frame.f_lasti // 2]
        return line or frame.f_lineno, column or 0

    def keep(self, value: Any, place: tuple[int, int] | None = None) -> Any:
        """Leave a copy of a value on the engine, whose handle comes home as a saved value does."""
        if self.keeper is None:
            raise NotSupportedError("Nothing can be kept here: save the value instead.")
        self.saves.add_kept(value, self.keeper.keep(value), place or self._place())
        return value

    def _keep_method(self, value: Any) -> Any:
        own = own_method(value, "keep")
        return self.keep(value, self._place(sys._getframe(1))) if own is None else own(value)

    # -- the end -----------------------------------------------------------------------------

    def execute(self) -> None:
        """Execute the block; its error is kept for the one who asks."""
        try:
            exec(self.code.compiled, self.scope)
            late = self._past.check()
            if late is not None:
                raise late
        except Stopped:
            self.error = self._past.check()
        except GreenletExit as killed:
            self.error = killed
            raise
        except BlockTimeout as error:
            self.error = error
            if not error.args:
                self.error = self._timeout(error)
        except BaseException as error:  # a block may raise anything; it ends this run alone
            self.error = error
        finally:
            self._close()

    def _close(self) -> None:
        self.dead = True
        self._worker = self._frame = None
        self._past.clear()
        # Else the scope and the run hold each other, and every value, until a later collection.
        self.scope.pop(SAVE, None)
        self.scope.pop(KEEP, None)

    def forget(self) -> None:
        """Hold no values any longer: what the block has to say has been told."""
        self.scope.clear()
        self.saves = Saves(self.code)
        self.recorders = []
        self.value = self.look = self.keeper = None
        if self.error is not None:
            self.error.__traceback__ = None  # whose frames hold what functions of the block did

    def _timeout(self, error: BlockTimeout) -> BlockTimeout:
        if self.limit is None:
            return error  # a block may raise one itself
        timeout = BlockTimeout(
            f"The block ran for more than {self.limit:g} s without giving control back to the "
            "engine, which all requests share. Do the work outside the block, or raise the limit "
            "(block_timeout=)."
        )
        return timeout.with_traceback(error.__traceback__)


def _idle_worker() -> _Worker:
    while _idle.workers:
        worker = _idle.workers.pop()
        if not worker.dead:
            return worker
    return _Worker()


def own_method(value: Any, name: str) -> Any:
    """The method of the user's own that `x.save()` means where x is no tensor, if it has one."""
    return None if isinstance(value, Tensor) else getattr(type(value), name, None)


def save(value: Any) -> Any:
    """Mark a value to come home under the name that holds it; gives the value back.

    Inside a block, `x.save()` does the same. In a helper function that a block calls, use this.
    In the body of a trace without a prompt, it marks a container that every invoke may fill.

    Raises:
        LocationError: called outside a block.

    Example:
        >>> with model.trace("Hello"):
        ...     norms = nnsight_core.save([h.output.norm() for h in model.transformer.h])
    """
    if current_run() is None and offer(value):
        return value
    return need_run("`save`").save(value)


def keep(value: Any) -> Any:
    """Leave a value on the engine; the name that holds it gets a handle. Gives the value back.

    Inside a block, `x.keep()` does the same. In a helper function that a block calls, use this.

    Raises:
        LocationError: called outside a block.

    Example:
        >>> with model.trace("Hello"):
        ...     hidden = nnsight_core.keep(model.transformer.h[3].output)
    """
    return need_run("`keep`").keep(value)


def _frame_of(code: Code) -> FrameType | None:
    """The frame in which a block's own code is executing."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not code.compiled:
        frame = frame.f_back
    return frame
