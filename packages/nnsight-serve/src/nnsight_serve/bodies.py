"""How much memory the bodies of requests take, each of them and all together.

What a body takes is counted as it comes, and once more where it is unpacked, until its request is
over: what it holds is in use until then.
"""

from __future__ import annotations

import threading

from nnsight_core.errors import BusyError
from nnsight_serve.refusals import Refused

AGAIN = 1.0
"""Seconds after which a body may be sent again, where all together take too much."""


class Bodies:
    """Counts the bytes of bodies, and refuses what would be too many.

    Args:
        of_one: how many one body may have, packed and unpacked.
        in_all: how many all may have together. One that is alone may be unpacked beyond that.

    Attributes:
        of_one: as given, or `in_all` if that is less.
        option: the option of the server that says so.
    """

    def __init__(self, of_one: int, in_all: int) -> None:
        self.of_one = min(of_one, in_all)
        self.option = "--max-body" if of_one <= in_all else "--max-bodies"
        self._in_all = in_all
        self._held = 0
        # Bodies are unpacked in threads.
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """How many bytes there are."""
        return self._held


class Body:
    """The body of one request.

    Example:
        >>> body = Body(Bodies(1 << 29, 1 << 33))
        >>> body.expect(1000)
        >>> body.take(1000)
        >>> body.close()
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._came = self._held = 0
        self._closed = False

    def expect(self, size: int) -> None:
        """It will have so many bytes.

        Raises:
            Refused: they are too many, now or whenever they came.
        """
        if size > self._bodies.of_one:
            raise too_large(self._bodies)
        with self._bodies._lock:
            self._check(size)

    def take(self, size: int) -> None:
        """So many bytes of it have come.

        Raises:
            Refused: as `expect`.
        """
        self._came += size
        if self._came > self._bodies.of_one:
            raise too_large(self._bodies)
        self.unpack(size)

    def unpack(self, size: int) -> None:
        """So many bytes more are in memory, or will be in a moment.

        Raises:
            Refused: all bodies together would be too many.
        """
        bodies = self._bodies
        with bodies._lock:
            self._check(size)
            if not self._closed:  # else its client has left, and nobody would count it out
                bodies._held += size
                self._held += size

    def close(self) -> None:
        """Its request is over."""
        with self._bodies._lock:
            self._bodies._held -= self._held
            self._held, self._closed = 0, True

    def _check(self, size: int) -> None:
        bodies = self._bodies
        others = bodies._held - self._held
        if size and others and bodies._held + size > bodies._in_all:
            raise Refused(
                503,
                BusyError(
                    f"{size} bytes more are too many: the requests that are under way have "
                    f"{bodies._held} bytes in memory, and may have {bodies._in_all} "
                    "(--max-bodies). Send it again later.",
                    AGAIN,
                ),
            )


def too_large(bodies: Bodies) -> Refused:
    """The refusal of a body beyond the limit."""
    error = ValueError(
        f"The request is larger than the {bodies.of_one} bytes that this server takes. Send less, "
        f"or start it with a larger {bodies.option}."
    )
    return Refused(413, error, limit=bodies.of_one)
