"""The run whose block is executing, as whatever the block touches asks for it.

Apart from the runs themselves, since a model is held, and its tree looked at, where none ever runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent, greenlet

from nnsight_core.errors import LocationError

if TYPE_CHECKING:
    from nnsight_core.run import Run


class Worker(greenlet):
    """A greenlet in which blocks execute.

    Attributes:
        executing: the run whose block executes in it, if one does.
    """

    executing: Run | None = None


def current_run() -> Run | None:
    """The run whose block is executing, if one is."""
    here = getcurrent()
    return here.executing if isinstance(here, Worker) else None


def need_run(what: str, side: str = "") -> Run:
    """The run whose block is executing.

    Raises:
        LocationError: no block is executing here.
    """
    run = current_run()
    if run is None:
        name = f"{what}.{side}" if side else what
        raise LocationError(
            f"{name} has a value only inside a block: `with model.trace(prompt): ...` (with "
            "several prompts, inside `with tracer.invoke(prompt): ...`)."
        )
    return run
