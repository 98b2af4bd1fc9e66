"""Happenings: what a block does at locations, in the order of its text, and what may not be moved.

A lowered write no longer waits for its turn in the block. So whatever depends on when it came must
be told here: a value that was read before it was written, an order that the forward pass does not
have (an error that must stay one), a request that was stopped before the write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from nnsight_core.lowering.affine import Affine, Steps, regions_meet, steps_meet
from nnsight_core.tree import ModelTree

_PHASES = ("logits", "samples", "result")
_INNER = ("output", "input")


@dataclass(slots=True, eq=False)
class Happening:
    """One thing that a block does at a location.

    Attributes:
        path: the module's, `*` for what is not known of it; empty for an engine value.
        side: `output`, `input`, an engine value's name, or `stop`.
        visit: the loop over steps that it stands in.
        write: the write that it is.
        read: whether the value itself is used (or else the block only waits for it).
        named: whether it is used by a name, so that the block does not wait here.
        turn: which statement does it, counted as they come.
        gone: whether its statement is not in the rest.
    """

    line: int
    path: str
    side: str
    steps: Steps
    visit: int
    write: Affine | None
    read: bool
    named: bool
    node: ast.stmt
    turn: int
    gone: bool = False

    @property
    def place(self) -> str:
        return f"{self.path}.{self.side}" if self.path else self.side


class Order:
    """What a forward pass reaches first.

    Args:
        outputs: the paths of modules in the order in which a step makes their outputs.
    """

    def __init__(self, tree: ModelTree, outputs: Sequence[str] = ()) -> None:
        self.tree = tree
        self.ranks: dict[str, tuple[int, int]] = {}  # of the first output in a module, and the last
        for rank, path in enumerate(outputs):
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                first, _ = self.ranks.get(part := ".".join(parts[:end]), (rank, rank))
                self.ranks[part] = first, rank

    def holds(self, first: Happening, then: Happening) -> bool:
        """Whether the forward pass surely comes to `then` no sooner than to `first`."""
        if first.side in _PHASES or then.side in _PHASES:
            ranks = [_PHASES.index(h.side) if h.side in _PHASES else -1 for h in (first, then)]
            return ranks[0] <= ranks[1]
        return all(
            self._holds(one, first.side, other, then.side)
            for one in self._paths(first.path)
            for other in self._paths(then.path)
        )

    def _holds(self, one: str, side: str, other: str, then: str) -> bool:
        if one == other:
            return side == "input" or then == "output"
        if _inside(one, other):
            return then == "output"
        if _inside(other, one):
            return side == "input"
        mine, yours = one.split("."), other.split(".")
        shared = next(i for i, (a, b) in enumerate(zip(mine, yours, strict=False)) if a != b)
        above = mine[:shared]
        before, after = (self.ranks.get(".".join([*above, p[shared]])) for p in (mine, yours))
        if before is not None and after is not None:
            return before[1] < after[0]
        a, b = mine[shared], yours[shared]
        return a.isdecimal() and b.isdecimal() and int(a) < int(b)

    def _paths(self, path: str) -> list[str]:
        if "*" not in path:
            # What an operation's name says of its time is only which module it runs in.
            module, source, _ = path.partition(".source.")
            return [f"{module}.source" if source else module]
        return [found for found in self.tree.modules if matches(path, found)]


def matches(pattern: str, path: str) -> bool:
    """Whether a path may be the one that a pattern means."""
    if pattern in ("**", "?") or "?" in pattern:
        return True
    parts = map(re.escape, pattern.partition(".source.")[0].split("*"))
    return re.fullmatch("[^.]*".join(parts), path) is not None


def conflicts(
    happenings: list[Happening], order: Order, tree: ModelTree
) -> Iterator[tuple[int, str]]:
    """The reasons for which some writes cannot be lowered."""
    for number, one in enumerate(happenings):
        for then in happenings[number + 1 :]:
            if one.turn == then.turn:
                continue
            if not (one.gone or then.gone) or not steps_meet(one.steps, then.steps):
                continue
            reason = _conflict(one, then, order)
            if reason:
                yield reason
            # What comes after is held against `then`, which comes after this one.
            if then.gone and then.visit == one.visit and not (one.read or one.side == "stop"):
                break
    writes = [h.write for h in happenings if h.write is not None]
    for one, other in combinations(writes, 2):
        if (one.path, one.index) != (other.path, other.index):
            continue
        if not steps_meet(one.steps, other.steps):
            continue
        infos = tree.modules[one.path].output or ()
        width = next(t.shape[-1] for t in infos if t.at in ("", f"[{one.index}]"))
        if regions_meet(one, other, int(width)):
            words = f"{one.path}.output is written again where line {one.line} has written"
            yield other.line, words


def _conflict(one: Happening, then: Happening, order: Order) -> tuple[int, str] | None:
    if one.side == "stop":
        if then.write is None:
            return None
        return then.line, f"{then.place} is written after the request may have been stopped"
    if then.side == "stop":
        return None
    if one.read and then.write and one.side == "output" and matches(one.path, then.path):
        return then.line, f"{then.place} is written after line {one.line} has used it"
    if one.named or then.named:
        return None
    if not order.holds(one, then):
        words = f"{then.place} comes after {one.place} here, which is not surely their order"
        return then.line, words
    return None


def _inside(inner: str, outer: str) -> bool:
    return not outer or inner.startswith(outer + ".")
