"""Errors on the wire: raised again as what they were, with the user's lines."""

from __future__ import annotations

import dataclasses
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_core import BlockError, CaptureError, LateWriteError, LocationError
from nnsight_core.code import compile_block
from nnsight_core.wire.data import Encoder
from nnsight_core.wire.errors import (
    MAX_BYTES,
    MAX_ERRORS,
    MAX_TEXT,
    ErrorRecord,
    rebuild_error,
    record_error,
)
from nnsight_core.wire.frames import Frame, read_frame
from nnsight_core.wire.tracebacks import MAX_FRAMES, FrameRecord, frames_of, traceback_of


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
    error = Holding(object())
    back = there_and_back(error)
    assert type(back) is Holding and str(back) == str(error)


class Telling(Exception):
    """An error whose text is made of an attribute."""

    def __init__(self, code: Any) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


def test_attributes_come_back_though_no_init_is_run() -> None:
    back = there_and_back(Telling(7))
    assert type(back) is Telling and back.code == 7 and str(back) == "code 7"
    assert not hasattr(back, "__notes__")


def test_an_error_whose_text_is_made_of_what_stays_behind_has_it_as_a_note() -> None:
    error = Telling(threading.Lock())
    back = there_and_back(error)
    assert type(back) is Telling and back.__notes__ == [str(error)]


class Rich(ValueError):
    """An error with attributes of many kinds."""

    __slots__ = ("placed", "unset")
    level = "of the class"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hidden = torch.arange(3.0)
        self.again = [self.hidden, {"step": 3}]
        self.nothing = None
        self.level = "of the error"
        self.placed = (1, "two")
        self.lock = threading.Lock()
        self.other = ValueError("an error is no data")
        self._own = float("inf")


def test_attributes_come_back_and_what_is_no_data_is_left_out() -> None:
    error = Rich("rich")
    error.add_note("once")
    back = there_and_back(error)
    assert type(back) is Rich and back.args == ("rich",) and back.__notes__ == ["once"]
    assert torch.equal(back.hidden, torch.arange(3.0)) and back.again[0] is back.hidden
    assert (back.again[1], back.nothing, back.level) == ({"step": 3}, None, "of the error")
    assert back.placed == (1, "two") and back._own == float("inf")
    for left_out in ("lock", "other", "unset"):
        assert not hasattr(back, left_out)


def test_an_argument_and_an_attribute_are_one_object() -> None:
    error = ValueError([1, 2])
    error.kept = error.args[0]  # type: ignore[attr-defined]
    back = there_and_back(error)
    assert back.args == ([1, 2],) and back.kept is back.args[0]  # type: ignore[attr-defined]


def test_values_are_read_apart_from_what_else_is_in_the_frame() -> None:
    hidden = torch.ones(2)
    encoder = Encoder()
    encoder.encode(hidden)
    record = record_error(ValueError(hidden), encoder)
    assert torch.equal(rebuild_error(record, encoder.buffers).args[0], hidden)


def test_attributes_of_python_s_own_errors_come_back() -> None:
    assert there_and_back(ImportError("no", name="m", path="p")).path == "p"  # type: ignore[attr-defined]
    with pytest.raises(NameError) as raised:
        nowhere  # type: ignore[name-defined]  # noqa: F821
    assert there_and_back(raised.value).name == "nowhere"  # type: ignore[attr-defined]
    assert there_and_back(OSError(2, "no", "a", None, "b")).filename2 == "b"  # type: ignore[attr-defined]


class Strict(Exception):
    """An error whose class guards itself: nothing of it may be run at home."""

    def __new__(cls, *args: Any) -> Strict:
        if STRICT:
            raise AssertionError("__new__ was run")
        return super().__new__(cls, *args)

    def __init__(self, code: int) -> None:
        if STRICT:
            raise AssertionError("__init__ was run")
        vars(self)["code"] = code

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("__setattr__ was run")

    @property
    def half(self) -> float:
        """Made of an attribute."""
        return self.code / 2  # type: ignore[attr-defined]


STRICT = False


def test_nothing_of_the_class_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    error = Strict(8)
    vars(error)["half"] = "shadowed"
    vars(error)["__notes__"] = ["noted"]
    monkeypatch.setitem(globals(), "STRICT", True)
    back = there_and_back(error)
    assert type(back) is Strict and back.half == 4 and back.__notes__ == ["noted"]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An error that cannot be changed."""

    code: int
    hint: str = "none"


def test_a_dataclass_comes_back() -> None:
    error = Frozen(3)
    vars(error)["__notes__"] = ["noted"]
    BaseException.__setattr__(error, "__cause__", Frozen(4))
    back = there_and_back(error)
    assert back == error and back.__notes__ == ["noted"] and back.__cause__ == Frozen(4)


def test_what_is_too_large_is_left_out() -> None:
    error = Telling(0)
    error.code = "c" * 100
    error.large = torch.zeros(MAX_BYTES)  # type: ignore[attr-defined]
    error.long = "x" * (MAX_BYTES + 1)  # type: ignore[attr-defined]
    error.many = [bytes(MAX_BYTES // 4)] + list(range(MAX_BYTES))  # type: ignore[attr-defined]
    error.small = 1  # type: ignore[attr-defined]
    encoder = Encoder()
    record_error(error, encoder)
    assert encoder.buffers == []
    back = there_and_back(error)
    assert vars(back) == {"code": "c" * 100, "small": 1}


def test_a_text_without_end_is_cut() -> None:
    error = ValueError("x" * (2 * MAX_BYTES))
    error.add_note("y" * (2 * MAX_BYTES))
    back = there_and_back(error)
    assert type(back) is ValueError and str(back) == "x" * MAX_TEXT + "…"
    assert back.__notes__ == ["y" * MAX_TEXT + "…"]


class Hostile:
    """Answers every question with an error."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")


def test_an_attribute_that_answers_no_question_is_left_out() -> None:
    error = Telling("c")
    error.bad, error.worse = Hostile(), [1, Hostile()]  # type: ignore[attr-defined]
    error.number, error.last = 10**5000, [1]  # type: ignore[attr-defined]
    back = there_and_back(error)
    assert vars(back) == {"code": "c", "last": [1]}


def raised(make: Callable[[], Any]) -> BaseException:
    try:
        make()
    except BaseException as error:
        return error
    raise AssertionError


def low() -> None:
    raise Telling("low")


def explicit() -> None:
    try:
        low()
    except Telling as error:
        raise KeyError("high") from error


def implicit() -> None:
    try:
        low()
    except Telling:
        raise KeyError("high")  # noqa: B904


def hushed() -> None:
    try:
        low()
    except Telling:
        raise KeyError("high") from None


@pytest.mark.parametrize("way", [explicit, implicit, hushed])
def test_what_an_error_was_raised_from_comes_back_with_its_own_lines(way: Any) -> None:
    error = raised(way)
    back = there_and_back(error)
    shown = [traceback.format_exception(e) for e in (error, back)]
    assert strip_marks(shown[1]) == strip_marks(shown[0])
    assert back.__suppress_context__ is (way is explicit)
    if way is not hushed:
        assert type(back.__context__) is Telling and back.__context__.code == "low"
        assert (back.__cause__ is back.__context__) is (way is explicit)


def strip_marks(lines: list[str]) -> list[str]:
    return [part for line in lines for part in line.splitlines() if part.strip(" ~^")]


def test_a_chain_is_cut_where_it_is_too_long_or_goes_in_circles() -> None:
    error: BaseException = ValueError(0)
    for number in range(1, 100):
        error, error.__cause__ = ValueError(number), error
    back: BaseException | None = there_and_back(error)
    numbers = []
    while back is not None:
        numbers.append(back.args[0])
        back = back.__cause__
    assert numbers == list(range(99, 99 - MAX_ERRORS, -1))
    one, two = ValueError(1), ValueError(2)
    one.__cause__, two.__cause__ = two, one
    assert there_and_back(one).__cause__.args == (2,)  # type: ignore[union-attr]


class Batch(ExceptionGroup[Exception]):
    """A group of the user's own."""

    def __new__(cls, errors: list[Exception], code: int) -> Batch:
        self = super().__new__(cls, f"{len(errors)} of a batch", errors)
        self.code = code
        return self


def test_a_group_comes_back_with_its_members() -> None:
    members = [raised(low), ExceptionGroup("inner", [raised(explicit)])]
    members[0].add_note("first")
    group = ExceptionGroup("several", members)  # type: ignore[type-var]
    back = there_and_back(group)
    assert type(back) is ExceptionGroup and str(back) == str(group)
    first, inner = back.exceptions
    assert type(first) is Telling and first.code == "low" and first.__notes__ == ["first"]
    assert type(inner.exceptions[0].__cause__) is Telling  # type: ignore[attr-defined]
    shown = [traceback.format_exception(e) for e in (group, back)]
    assert strip_marks(shown[1]) == strip_marks(shown[0])
    with pytest.raises(ExceptionGroup) as caught:
        try:
            raise back
        except* KeyError:
            pass
    assert caught.value.exceptions == (first,)


def test_a_group_of_the_user_s_own_class_comes_back() -> None:
    back = there_and_back(Batch([ValueError("a")], 5))
    assert type(back) is Batch and back.code == 5 and back.message == "1 of a batch"
    assert str(back.exceptions) == "(ValueError('a'),)"


def test_a_group_that_may_end_the_process_comes_back() -> None:
    back = there_and_back(BaseExceptionGroup("x", [SystemExit(3), ValueError("a")]))
    assert type(back) is BaseExceptionGroup and back.exceptions[0].code == 3  # type: ignore[attr-defined]


def test_a_group_whose_class_is_not_here_keeps_its_members() -> None:
    class Local(ExceptionGroup[Exception]):
        pass

    back = there_and_back(Local("x", [ValueError("a")]))
    assert type(back) is ExceptionGroup and back.message.endswith("Local: x (1 sub-exception)")
    assert type(back.exceptions[0]) is ValueError


def test_members_beyond_the_limit_stay_behind_and_are_counted() -> None:
    back = there_and_back(ExceptionGroup("many", [ValueError(n) for n in range(100)]))
    assert isinstance(back, ExceptionGroup) and len(back.exceptions) == MAX_ERRORS - 1
    assert f"{100 - MAX_ERRORS + 1} more errors of this group stay behind." in back.__notes__


def test_a_class_that_is_not_here_still_brings_what_it_held() -> None:
    class Gone(Exception):
        pass

    error = Gone("x")
    error.code = 7  # type: ignore[attr-defined]
    back = there_and_back(error)
    assert type(back) is BlockError and back.code == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "damaged",
    [
        {"attributes": {"a": {"$": "zzz"}, "b": 1}},
        {"attributes": {"__class__": 3, "__cause__": 3, "args": 3, "add_note": 3, "b": 1}},
        {"attributes": {"b": 1}, "members": [{"module": "", "name": "", "message": ""}]},
        {"attributes": {"b": 1}, "frames": [{"filename": "a\0b", "line": 10**12, "function": "f"}]},
    ],
)
def test_a_damaged_record_is_still_an_error(damaged: dict[str, Any]) -> None:
    plain = {"module": "builtins", "name": "ValueError", "args": ["x"], "message": "x"}
    back = rebuild_error(ErrorRecord.model_validate({**plain, **damaged}), [])
    assert type(back) is ValueError and back.args == ("x",) and vars(back) == {"b": 1}
    back.add_note("still works")


def test_a_record_nested_without_end_is_cut() -> None:
    record = ErrorRecord(module="builtins", name="ValueError", args=[0], message="0")
    for number in range(1, 200):
        record = record.model_copy(update={"cause": record, "args": [number]})
    back: BaseException | None = rebuild_error(record, [])
    count = 0
    while back is not None:
        back, count = back.__cause__, count + 1
    assert count == MAX_ERRORS


def test_a_traceback_without_end_keeps_both_its_ends() -> None:
    frames = [FrameRecord(filename="a.py", line=n, function="f") for n in range(1, 10)]
    assert len(list(frames_of(traceback_of(frames * 1000)))) == MAX_FRAMES

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        low()

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(4000)
    try:
        found = list(frames_of(raised(lambda: deep(2000)).__traceback__))
    finally:
        sys.setrecursionlimit(limit)
    assert len(found) == MAX_FRAMES
    assert found[0].function == "raised" and found[-1].function == "low"


def test_frames_of_ours_at_the_end_of_a_cause_s_traceback_stay_behind() -> None:
    def asks() -> None:
        try:
            compile_block("return 1\n", "user.py", 1, "f")
        except CaptureError as error:
            raise KeyError("asked") from error

    cause = there_and_back(raised(asks)).__cause__
    assert cause is not None
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)] == ["asks"]


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
