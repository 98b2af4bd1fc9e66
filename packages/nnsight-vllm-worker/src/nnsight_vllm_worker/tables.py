"""Table writes: affine writes of blocks, done by the taps themselves, inside CUDA graphs.

What a write does (`nnsight_core.lowering`) is kept as an entry of device tables that all taps read.
Which rows of a pass it applies to is said before the pass, by a map from rows to entries; a pass in
which nothing has changed since the last one costs no copy.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nnsight_core.errors import EngineError
from nnsight_core.lowering import Affine, Lowered
from nnsight_vllm_worker.layouts import Split, part
from nnsight_vllm_worker.tap_op import ADD, PROJECT, SCALE, SET
from nnsight_vllm_worker.taps import Tap, Taps

_KINDS = {"add": ADD, "scale": SCALE, "set": SET, "project": PROJECT}


class Span(NamedTuple):
    """Rows of a request's part of a pass that one tensor's entry applies to."""

    tensor: int
    start: int
    stop: int
    entry: int


class Written(NamedTuple):
    """One write: what it does, the tensor it is for and its entry."""

    affine: Affine
    tensor: int
    entry: int


class Entries:
    """What some blocks write, for every request that has them.

    Attributes:
        users: how many requests it is for.
        tables: by the length of their prompts.
    """

    def __init__(self, tables: Tables, lowered: tuple[Lowered, ...]) -> None:
        self.lowered = lowered
        self.writes: list[Written] = []
        self.taken: list[int] = []
        self.users = 0
        self.tables: dict[int, Table] = {}
        self._tables = tables
        self._chains: dict[tuple[int, ...], int] = {}

    def table(self, prompt: int) -> Table:
        """The writes of one more request, whose prompt has so many tokens."""
        self.users += 1
        return self.tables.setdefault(prompt, Table(self, prompt))

    def chain(self, entries: tuple[int, ...]) -> int:
        """The first of several entries for one row, each of which leads to the next."""
        if len(entries) == 1:
            return entries[0]
        if entries not in self._chains:
            after = self.chain(entries[1:])
            self._chains[entries] = self._tables.copy(self, entries[0], after)
        return self._chains[entries]


class Table:
    """The table writes of requests that are alike.

    Args:
        prompt: how many tokens their prompts have.
    """

    def __init__(self, entries: Entries, prompt: int) -> None:
        self.entries = entries
        self.prompt = prompt
        self._known: dict[Any, tuple[Span, ...]] = {}

    def spans(self, computed: int, tokens: int) -> tuple[Span, ...]:
        """What applies to `tokens` tokens from the `computed`-th on, rows counted from there."""
        if tokens == 1 and computed >= self.prompt:
            # The one row of a later step: only what is on in it matters.
            step = computed - self.prompt + 1
            # Of another form than the other keys: to Python, `(False, True)` is `(0, 1)`.
            key: Any = ("on", *[step in w.affine.steps for w in self.entries.writes])
        else:
            key = (computed, tokens)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = tuple(self._spans(computed, tokens))
        return known

    def _spans(self, computed: int, tokens: int) -> list[Span]:
        writes = self.entries.writes
        if len({write.tensor for write in writes}) == len(writes):
            return [
                Span(write.tensor, start, stop, write.entry)
                for write in sorted(writes, key=lambda write: write.tensor)
                for start, stop in _stretches(self._rows(write.affine, computed, tokens))
            ]
        on: dict[tuple[int, int], tuple[int, ...]] = {}
        for write in writes:
            for row in self._rows(write.affine, computed, tokens):
                on[write.tensor, row] = (*on.get((write.tensor, row), ()), write.entry)
        spans: list[Span] = []
        for (tensor, row), entries in sorted(on.items()):
            entry = self.entries.chain(entries)
            last = spans[-1] if spans else None
            if last and (last.tensor, last.stop, last.entry) == (tensor, row, entry):
                spans[-1] = last._replace(stop=row + 1)
            else:
                spans.append(Span(tensor, row, row + 1, entry))
        return spans

    def _rows(self, affine: Affine, computed: int, tokens: int) -> list[int]:
        """The rows of a part of the request that a write is for, each in the step it belongs to.

        They ascend.
        """
        first = _chosen(affine.rows, self.prompt) if 0 in affine.steps else []
        later = bool(_chosen(affine.rows, 1))
        rows = [row - computed for row in first if computed <= row < computed + tokens]
        for position in range(max(computed, self.prompt), computed + tokens):
            if later and position - self.prompt + 1 in affine.steps:
                rows.append(position - computed)
        return sorted(rows)


def _stretches(rows: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers, as stretches of such as follow one another."""
    if rows and rows[-1] - rows[0] == len(rows) - 1:
        return [(rows[0], rows[-1] + 1)]
    breaks = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    edges = [0, *breaks, len(rows)]
    return [(rows[a], rows[b - 1] + 1) for a, b in itertools.pairwise(edges) if a < b]


def _chosen(rows: slice | int, count: int) -> list[int]:
    if isinstance(rows, slice):
        return list(range(*rows.indices(count)))
    row = rows + count if rows < 0 else rows
    return [row] if 0 <= row < count else []


class Full(EngineError):
    """The tables have no room for a request's writes."""

    def __init__(self) -> None:
        super().__init__(
            "The tables of the taps have no room for what the block writes. Run fewer requests at "
            "once, or let their blocks write less."
        )


class Tables:
    """The tables of one engine, and who has entries in them.

    Attributes:
        tensors: of which some rows of the pass have entries.
        released: how often writes were let go.
    """

    def __init__(self, taps: Taps) -> None:
        self._taps = taps
        self._free = list(range(taps.kinds.shape[0] - 1, 0, -1))
        self._placed: list[tuple[int, tuple[Span, ...]]] = []
        self.tensors: set[int] = set()
        self.released = 0
        self._entries: dict[tuple[int, ...], Entries] = {}
        # Of the passes: blocks that run beside them may let the writes of a request go.
        self._stream: torch.cuda.Stream | None = None

    @property
    def used(self) -> int:
        """How many entries are in use."""
        return self._taps.kinds.shape[0] - 1 - len(self._free)

    @property
    def placed(self) -> bool:
        """Whether the map names rows, so that it must be looked at before a pass."""
        return bool(self._placed)

    @property
    def seats(self) -> list[tuple[int, tuple[Span, ...]]]:
        """Which rows of the pass have which entries, as `place` was told."""
        return self._placed

    def install(self, lowered: tuple[Lowered, ...], prompt: int) -> Table:
        """Take a request's writes; those of the same lowered blocks are taken once.

        Raises:
            Full: there is no room.
        """
        key = tuple(map(id, lowered))
        if key not in self._entries:
            self._entries[key] = self._take(lowered)
        return self._entries[key].table(prompt)

    def _take(self, lowered: tuple[Lowered, ...]) -> Entries:
        entries = Entries(self, lowered)
        try:
            for affine in [write for each in lowered for write in each.writes]:
                tap = self._taps.taps[self._taps.named[f"{affine.path}.output"]]
                entry = self._entry(entries)
                along = self._entry(entries) if affine.kind == "project" else 0
                with torch.cuda.stream(self._stream):
                    self.fill(entry, along, affine, tap)
                entries.writes.append(Written(affine, tap.first + affine.index, entry))
        except Full:
            self._free += entries.taken
            raise
        return entries

    def release(self, table: Table) -> None:
        """Let a request's writes go."""
        entries = table.entries
        self.released += 1
        entries.users -= 1
        if not entries.users:
            self._free += entries.taken
            del self._entries[tuple(map(id, entries.lowered))]

    def copy(self, entries: Entries, entry: int, after: int) -> int:
        """An entry like another one, which leads to `after`."""
        new = self._entry(entries)
        with torch.cuda.stream(self._stream):
            self.fill_like(new, entry, after)
        return new

    def place(self, seats: list[tuple[int, tuple[Span, ...]]]) -> None:
        """Say which rows of the pass that begins have which entries.

        Args:
            seats: each request's first row in the batch, and its spans.
        """
        if self._taps.entries.is_cuda:
            self._stream = torch.cuda.current_stream()
        wanted = [seat for seat in seats if seat[1]]
        if wanted == self._placed:
            return
        every = [*wanted, *self._placed]
        tensors = sorted({span.tensor for _, spans in every for span in spans})
        rows = max(first + span.stop for first, spans in every for span in spans)
        cuda = self._taps.entries.is_cuda
        host = torch.zeros((len(tensors), rows), dtype=torch.int32, pin_memory=cuda)
        line = {tensor: number for number, tensor in enumerate(tensors)}
        for first, spans in wanted:
            for span in spans:
                host[line[span.tensor], first + span.start : first + span.stop] = span.entry
        for tensor, number in line.items():
            self._taps.entries[tensor, :rows].copy_(host[number], non_blocking=True)
        self._placed = wanted
        self.tensors = {span.tensor for _, spans in wanted for span in spans}

    def _entry(self, entries: Entries) -> int:
        if not self._free:
            raise Full
        entries.taken.append(self._free.pop())
        return entries.taken[-1]

    def fill(self, entry: int, along: int, affine: Affine, tap: Tap) -> None:
        """Say in an entry, and where a projection goes along in another, what a write does."""
        taps = self._taps
        columns: Any = affine.columns
        if isinstance(columns, list):
            columns = torch.tensor(columns, device=taps.operands.device)
        own = partial(self._put, tap, affine.index, columns)
        own(taps.masks[entry], True)
        own(taps.operands[entry], affine.operand)
        if affine.along is not None:
            own(taps.operands[along], affine.along)
        about = [_KINDS[affine.kind], 0, along]
        taps.kinds[entry].copy_(torch.tensor(about, dtype=torch.int32))
        taps.factors[entry] = affine.factor

    def fill_like(self, new: int, entry: int, after: int) -> None:
        """Say in an entry what another one says, and that it leads to `after`."""
        taps = self._taps
        for tensor in (taps.operands, taps.masks, taps.kinds, taps.factors):
            tensor[new].copy_(tensor[entry])
        taps.kinds[new, 1] = after

    def _put(self, tap: Tap, index: int, columns: Any, row: Tensor, value: Tensor | float) -> None:
        """Write a value into some columns of a tensor's row, or into those that this rank has."""
        row.zero_()
        layout, width = tap.layouts[index], tap.slabs[index].shape[1]
        value = value.to(row) if isinstance(value, Tensor) else value
        if isinstance(layout, Split):
            whole = row.new_zeros(layout.whole(self._taps.count))
            whole[columns] = value
            row[:width] = part(layout, whole, self._taps.rank, self._taps.count, axis=0)
        else:
            row[:width][columns] = value
