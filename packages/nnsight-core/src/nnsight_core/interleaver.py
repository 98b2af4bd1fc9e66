"""The interleaver: brings values to the runs that wait for them, and their writes back.

It knows nothing of vLLM. A backend tells it when a step begins, which runs take part, and when a
location is reached with which value; a `Rows` says which part of that value is a run's own. There
are no threads and no locks: a run's code executes inside the call that reports the visit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nnsight_core.errors import LocationError
from nnsight_core.locations import Location, Phase
from nnsight_core.run import Run, check_order, check_replacement
from nnsight_core.visit import Rows, Visit, outside_inference


class Interleaver:
    """The runs of one engine, and the visits of the step that is running.

    Attributes:
        watching: whether visits of modules must be reported; all that a module looks at when
            nothing is traced.
        waiting: the parked runs, by the location that each waits for.
        passed: the locations that this forward pass has gone past.
        skips: replacements that wait for a module to come out, by its output.
        phase: how far the step has come.
        on_end: called with each run that has ended.
    """

    def __init__(self, rows: Rows, on_end: Callable[[Run], None]) -> None:
        self.rows = rows
        self.on_end = on_end
        self.watching = False
        self.waiting: dict[Location, list[Run]] = {}
        self.passed: set[Location] = set()
        self.skips: dict[Location, list[tuple[Run, Any]]] = {}
        self.phase = Phase.OVER

    # -- a step, in the order of its calls -------------------------------------------------------

    def begin(self, runs: Iterable[Run]) -> None:
        """A step begins: these runs start in it."""
        self.passed.clear()
        self.skips.clear()
        self.phase = Phase.FORWARD
        for run in runs:
            run.interleaver = self
            self._go_on(run)

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
        for run in self.waiting.pop(location, ()):
            value = self._serve(run, location, value)
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

    def drop(self, run: Run) -> None:
        """Forget a run whose request is gone; its block stops where it is."""
        self._unpark(run)
        for location, skips in list(self.skips.items()):
            self.skips[location] = left = [entry for entry in skips if entry[0] is not run]
            if not left:
                del self.skips[location]
        self._look()
        run.stop()

    # -- for the runs ----------------------------------------------------------------------------

    def check(self, run: Run, location: Location) -> None:
        """Refuse a location that this step cannot reach any more."""
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
            if changed and (location.side == "input" or visit.of_model(changed)):
                value = visit.put_into_copy(value, changed)
            elif changed:
                visit.put_back(changed)
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
            visit.put_back(visit.written(replacement))
        except Exception as error:
            self._fail(run, error)

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
        else:
            self.waiting.setdefault(wanted, []).append(run)
        self._look()

    def _look(self) -> None:
        self.watching = self.phase == Phase.FORWARD and bool(self.waiting or self.skips)

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
