"""How far a request has come, judged from the frames of its blocks.

Both engines follow their requests with it, so that a frame means the same to each.
"""

from __future__ import annotations

from nnsight_core.wire.frames import Frame
from nnsight_vllm_worker.submission import Request


class Progress:
    """What is still to come of one request; its edits have been chosen.

    Attributes:
        key: the request's.
        failed: whether its own block raised, so that its generation need not go on.
    """

    def __init__(self, request: Request) -> None:
        self.key = request.key
        self.failed = False
        blocks = [edit.id for edit in request.edits] + [""] * request.traced
        self._awaited = {(index, edit) for index in range(request.sequences) for edit in blocks}
        self._waiting: set[tuple[int, str]] = set()
        self._steps = dict.fromkeys(self._awaited, 0) if request.streams else {}

    def take(self, frame: Frame) -> bool:
        """Note a frame; whether it says something to be passed on."""
        header = frame.header
        place = (header["sequence"], header.get("edit", ""))
        if header.get("waits"):
            self._waiting.add(place)
            return False
        if header["kind"] == "saved":
            self._steps[place] = header["steps"]
            return bool(header["saves"] or header["more"] or header["gone"])
        if header["kind"] == "ended":
            self._awaited.discard(place)
            self._waiting.discard(place)
            self.failed |= header["error"] is not None and not place[1]
        return True

    def told(self, lengths: dict[int, int]) -> bool:
        """Whether its blocks have told all of the first steps of its sequences.

        Args:
            lengths: how many steps, by sequence.
        """
        for (index, edit), steps in self._steps.items():
            due = (index, edit) in self._awaited and 0 <= steps < lengths.get(index, 0)
            if due and (index, edit) not in self._waiting:
                return False
        return True

    @property
    def ended(self) -> bool:
        """Whether no block of it has anything left to say."""
        return not self._awaited

    @property
    def answered(self) -> bool:
        """Whether its blocks have done all they can do without the finished output."""
        return self._awaited <= self._waiting
