"""The channel: frames from the worker to the process that holds the engine, as they are made.

A local socket beside vLLM's own, so that nothing of ours waits for a round trip through the engine
loop. Rank 0 sends, the holder of the engine receives. The sockets live in the process's own
context: one that was collected with them would wait for them for ever.

A frame is one message: its header, and the buffers. Those of a large frame follow in messages of
pieces, of which the next ones are on their way while the first are taken or passed on: ZeroMQ would
else make memory for all of it first, which takes longer than to fill it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator

import orjson
import zmq

from nnsight_core.errors import EngineDeadError
from nnsight_core.wire.frames import Frame, memory

PIECE = 1 << 20
"""Bytes that travel together."""
_AT_ONCE = 8
"""Pieces that are taken before whoever passes them on has a turn."""


class Receiver:
    """The receiving end; `address` is what the worker connects to.

    Args:
        whole: whether a large frame is given once all of it is there. Else it is given at once, for
            somebody to pass its pieces on as they come.

    Attributes:
        more: whether more is there than was taken at once.
    """

    def __init__(self, whole: bool = True) -> None:
        self._whole = whole
        self.more = False
        self._folder = tempfile.mkdtemp(prefix="nnsight-")
        self.address = f"ipc://{os.path.join(self._folder, 'frames')}"
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._coming: _Filling | Pieces | None = None

    @property
    def fileno(self) -> int:
        """A file descriptor that becomes readable when frames may have come."""
        return self._socket.get(zmq.FD)

    def take(self, wait: float = 0.0) -> Frame | None:
        """The next frame; None if none comes within `wait` seconds, or before many pieces."""
        taken = 0
        while self._socket.poll(int(wait * 1000), zmq.POLLIN):
            if self._coming is None:
                frame = self._begin()
            elif taken < _AT_ONCE:
                frame = self._go_on(self._coming)
                taken += not self._whole
            else:
                self.more = True
                return None
            if frame is not None:
                return frame
        self.more = False
        return None

    def break_off(self) -> None:
        """No more comes of a frame that is coming."""
        if isinstance(self._coming, Pieces):
            self._coming.break_off()

    def _begin(self) -> Frame | None:
        header, sizes, *buffers = self._socket.recv_multipart(copy=False)
        frame = Frame(orjson.loads(header.buffer), [memoryview(b.buffer) for b in buffers])
        large: list[int] = orjson.loads(sizes.buffer)
        if not large:
            return frame
        if self._whole:
            self._coming = _Filling(frame, large)
            return None
        frame.lengths = large
        frame.coming = self._coming = Pieces(sum(large))
        return frame

    def _go_on(self, coming: _Filling | Pieces) -> Frame | None:
        frame = coming.take(memoryview(self._socket.recv(copy=False).buffer))
        if not coming.left:
            self._coming = None
        return frame

    def close(self) -> None:
        """Close the socket and remove its folder."""
        self.break_off()
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class Sender:
    """The sending end, in the worker."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, frame: Frame) -> None:
        """Send a frame; never waits for the receiver."""
        header = frame.seal()
        views = [memoryview(buffer).cast("B") for buffer in frame.buffers]
        sizes = [len(view) for view in views]
        if sum(sizes) <= PIECE:
            self._socket.send_multipart([header, b"[]", *views], copy=False)
            return
        self._socket.send_multipart([header, orjson.dumps(sizes)], copy=False)
        for view in views:
            for start in range(0, len(view), PIECE):
                self._socket.send(view[start : start + PIECE], copy=False)

    def close(self) -> None:
        """Close the socket; what the receiver has not taken by then is dropped."""
        self._socket.close(linger=0)


class Pieces:
    """The pieces of a frame's buffers, for one reader, who gets each when it is there.

    Attributes:
        left: how many bytes have still to come.

    Raises:
        EngineDeadError: (to the reader) they do not come any more.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self._there: deque[memoryview] = deque()
        self._came = asyncio.Event()
        self._broken = self._unread = False

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        try:
            while self._there or self.left:
                if self._there:
                    yield self._there.popleft()
                    continue
                if self._broken:
                    raise EngineDeadError("The engine ended before all of a message had come.")
                self._came.clear()
                await self._came.wait()
        finally:
            self._unread = True
            self._there.clear()

    def take(self, piece: memoryview) -> None:
        """The next piece has come."""
        self.left -= len(piece)
        if not self._unread:
            self._there.append(piece)
        self._came.set()

    def break_off(self) -> None:
        """No more comes."""
        self._broken = True
        self._came.set()


class _Filling:
    """A large frame that is put together; `left` as in `Pieces`."""

    def __init__(self, frame: Frame, sizes: list[int]) -> None:
        self.left = sum(sizes)
        self._frame = frame
        made = [memory(size) for size in sizes]
        frame.buffers = list(made)
        self._empty = deque(room for room in made if room)

    def take(self, piece: memoryview) -> Frame | None:
        """Take the next piece; gives the frame once it has all of them."""
        room = self._empty.popleft()
        room[: len(piece)] = piece
        if len(piece) < len(room):
            self._empty.appendleft(room[len(piece) :])
        self.left -= len(piece)
        return None if self.left else self._frame
