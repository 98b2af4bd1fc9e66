"""Time limits: an error that is on its way when a block gives control back harms nobody."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from greenlet import GreenletExit

from nnsight_core import BlockTimeout, watchdog
from nnsight_core.watchdog import Watchdog


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """One that looks as often as it can, while threads take turns often."""
    monkeypatch.setattr(watchdog, "_PERIOD", 1e-5)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    dog = Watchdog()
    monkeypatch.setattr(watchdog, "WATCHDOG", dog)
    yield dog
    sys.setswitchinterval(interval)


def spin() -> None:
    while True:
        pass


def test_an_error_ends_what_runs_for_too_long(dog: Watchdog) -> None:
    with pytest.raises(BlockTimeout, match="more than 0.01 s"):
        dog.call(0.01, spin)
    assert dog.call(9, int, "3") == dog.call(None, int, "3") == 3
    with pytest.raises(ValueError, match="invalid literal"):
        dog.call(9, int, "x")


def test_what_others_make_of_the_error_is_a_timeout(dog: Watchdog) -> None:
    def wrap() -> None:
        try:
            spin()
        except BlockTimeout as error:
            raise SystemExit from error

    with pytest.raises(BlockTimeout):
        dog.call(0.01, wrap)


def test_what_catches_the_error_for_ever_is_left(dog: Watchdog) -> None:
    def catch() -> None:
        while True:
            try:
                spin()
            except BaseException:
                continue

    for _ in range(2):
        with pytest.raises(BlockTimeout, match="more than 0.01 s"):
            dog.call(0.01, catch)
    assert dog.call(9, int, "3") == 3


def test_a_greenlet_that_is_told_to_end_is_an_error(dog: Watchdog) -> None:
    def end() -> None:
        raise GreenletExit

    with pytest.raises(GreenletExit):
        dog.call(9, end)


def test_no_error_comes_once_control_is_back(dog: Watchdog) -> None:
    came = late = 0
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            dog.enter(1e-9)
            for _ in range(200):
                pass
        except BlockTimeout:
            came += 1
        finally:
            try:
                dog.leave()
            except BlockTimeout:
                dog.leave()
                late += 1
        for _ in range(200):
            pass
    assert came > 0
    # Python would stand still here if it were still looking for an error that was taken back.
    assert _within(5, lambda: _traced(spin_a_little)) == ["call"]


def test_an_error_that_is_caught_comes_again_and_then_leaves(dog: Watchdog) -> None:
    left: list[str] = []
    caught = 0
    try:
        dog.enter(0.01, lambda frame: left.append(frame.f_code.co_name))
        while not left:
            try:
                spin()
            except BlockTimeout:
                caught += 1
    finally:
        dog.leave()
    assert caught == 3 and left


def spin_a_little() -> None:
    for _ in range(10):
        pass


def _traced(function: Callable[[], None]) -> list[str]:
    events: list[str] = []
    sys.settrace(lambda _frame, event, _argument: events.append(event))
    try:
        function()
    finally:
        sys.settrace(None)
    return events


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    try:
        return function()
    finally:
        timer.cancel()
