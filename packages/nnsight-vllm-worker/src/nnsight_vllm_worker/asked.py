"""What a request that comes through vLLM's own routes asks of edits, and what it is told of them.

Such a request reaches the engine as vLLM sends it. Of ours it carries a token alone, by which the
process that holds the engine knows it again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

from nnsight_core.backend import EditInfo

ASKED = "nnsight_asked"
"""The entry of `extra_args` that holds the token of what was asked."""


class Asked:
    """What one request asks of edits; it is forgotten when nobody refers to it any more.

    Args:
        names: the edits that it asks for; None for all. Those without a name always belong.

    Attributes:
        token: what its sequences carry.
        edits: the ids of the edits that it has, in their order.
        errors: what they raised, each error once.
    """

    def __init__(self, names: list[str] | None) -> None:
        self.names = names
        self.token = uuid.uuid4().hex
        self.edits: dict[str, EditInfo] = {}
        self.errors: list[dict[str, Any]] = []
        self._awaited: set[tuple[str, str]] = set()
        self._came = asyncio.Event()

    def begin(self, key: str, edits: Iterable[EditInfo]) -> None:
        """A sequence of it is sent, with these edits."""
        for edit in edits:
            self.edits[edit.id] = edit
            self._awaited.add((key, edit.id))

    def note(self, header: dict[str, Any]) -> None:
        """An edit's block has ended for one of its sequences, or waits for what will not come."""
        edit, raised = header["edit"], header["error"]
        if raised is not None:
            error = {
                "edit": edit,
                "name": self.edits[edit].name,
                "type": raised["name"],
                "message": raised["message"],
            }
            if error not in self.errors:
                self.errors.append(error)
        self._awaited.discard((header["key"], edit))
        self._came.set()

    async def answered(self, seconds: float) -> None:
        """Wait until all its edits have ended, for some seconds at most."""
        try:
            async with asyncio.timeout(seconds):
                while self._awaited:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return

    def told(self) -> dict[str, Any] | None:
        """What the answer says of its edits; None if it had none."""
        return {"edits": [*self.edits], "errors": self.errors} if self.edits else None
