"""Errors: the tree that is drawn is the tree that is there."""

from __future__ import annotations

import re

import pytest

from nnsight_core import BusyError, NNsightError, NNsightWarning, ProtocolError, errors
from nnsight_core.wire.data import Encoder
from nnsight_core.wire.errors import rebuild_error, record_error

LINE = re.compile(r"^((?:│   |    )*(?:[├└]── )?)(\w+)(?: \((\w+)\))?( {2,}\S.*)?$")


def drawn() -> dict[str, tuple[str, str | None]]:
    """Each class of the drawing with the class it stands under and the class of Python's."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str, str | None]] = {}
    above: list[str] = []
    for line in errors.__doc__.split("```")[1].splitlines()[1:]:
        matched = LINE.match(line)
        if not line.strip():
            continue
        assert matched is not None, line
        depth = len(matched[1]) // 4
        above[depth:] = [matched[2]]
        found[matched[2]] = (above[depth - 1] if depth else "", matched[3])
    return found


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {
        name: thing
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, BaseException)
    }
    assert drawn().keys() == real.keys()
    for name, (parent, python) in drawn().items():
        bases = [base.__name__ for base in real[name].__bases__]
        expected = [parent] if parent else ["Exception"] if python is None else []
        assert bases == [*expected, *([python] if python else [])], name


@pytest.mark.parametrize("name", [n for n, (p, _) in drawn().items() if p])
def test_every_error_is_ours_and_python_s(name: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, NNsightError | NNsightWarning)
    up = name
    while up:
        parent, python = drawn()[up]
        if python is not None:
            assert issubclass(cls, getattr(__builtins__, python, None) or eval(python))
        up = parent
    error = cls("what happened")
    assert "what happened" in str(error) and (cls.__doc__ or "").strip()


def test_a_protocol_error_keeps_what_had_arrived() -> None:
    assert ProtocolError("gone").arrived == {}
    assert ProtocolError("gone", {"x": 1}).arrived == {"x": 1}


def test_a_busy_error_says_when_to_come_again_wherever_it_is_raised() -> None:
    assert BusyError("full").retry_after is None
    record = record_error(BusyError("full", 2.5), Encoder())
    again = rebuild_error(record.model_validate(record.model_dump(mode="json")), [])
    assert type(again) is BusyError and str(again) == "full" and again.retry_after == 2.5
