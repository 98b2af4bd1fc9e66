"""The edits of one engine, as the process that holds it knows them.

Which edits belong to a request is decided here, once, when the request is sent, and travels with
it. So it ends with those that it began with, whatever is installed or cleared meanwhile, and every
rank agrees.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from nnsight_core.backend import EditInfo, EditSpec
from nnsight_core.wire.frames import Buffer, Frame, read_frame
from nnsight_core.wire.messages import InstalledMessage, expect
from nnsight_vllm_worker.asked import ASKED, Asked
from nnsight_vllm_worker.requests import EDITS, EXTRA, FOREIGN
from nnsight_vllm_worker.submission import Carried, Request
from nnsight_vllm_worker.vllm_ports.incoming import Marks
from nnsight_vllm_worker.vllm_ports.scheduling import KEY, WHOLE

_log = logging.getLogger(__name__)


class NotInstalled(Exception):
    """A worker refused an edit.

    Attributes:
        said: what it answered.
        frame: the same as it came, with the buffers that the error names.
    """

    def __init__(self, said: InstalledMessage, frame: Frame) -> None:
        super().__init__(said.error.message if said.error is not None else "")
        self.said = said
        self.frame = frame


@dataclass(slots=True, eq=False)
class Installed:
    """One edit.

    Attributes:
        info: what is told of it.
        carried: its block.
        holds: what has to live as long as the edit does.
        whole: as the workers said (`InstalledMessage`).
        ours: how many requests of ours may still need it.
        foreign: the sequences of others that may.
    """

    info: EditInfo
    carried: Carried
    holds: Any = None
    whole: bool = True
    ours: int = 0
    foreign: set[str] = field(default_factory=set)

    @property
    def id(self) -> str:
        return self.info.id


class Edits:
    """The edits of one engine.

    Args:
        under_way: gives the ids of the sequences that have not finished.
    """

    def __init__(self, under_way: Callable[[], Collection[str]]) -> None:
        self._under_way = under_way
        self._numbers = itertools.count(1)
        self._active: list[Installed] = []
        self._leaving: list[Installed] = []
        self._asked: WeakValueDictionary[str, Asked] = WeakValueDictionary()

    @property
    def under_way(self) -> int:
        """How many sequences have not finished."""
        return len(self._under_way())

    def new(
        self, spec: EditSpec, carried: Carried, blobs: Mapping[str, Buffer], owner: str = ""
    ) -> Installed:
        """An edit that is to be installed; it takes part in nothing until it is added.

        Args:
            blobs: the bytes of the outside tensors that it uses.
        """
        now = time.time()
        info = EditInfo(
            id=f"{spec.name or 'edit'}#{next(self._numbers)}",
            name=spec.name,
            owner=owner,
            since=now,
            until=None if spec.ttl is None else now + spec.ttl,
            share=spec.share,
            bytes=carried.size(blobs),
        )
        return Installed(info, carried, spec.invoke)

    def add(self, edit: Installed, answer: bytes) -> None:
        """The worker has answered; the edit belongs to every request from now on.

        Raises:
            NotInstalled: the worker refused it.
        """
        frame = read_frame(answer)
        said = expect(frame, InstalledMessage)
        if said.error is not None:
            raise NotInstalled(said, frame)
        edit.whole, edit.info.way = said.whole, said.way
        self._active.append(edit)

    def infos(self) -> list[EditInfo]:
        """What is told of the edits that are installed."""
        self._expire()
        return [edit.info.model_copy() for edit in self._active]

    def held(self) -> list[EditInfo]:
        """What is told of the edits that take memory, those that were cleared included."""
        return [edit.info for edit in (*self._active, *self._leaving)]

    def clear(self, ids: Collection[str] | None) -> None:
        """Let no further request have some edits, or any."""
        gone = [edit for edit in self._active if ids is None or edit.id in ids]
        self._active = [edit for edit in self._active if edit not in gone]
        self._leaving += gone

    def idle(self) -> list[Installed]:
        """The cleared edits that no request needs any more; they are given once."""
        self._expire()
        under_way = self._under_way() if self._leaving else ()
        for edit in self._leaving:
            edit.foreign = {request for request in edit.foreign if request in under_way}
        idle = [edit for edit in self._leaving if not edit.ours and not edit.foreign]
        self._leaving = [edit for edit in self._leaving if edit not in idle]
        return idle

    def chosen(self, names: list[str] | None, key: str | None = None) -> list[Installed]:
        """The edits of a request that begins now.

        Args:
            names: those that were asked for; None for all. Those without a name always belong.
            key: names the request; None for all edits that may belong to one.

        Raises:
            ValueError: no edit has one of the names.
        """
        self._expire()
        known = {edit.info.name for edit in self._active if edit.info.name is not None}
        for name in names or ():
            if name not in known:
                there = ", ".join(sorted(map(repr, known))) or "none"
                raise ValueError(f"edits={names!r}: no edit {name!r} is installed; there: {there}.")
        return [
            edit
            for edit in self._active
            if _belongs(edit, names)
            if key is None or edit.info.share >= 1 or _place(key) < edit.info.share
        ]

    def begin(self, request: Request) -> None:
        """Give a request of ours its edits; `end` takes them back."""
        request.edits = self.chosen(request.names, request.key)
        if request.edits:
            request.params.extra_args[EDITS] = [edit.id for edit in request.edits]
        for edit in request.edits:
            edit.ours += 1
            edit.info.requests += 1

    def end(self, request: Request) -> None:
        """A request of ours is over."""
        for edit in request.edits:
            edit.ours -= 1
        request.edits = []

    def ask(self, names: list[str] | None) -> Asked:
        """What a request of others asks for; its sequences are to carry the token of it.

        Raises:
            ValueError: no edit has one of the names.
        """
        self.chosen(names)
        asked = Asked(names)
        self._asked[asked.token] = asked
        return asked

    def marks(self, sequence: str, request: str, extra: dict[str, Any]) -> Marks | None:
        """What is said of a request as it is sent, whoever sends it."""
        if KEY in extra:
            ids = extra.get(EDITS, ())
            edits = [e for e in (*self._active, *self._leaving) if e.id in ids]
            own, key, said = EXTRA in extra, extra[KEY], {}
        elif self._active and EXTRA not in extra:
            asked = self._asked.get(extra.get(ASKED, ""))
            edits = self.chosen(None, request)
            if asked is not None:
                edits = [edit for edit in edits if _belongs(edit, asked.names)]
            # Of each sequence, since nobody says how many there are.
            own, key = False, FOREIGN + sequence
            said = {KEY: key, EDITS: [edit.id for edit in edits]}
            for edit in edits:
                if len(edit.foreign) >= _MANY:
                    edit.foreign.intersection_update(self._under_way())
                edit.foreign.add(sequence)
                edit.info.requests += 1
            if asked is not None:
                self._asked[key] = asked
                asked.begin(key, [edit.info for edit in edits])
        else:
            return None
        if not edits and not own:
            return None
        whole = WHOLE in extra or any(edit.whole for edit in edits)
        # What is written goes into keys and values that no other request may find.
        return Marks(said, whole, f" {key}" if whole else None)

    def note(self, frame: Frame) -> None:
        """A frame has come; if it says that an edit's block has ended, that is counted."""
        header = frame.header
        if not header.get("edit") or header["kind"] != "ended":
            return
        asked = self._asked.get(header["key"])
        if asked is not None:
            asked.note(header)
        if header["waits"]:
            return
        for edit in (*self._active, *self._leaving):
            if edit.id == header["edit"]:
                edit.info.seconds += header.get("seconds", 0.0)
                edit.info.errors += header["error"] is not None
                if header["error"] is not None and header["key"].startswith(FOREIGN):
                    _warn(edit.info, header["error"])

    def _expire(self) -> None:
        now = time.time()
        gone = [e.id for e in self._active if e.info.until is not None and e.info.until <= now]
        if gone:
            self.clear(gone)


def _belongs(edit: Installed, names: Collection[str] | None) -> bool:
    """Whether an edit belongs to a request that asks for some names."""
    return names is None or edit.info.name is None or edit.info.name in names


def _warn(edit: EditInfo, error: dict[str, Any]) -> None:
    """Say what an edit raised in a request of others, each time that it is twice as often."""
    if edit.errors & (edit.errors - 1) == 0:
        times = "once" if edit.errors == 1 else f"{edit.errors} times"
        what = f"{error['name']}: {error['message']}"
        _log.warning("The edit %s has failed %s, last with %s", edit.id, times, what)


_MANY = 1024
"""Sequences of others after which those that have finished are forgotten."""


def _place(key: str) -> float:
    """Where a request lies between 0 and 1, by its key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
