"""The channel: frames arrive as they were sent, however large their buffers are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy
import pytest
import torch
import zmq

from nnsight_core.wire.data import Decoder, Encoder
from nnsight_core.wire.frames import Buffer, Frame, read_frame
from nnsight_vllm_worker.channel import PIECE, Receiver, Sender

PATIENCE = 20.0


@pytest.fixture(params=[True, False], ids=["whole", "pieces"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Receiver, Sender]]:
    receiver = Receiver(request.param)
    sender = Sender(receiver.address)
    yield receiver, sender
    sender.close()
    receiver.close()


def arrived(receiver: Receiver) -> Frame:
    frame = receiver.take(PATIENCE)
    assert frame is not None
    return frame


def contents(frame: Frame) -> list[bytes]:
    """The buffers as whoever it is sent on to reads them."""
    if frame.lengths is None:
        assert [bytes(b) for b in frame.buffers] == contents_of(frame)
    return contents_of(frame)


def contents_of(frame: Frame) -> list[bytes]:
    return [bytes(buffer) for buffer in read_frame(frame.to_bytes()).buffers]


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [5, 0, 7],
        [PIECE],
        [PIECE + 1],
        [3 * PIECE],
        [7, 2 * PIECE + 13, 0, PIECE, 5 * PIECE - 1, 9],
    ],
    ids=lambda sizes: "-".join(map(str, sizes)) or "none",
)
def test_buffers_of_any_size_arrive(ends: tuple[Receiver, Sender], sizes: list[int]) -> None:
    receiver, sender = ends
    buffers: list[Buffer] = [os.urandom(size) for size in sizes]
    sender.send(Frame({"key": "a", "n": 1}, buffers))
    frame = arrived(receiver)
    assert frame.header == {"key": "a", "n": 1}
    assert contents(frame) == buffers
    assert receiver.take() is None


def test_frames_arrive_in_order(ends: tuple[Receiver, Sender]) -> None:
    receiver, sender = ends
    sizes = [3, 2 * PIECE, 0, PIECE + 1, PIECE, 4 * PIECE + 3, 1]
    for number, size in enumerate(sizes):
        sender.send(Frame({"n": number}, [bytes([number]) * size, b"end"]))
    for number, size in enumerate(sizes):
        frame = arrived(receiver)
        assert frame.header == {"n": number}
        assert contents(frame) == [bytes([number]) * size, b"end"]


def test_what_is_not_a_row_of_bytes_arrives_as_its_bytes(ends: tuple[Receiver, Sender]) -> None:
    receiver, sender = ends
    large = numpy.arange(PIECE, dtype=numpy.int64).reshape(1024, -1)
    small = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    sender.send(Frame({}, [memoryview(large), memoryview(small)]))
    assert contents(arrived(receiver)) == [large.tobytes(), small.tobytes()]


def test_a_frame_is_taken_once_all_of_it_is_there(ends: tuple[Receiver, Sender]) -> None:
    receiver, _ = ends
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(receiver.address)
    try:
        socket.send_multipart([b'{"n":1}', b"[3,0,5]"])
        for piece in (b"xy", b"z", b"abcd", b"e"):
            assert receiver.take(0.05) is None
            socket.send(piece)
        frame = arrived(receiver)
        assert frame.header == {"n": 1} and contents(frame) == [b"xyz", b"", b"abcde"]
    finally:
        socket.close(linger=0)


def test_a_large_tensor_stays_where_it_came_and_can_be_written() -> None:
    receiver = Receiver()
    sender = Sender(receiver.address)
    encoder = Encoder()
    form = encoder.encode(torch.arange(PIECE), "x")
    sender.send(Frame({}, list(encoder.buffers)))
    frame = arrived(receiver)
    sender.close()
    receiver.close()
    tensor = Decoder(frame.buffers, own=True).decode(form)
    assert torch.equal(tensor, torch.arange(PIECE))
    tensor[0] = 7
    assert memoryview(frame.buffers[0]).cast("q")[0] == 7


def test_the_sender_waits_for_nobody(ends: tuple[Receiver, Sender]) -> None:
    receiver, sender = ends
    frame = Frame({}, [bytes(8 * PIECE)])
    sending = threading.Thread(target=lambda: [sender.send(frame) for _ in range(8)])
    sending.start()
    sending.join(PATIENCE)
    assert not sending.is_alive()
    assert all(contents(arrived(receiver)) == frame.buffers for _ in range(8))
