"""The channel: frames from the worker to the process that holds the engine, as they are made.

A local socket beside vLLM's own, so that nothing of ours waits for a round trip through the engine
loop. Rank 0 sends, the holder of the engine receives. The sockets live in the process's own
context: one that was collected with them would wait for them for ever.

A frame is one message: its header, and the buffers. Those of a large frame follow in messages of
pieces, of which the next ones are on their way while the first are taken: ZeroMQ would else have
new memory made for a whole message, page by page, which takes longer than to fill it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque

import orjson
import zmq

from nnsight_core.wire.frames import Frame, memory

PIECE = 1 << 20
"""Bytes that travel together."""


class Receiver:
    """The receiving end; `address` is what the worker connects to.

    Args:
        whole: whether the buffers of large frames are put together.
    """

    def __init__(self, whole: bool = True) -> None:
        self._whole = whole
        self._folder = tempfile.mkdtemp(prefix="nnsight-")
        self.address = f"ipc://{os.path.join(self._folder, 'frames')}"
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._coming: _Coming | None = None

    @property
    def fileno(self) -> int:
        """A file descriptor that becomes readable when frames may have come."""
        return self._socket.get(zmq.FD)

    def take(self, wait: float = 0.0) -> Frame | None:
        """The next frame; None if none comes within `wait` seconds."""
        while self._socket.poll(int(wait * 1000), zmq.POLLIN):
            if self._coming is not None:
                frame = self._coming.take(memoryview(self._socket.recv(copy=False).buffer))
                if frame is not None:
                    self._coming = None
                    return frame
                continue
            header, sizes, *buffers = self._socket.recv_multipart(copy=False)
            frame = Frame(orjson.loads(header.buffer), [memoryview(b.buffer) for b in buffers])
            large = orjson.loads(sizes.buffer)
            if not large:
                return frame
            self._coming = _Coming(frame, large, self._whole)
        return None

    def close(self) -> None:
        """Close the socket and remove its folder."""
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
        header = orjson.dumps(frame.header)
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


class _Coming:
    """A large frame whose pieces are still coming."""

    def __init__(self, frame: Frame, sizes: list[int], whole: bool) -> None:
        self._frame = frame
        self._left = sum(sizes)
        self._empty: deque[memoryview] | None = None
        if whole:
            made = [memory(size) for size in sizes]
            frame.buffers = list(made)
            self._empty = deque(room for room in made if room)
        else:
            frame.lengths = sizes

    def take(self, piece: memoryview) -> Frame | None:
        """Take the next piece; gives the frame once it has all of them."""
        if self._empty is None:
            self._frame.buffers.append(piece)
        else:
            room = self._empty.popleft()
            room[: len(piece)] = piece
            if len(piece) < len(room):
                self._empty.appendleft(room[len(piece) :])
        self._left -= len(piece)
        return None if self._left else self._frame
