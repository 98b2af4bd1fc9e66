"""Tensors that clients have sent before, by content, so that they need not send them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from nnsight_core.errors import ProtocolError
from nnsight_core.wire.frames import Buffer


class Missing(ProtocolError):
    """A block needs contents that did not come and are not here.

    Attributes:
        digests: which.
    """

    def __init__(self, digests: list[str]) -> None:
        shown = ", ".join(digest[:16] for digest in digests[:4])
        super().__init__(f"{len(digests)} tensors that the blocks need are not here: {shown}.")
        self.digests = digests


class Uploads:
    """What has been sent, the least recently used first to leave.

    Args:
        limit: how many bytes may stay.

    Example:
        >>> uploads = Uploads(1 << 30)
        >>> uploads.take(["a1f3"], {"a1f3": b"..."})
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._held: OrderedDict[str, bytes] = OrderedDict()

    def take(self, needed: Iterable[str], given: dict[str, Buffer]) -> dict[str, Buffer]:
        """The contents that are needed, from what came and what was here.

        Raises:
            Missing: some are neither.
        """
        needed = dict.fromkeys(needed)
        missing = [d for d in needed if d not in given and d not in self._held]
        if missing:
            raise Missing(missing)
        found: dict[str, Buffer] = {}
        for digest in needed:
            if digest in self._held:
                self._held.move_to_end(digest)
                found[digest] = self._held[digest]
            else:
                found[digest] = self._hold(digest, bytes(given[digest]))
        return found

    @property
    def bytes(self) -> int:
        """How many bytes are held."""
        return self._bytes

    def _hold(self, digest: str, data: bytes) -> bytes:
        # What is larger than all that may stay would drive everything else out, and leave itself.
        if len(data) <= self._limit:
            self._held[digest] = data
            self._bytes += len(data)
            while self._bytes > self._limit:
                self._bytes -= len(self._held.popitem(last=False)[1])
        return data
