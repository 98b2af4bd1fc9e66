"""Code that is left where it is: Python goes on as before, and the code never does."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch import nn

from nnsight_core import BlockTimeout, NotSupportedError, TorchModel, watchdog
from nnsight_core.leaving import keep, leave_at
from nnsight_core.watchdog import Watchdog


def recurse(depth: int) -> int:
    return recurse(depth + 1)


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    monkeypatch.setattr(watchdog, "_PERIOD", 1e-3)
    monkeypatch.setattr(watchdog, "_AGAIN", 1e-2)
    dog = Watchdog()
    monkeypatch.setattr(watchdog, "WATCHDOG", dog)
    return dog


@pytest.mark.parametrize("times", [1, 3])
def test_code_that_catches_every_error_is_left(dog: Watchdog, times: int) -> None:
    went_on: list[BaseException] = []

    def catches() -> None:
        caught = []
        while True:
            try:
                while True:
                    pass
            except BaseException as error:
                caught.append(error)
                if len(caught) > 2:
                    went_on.append(error)

    for _ in range(times):
        here, code = getcurrent(), greenlet(catches)
        dog.enter(0.01, lambda frame, back=here: leave_at(frame, back.switch))
        code.switch()
        dog.leave()
        assert not code.dead
        keep(code)
        del code
        gc.collect()
    assert went_on == []


def test_python_goes_on_as_before(dog: Watchdog) -> None:
    test_code_that_catches_every_error_is_left(dog, 1)
    # Python would abort here if it were still in the midst of making an error.
    for _ in range(3):
        with pytest.raises(RecursionError):
            recurse(0)
    events: list[str] = []
    before = sys.gettrace()
    sys.settrace(lambda _frame, event, _argument: events.append(event))
    try:
        threading.get_ident()
        gc.isenabled()
        (lambda: None)()
    finally:
        sys.settrace(before)
    assert events == ["call"]


@pytest.mark.parametrize("way", ["raise", "throw", "switch"])
def test_a_block_without_a_limit_may_do_what_a_time_limit_does(way: str) -> None:
    model = TorchModel(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(NotSupportedError if way == "switch" else BlockTimeout):
        with model.trace(torch.ones(1, 2)):
            model[0].output
            if way == "raise":
                raise BlockTimeout
            parent = getcurrent().parent
            parent.throw(BlockTimeout()) if way == "throw" else parent.switch()
    with model.trace(torch.ones(1, 2)):
        hidden = model[0].output.save()
    assert hidden.shape == (1, 2)


def test_what_has_ended_is_not_kept() -> None:
    ended = greenlet(lambda: None)
    ended.switch()
    before = sys.getrefcount(ended)
    keep(ended)
    assert sys.getrefcount(ended) == before
