"""The tap's kernel, for GPUs (Triton)."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


def launch(
    values: tuple[Tensor, Tensor],
    slabs: tuple[Tensor, Tensor],
    slots: Tensor,
    entries: Tensor,
    tables: tuple[Tensor, ...],
    count: int,
) -> None:
    """Write and copy the rows of one tensor, or of two of one shape. See `tap_op.tap`."""
    operands, masks, kinds, factors = tables
    one, other = values
    rows = one.shape[0]
    if rows == 0:
        return
    if not one[0].is_contiguous():
        raise RuntimeError(f"A tap holds rows that do not lie in one piece: {one.stride()}.")
    width = one[0].numel()
    block = triton.next_power_of_2(width)
    kernel: Any = _tap
    kernel[(rows, count)](
        one,
        other,
        slabs[0],
        slabs[1],
        slots,
        entries,
        operands,
        masks,
        kinds,
        factors,
        width,
        one.stride(0),
        other.stride(0),
        entries.stride(0),
        operands.stride(0),
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )


@triton.jit
def _tap(
    one,
    other,
    slab_one,
    slab_other,
    slots,
    entries,
    operands,
    masks,
    kinds,
    factors,
    width,
    stride_one,
    stride_other,
    stride_entries,
    stride_operands,
    BLOCK: tl.constexpr,
) -> Any:
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    entry = tl.load(entries + which * stride_entries + row).to(tl.int64)
    if (slot < 0) & (entry == 0):
        return
    if which == 0:
        start = one + row * stride_one
        slab = slab_one
    else:
        start = other + row * stride_other
        slab = slab_other
    # The whole row: a projection is a sum over it, which no other program may have written into.
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(start + columns, mask=inside)
    if entry > 0:
        while entry > 0:
            kind = tl.load(kinds + entry * 3)
            at = entry * stride_operands + columns
            a = tl.load(operands + at, mask=inside, other=0.0)
            mask = tl.load(masks + at, mask=inside, other=0) != 0
            old = x.to(tl.float32)
            new = a
            if kind == 1:
                new = old + a
            elif kind == 2:
                new = old * a
            elif kind == 4:
                along = tl.load(kinds + entry * 3 + 2).to(tl.int64) * stride_operands
                b = tl.load(operands + along + columns, mask=inside, other=0.0)
                dot = tl.sum(tl.where(inside, old * a, 0.0), 0)
                new = old - tl.load(factors + entry) * dot * b
            x = tl.where(mask, new.to(x.dtype), x)
            entry = tl.load(kinds + entry * 3 + 1).to(tl.int64)
        tl.store(start + columns, x, mask=inside)
    if slot >= 0:
        tl.store(slab + slot * width + columns, x, mask=inside)
