"""How much may be in the engine at once, of one key and of all.

What is counted are requests of the engine: a trace of five invokes is five of them, and so counts
five. Installing an edit counts one while it is being installed.
"""

from __future__ import annotations

import time
from collections import Counter

from nnsight_core.errors import BusyError
from nnsight_serve.refusals import Refused

AGAIN_KEY = 1.0
"""Seconds after which a key that has too much in the engine may ask again."""
AGAIN_ALL = 5.0
"""Seconds after which any key may ask again, where the engine has too much."""


class Limits:
    """Counts what is in the engine, and refuses what would be too much.

    Args:
        of_key: how many requests one key may have in it; None for any number.
        in_all: how many there may be, those that wait included.

    Attributes:
        closing: when the server will be gone, by `time.monotonic`, if it is shutting down and so
            takes nothing more.
    """

    def __init__(self, of_key: int | None, in_all: int) -> None:
        self.closing: float | None = None
        self._of_key = of_key
        self._in_all = in_all
        self._running: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """How many requests have been taken and are not over."""
        return self._running.total()

    def fit(self, requests: int) -> None:
        """Refuse requests that could not be taken together whenever they came.

        Raises:
            Refused: they are more than there may ever be.
        """
        most = min(self._in_all, self._of_key or self._in_all)
        if requests > most:
            error = ValueError(
                f"These are {requests} requests at once, and this server takes {most} at most. "
                "Send them in several traces, or calls."
            )
            raise Refused(413, error, limit=most)

    def take(self, caller: str, requests: int) -> None:
        """Count requests in; each is to be counted out with `leave`.

        Raises:
            Refused: they are too many, now or whenever they came.
        """
        self.fit(requests)
        self.refuse_if_closing()
        there = self._running[caller]
        if self._of_key is not None and there + requests > self._of_key:
            raise Refused(
                429,
                BusyError(
                    f"{requests} more requests are too many: {there} of this key are in the "
                    f"engine, where it may have {self._of_key} (--max-concurrent). Wait until "
                    "some are over.",
                    AGAIN_KEY,
                ),
            )
        if self.running + requests > self._in_all:
            raise Refused(
                503,
                BusyError(
                    f"{requests} more requests are too many: {self.running} are in the engine, "
                    f"which takes {self._in_all} (--max-requests). Ask again later.",
                    AGAIN_ALL,
                ),
            )
        self._running[caller] += requests

    def leave(self, caller: str, requests: int) -> None:
        """Count requests out."""
        self._running[caller] -= requests
        if not self._running[caller]:
            del self._running[caller]

    def refuse_if_closing(self) -> None:
        """Refuse whatever comes while the server is shutting down.

        Raises:
            Refused: it is.
        """
        if self.closing is not None:
            left = max(self.closing - time.monotonic(), 1.0)
            raise Refused(503, BusyError("The server is shutting down.", left))
