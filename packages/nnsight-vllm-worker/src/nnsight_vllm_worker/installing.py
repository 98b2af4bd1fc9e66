"""What a worker does when an edit is installed: its block is read, and lowered if it can be."""

from __future__ import annotations

from typing import Any

from nnsight_core.explain import Explanation
from nnsight_core.keeps import Keeper
from nnsight_core.lowering import Lowered, NotLowered
from nnsight_core.run import Run
from nnsight_core.wire.messages import InstalledMessage
from nnsight_vllm_worker.known import Known
from nnsight_vllm_worker.requests import Tracing
from nnsight_vllm_worker.traced import Traced


def installed_of(tracing: Tracing, known: Known, edit: str) -> InstalledMessage:
    """Install a block as an edit, and say what is known of it.

    Raises:
        LocationError: its text surely names a location that does not exist.
    """
    bare = Traced("", "", 0, edit, 1, Run(known.code, {}))
    bare.run = known.run(bare, bare.blobs, Keeper(tracing.keeps, edit))
    effects, wants = known.reach(bare.run)
    effects.check(tracing.blocks.tree, known.code)
    tracing.look_inside(known, effects)
    found: Any = None
    if effects.writes_forward and tracing.blocks.tree.taps:
        found = known.lowered(bare.run, None)
    lowered = isinstance(found, Lowered)
    if lowered:
        wants = known.wants_of_rest(found, bare.run)
    tracing.edits[edit] = known
    told = Explanation(
        wants,
        tuple(map(str, found.writes)) if lowered else (),
        tuple(str(found).splitlines()) if isinstance(found, NotLowered) else (),
    )
    return InstalledMessage(
        key=edit,
        # Lowered or not: what stands before it in a request, or tables that are full, may leave it
        # to its Python, which is known when the first pass over the prompt has been scheduled.
        whole=known.block.whole,
        way=str(told),
    )
