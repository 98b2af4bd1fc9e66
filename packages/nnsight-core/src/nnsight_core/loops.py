"""Loops over a request's steps: `for step in tracer.iter[:5]`.

Step 0 is the prefill, which draws the first token; each later step feeds one token and draws the
next. A loop parks its run until the step that it is to see begins, and ends quietly when the
request makes no such step.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nnsight_core.current import need_run
from nnsight_core.errors import LoopOverrunWarning, NotSupportedError, StepError

if TYPE_CHECKING:
    from nnsight_core.run import Run


class StepChoice:
    """`tracer.iter`: choose steps by number, slice or list, and loop over them.

    Example:
        >>> with model.trace("Count up to ten:", max_tokens=5) as tracer:
        ...     logits = [].save()
        ...     for step in tracer.iter[:5]:
        ...         logits.append(model.logits)
    """

    __slots__ = ()

    def __getitem__(self, which: int | slice | list[int] | tuple[int, ...] | range) -> StepLoop:
        if isinstance(which, slice):
            return _of_slice(which)
        if isinstance(which, list | tuple | range):
            return _of_list([_number(step) for step in which])
        return _of_list([_number(which)])

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __enter__(self) -> None:
        raise NotSupportedError(
            "`with tracer.iter[...]` is not there: write `for step in tracer.iter[...]:`."
        )

    def __exit__(self, *_: Any) -> None:
        return None

    def __call__(self, *_: Any, **__: Any) -> None:
        raise StepError("tracer.iter takes steps in brackets: `tracer.iter[:5]`.")


class StepLoop:
    """Some steps of a request, in ascending order; each iteration waits for its step.

    Args:
        steps: the steps; None for every `stride`-th from `start` on, to the end of the request.
    """

    __slots__ = ("_start", "_steps", "_stride")

    def __init__(self, steps: list[int] | range | None, start: int = 0, stride: int = 1) -> None:
        self._steps = steps
        self._start = start
        self._stride = stride

    @property
    def steps(self) -> range | tuple[int, ...]:
        """The numbers of the steps; without a bound, a range up to `sys.maxsize`."""
        if self._steps is None:
            return range(self._start, sys.maxsize, self._stride)
        return self._steps if isinstance(self._steps, range) else tuple(self._steps)

    def __iter__(self) -> Iterator[int]:
        run = need_run("A loop over steps")
        line = run.line()
        steps = self._steps
        every = itertools.count(self._start, self._stride) if steps is None else steps
        for count, step in enumerate(every):
            if not run.reach(step):
                # A loop without a bound has seen what it asked for, unless it has seen nothing.
                if steps is not None or count == 0:
                    run.note(LoopOverrunWarning, self._overrun(run, count), line)
                return
            yield step

    __enter__ = StepChoice.__enter__
    __exit__ = StepChoice.__exit__

    def _overrun(self, run: Run, count: int) -> str:
        made = run.step + 1
        wanted = f"steps from {self._start} on"
        if self._steps is not None:
            wanted = f"{len(self._steps)} steps, up to step {self._steps[-1]}"
        return (
            f"A loop asked for {wanted}, and the request made {made} (steps 0 to {made - 1}): the "
            f"loop ended after {count} iterations, and the block went on after it. For a fixed "
            "number of steps, set max_tokens and ignore_eos=True."
        )


ALL_STEPS = StepLoop(None)
ITER = StepChoice()


def _of_slice(which: slice) -> StepLoop:
    start = 0 if which.start is None else _number(which.start)
    stride = 1 if which.step is None else _number(which.step)
    if stride == 0:
        raise StepError("The step of a slice over steps cannot be 0.")
    if which.stop is None:
        return StepLoop(None, start, stride)
    return StepLoop(range(start, _number(which.stop), stride))


def _of_list(steps: list[int]) -> StepLoop:
    if any(b <= a for a, b in itertools.pairwise(steps)):
        raise StepError(
            f"The steps {steps} do not ascend: a request makes its steps once, in order."
        )
    return StepLoop(steps)


def _number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise StepError(
            f"{step!r} is no step: a step is a whole number, 0 being the prefill."
        ) from None
    if number < 0:
        raise StepError(
            f"Step {number} is negative: how many steps a request will make is not known while it "
            "runs. Count from 0, the prefill."
        )
    return number
