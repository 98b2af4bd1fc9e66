"""What became of the invokes of a trace: what came home by name, and the error to be raised."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

from nnsight_core.backend import Ended, Event, Finished, Invoke, Noted, Printed
from nnsight_core.errors import BlockError
from nnsight_core.outputs import LateResult, RequestOutput
from nnsight_core.shared import merge, put_into
from nnsight_core.wire.tracebacks import FrameRecord, traceback_of


class Outcome:
    """What became of one invoke."""

    def __init__(self, index: int, invoke: Invoke) -> None:
        self.index = index
        self.function = invoke.block.code.function if invoke.block is not None else "fn"
        self.output: RequestOutput | None = None
        self.sequences: dict[int, Ended] = {}
        self.errors: list[BaseException] = []
        self._line = ""

    def take(self, event: Event) -> None:
        match event:
            case Printed():
                *lines, self._line = (self._line + event.text).split("\n")
                for line in lines:
                    self._write(line)
            case Ended():
                self.sequences[event.sequence] = event
                self._add(event.error, f"Raised in the block of invoke {self.index}.")
            case Finished():
                self.output = event.output
                self._count_ways()
                self._add(event.error, f"Raised for invoke {self.index}, outside its block.")

    def _count_ways(self) -> None:
        """Say of the output how its steps ran; those that nobody looked at ran plain."""
        if self.output is None or not self.sequences:
            return
        ways: Counter[str] = Counter()
        for ended in self.sequences.values():
            ways.update(ended.ways)
        steps = sum(len(sequence.token_ids) for sequence in self.output.outputs)
        ways["plain"] += max(steps - ways.total(), 0)
        self.output.ways = {way: count for way, count in ways.items() if count}

    def show(self) -> None:
        """Issue the warnings of the blocks; one that the user's filters make an error is one."""
        if self._line:
            self._write(self._line)
            self._line = ""
        for _, ended in sorted(self.sequences.items()):
            for note in ended.warnings:
                place = (note.filename, note.line)
                try:
                    warnings.warn_explicit(_warning(note), None, *place)  # type: ignore[arg-type]
                except Exception as error:
                    error.__context__ = None
                    function = self.function
                    frame = FrameRecord(filename=place[0], line=place[1], function=function)
                    error = error.with_traceback(traceback_of([frame]))
                    self._add(error, f"Issued in the block of invoke {self.index}.")

    def _add(self, error: BaseException | None, note: str) -> None:
        if error is not None:
            # Not `add_note`, which sets an attribute: a class may forbid that.
            vars(error).setdefault("__notes__", []).append(note)
            self.errors.append(error)

    def _write(self, line: str) -> None:
        sys.stdout.write(f"[invoke {self.index}] {line}\n")

    def names(self) -> dict[str, Any]:
        """The saved values by name: of one sequence the value, of several the list of them."""
        count = max(self.sequences, default=-1) + 1
        if count <= 1:
            saves = self.sequences[0].saves if count else {}
            return {name: self._late(value) for name, value in saves.items()}
        ended = [self.sequences[i] for i in sorted(self.sequences)]
        names = dict.fromkeys(name for e in ended for name in e.saves)
        every = [self.sequences[i].saves if i in self.sequences else {} for i in range(count)]
        return {name: self._of_sequences([saves.get(name) for saves in every]) for name in names}

    def _of_sequences(self, values: list[Any]) -> Any:
        # The finished output holds every sequence, so there is one of it.
        if all(isinstance(value, LateResult) for value in values):
            return self.output
        return [self._late(value) for value in values]

    def value(self) -> Any:
        return one_or_all([self._late(e.value) for _, e in sorted(self.sequences.items())])

    def _late(self, value: Any, seen: frozenset[int] = frozenset()) -> Any:
        """Saved values with the finished output where the block saved `tracer.result`.

        Lists and dicts are changed as they are, so that one under two names stays one.
        """
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
