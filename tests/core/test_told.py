"""What blocks tell besides their values: warnings, prints, and what led to an error."""

from __future__ import annotations

import dataclasses
import linecache
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_core import BlockError, ProtocolError, TorchModel, UnboundSaveWarning
from nnsight_core.backend import Ended, Event, Finished, Invoke, Noted, Printed
from nnsight_core.wire.blocks import decode_event
from nnsight_core.wire.messages import EndedMessage, WarningData

from . import wired
from .wired import X

HERE = __file__


class Telling:
    """A backend that tells what it was given, whatever the blocks are."""

    def __init__(self, *events: Event | Exception) -> None:
        self._events = events

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield event


@pytest.fixture
def model() -> TorchModel:
    return wired.make(wired=False)


@pytest.fixture
def telling(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchModel]:
    """A model whose backend tells the given events."""

    def tell(*events: Event | Exception) -> TorchModel:
        monkeypatch.setattr(model, "_backend", Telling(*events))
        return model

    return tell


class Odd(UserWarning):
    """A warning of the user's own, made in a way of its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Told(UserWarning):
    """A warning whose text is made of what does not travel."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


def line_of(text: str) -> int:
    lines = linecache.getlines(HERE)
    return next(i for i, line in enumerate(lines, 1) if line.strip() == text)


# -- prints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["hello\n"], "[invoke 0] hello\n"),
        (["one\ntwo\n"], "[invoke 0] one\n[invoke 0] two\n"),
        (["a", "b ", "c\n"], "[invoke 0] ab c\n"),
        (["no end"], "[invoke 0] no end\n"),
        (["\n"], "[invoke 0] \n"),
        ([""], ""),
        (["a\n", "", "\n", "b"], "[invoke 0] a\n[invoke 0] \n[invoke 0] b\n"),
        (["1%\r", "2%\r", "done\n"], "[invoke 0] 1%\r2%\rdone\n"),
    ],
)
def test_prints_are_lines_marked_with_their_invoke(
    telling: Any, capsys: pytest.CaptureFixture[str], texts: list[str], shown: str
) -> None:
    model = telling(*[Printed(0, text) for text in texts], Ended(0), Finished(0))
    with model.trace(X):
        pass
    assert capsys.readouterr().out == shown


def test_lines_of_several_invokes_are_not_mixed(
    telling: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [(0, "a"), (1, "x"), (0, "b\n"), (1, "y\n"), (0, "c")]
    events = [Printed(invoke, text) for invoke, text in parts]
    model = telling(*events, *[Ended(i) for i in (0, 1)], *[Finished(i) for i in (0, 1)])
    with model.trace() as tracer:
        for _ in range(2):
            with tracer.invoke(X):
                pass
    assert capsys.readouterr().out == "[invoke 0] ab\n[invoke 1] xy\n[invoke 0] c\n"


def test_what_was_printed_before_the_peer_was_lost_is_shown(
    telling: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = telling(Printed(0, "before"), ProtocolError("gone"))
    with pytest.raises(ProtocolError):
        with model.trace(X):
            pass
    assert capsys.readouterr().out == "[invoke 0] before\n"


# -- warnings --------------------------------------------------------------------------------------


def test_a_warning_that_the_filters_make_an_error_is_raised_after_values_were_bound(
    model: TorchModel,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnboundSaveWarning) as raised:
            with model.trace(X) as tracer:
                kept = model[0].output.save()
                model[1].output.save()  # unbound
    assert kept.shape == (1, 2) and torch.equal(tracer.saves["kept"], kept)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert last.filename == HERE and last.line == "model[1].output.save()  # unbound"
    assert raised.value.__notes__ == ["Issued in the block of invoke 0."]
    assert raised.value.__context__ is None


def test_warnings_that_are_errors_join_the_other_errors(telling: Any) -> None:
    notes = [Noted(Odd, f"number {i}", HERE, line_of("y = 0  # noted")) for i in range(2)]
    model = telling(
        Ended(0, saves={"x": 1}, warnings=notes),
        Finished(0),
        Ended(1, saves={"x": 2}, error=ValueError("bad")),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", Odd)
        with pytest.raises(ExceptionGroup, match="3 errors in 2 invokes") as raised:
            with model.trace() as tracer:
                for _ in range(2):
                    with tracer.invoke(X):
                        x = 0
                        y = 0  # noted
                        # noted
    assert x == [1, 2]
    assert [str(e) for e in raised.value.exceptions] == ["number 0", "number 1", "bad"]
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("y = 0  # noted") == 2


def test_a_warning_of_the_user_s_own_class_is_one_however_it_is_made(telling: Any) -> None:
    events = Ended(0, warnings=[Noted(Odd, "odd", "a.py", 3), Noted(Told, "code 7", "a.py", 4)])
    model = telling(events, Finished(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(X):
            pass
    found = [(w.category, str(w.message), w.filename, w.lineno) for w in caught]
    # A class whose text is not that of the warning here is not used.
    assert found == [(Odd, "odd", "a.py", 3), (UserWarning, "code 7", "a.py", 4)]


def test_a_warning_class_that_the_block_held_is_found() -> None:
    class Local(UserWarning):
        pass

    note = WarningData(
        module=Local.__module__, name=Local.__qualname__, message="m", filename="a.py", line=3
    )
    message = EndedMessage(key="0", warnings=[note])
    for known, category in (([int, Local], Local), ([], UserWarning)):
        event = decode_event(message, message.frame(), 0, known)
        assert isinstance(event, Ended) and event.warnings == [Noted(category, "m", "a.py", 3)]


# -- errors ----------------------------------------------------------------------------------------


def low() -> None:
    raise KeyError("low")


@pytest.mark.parametrize("way", [False, True], ids=["here", "wired"])
def test_what_was_being_handled_is_shown_with_an_error(way: bool) -> None:
    model = wired.make(way)
    with pytest.raises(ValueError) as raised:
        with model.trace(X):
            try:
                low()
            except KeyError:
                raise ValueError("high")  # noqa: B904
    assert isinstance(raised.value.__context__, KeyError)
    assert raised.value.__context__.__context__ is None
    shown = "".join(traceback.format_exception(raised.value))
    assert "During handling of the above" in shown and "Skipped" not in shown
    with pytest.raises(ValueError) as raised:
        with model.trace(X):
            try:
                low()
            except KeyError as error:
                raise ValueError("high") from error
    assert raised.value.__context__ is raised.value.__cause__ is not None


@pytest.mark.parametrize("way", [False, True], ids=["here", "wired"])
def test_a_cause_of_ours_ends_at_the_user_s_line(way: bool) -> None:
    model = wired.make(way)
    with pytest.raises(ValueError) as raised:
        with model.trace(X):
            try:
                model.nothing  # asked
            except AttributeError as error:
                raise ValueError("high") from error
    cause = raised.value.__cause__
    assert cause is not None
    found = traceback.extract_tb(cause.__traceback__)
    assert [(f.filename, f.line) for f in found] == [(HERE, "model.nothing  # asked")]


def test_few_lines_of_ours_stand_between_the_user_s(model: TorchModel) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        with model.trace(X):
            1 / 0
    found = traceback.extract_tb(raised.value.__traceback__)
    assert [f.filename == HERE for f in found] == [True, False, False, True]


def test_each_error_says_which_invoke_it_is_of(telling: Any) -> None:
    model = telling(
        Ended(0, error=SystemExit(3)), Finished(0), Finished(1, error=ValueError("too long"))
    )
    with pytest.raises(ExceptionGroup) as raised:
        with model.trace() as tracer:
            for _ in range(2):
                with tracer.invoke(X):
                    pass
    ended, refused = raised.value.exceptions
    assert isinstance(ended, BlockError) and str(ended) == "SystemExit: 3"
    assert ended.__notes__ == ["Raised in the block of invoke 0."]
    assert refused.__notes__ == ["Raised for invoke 1, outside its block."]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An error that cannot be changed."""

    code: int


@pytest.mark.parametrize("way", [False, True], ids=["here", "wired"])
def test_an_error_that_cannot_be_changed_is_raised(way: bool) -> None:
    model = wired.make(way)
    caught: Any = None
    try:
        with model.trace(X):
            kept = model[0].output.save()
            raise Frozen(3)
    except Frozen as error:
        caught = error
    assert caught == Frozen(3) and caught.__notes__ == ["Raised in the block of invoke 0."]
    assert kept.shape == (1, 2)
