"""Errors on the wire: raised again as what they were, with the user's lines."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest

from nnsight_core import BlockError, CaptureError, LateWriteError, LocationError
from nnsight_core.wire.data import Encoder
from nnsight_core.wire.errors import ErrorRecord, rebuild_error, record_error
from nnsight_core.wire.frames import Frame, read_frame


def there_and_back(error: BaseException, known: list[type] | None = None) -> BaseException:
    encoder = Encoder()
    header = record_error(error, encoder).model_dump(mode="json")
    frame = read_frame(Frame(header, encoder.buffers).to_bytes())
    record = ErrorRecord.model_validate(frame.header)
    return rebuild_error(record, frame.buffers, known or [])


class Mine(Exception):
    """An error whose __init__ wants what does not travel."""

    def __init__(self, lock: Any, *, code: int) -> None:
        super().__init__(f"code {code}")


class Holding(ValueError):
    """An error that keeps an object."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        ValueError(),
        KeyError("k"),
        KeyError(("a", 1)),
        IndexError(3, [4]),
        OSError(2, "gone", "file.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start"),
        StopIteration(5),
        SyntaxError("wrong"),
        ImportError("no module"),
        SystemExit(3),
        KeyboardInterrupt(),
        ZeroDivisionError("division by zero"),
        LocationError("no such"),
        LateWriteError("late"),
        CaptureError("no body"),
        Mine(object(), code=7),
        TimeoutError("late"),
    ],
    ids=repr,
)
def test_an_error_comes_back_as_its_class_with_its_text_and_arguments(error: BaseException) -> None:
    back = there_and_back(error)
    assert type(back) is type(error) and str(back) == str(error) and back.args == error.args


def test_attributes_that_python_keeps_beside_the_arguments_come_back() -> None:
    assert there_and_back(SystemExit(3)).code == 3  # type: ignore[attr-defined]
    assert there_and_back(StopIteration(5)).value == 5  # type: ignore[attr-defined]
    assert there_and_back(OSError(2, "gone")).errno == 2  # type: ignore[attr-defined]


def test_an_error_with_arguments_that_are_no_data_keeps_its_class_and_text() -> None:
    for error in (Holding(object()), ExceptionGroup("two", [ValueError("a")])):
        back = there_and_back(error)
        assert str(back) in (str(error), f"{type(error).__name__}: {error}")
    assert type(there_and_back(Holding(object()))) is Holding


class Telling(Exception):
    """An error whose text is made of an attribute."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


def test_an_error_whose_text_is_made_of_attributes_has_it_as_a_note() -> None:
    back = there_and_back(Telling(7))
    assert type(back) is Telling and back.__notes__ == ["code 7"]


def test_notes_come_back() -> None:
    error = ValueError("bad")
    error.add_note("in the morning")
    error.add_note("again")
    assert there_and_back(error).__notes__ == ["in the morning", "again"]


def test_a_class_that_is_not_here_is_a_block_error_with_its_name() -> None:
    record = ErrorRecord(module="some.where", name="Odd", args=["x"], message="went wrong")
    before = set(sys.modules)
    error = rebuild_error(record, [])
    assert type(error) is BlockError and str(error) == "Odd: went wrong"
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "print"),
        ("os", "system"),
        ("builtins", "int"),
        ("antigravity", "X"),
        ("transformers", "BertModel"),
        ("", ""),
        ("builtins", "ValueError.__new__"),
    ],
)
def test_what_is_no_error_class_is_never_called(module: str, name: str) -> None:
    before = set(sys.modules)
    error = rebuild_error(ErrorRecord(module=module, name=name, args=["x"], message="m"), [])
    assert type(error) is BlockError and set(sys.modules) == before


def test_a_class_that_the_block_held_is_found() -> None:
    def make() -> type[Exception]:
        class Inner(Exception):
            """Made in a function, so that no name leads to it."""

        return Inner

    inner = make()
    assert type(there_and_back(inner("x"), [int, inner])) is inner
    assert type(there_and_back(inner("x"))) is BlockError


def test_an_error_that_cannot_be_printed_travels() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "cannot be had" in str(there_and_back(Odd(object())))


def failing(depth: int) -> None:
    if depth:
        failing(depth - 1)
    raise ValueError("deep")


def test_the_traceback_has_the_same_files_lines_and_functions() -> None:
    with pytest.raises(ValueError) as raised:
        failing(2)
    want = traceback.extract_tb(raised.value.__traceback__)
    back = there_and_back(raised.value)
    found = traceback.extract_tb(back.__traceback__)
    assert [(f.filename, f.lineno, f.name, f.line) for f in found] == [
        (f.filename, f.lineno, f.name, f.line) for f in want
    ]
    with pytest.raises(ValueError) as again:
        raise back
    assert traceback.extract_tb(again.value.__traceback__)[1:] == found
    assert "failing(depth - 1)" in "".join(traceback.format_exception(back))


def test_frames_of_files_that_are_not_here_are_shown_by_name() -> None:
    record = ErrorRecord.model_validate(
        {
            "module": "builtins",
            "name": "ValueError",
            "args": ["x"],
            "message": "x",
            "frames": [
                {"filename": "/nowhere/a.py", "line": 12, "function": "f", "text": "boom()"},
                {"filename": "/nowhere/b.py", "line": 0, "function": "<module>"},
            ],
        }
    )
    shown = "".join(traceback.format_exception(rebuild_error(record, [])))
    assert 'File "/nowhere/a.py", line 12, in f' in shown and "b.py" in shown


def test_a_record_with_damaged_arguments_is_still_an_error() -> None:
    record = ErrorRecord(module="builtins", name="ValueError", args=[{"$": "zzz"}], message="text")
    error = rebuild_error(record, [])
    assert type(error) is ValueError and error.args == ("text",)
