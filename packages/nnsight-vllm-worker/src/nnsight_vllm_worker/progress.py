"""How far a request has come, judged from the frames of its blocks.

Both engines follow their requests with it, so that a frame means the same to each.
"""

from __future__ import annotations

from nnsight_core.wire.frames import Frame
from nnsight_vllm_worker.submission import Request


class Progress:
    """What is still to come of one request.

    Attributes:
        key: the request's.
        waits: whether a block of it waits for the finished output.
        failed: whether a block of it raised, so that its generation need not go on.
    """

    def __init__(self, request: Request) -> None:
        self.key = request.key
        self.waits = False
        self.failed = False
        self._awaited = set(range(request.sequences)) if request.traced else set()

    def take(self, frame: Frame) -> bool:
        """Note a frame; whether it says something to be passed on."""
        header = frame.header
        if header.get("waits"):
            self.waits = True
            return False
        if header["kind"] == "ended":
            self._awaited.discard(header["sequence"])
            self.failed |= header["error"] is not None
        return True

    @property
    def ended(self) -> bool:
        """Whether no block of it has anything left to say."""
        return not self._awaited

    @property
    def answered(self) -> bool:
        """Whether its blocks have done all they can do without the finished output."""
        return self.waits or self.ended
