"""The channel: frames arrive as they were sent, however large their buffers are."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import zmq

from nnsight_core import EngineDeadError
from nnsight_core.wire.data import Decoder, Encoder
from nnsight_core.wire.frames import Buffer, Frame, read_frame
from nnsight_vllm_worker.channel import PIECE, Pieces, Receiver, Sender

PATIENCE = 20.0


@pytest.fixture(params=[True, False], ids=["whole", "pieces"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Receiver, Sender]]:
    receiver = Receiver(request.param)
    sender = Sender(receiver.address)
    yield receiver, sender
    sender.close()
    receiver.close()


def arrived(receiver: Receiver, count: int = 1) -> list[Frame]:
    """The next frames, once all of them is there."""
    frames: list[Frame] = []
    deadline = time.monotonic() + PATIENCE
    while len(frames) < count or left(frames[-1]):
        assert time.monotonic() < deadline
        frame = receiver.take(0.05)
        if frame is not None:
            frames.append(frame)
    assert receiver.take() is None and not receiver.more
    return frames


def left(frame: Frame) -> int:
    return frame.coming.left if isinstance(frame.coming, Pieces) else 0


async def all_of(coming: AsyncIterable[Buffer]) -> list[Buffer]:
    return [piece async for piece in coming]


def contents(frame: Frame) -> list[bytes]:
    """The buffers as whoever reads them that the frame is sent on to."""
    if frame.coming is None:
        sent_on = [bytes(buffer) for buffer in frame.buffers]
    else:
        assert not frame.buffers
        frame = replace(frame, buffers=asyncio.run(all_of(frame.coming)), coming=None)
        sent_on = None
    back = read_frame(frame.to_bytes())
    assert back.header == frame.header
    read = [bytes(buffer) for buffer in back.buffers]
    assert sent_on in (read, None) and frame.sizes == [len(buffer) for buffer in read]
    return read


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [5, 0, 7],
        [PIECE],
        [PIECE + 1],
        [3 * PIECE],
        [7, 2 * PIECE + 13, 0, PIECE, 20 * PIECE - 1, 9],
    ],
    ids=lambda sizes: "-".join(map(str, sizes)) or "none",
)
def test_buffers_of_any_size_arrive(ends: tuple[Receiver, Sender], sizes: list[int]) -> None:
    receiver, sender = ends
    buffers: list[Buffer] = [os.urandom(size) for size in sizes]
    sender.send(Frame({"key": "a", "n": 1}, buffers))
    [frame] = arrived(receiver)
    assert frame.header == {"key": "a", "n": 1} and contents(frame) == buffers


def test_frames_arrive_in_order(ends: tuple[Receiver, Sender]) -> None:
    receiver, sender = ends
    sizes = [3, 2 * PIECE, 0, PIECE + 1, PIECE, 4 * PIECE + 3, 1]
    for number, size in enumerate(sizes):
        sender.send(Frame({"n": number}, [bytes([number]) * size, b"end"]))
    frames = arrived(receiver, len(sizes))
    for number, (size, frame) in enumerate(zip(sizes, frames, strict=True)):
        assert frame.header == {"n": number}
        assert contents(frame) == [bytes([number]) * size, b"end"]


def test_what_is_not_a_row_of_bytes_arrives_as_its_bytes(ends: tuple[Receiver, Sender]) -> None:
    receiver, sender = ends
    large = numpy.arange(PIECE, dtype=numpy.int64).reshape(1024, -1)
    small = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    sender.send(Frame({}, [large.data, small.data]))
    [frame] = arrived(receiver)
    assert contents(frame) == [large.tobytes(), small.tobytes()]


def test_the_sender_waits_for_nobody(ends: tuple[Receiver, Sender]) -> None:
    receiver, sender = ends
    frame = Frame({}, [bytes(8 * PIECE)])
    sending = threading.Thread(target=lambda: [sender.send(frame) for _ in range(8)])
    sending.start()
    sending.join(PATIENCE)
    assert not sending.is_alive()
    assert all(contents(each) == frame.buffers for each in arrived(receiver, 8))


@pytest.fixture
def worker() -> Iterator[tuple[zmq.Socket[bytes], Receiver, Receiver]]:
    """What a worker sends with, and a receiver of each kind, of which the next one is given it."""
    socket = zmq.Context.instance().socket(zmq.PUSH)
    whole, cut = Receiver(), Receiver(whole=False)
    yield socket, whole, cut
    socket.close(linger=0)
    whole.close()
    cut.close()


def test_a_frame_to_be_read_is_given_once_all_of_it_is_there(worker) -> None:
    socket, receiver, _ = worker
    socket.connect(receiver.address)
    socket.send_multipart([b'{"n":1}', b"[3,0,5]"])
    for piece in (b"xy", b"z", b"abcd", b"e"):
        assert receiver.take(0.05) is None
        socket.send(piece)
    [frame] = arrived(receiver)
    assert frame.header == {"n": 1} and contents(frame) == [b"xyz", b"", b"abcde"]


def test_a_frame_to_be_passed_on_is_given_at_once(worker) -> None:
    socket, _, receiver = worker
    socket.connect(receiver.address)
    socket.send_multipart([b'{"n":1}', b"[3,0,5]"])
    frame = receiver.take(PATIENCE)
    assert frame is not None and frame.header == {"n": 1} and frame.sizes == [3, 0, 5]

    async def read() -> list[bytes]:
        assert frame is not None and frame.coming is not None
        coming, read = aiter(frame.coming), []
        for piece in (b"xy", b"z", b"abcd", b"e"):
            reading = asyncio.ensure_future(anext(coming))
            await asyncio.sleep(0)
            assert not reading.done()
            socket.send(piece)
            assert receiver.take(0.05) is None
            read.append(bytes(await reading))
        assert await anext(coming, None) is None
        return read

    assert asyncio.run(read()) == [b"xy", b"z", b"abcd", b"e"]


def test_many_pieces_are_not_taken_at_once(worker) -> None:
    socket, _, receiver = worker
    socket.connect(receiver.address)
    socket.send_multipart([b"{}", b"[100]"])
    for _ in range(100):
        socket.send(b"x")
    frame = receiver.take(PATIENCE)
    assert frame is not None and left(frame) == 100
    turns = 0
    while left(frame):
        assert receiver.take(PATIENCE) is None
        turns += 1
    assert turns > 10
    assert contents(frame) == [b"x" * 100]


def begun(socket: Any, receiver: Any, lengths: bytes, first: bytes) -> Pieces:
    """What is still to come of a message whose first piece has."""
    socket.send_multipart([b"{}", lengths])
    socket.send(first)
    frame = receiver.take(PATIENCE)
    assert frame is not None and receiver.take(0.05) is None
    assert isinstance(frame.coming, Pieces)
    return frame.coming


def test_what_breaks_off_is_told_to_who_waits_for_it(worker) -> None:
    socket, _, receiver = worker
    socket.connect(receiver.address)
    coming = begun(socket, receiver, b"[5]", b"xy")

    async def read() -> None:
        reading = asyncio.ensure_future(all_of(coming))
        await asyncio.sleep(0.01)
        assert not reading.done()
        receiver.break_off()
        await reading

    with pytest.raises(EngineDeadError, match="before all of a message had come"):
        asyncio.run(read())


def test_pieces_that_nobody_waits_for_any_more_are_dropped(worker) -> None:
    socket, _, receiver = worker
    socket.connect(receiver.address)
    coming = begun(socket, receiver, b"[4]", b"ab")

    async def leave() -> None:
        pieces = aiter(coming)
        assert bytes(await anext(pieces)) == b"ab"
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    socket.send(b"cd")
    socket.send_multipart([b'{"n":2}', b"[]"])
    [after] = arrived(receiver)
    assert after.header == {"n": 2} and not coming.left and not coming._there


def test_a_large_tensor_stays_where_it_came_and_can_be_written() -> None:
    receiver = Receiver()
    sender = Sender(receiver.address)
    encoder = Encoder()
    form = encoder.encode(torch.arange(PIECE), "x")
    sender.send(Frame({}, list(encoder.buffers)))
    [frame] = arrived(receiver)
    sender.close()
    receiver.close()
    tensor = Decoder(frame.buffers, own=True).decode(form)
    assert torch.equal(tensor, torch.arange(PIECE))
    tensor[0] = 7
    assert memoryview(frame.buffers[0]).cast("B").cast("q")[0] == 7
