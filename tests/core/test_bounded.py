"""Values up to a limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_core import EncodeError, SaveLimitError
from nnsight_core.wire import data
from nnsight_core.wire.bounded import BoundedEncoder, Room
from nnsight_core.wire.data import Decoder


def test_what_fits_is_what_any_encoder_gives() -> None:
    value = {"a": [torch.arange(4), 1, "text"], "b": torch.ones(3)}
    plain, bounded = data.Encoder(), BoundedEncoder(Room.of(1 << 10))
    assert bounded.encode(value) == plain.encode(value)
    assert [bytes(b) for b in bounded.buffers] == [bytes(b) for b in plain.buffers]


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1 << 18), [0] * 200, "x" * 1001, {"a": {"b": bytes(1001)}}, [torch.zeros(99)] * 9],
    ids=["tensor", "numbers", "text", "bytes", "tensors"],
)
def test_what_does_not_fit_leaves_nothing_behind(value: Any) -> None:
    room = Room.of(1000)
    encoder = BoundedEncoder(room)
    alike = isinstance(value, list) and isinstance(value[0], torch.Tensor)
    with pytest.raises(SaveLimitError, match=r"hidden.*does not fit.* 1000 bytes .*max_saves"):
        encoder.encode([t.clone() for t in value] if alike else value, "hidden")
    assert room.left == 1000 and encoder.buffers == []
    assert encoder.encode(torch.zeros(9), "small") and 0 < room.left < 1000


def test_a_tensor_that_does_not_fit_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "tensor_bytes", None)
    with pytest.raises(SaveLimitError):
        BoundedEncoder(Room.of(1 << 20)).encode(torch.zeros(1 << 20))


def test_many_small_tensors_count_once_and_together() -> None:
    tensors = [torch.full((10,), float(i)) for i in range(20)]
    room = Room.of(1200)
    encoder = BoundedEncoder(room)
    encoder.pack(tensors)
    form = encoder.encode(tensors, "small")
    assert len(encoder.buffers) == 1 and 200 <= room.left <= 400
    assert all(map(torch.equal, Decoder(encoder.buffers).decode(form), tensors))
    encoder = BoundedEncoder(Room.of(700))
    encoder.pack(tensors)
    with pytest.raises(EncodeError, match="does not fit"):
        encoder.encode(tensors, "small")
    assert encoder.buffers == []


def test_encoders_share_their_room() -> None:
    room = Room.of(1000)
    BoundedEncoder(room).encode(torch.zeros(200), "first")
    with pytest.raises(SaveLimitError, match="of which 816 are taken"):
        BoundedEncoder(room).encode(torch.zeros(200), "second")
