"""The channel: frames from the worker to the process that holds the engine, as they are made.

A local socket beside vLLM's own, so that nothing of ours waits for a round trip through the engine
loop. Rank 0 sends, the holder of the engine receives. The sockets live in the process's own
context: one that was collected with them would wait for them for ever.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import orjson
import zmq

from nnsight_core.wire.frames import Frame


class Receiver:
    """The receiving end; `address` is what the worker connects to."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="nnsight-")
        self.address = f"ipc://{os.path.join(self._folder, 'frames')}"
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)

    @property
    def fileno(self) -> int:
        """A file descriptor that becomes readable when frames may have come."""
        return self._socket.get(zmq.FD)

    def take(self, wait: float = 0.0) -> Frame | None:
        """The next frame; None if none comes within `wait` seconds."""
        if not self._socket.poll(int(wait * 1000), zmq.POLLIN):
            return None
        header, *buffers = self._socket.recv_multipart(copy=False)
        return Frame(orjson.loads(header.buffer), [memoryview(b.buffer) for b in buffers])

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
        self._socket.send_multipart([orjson.dumps(frame.header), *frame.buffers], copy=False)

    def close(self) -> None:
        """Close the socket; what the receiver has not taken by then is dropped."""
        self._socket.close(linger=0)
