"""Affine writes: what a lowered block does to the forward pass, as data that device tables hold.

`nnsight_core.lowering` makes them from a block's text; a worker carries them out without Python.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nnsight_core.code import Code

Kind = Literal["add", "scale", "set", "project"]
Steps = range | tuple[int, ...]
"""Step numbers; a range that stops at `sys.maxsize` goes on to the end of the request."""
FIRST: Steps = (0,)
EVERY: Steps = range(sys.maxsize)

_DID = {"add": "gets {} added", "scale": "is multiplied by {}", "set": "becomes {}"}


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """One write into a module's output, `x` being the request's rows of it in one step.

    An operand is computed with `x` as PyTorch would: in the type that both promote to (float32 at
    least), then rounded to the type of `x`; a projection, where PyTorch rounds more than once, is
    the same but for that. `set` puts the operand whatever was there, NaN too.

    Attributes:
        path: the module.
        index: which tensor of its output: 0 for a bare tensor, i for `output[i]` of a tuple.
        steps: in which of the request's steps.
        rows: of the request's rows in such a step, as Python indexes them.
        columns: of the last axis.
        kind: `add` x + operand, `scale` x * operand, `set` operand, `project` x - factor * (x @
            operand)[:, None] * along.
        operand: one number, or one for each column chosen.
        along: of a projection, the direction that is taken out; it has the columns of `operand`.
        factor: of a projection.
        line: where the block says so.

    Example:
        >>> print(lowered.writes[0])
        line 12: model.layers.3.output[-1:] gets a tensor of 4096 added, at step 0
    """

    path: str
    index: int
    steps: Steps
    rows: slice | int
    columns: slice | int | list[int]
    kind: Kind
    operand: Tensor | float
    line: int
    along: Tensor | None = None
    factor: float = 1.0

    def __str__(self) -> str:
        part = f"[{index_text(self.rows)}, {index_text(self.columns)}]".replace(", :]", "]")
        what = f"{self.path}.output" + (f" ({self.index})" if self.index else "")
        what += "" if part == "[:]" else part
        if self.kind == "project":
            times = "" if self.factor == 1 else f"{self.factor:g} times "
            did = f"has {times}its part along a direction taken out"
        else:
            did = _DID[self.kind].format(_number_text(self.operand))
        return f"line {self.line}: {what} {did}, at {steps_text(self.steps)}"


@dataclass(frozen=True, slots=True)
class Lowered:
    """A block whose writes in the forward pass need no Python.

    Attributes:
        writes: the writes, in the order of the text; no two touch the same entry in one step.
        rest: the block without them, with the user's lines.
        alone: whether the rest reads, saves and writes nothing; it may still loop over steps, and
            warn of steps that the request does not make.
    """

    writes: tuple[Affine, ...]
    rest: Code
    alone: bool


@dataclass(frozen=True, slots=True)
class NotLowered:
    """A block that runs as it stands, and why: the lines and the reasons in words.

    Example:
        >>> print(lower(code, names, tree))
        line 12: model.layers.3.output is written with a value that depends on the step number
    """

    reasons: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        return "\n".join(f"line {line}: {words}" for line, words in self.reasons)


def index_text(index: slice | int | list[int]) -> str:
    """An index as it is written: `2:`, `-1`, `[1, 5]`."""
    if not isinstance(index, slice):
        return str(index)
    start, stop, step = ("" if i is None else str(i) for i in (index.start, index.stop, index.step))
    return f"{start}:{stop}" + (f":{step}" if step else "")


def steps_text(steps: Steps) -> str:
    """Steps in words: `step 0`, `every step`, `steps 1:5`."""
    if steps == EVERY:
        return "every step"
    if len(steps) == 1:
        return f"step {steps[0]}"
    if isinstance(steps, tuple):
        return f"steps {', '.join(map(str, steps))}"
    stop = None if steps.stop == sys.maxsize else steps.stop
    return f"steps {index_text(slice(steps.start, stop, None if steps.step == 1 else steps.step))}"


def _number_text(operand: Tensor | float) -> str:
    return f"a tensor of {len(operand)}" if isinstance(operand, Tensor) else f"{operand:g}"


def steps_meet(one: Steps, other: Steps) -> bool:
    """Whether two choices of steps may have one in common."""
    if not one or not other:
        return False
    few, many = sorted((one, other), key=lambda steps: (isinstance(steps, range), _count(steps)))
    if isinstance(few, tuple) or _count(few) <= 1024:
        return any(step in many for step in few)
    return max(one[0], other[0]) <= min(one[-1], other[-1])


def _count(steps: Steps) -> int:
    return len(steps)


def regions_meet(one: Affine, other: Affine, width: int) -> bool:
    """Whether two writes to one tensor may touch the same entry, whatever the number of rows."""
    columns = [set(_chosen(w.columns, width)) for w in (one, other)]
    if not columns[0] & columns[1]:
        return False
    numbers = [_numbers(w.rows) for w in (one, other)]
    # Beyond this many rows nothing new comes: what is counted from either end stays apart, and
    # strides have gone through every way in which they can meet.
    most = 2 * max(numbers[0] + numbers[1]) + 2 * max(numbers[0]) * max(numbers[1]) + 2
    if most > 600:
        return True
    return any(
        set(_chosen(one.rows, rows)) & set(_chosen(other.rows, rows)) for rows in range(1, most)
    )


def _numbers(index: slice | int) -> list[int]:
    parts = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    return [1, *(abs(part) for part in parts if part is not None)]


def _chosen(index: slice | int | list[int], size: int) -> list[int]:
    if isinstance(index, list):
        return [i % size for i in index]
    if isinstance(index, int):
        return [index % size] if -size <= index < size else []
    return list(range(*index.indices(size)))
