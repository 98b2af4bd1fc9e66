"""How many edits one key may have on the engine, and how much memory these may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nnsight_core.backend import EditInfo
from nnsight_core.errors import BusyError
from nnsight_serve.refusals import Refused


class EditLimits:
    """Refuses edits that would be too many.

    Args:
        count: how many one key may have.
        size: how many bytes they may have together: their blocks, and the tensors that these use.
    """

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._coming: Counter[str] = Counter()
        self._coming_bytes: Counter[str] = Counter()

    @contextmanager
    def installing(self, caller: str, there: Iterable[EditInfo], size: int) -> Iterator[None]:
        """An edit is being installed within this.

        Args:
            caller: the name of the key; empty where there are no keys, and all count as one.
            there: the edits on the engine, whoever has them.
            size: how many bytes the new one has.

        Raises:
            Refused: the key has too many.
        """
        if size > self._size:
            raise Refused(413, ValueError(self._too_large(size)), limit=self._size)
        mine = [info for info in there if not caller or info.owner == caller]
        count = len(mine) + self._coming[caller]
        held = sum(info.bytes for info in mine) + self._coming_bytes[caller]
        whose = "of this key" if caller else "on this server"
        if count >= self._count:
            raise _too_many(
                f"{count} edits {whose} are installed, or used by requests that go on, where "
                f"there may be {self._count} (--max-edits)"
            )
        if held + size > self._size:
            raise _too_many(
                f"{size} bytes more are too many: the edits {whose} have {held} bytes, where they "
                f"may have {self._size} (--edit-bytes)"
            )
        self._coming[caller] += 1
        self._coming_bytes[caller] += size
        try:
            yield
        finally:
            self._coming[caller] -= 1
            self._coming_bytes[caller] -= size
            if not self._coming[caller]:
                del self._coming[caller], self._coming_bytes[caller]

    def _too_large(self, size: int) -> str:
        return (
            f"The edit has {size} bytes, and all edits of a key may have {self._size} here. Use "
            "smaller tensors, or start the server with a larger --edit-bytes."
        )


def _too_many(what: str) -> Refused:
    # They do not end by themselves, so that there is no time after which to ask again.
    clear = "Clear some first: `edit.clear()`, `model.clear_edits()`."
    return Refused(429, BusyError(f"{what}. {clear}"))
