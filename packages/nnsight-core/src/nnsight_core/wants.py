"""What a block wants of a step, read from its text, and which way the step can run for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from nnsight_core.code import Code
from nnsight_core.effects import FIRST, Access, Effects
from nnsight_core.lowering import Affine, Lowered, NotLowered, lower
from nnsight_core.tree import ModelTree


class Way(IntEnum):
    """How a step runs for a request, from the fastest way to the freest."""

    PLAIN = 0
    """vLLM's own pass; nothing of the block runs."""
    DEFERRED = 1
    """vLLM's own pass; the block runs afterwards on copies, while the device goes on."""
    AFTER = 2
    """vLLM's own pass; the block runs on copies when it is over and before anything is sampled."""
    INTERLEAVED = 3
    """What vLLM compiled; the block runs at taps, within the pass, where graphs break."""
    EAGER = 4
    """The model's plain Python; the block runs at any location."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a block wants of one step.

    Attributes:
        way: the fastest way that gives it.
        taps: the taps that it may read or write, by name.
        logits: whether it may read the logits.
        why: why no faster way will do, in words; empty for the fastest.
    """

    way: Way
    taps: tuple[str, ...]
    why: str
    logits: bool = True


@dataclass(frozen=True, slots=True)
class Wants:
    """What a block wants of its request's first step, and of each later one that it looks at.

    Attributes:
        loops: whether it looks at later steps at all.
    """

    first: Want
    later: Want
    loops: bool

    def at(self, step: int) -> Want:
        """What it wants of one step, if its block looks at it."""
        return self.first if step == 0 else self.later if self.loops else NOTHING


NOTHING = Want(Way.PLAIN, (), "", False)


def lower_at_taps(
    code: Code, names: Mapping[str, Any], tree: ModelTree, tokens: int | None, device: Any
) -> Lowered | NotLowered:
    """Lower a block's writes, if all of them are at taps. See `nnsight_core.lowering`."""
    order = [name.removesuffix(".output") for name in tree.taps if name.endswith(".output")]
    found = lower(code, names, tree, tokens=tokens, order=order, device=device)
    if isinstance(found, NotLowered):
        return found
    away = [(w.line, why) for w in found.writes if (why := _unfit(w, tree)) is not None]
    return NotLowered(tuple(away)) if away else found


def _unfit(write: Affine, tree: ModelTree) -> str | None:
    """Why a tap cannot do a write; None if it can."""
    if f"{write.path}.output" not in tree.taps or _wide(write, tree):
        return f"{write.path}.output is written, which is no tap of this dtype"
    held = tree.modules[write.path].output
    shared = held[write.index].shared if held else None
    if shared == "sum":
        return f"{write.path}.output is written, of which each rank holds a summand"
    if shared is not None and write.kind == "project":
        return f"{write.path}.output is projected, of which each rank holds some columns"
    return None


def _wide(write: Affine, tree: ModelTree) -> bool:
    """Whether a tensor's dtype holds more than the tables, which compute in float32."""
    held = tree.modules[write.path].output
    return held is None or held[write.index].dtype not in ("float32", "bfloat16", "float16")


def wants_of(effects: Effects, tree: ModelTree) -> Wants:
    """What a block wants of its steps on an engine with the taps of this tree."""
    later = [a for a in effects.reads if a.when != FIRST or effects.loose]
    wrote = [a for a in effects.writes if a.when != FIRST or effects.loose]
    return Wants(
        _want(effects, effects.reads, effects.writes, tree),
        _want(effects, later, wrote, tree),
        # A function that is called may loop, too.
        effects.loops or effects.loose or effects.opaque,
    )


def _want(
    effects: Effects,
    reads: list[Access],
    writes: list[Access],
    tree: ModelTree,
) -> Want:
    if not tree.compiled:
        return Want(Way.EAGER, (), "this engine compiles nothing")
    if effects.opaque:
        why = "it hands values to a function whose text is not part of the block"
        return Want(Way.EAGER, (), why)
    found: set[str] = set()
    for access in [*reads, *writes]:
        if not _of_forward(access):
            continue
        names = _names(access, tree)
        untapped = next((name for name in names if name not in tree.taps), None)
        if untapped is not None:
            return Want(Way.EAGER, (), f"line {access.line}: {untapped} is not a tap")
        found.update(names)
    ordered = tuple(name for name in tree.taps if name in found)
    for access in writes:
        if access.side == "input":
            why = (
                f"line {access.line}: {access.path}.input is written, which only the eager way can"
            )
            return Want(Way.EAGER, (), why)
        if _of_forward(access):
            why = f"line {access.line}: {access.path}.{access.side} is written by Python"
            return Want(Way.INTERLEAVED, ordered, why)
    if writes:
        why = f"line {writes[0].line}: {writes[0].side} are written"
        return Want(Way.AFTER, ordered, why)
    weights = effects.weights and tree.ranks > 1
    if effects.calls or effects.stops or weights:
        why = "it runs modules of the model" if effects.calls else "it may end its request"
        if weights:
            why = "it may look at weights, of which each rank holds a part"
        return Want(Way.AFTER, ordered, why)
    return Want(Way.DEFERRED, ordered, "", any(access.side == "logits" for access in reads))


def _of_forward(access: Access) -> bool:
    return access.side in ("output", "input")


def _names(access: Access, tree: ModelTree) -> list[str]:
    """The locations that an access may mean; its own name if they are not known."""
    name = f"{access.path}.{access.side}"
    if "*" not in access.path and "?" not in access.path:
        return [name]
    if "**" in access.path or "?" in access.path or ".source." in access.path:
        return [name]
    wanted = re.compile(re.escape(access.path).replace(r"\*", "[^.]*"))
    found = [f"{path}.{access.side}" for path in tree.modules if wanted.fullmatch(path)]
    return found or [name]
