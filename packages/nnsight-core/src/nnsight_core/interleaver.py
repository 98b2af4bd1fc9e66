"""The interleaver: brings values to the runs that wait for them, and their writes back.

It knows nothing of vLLM. A backend tells it when a step begins, which runs take part, and when a
location is reached with which value; a `Rows` says which part of that value is a run's own. There
are no threads and no locks: a run's code executes inside the call that reports the visit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from nnsight_core.checks import check_order, check_replacement, check_tokens, unseen_write
from nnsight_core.errors import LocationError, NotATapError, WriteError
from nnsight_core.locations import SAMPLES, STEP, Location, Phase
from nnsight_core.run import Run
from nnsight_core.visit import Look, Rows, Visit, outside_inference

if TYPE_CHECKING:
    from nnsight_core.node import Places


class Observer(Protocol):
    """Something that looks on at a location without being a block (a cache)."""

    def see(self, location: Location, value: Any) -> Any:
        """Look at a value after the runs have; gives back the value to go on with."""
        ...


Observed = tuple[Location, Observer]
Own = Callable[[Run, Location], Any]


class Interleaver:
    """The runs of one engine, and the visits of the step that is running.

    Attributes:
        places: the model's nodes and locations.
        watching: whether visits of modules must be reported; all that a module looks at when
            nothing is traced.
        waiting: the parked runs, by the location that each waits for.
        passed: the locations that this forward pass has gone past.
        skips: replacements that wait for a module to come out, by its output.
        observers: what looks on in this forward pass, by location.
        phase: how far the step has come.
        on_end: called with each run that has ended.
        reachable: the locations that this forward pass can reach; None for every one.
        shown: the locations of a pass that is over, by their place in the forward order, for which
            runs need not wait and in which nothing can be changed any more.
        vocabulary: how many tokens the model has, where none but these may be written as samples.
    """

    def __init__(self, rows: Rows, on_end: Callable[[Run], None]) -> None:
        self.rows = rows
        self.on_end = on_end
        self.places: Places | None = None
        self.watching = False
        self.waiting: dict[Location, list[Run]] = {}
        self.passed: set[Location] = set()
        self.skips: dict[Location, list[tuple[Run, Any]]] = {}
        self.observers: dict[Location, list[Observer]] = {}
        self.phase = Phase.OVER
        self.reachable: Collection[Location] | None = None
        self.shown: dict[Location, int] = {}
        self.vocabulary: int | None = None
        self._own: Own = _nothing

    # -- a step, in the order of its calls -------------------------------------------------------

    def begin(self, runs: Iterable[Run], observers: Iterable[Observed] = ()) -> None:
        """A forward pass begins, in which each of these runs is in its step `run.step`."""
        self.passed.clear()
        self.skips.clear()
        self.observers.clear()
        self.phase = Phase.FORWARD
        self.observe(observers)
        for run in runs:
            run.interleaver = self
            run.skipped.clear()
            for recorder in run.recorders:
                self.observe((location, recorder) for location in recorder.locations)
            if run.ready():
                self._go_on(run)
        self._look()

    def show(
        self,
        runs: list[Run],
        observers: Iterable[Observed],
        values: Mapping[Location, Any],
        own: Own | None = None,
    ) -> None:
        """Let runs look at a pass that is over, each from its beginning to its end.

        Args:
            values: what each location holds, in forward order.
            own: gives what of it is one run's own, in tensors that nobody else has been given, and
                whose versions begin at 0.
        """
        self.reachable = self.shown = {location: number for number, location in enumerate(values)}
        self._own = own or _nothing
        for run in runs:
            run.look = None
        with outside_inference():
            self.begin(runs, observers)
            for run in runs:
                try:
                    self._look_away(run)
                except Exception as error:  # whatever it is, it ends this run alone
                    run.open = run.value = None
                    self._fail(run, error)
        for location in self.observers:
            for observer in self.observers[location] if location in values else ():
                observer.see(location, values[location])
        self.advance(Phase.RESULT)
        # Else the last pass is held until the next one.
        self.shown, self._own = {}, _nothing
        for run in runs:
            run.look = None

    def look(self, run: Run, location: Location) -> Any:
        """What a location holds, in a pass that is over."""
        before = run.look
        if before is not None:
            if self.shown[location] < self.shown[before.location]:
                check_order(run, location, True)
            self._look_away(run)
        with outside_inference():  # a block may be in that mode itself
            run.look = look = Look(location, self._own(run, location))
        run.open, run.value = location, look.value
        return look.value

    def _look_away(self, run: Run) -> None:
        """A run has seen what it looked at, and has left it as it was."""
        look = run.look
        if look is None or run.open is None:
            return
        left = look.left(run.value)
        run.close(look.tensors)
        if not left:
            raise unseen_write(look.location)

    def observe(self, observers: Iterable[Observed]) -> None:
        """Let observers look on for the rest of this forward pass."""
        for location, observer in observers:
            self.observers.setdefault(location, []).append(observer)

    def arrive(self, location: Location, value: Any) -> Any:
        """A location is reached; gives back what its value is after the runs have seen it.

        What an output or an engine value holds is changed where it lies, so that everything that
        reads it sees the change. What a module is handed (`input`) is changed for that module
        alone: a tensor that is written there is replaced by a changed copy, since the same memory
        is often the residual stream as well. So is what a module hands out of its own parameters.
        """
        if self.skips:
            for run, replacement in self.skips.pop(location, ()):
                self._put_skip(run, location, value, replacement)
        runs = self.waiting.pop(location, ())
        for run in runs if len(runs) < 2 else sorted(runs, key=_rank):
            value = self._serve(run, location, value)
        for observer in self.observers.get(location, ()):
            value = observer.see(location, value)
        self.passed.add(location)
        return value

    def deliver(self, run: Run, location: Location, value: Any) -> None:
        """Hand one run what it waits for, outside any step."""
        self._unpark(run)
        with outside_inference():
            run.open, run.value = location, value
            wanted = self._switch(run, value)
            run.close()
        self._park(run, wanted)

    def finish(self, run: Run) -> None:
        """The request makes no further step: a loop that waits for one ends, and the block goes on.

        What the block still asks for is refused, but for the finished output.
        """
        run.over = True
        if not run.dead and run.waits_for is STEP:
            self._go_on(run)

    def advance(self, phase: Phase) -> None:
        """The step has left the phases before `phase`: what still waits there was not reached."""
        self.phase = phase
        for location in [at for at in self.waiting if at.phase < phase]:
            for run in self.waiting.pop(location):
                self._go_on(
                    run,
                    error=LocationError(
                        f"{location} was not reached in step {run.step} after the block asked for "
                        "it: this model's forward pass did not run it from there on."
                    ),
                )
        if phase > Phase.FORWARD:
            self.watching = False
            self.observers.clear()

    def drop(self, run: Run) -> None:
        """Forget a run whose request is gone; its block stops where it is."""
        self._unpark(run)
        for location, skips in list(self.skips.items()):
            self.skips[location] = left = [entry for entry in skips if entry[0] is not run]
            if not left:
                del self.skips[location]
        own = set(map(id, run.recorders))
        for location, observers in list(self.observers.items()) if own else ():
            self.observers[location] = others = [each for each in observers if id(each) not in own]
            if not others:
                del self.observers[location]
        self._look()
        run.kill()

    # -- for the runs ----------------------------------------------------------------------------

    def check(self, run: Run, location: Location) -> None:
        """Refuse a location that this step cannot reach, or not any more."""
        reachable = self.reachable
        if reachable is not None and location.phase == Phase.FORWARD and location not in reachable:
            raise NotATapError(
                f"{location} was asked for in a step that runs compiled, since the block's text "
                "did not say that it would be. Name the module plainly in the block, or make it a "
                "tap (taps=)."
            )
        gone = location.phase < self.phase or (location in self.passed and not location.repeats)
        if gone or run.skipped:
            check_order(run, location, gone)

    # -- inside ----------------------------------------------------------------------------------

    def _serve(self, run: Run, location: Location, value: Any) -> Any:
        try:
            with outside_inference():
                visit = Visit(self.rows, run, location, value)
                run.open, run.value = location, visit.value
                wanted = self._switch(run, visit.value)
                changed = visit.written(run.value)
                run.close()
            if changed:
                self._may_write(run, location, changed)
            if changed and (location.side == "input" or visit.of_model(changed)):
                if self.reachable is not None:
                    raise WriteError(
                        f"{location} was written, and in a step that runs compiled it can only be "
                        "read. Write to an output, or name the write plainly in the block."
                    )
                value = visit.put_into_copy(value, changed)
            elif changed:
                visit.put_back(changed)
            if changed:
                self.rows.wrote(run, location, changed)
        except Exception as error:
            # The rows could not be told apart, what was written cannot be put back, memory is
            # short: whatever it is, it ends this run and not the forward pass.
            if run.open is not None:
                run.close()
            self._fail(run, error)
        else:
            self._park(run, wanted)
        return value

    def _put_skip(self, run: Run, location: Location, value: Any, replacement: Any) -> None:
        try:
            with outside_inference():
                visit = Visit(self.rows, run, location, value)
            check_replacement(location, visit.value, replacement)
            self._may_write(run, location, {})
            changed = visit.written(replacement)
            visit.put_back(changed)
            self.rows.wrote(run, location, changed)
        except Exception as error:
            self._fail(run, error)

    def _may_write(self, run: Run, location: Location, changed: dict[int, Tensor]) -> None:
        if run.reader and location.phase == Phase.FORWARD:
            raise unseen_write(location)
        if location is SAMPLES and self.vocabulary is not None:
            check_tokens(changed.values(), self.vocabulary)

    def _go_on(self, run: Run, error: BaseException | None = None) -> None:
        with outside_inference():
            wanted = self._switch(run, None, error)
        self._park(run, wanted)

    def _switch(self, run: Run, value: Any, error: BaseException | None = None) -> Location | None:
        # A module that the block itself calls is no visit.
        self.watching = False
        return run.resume(value, error)

    def _park(self, run: Run, wanted: Location | None) -> None:
        if wanted is None:
            self.on_end(run)
        elif wanted is not STEP:
            self.waiting.setdefault(wanted, []).append(run)
        self._look()

    def _look(self) -> None:
        self.watching = self.phase == Phase.FORWARD and bool(
            self.waiting or self.skips or self.observers
        )

    def _fail(self, run: Run, error: Exception) -> None:
        self._unpark(run)
        if run.dead:
            run.error = run.error or error
            self.on_end(run)
        else:
            self._go_on(run, error)

    def _unpark(self, run: Run) -> None:
        for location, runs in list(self.waiting.items()):
            if run in runs:
                runs.remove(run)
                if not runs:
                    del self.waiting[location]


def _rank(run: Run) -> int:
    return run.rank


def _nothing(run: Run, location: Location) -> Any:
    raise LookupError(location)
