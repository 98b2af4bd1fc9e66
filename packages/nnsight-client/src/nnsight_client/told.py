"""What a server's answers have told of its state, for those who cannot wait to ask for it."""

from __future__ import annotations

import time

from nnsight_core.backend import EditInfo, EditList
from nnsight_core.errors import NotSupportedError


class Told:
    """The edits that are installed on a server, and how long it keeps values.

    Answers that overtake one another are told apart by the server's clock.

    Attributes:
        keep_seconds: how long a kept value stays; None while that is not known.

    Example:
        >>> told = Told()
        >>> told.take(EditList(edits=[], now=1790000000.0))
        >>> told.edits()
        []
    """

    def __init__(self) -> None:
        self.keep_seconds: float | None = None
        self._edits: EditList | None = None
        self._came = 0.0

    def take(self, edits: EditList) -> None:
        """An answer has come that lists the edits."""
        if self._edits is None or edits.now >= self._edits.now:
            self._edits, self._came = edits, time.monotonic()

    def edits(self) -> list[EditInfo]:
        """The edits as the last answer told them, but for those whose time is over since.

        Raises:
            NotSupportedError: no answer has come.
        """
        if self._edits is None:
            raise NotSupportedError(
                "What is installed on a server is known in mode='async' once it has answered, and "
                "no answer has come yet: `await model.aedits()` asks for it."
            )
        now = self._edits.now + time.monotonic() - self._came
        there = [e for e in self._edits.edits if e.until is None or e.until > now]
        return [info.model_copy() for info in there]
