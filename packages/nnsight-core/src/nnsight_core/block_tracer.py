"""`tracer` as a block sees it."""

from __future__ import annotations

from typing import Any, NoReturn

from nnsight_core.cache import Cache, open_cache
from nnsight_core.current import need_run
from nnsight_core.errors import LocationError, NotSupportedError
from nnsight_core.loops import ALL_STEPS, ITER, StepChoice, StepLoop
from nnsight_core.outputs import RESULT_LATER, LateResult

BARRIER = (
    "tracer.barrier is not there: the invokes of a trace are requests of their own, which the "
    "engine may run in different steps. Hand values over with two traces: save them in the first, "
    "use the variables in the second."
)
_HAS = "all, cache, iter, result, stop"


class BlockTracer:
    """`tracer` inside a block: the request's steps, its finished output, an activation cache."""

    __slots__ = ()

    @property
    def result(self) -> LateResult:
        """The request's finished output (`RequestOutput`); may be saved anywhere in the block."""
        return RESULT_LATER

    @property
    def iter(self) -> StepChoice:
        """The request's steps, chosen in brackets: `for step in tracer.iter[1:5]`."""
        return ITER

    def all(self) -> StepLoop:
        """Every step of the request: `for step in tracer.all()`."""
        return ALL_STEPS

    def stop(self) -> NoReturn:
        """End the request after this step; what was saved so far comes home.

        The token of this step is the last one. The output's `stop_reason` is `tracer.stop`.
        Nothing of the block runs after it.

        Example:
            >>> for step in tracer.all():
            ...     if model.samples.item() == full_stop:
            ...         tracer.stop()
        """
        need_run("tracer.stop").stop()

    def cache(self, modules: Any = None, **options: Any) -> Cache:
        """Keep what modules give back in every step, without naming each. See `open_cache`."""
        return open_cache(need_run("tracer.cache"), modules, **options)

    def barrier(self, *_: Any, **__: Any) -> NoReturn:
        raise NotSupportedError(BARRIER)

    def invoke(self, *_: Any, **__: Any) -> NoReturn:
        raise LocationError(
            "tracer.invoke stands inside a block: a trace that was given a prompt has no invokes. "
            "Write `with model.trace() as tracer:`, and in it `with tracer.invoke(prompt):` for "
            "each prompt."
        )

    def __getattr__(self, name: str) -> Any:
        if name == "next":
            raise NotSupportedError("tracer.next is not there: write `for step in tracer.iter[:]`.")
        raise LocationError(f"The tracer of a block does not have {name!r}; it has {_HAS}.")


BLOCK_TRACER = BlockTracer()
