"""How shards make up a whole tensor, and the other way round; on 4 and 8 real ranks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import spawn

from nnsight_vllm_worker.group import Group
from nnsight_vllm_worker.layouts import SUM, Piece, Split, fits, join, part, split, whole_shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@st.composite
def splits(draw: st.DrawFn) -> tuple[Split, int]:
    ranks = draw(st.sampled_from((1, 2, 4, 8)))
    copies = st.sampled_from([n for n in (1, 2, 4, 8) if n <= ranks])
    pieces = st.builds(Piece, st.integers(1, 5).map(lambda heads: 4 * heads), copies)
    return Split(tuple(draw(st.lists(pieces, min_size=1, max_size=4)))), ranks


@given(splits(), st.booleans())
def test_a_tensor_taken_apart_is_put_together_again(case: tuple[Split, int], heads: bool) -> None:
    layout, ranks = case
    whole = torch.arange(3 * layout.whole(ranks)).view(3, -1)
    if heads:
        whole = whole.view(3, -1, 4)
    shards = [part(layout, whole, rank, ranks) for rank in range(ranks)]
    assert all(fits(layout, tuple(shard.shape)) for shard in shards)
    assert whole_shape(layout, tuple(shards[0].shape), ranks) == whole.shape
    assert torch.equal(join(layout, shards), whole)


def test_fused_parts_come_in_the_order_of_one_gpu() -> None:
    # 4 heads of q, 2 of k and v, on 4 ranks: each k and v is on two of them.
    q, k, v = torch.arange(8.0).view(4, 2), torch.arange(10, 14.0), torch.arange(20, 24.0)
    kv = [(k[:2], v[:2])] * 2 + [(k[2:], v[2:])] * 2
    shards = [torch.cat([q[r], *kv[r]])[None] for r in range(4)]
    layout = Split((Piece(2), Piece(2, 2), Piece(2, 2)))
    assert torch.equal(join(layout, shards)[0], torch.cat([q.flatten(), k, v]))
    for rank in range(4):
        assert torch.equal(part(layout, join(layout, shards), rank, 4), shards[rank])


def test_summands_add_up_exactly() -> None:
    whole = torch.randn(3, 8)
    shards = [part(SUM, whole, rank, 4) for rank in range(4)]
    assert torch.equal(join(SUM, shards), whole)


def test_a_view_of_columns_keeps_their_pieces_or_has_no_layout() -> None:
    qkv = Split((Piece(8), Piece(4, 2), Piece(4, 2)))
    assert qkv.between(8, 12) == Split((Piece(4, 2),))
    assert qkv.between(0, 12) == Split((Piece(8), Piece(4, 2)))
    assert qkv.between(0, 4) is None and qkv.between(8, 8) is None
    assert not fits(qkv, (5, 2, 8)) and fits(qkv, (5, 4, 4)) and not fits(qkv, (16,))


def layouts(ranks: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Layouts with a whole shape: plain, fused, of heads, with copies, of summands."""
    kv = Piece(4, ranks // 2)
    return [
        (split(6), (3, 6 * ranks)),
        (split(4, 4), (3, 8 * ranks)),
        (split(8), (3, 2 * ranks, 4)),
        (Split((Piece(8), kv, kv)), (3, 8 * ranks + 16)),
        (SUM, (3, 5)),
    ]


def rank(number: int, size: int, place: str) -> None:
    """One of several real ranks: gathers, scatters and broadcasts each layout in each dtype."""
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=size)
    ours = Group(list(range(size)), number, dist.group.WORLD, dist.group.WORLD)
    for layout, shape in layouts(size):
        for dtype in DTYPES:
            torch.manual_seed(0)
            whole = (torch.randn(shape) * 4).to(dtype)
            mine = part(layout, whole, number, size)
            found = ours.gather(mine)
            assert bool(found) == (number == 0)
            if found and not (layout is SUM and dtype is torch.bool):
                assert torch.equal(join(layout, found), whole)
            parts = [part(layout, whole, r, size) for r in range(size)] if number == 0 else None
            assert torch.equal(ours.scatter(parts, mine), mine)
            assert torch.equal(ours.broadcast(whole if number == 0 else None, whole), whole)
    assert ours.agree({"rank": number}) == [{"rank": r} for r in range(size)]
    dist.destroy_process_group()


@pytest.mark.local
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_hand_each_other_every_layout(size: int, tmp_path: Path) -> None:
    spawn(rank, (size, str(tmp_path / "meeting")), nprocs=size)
