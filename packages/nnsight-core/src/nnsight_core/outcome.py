"""What became of the invokes of a trace: what came home by name, and the error to be raised."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from typing import Any

from nnsight_core.backend import Ended, Event, Finished, Invoke, Noted, Printed, Saved, Went
from nnsight_core.errors import BlockError, EditErrorWarning, ProtocolError
from nnsight_core.outputs import LateResult, RequestOutput
from nnsight_core.shared import merge, put_into
from nnsight_core.wire.tracebacks import FrameRecord, traceback_of


class Outcome:
    """What became of one invoke.

    Attributes:
        output: the newest output.
        finished: whether it is the last one.
        sequences: how the invoke's own block ended, by sequence.
        edits: the same of each edit's block, by the edit's id.
        errors: what is to be raised.
    """

    def __init__(self, index: int, invoke: Invoke) -> None:
        self.index = index
        self.invoke = invoke
        self.function = invoke.block.code.function if invoke.block is not None else "fn"
        self.output: RequestOutput | None = None
        self.finished = False
        self.count = invoke.sampling.get("n") or 1
        self.sequences: dict[int, Ended] = {}
        self.edits: dict[str, dict[int, Ended]] = {}
        self.errors: list[BaseException] = []
        self._told: dict[tuple[str, int], dict[str, Any]] = {}
        self._new: dict[tuple[str, int], dict[str, Any]] = {}
        self._lines: dict[str, str] = {}

    def take(self, event: Event) -> None:
        match event:
            case Printed():
                *lines, rest = (self._lines.get(event.edit, "") + event.text).split("\n")
                self._lines[event.edit] = rest
                for line in lines:
                    self._write(line, event.edit)
            case Saved():
                self._tell(event)
            case Ended():
                event.saves = self._tell(event)
                if not event.edit:
                    self.sequences[event.sequence] = event
                    self._add(event.error, f"Raised in the block of invoke {self.index}.")
                    return
                self.edits.setdefault(event.edit, {})[event.sequence] = event
                if event.error is not None:
                    where = f"Raised in the edit {event.edit}, in invoke {self.index}."
                    _note(event.error, where)
            case Went():
                self._put(event.output)
            case Finished():
                self.finished = True
                if event.output is not None:
                    self._put(event.output)
                    self._count_ways()
                self._add(event.error, f"Raised for invoke {self.index}, outside its block.")

    def _tell(self, event: Saved | Ended) -> dict[str, Any]:
        """Put what is new to what was told before."""
        saves = self._told.setdefault((event.edit, event.sequence), {})
        new = self._new.setdefault((event.edit, event.sequence), {})
        for name, value in event.saves.items():
            saves[name], new[name] = value, _copied(value)
        for name, added in event.more.items():
            if name not in saves:
                raise ProtocolError(f"It was said what {name!r} has grown by, but not what it is.")
            grown = saves[name]
            if isinstance(grown, list):
                grown.extend(added)
            else:
                grown.update(added)
            seen = new.get(name)
            if seen is None:
                new[name] = _copied(added)
            elif isinstance(seen, list):
                seen.extend(added)
            else:
                seen.update(added)
        for name in event.gone:
            saves.pop(name, None)
        return saves

    def _put(self, output: RequestOutput) -> None:
        """Take an output, with what is saved by now."""
        self.output = output
        output.saves = self.all_names()
        if not self.finished:
            # What has come when the output is looked at may be more than belongs to it.
            output.saves = {name: _copied(value) for name, value in output.saves.items()}
        new: dict[int, dict[str, Any]] = {}
        for edit, index in sorted(self._new, key=lambda place: _rank(place[0])):
            new.setdefault(index, {}).update(self._new[edit, index])
        output.new_saves = self._by_sequence(new)
        self._new = {}
        ended = [by_sequence[i] for by_sequence in self.edits.values() for i in sorted(by_sequence)]
        output.errors = [e.error for e in ended if e.error is not None]

    def _count_ways(self) -> None:
        """Say of the output how its steps ran; those that nobody looked at ran plain."""
        every = self.sequences or max(self.edits.values(), key=_slowest, default={})
        if self.output is None or not every:
            return
        ways: Counter[str] = Counter()
        for ended in every.values():
            ways.update(ended.ways)
        steps = sum(len(sequence.token_ids) for sequence in self.output.outputs)
        ways["plain"] += max(steps - ways.total(), 0)
        self.output.ways = {way: count for way, count in ways.items() if count}

    def show(self) -> None:
        """Issue the warnings of the blocks; one that the user's filters make an error is one."""
        for edit, line in self._lines.items():
            if line:
                self._write(line, edit)
        self._lines.clear()
        for edit, sequences in {"": self.sequences, **self.edits}.items():
            for _, ended in sorted(sequences.items()):
                for note in ended.warnings:
                    self._warn(note)
                if edit and ended.error is not None:
                    self._warn_of(edit, ended.error)

    def _warn(self, note: Noted) -> None:
        place = (note.filename, note.line)
        try:
            warnings.warn_explicit(_warning(note), None, *place)  # type: ignore[arg-type]
        except Exception as error:
            error.__context__ = None
            frame = FrameRecord(filename=place[0], line=place[1], function=self.function)
            error = error.with_traceback(traceback_of([frame]))
            self._add(error, f"Issued in the block of invoke {self.index}.")

    def _warn_of(self, edit: str, error: BaseException) -> None:
        text = f"The edit {edit} raised {type(error).__name__}: {error} (in `output.errors`)"
        try:
            warnings.warn_explicit(f"{text}.", EditErrorWarning, "<edit>", 1, registry={})
        except EditErrorWarning as raised:
            self.errors.append(raised)

    def _add(self, error: BaseException | None, note: str) -> None:
        if error is not None:
            _note(error, note)
            self.errors.append(error)

    def _write(self, line: str, edit: str) -> None:
        of_edit = f", edit {edit}" if edit else ""
        sys.stdout.write(f"[invoke {self.index}{of_edit}] {line}\n")

    def names(self, edit: str = "") -> dict[str, Any]:
        """The saved values by name: of one sequence the value, of several the list of them."""
        told = {index: saves for (of, index), saves in self._told.items() if of == edit}
        return self._by_sequence(told)

    def _by_sequence(self, held: dict[int, dict[str, Any]]) -> dict[str, Any]:
        if self.count == 1:
            return {name: self._late(value) for name, value in held.get(0, {}).items()}
        names = dict.fromkeys(name for i in sorted(held) for name in held[i])
        every = [held.get(i, {}) for i in range(self.count)]
        return {name: self._of_sequences([saves.get(name) for saves in every]) for name in names}

    def all_names(self) -> dict[str, Any]:
        """The saved values of edits, and over them those of the invoke's own block."""
        names = [self.names(edit) for edit in sorted({edit for edit, _ in self._told}, key=_rank)]
        return {name: value for found in names for name, value in found.items()}

    def _of_sequences(self, values: list[Any]) -> Any:
        # The finished output holds every sequence, so there is one of it.
        if self.finished and all(isinstance(value, LateResult) for value in values):
            return self.output
        return [self._late(value) for value in values]

    def value(self) -> Any:
        return one_or_all([self._late(e.value) for _, e in sorted(self.sequences.items())])

    def _late(self, value: Any, seen: frozenset[int] = frozenset()) -> Any:
        """Saved values with the finished output where the block saved `tracer.result`.

        Lists and dicts are changed as they are, so that one under two names stays one.
        """
        if not self.finished:
            return value
        if isinstance(value, LateResult):
            return self.output
        kind = type(value)
        if kind not in (list, tuple, dict) or id(value) in seen:
            return value
        within = seen | {id(value)}
        parts = list(value.items()) if kind is dict else list(enumerate(value))
        changed = {}
        for key, part in parts:
            new = self._late(part, within) if type(part) in _MAY_BE_LATE else part
            if new is not part:
                changed[key] = new
        if kind is tuple and not changed:
            return value
        if kind is tuple:
            return tuple(changed.get(index, part) for index, part in parts)
        for key, new in changed.items():
            value[key] = new
        return value


_MAY_BE_LATE = (LateResult, list, tuple, dict)


def _copied(value: Any, deep: int = 1) -> Any:
    """A value that does not grow when a saved list or dict does, or those of several sequences."""
    if type(value) is list:
        return [_copied(part, deep - 1) for part in value] if deep else list(value)
    return dict(value) if type(value) is dict else value


def _note(error: BaseException, text: str) -> None:
    # Not `add_note`, which sets an attribute: a class may forbid that.
    vars(error).setdefault("__notes__", []).append(text)


def _slowest(sequences: dict[int, Ended]) -> int:
    """How slow the slowest way is in which steps ran."""
    ways = ("plain", "tables", "deferred", "after", "interleaved", "eager")
    return max(ways.index(way) for ended in sequences.values() for way in (*ended.ways, "plain"))


def _rank(edit: str) -> float:
    """The place of an edit among those that were installed, by its id (`name#number`).

    The invoke's own block comes after all of them.
    """
    number = edit.rpartition("#")[2]
    return math.inf if not edit else int(number) if number.isdecimal() else 0


def one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values or None


def by_name(invokes: list[Invoke], outcomes: list[Outcome]) -> dict[str, Any]:
    """A name that several invokes may save is a list with one entry per invoke."""
    found = [outcome.names() for outcome in outcomes]
    if len(found) == 1:
        return found[0]
    names: dict[str, Any] = {}
    for name in dict.fromkeys(name for saved in found for name in saved):
        may = [name in saved or may_save(i, name) for i, saved in zip(invokes, found, strict=True)]
        if sum(may) > 1:
            names[name] = [saved.get(name) for saved in found]
        else:
            names[name] = next(saved[name] for saved in found if name in saved)
    return names


def put_together(invokes: list[Invoke], outcomes: list[Outcome]) -> dict[str, Any]:
    """What was saved above the invokes, with all that they wrote; taken out of their saves."""
    bases: dict[int, Any] = {}
    names: dict[str, int] = {}
    versions: dict[int, list[Any]] = {}
    for invoke, outcome in zip(invokes, outcomes, strict=True):
        block = invoke.block
        for name in block.shared if block is not None else ():
            assert block is not None
            base = block.names[name]
            names[name] = id(base)
            bases[id(base)] = base
            for _, ended in sorted(outcome.sequences.items()):
                if name in ended.saves:
                    value = outcome._late(ended.saves.pop(name))
                    versions.setdefault(id(base), []).append(value)
    made = {key: put_into(base, merge(base, versions.get(key, []))) for key, base in bases.items()}
    return {name: made[key] for name, key in names.items()}


def may_save(invoke: Invoke, name: str) -> bool:
    """Whether an invoke's block may save something under a name."""
    if invoke.block is None:
        return False
    names = invoke.block.code.names
    return name in names.binds or name in names.saved or name in names.needs


def one_error(errors: list[BaseException], invokes: int) -> Exception | None:
    ready = [e if isinstance(e, Exception) else _wrapped(e) for e in errors]
    if len(ready) > 1:
        return ExceptionGroup(f"{len(ready)} errors in {invokes} invokes", ready)
    return ready[0] if ready else None


def reraise(error: Exception | None) -> None:
    """Raise an error that came home, with what it was raised from there."""
    if error is None:
        return
    before = error.__context__
    try:
        raise error
    finally:
        # Python puts there what is being handled here, such as how the body was skipped.
        BaseException.__setattr__(error, "__context__", before)


def _warning(note: Noted) -> Warning:
    """The warning itself, made without what its class does to its arguments."""
    base: Any = note.category
    while base.__module__ != "builtins":
        base = base.__base__
    warning = base.__new__(note.category, note.message)
    try:
        told = str(warning) == note.message
    except Exception:
        told = False
    return warning if told else base(note.message)


def _wrapped(error: BaseException) -> BlockError:
    """An error that would end this process (`sys.exit` in a block) becomes an ordinary one."""
    wrapped = BlockError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        wrapped.add_note(note)
    return wrapped.with_traceback(error.__traceback__)
