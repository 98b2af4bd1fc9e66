"""The operation that stands at a tap, inside what vLLM compiles and captures.

It does two things to each tensor of a location: rows that the tables name are written (`tables`),
and rows that have a slot are copied to it (`taps`). Both are decided by device memory alone, so the
operation can lie in a CUDA graph: a row without an entry and without a slot costs one look at each.
Where its Python runs (a step without graphs), a tap of which nobody wants anything does nothing,
and a sink may be asked as well.

The operation tells layers apart by the tensors it is given and by nothing else: a number would make
vLLM compile each layer anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nnsight_core.current import current_run

Sink = Callable[[list[Tensor]], None]
SINKS: dict[int, list[Sink]] = {}
"""What is called with a location's tensors where Python runs, by the address of its first slab."""

WANTED: dict[int, Collection[int]] = {}
"""The first slabs of the taps that have something to do in the pass that runs, by the address of
their engine's map of slots; of an engine that is not named here, all have."""

_calls = 0

ADD, SCALE, SET, PROJECT = 1, 2, 3, 4
"""What an entry of the tables does to a row `x`: `x + a`, `x * a`, `a`, `x - f (x @ a) b`."""


_LIBRARY = torch.library.Library("nnsight", "FRAGMENT")
_TABLES = (
    "Tensor slots, Tensor entries, Tensor operands, Tensor masks, Tensor kinds, Tensor factors"
)


def tap(
    values: list[Tensor], slabs: list[Tensor], slots: Tensor, entries: Tensor, *tables: Tensor
) -> None:
    """Write and copy rows of one location. `look` is the same where nothing may be written.

    Args:
        values: the location's tensors, each `[rows, ...]` and contiguous within a row.
        slabs: for each, `[slots, width]`.
        slots: `[rows at most]`, the slot of each row; -1 for none.
        entries: `[tensors, rows at most]`, the first entry of each row; 0 for none.
        tables: what entries do: `operands` (`[entries, widest]`, float32); `masks`, of that shape,
            the columns that an entry writes; `kinds` (`[entries, 3]`: the kind, which entry comes
            after it or 0, and in which operand a projection's direction lies); `factors`
            (`[entries]`, float32).
    """
    if _calls or current_run() is not None:
        return  # a module that a block calls on values of its own, whose rows are no batch's
    address = slabs[0].data_ptr()
    wanted = WANTED.get(slots.data_ptr())
    on_gpu = values[0].is_cuda
    # A graph that is captured is for other passes as well.
    if wanted is None or address in wanted or (on_gpu and torch.cuda.is_current_stream_capturing()):
        run = _on_gpu if on_gpu else _on_cpu
        run(values, slabs, slots, entries, *tables)
    for sink in SINKS.get(address, ()):
        sink(values)


@contextmanager
def calling() -> Iterator[None]:
    """Within it, what runs is a call of a block's, on a rank where no block runs."""
    global _calls
    _calls += 1
    try:
        yield
    finally:
        _calls -= 1


def _define() -> None:
    for name, values in (("tap", "Tensor(b!)[] values"), ("look", "Tensor[] values")):
        _LIBRARY.define(f"{name}({values}, Tensor(a!)[] slabs, {_TABLES}) -> ()")
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, tap, key)
        torch.library.register_fake(f"nnsight::{name}", lambda *_: None, lib=_LIBRARY)


_define()


def _on_cpu(
    values: list[Tensor], slabs: list[Tensor], slots: Tensor, entries: Tensor, *tables: Tensor
) -> None:
    operands, masks, kinds, factors = tables
    for index, (value, slab) in enumerate(zip(values, slabs, strict=True)):
        rows = value.shape[0]
        flat = value.view(rows, -1)
        width = flat.shape[1]
        firsts = entries[index, :rows]
        for first in firsts.unique().tolist():
            its, entry = (firsts == first).nonzero().flatten(), first
            while entry:
                kind, after, along = kinds[entry].tolist()
                a, x = operands[entry, :width], flat[its]
                new = _written(kind, x.float(), a, factors[entry] * operands[along, :width])
                flat[its] = torch.where(masks[entry, :width], new.to(flat.dtype), x)
                entry = after
        mine = slots[:rows] >= 0
        if mine.any():
            slab[slots[:rows][mine].long()] = flat[mine]


def _written(kind: int, x: Tensor, a: Tensor, along: Tensor) -> Tensor:
    match kind:
        case 1:
            return x + a
        case 2:
            return x * a
        case 3:
            return a
    return x - (x * a).sum(-1, keepdim=True) * along


def _on_gpu(
    values: list[Tensor], slabs: list[Tensor], slots: Tensor, entries: Tensor, *tables: Tensor
) -> None:
    from nnsight_vllm_worker.tap_kernel import launch

    # A pair of like tensors (a layer's output and the residual stream) goes in one launch.
    index = 0
    while index < len(values):
        one = values[index]
        other = values[index + 1] if index + 1 < len(values) else one
        two = other is not one and other.shape == one.shape and other.dtype == one.dtype
        other_slab = slabs[index + 1] if two else slabs[index]
        launch(
            (one, other if two else one),
            (slabs[index], other_slab),
            slots,
            entries[index:],
            tables,
            2 if two else 1,
        )
        index += 2 if two else 1
