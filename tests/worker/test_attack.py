"""Attacks: blocks that do not end, raise anything, take all memory, or save what misbehaves.

They end their own requests and no others, and the engine goes on.

Python raises an error that comes from outside between two of its instructions. So one single call
into C that never comes back (a lock that another block holds) is not ended by the time limit, and a
block that makes one holds up its engine. What ends the engine's process is in
`tests/processes/test_attack.py`.
"""

from __future__ import annotations

import gc
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import pytest
import torch

import nnsight_core
from nnsight_core import BlockError, BlockTimeout, EncodeError, LocationError, watchdog
from tests.fixtures.attack import GREEDY, READER, STEPS, assert_beside, tracing

pytest_plugins = ["tests.fixtures.attack"]
pytestmark = [pytest.mark.usefixtures("unharmed"), pytest.mark.local]


# -- blocks that do not end ----------------------------------------------------------------------


def spins(model: Any, tracer: Any) -> None:
    while True:
        pass


def spins_in_a_later_step(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:STEPS]:
        model.transformer.h[1].output
        while step == 2:
            pass


def spins_and_catches(model: Any, tracer: Any) -> None:
    for _ in range(3):
        try:
            while True:
                pass
        except BaseException:
            model.transformer.h
    while True:
        pass


def tries_for_ever(model: Any, tracer: Any) -> None:
    while True:
        try:
            for _ in range(10**9):
                pass
        except Exception:
            continue


def asks_for_ever(model: Any, tracer: Any) -> None:
    while True:
        try:
            model.transformer.h[3].output
        except BaseException:
            continue


def spins_in_tensors(model: Any, tracer: Any) -> None:
    hidden = model.transformer.h[3].output
    while True:
        hidden = torch.tanh(hidden @ hidden.T @ hidden)


@pytest.mark.parametrize(
    "attack",
    [
        spins,
        spins_in_a_later_step,
        spins_and_catches,
        tries_for_ever,
        asks_for_ever,
        spins_in_tensors,
    ],
)
def test_a_block_that_does_not_end_is_ended(
    gpt2: Any, normal: Any, attack: Callable[..., Any]
) -> None:
    start = time.monotonic()
    error = assert_beside(gpt2, normal, attack)
    assert isinstance(error, BlockTimeout) and "more than 1 s" in str(error)
    assert time.monotonic() - start < 20
    lines = (frame.name for frame in traceback.extract_tb(error.__traceback__))
    assert attack.__name__ in lines


def test_a_block_may_catch_the_timeout_and_end_in_order(gpt2: Any, normal: Any) -> None:
    def gives_up(model: Any, tracer: Any) -> str:
        try:
            while True:
                pass
        except BlockTimeout:
            return f"gave up at {model.transformer.h[5].output.shape[1]}"

    assert assert_beside(gpt2, normal, gives_up) == "gave up at 96"


def sleeps(model: Any, tracer: Any) -> None:
    # A call into C is not interrupted: the error comes as soon as it is back.
    time.sleep(1.5)
    model.transformer.h[3].output


def test_a_call_into_c_is_ended_when_it_comes_back(gpt2: Any, normal: Any) -> None:
    assert isinstance(assert_beside(gpt2, normal, sleeps), BlockTimeout)


@pytest.mark.parametrize("way", ["finally", "catch"])
def test_a_block_that_will_not_be_dropped_is_left(gpt2: Any, way: str) -> None:
    # The first sequence to come there fails, which drops the other one's block where it waits.
    try:
        # In a group with a timeout, if the other one has gone on before it could be dropped.
        with pytest.raises((ValueError, ExceptionGroup)):
            with gpt2.trace(READER, n=2, seed=1, temperature=1.0, max_tokens=6) as tracer:
                hidden = gpt2.transformer.h[3].output
                mine = not hasattr(sys, "_first_sequence")
                sys._first_sequence = True
                if mine:
                    gpt2.logits
                    raise ValueError("one of two")
                try:
                    gpt2.samples
                    for _ in tracer.all():
                        gpt2.samples
                except BaseException:
                    if way == "catch":
                        gpt2.samples
                    raise
                finally:
                    while way == "finally":
                        pass
    finally:
        vars(sys).pop("_first_sequence", None)


def test_an_interrupted_trace_does_not_wait_for_its_blocks(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = gpt2._engine.llm.llm_engine
    step, calls = engine.step, iter(range(9))

    def interrupted() -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with gpt2.trace(READER, max_tokens=20, ignore_eos=True) as tracer:
            try:
                for _ in tracer.all():
                    gpt2.samples
            finally:
                while True:
                    pass


@pytest.mark.parametrize(
    ("limit", "period"), [(1e-9, 1e-4), (5e-4, 1e-4), (2e-3, 5e-4)], ids=["at once", "0.5", "2"]
)
def test_an_error_that_comes_when_a_block_parks_or_ends_is_lost_or_its_own(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch, limit: float, period: float
) -> None:
    """Blocks whose time is up about when they give control back, with threads that switch often."""

    def run() -> tuple[Any, list[Any], BaseException | None]:
        hidden = done = error = None
        try:
            with gpt2.trace(**GREEDY) as tracer:
                for index in range(4):
                    with tracer.invoke(READER):
                        hidden = [].save()
                        for _ in tracer.iter[:STEPS]:
                            if index % 2:
                                gpt2.transformer.h[2].output[:] *= 1.5
                            for layer in gpt2.transformer.h[3::3]:
                                hidden.append(layer.output)
                            hidden.append(gpt2.logits)
                        done = "done".save()
        except Exception as raised:
            error = raised
        return hidden, done or [None] * 4, error

    tracing(gpt2).limit = None
    plain, _, _ = run()
    monkeypatch.setattr(watchdog, "_PERIOD", period)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    timeouts = ends = 0
    deadline = time.monotonic() + 5
    try:
        while time.monotonic() < deadline:
            tracing(gpt2).limit = limit * random.uniform(0.5, 1.5)
            hidden, done, error = run()
            errors = getattr(error, "exceptions", (error,)) if error is not None else ()
            failed = set()
            for one in errors:
                assert isinstance(one, BlockTimeout | BlockError), one
                failed.add(int(re.search(r"invoke (\d)", one.__notes__[0])[1]))
            assert [done[i] for i in range(4) if i not in failed] == ["done"] * (4 - len(failed))
            for index in {*range(4)} - failed:
                for here, there in zip(hidden[index], plain[index], strict=True):
                    # Not to the bit: with others gone, the batch is another.
                    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
            timeouts += len(failed)
            ends += 4 - len(failed)
            assert gpt2._engine.counts()["live"] == 0
    finally:
        sys.setswitchinterval(interval)
    assert ends + timeouts > 0


# -- recursion and memory ------------------------------------------------------------------------


def recurses(model: Any, tracer: Any) -> None:
    recurses(model, tracer)


def recurses_in_generators(model: Any, tracer: Any) -> int:
    def each(n: int) -> Iterator[int]:
        yield from each(n + 1)

    return sum(each(0))


def recurses_through_c(model: Any, tracer: Any) -> list[Any]:
    return list(map(recurses_through_c, [model], [tracer]))


def recurses_and_asks(model: Any, tracer: Any) -> None:
    for layer in model.transformer.h:
        layer.output
    recurses_and_asks(model, tracer)


@pytest.mark.parametrize("attack", [recurses, recurses_in_generators, recurses_through_c])
def test_recursion_ends_its_own_request(gpt2: Any, normal: Any, attack: Any) -> None:
    assert isinstance(assert_beside(gpt2, normal, attack), RecursionError)


def test_recursion_ends_at_a_location_that_is_over(gpt2: Any, normal: Any) -> None:
    assert isinstance(assert_beside(gpt2, normal, recurses_and_asks), LocationError)


def allocates_too_much(model: Any, tracer: Any) -> None:
    model.transformer.h[3].output
    torch.ones(1 << 50)


def allocates_bytes(model: Any, tracer: Any) -> None:
    model.transformer.h[3].output
    bytes(1 << 50)


@pytest.mark.parametrize("attack", [allocates_too_much, allocates_bytes])
def test_memory_that_is_not_there(gpt2: Any, normal: Any, attack: Any) -> None:
    assert isinstance(assert_beside(gpt2, normal, attack), RuntimeError | MemoryError)


def reserves(model: Any, tracer: Any) -> int:
    # No page of it is touched, so that it fits anywhere.
    held = torch.empty(10 << 30, dtype=torch.uint8)
    for _ in tracer.iter[:STEPS]:
        model.transformer.h[3].output
    return held.numel()


def test_memory_that_is_there(gpt2: Any, normal: Any) -> None:
    assert assert_beside(gpt2, normal, reserves) == 10 << 30


def saves_much(model: Any, tracer: Any) -> torch.Tensor:
    return torch.ones(32 << 20)


def test_a_large_save_comes_home(gpt2: Any, normal: Any) -> None:
    assert assert_beside(gpt2, normal, saves_much).numel() == 32 << 20


# -- errors of every kind ------------------------------------------------------------------------


class Own(BaseException):
    """No `Exception`, so that nothing that expects those catches it."""


def exits(model: Any, tracer: Any) -> None:
    model.transformer.h[3].output
    sys.exit(3)


RAISED = [
    SystemExit("bye"),
    KeyboardInterrupt(),
    GeneratorExit(),
    greenlet.GreenletExit(),
    StopIteration(3),
    StopAsyncIteration(),
    MemoryError(),
    BlockTimeout("mine"),
    nnsight_core.EngineDeadError("mine"),
    nnsight_core.ProtocolError("mine"),
    nnsight_core.NNsightWarning("mine"),
    BaseExceptionGroup("all", [KeyboardInterrupt(), ValueError("inner")]),
]


@pytest.mark.parametrize("raised", RAISED, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("step", [0, 1])
def test_an_error_of_any_class_ends_its_own_request(
    gpt2: Any, normal: Any, raised: BaseException, step: int
) -> None:
    number = RAISED.index(raised)

    def raises(model: Any, tracer: Any) -> None:
        for now in tracer.iter[:STEPS]:
            model.transformer.h[3].output
            if now == step:
                raise RAISED[number]

    error = assert_beside(gpt2, normal, raises)
    assert isinstance(error, type(raised) if isinstance(raised, Exception) else BlockError)
    assert type(raised).__name__ in f"{type(error).__name__} {error}"


def test_sys_exit_and_a_class_of_ones_own(gpt2: Any, normal: Any) -> None:
    def raises(model: Any, tracer: Any) -> None:
        raise Own("own")

    for attack, words in ((exits, "SystemExit: 3"), (raises, "Own: own")):
        error = assert_beside(gpt2, normal, attack)
        assert isinstance(error, BlockError) and words in str(error)


class InDel:
    """Raises when it is collected, which Python reports and forgets."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_errors_while_objects_are_collected(gpt2: Any, normal: Any) -> None:
    def raises(model: Any, tracer: Any) -> int:
        InDel(ValueError("in a __del__"))
        kept = [InDel(SystemExit("in a __del__"))]
        kept.append(kept)
        for _ in tracer.iter[:STEPS]:
            model.transformer.h[3].output
        return len(kept)

    assert assert_beside(gpt2, normal, raises) == 2
    gc.collect()


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class ExitText(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


class Key:
    """What is asked of it, it refuses."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise self.error

    def __repr__(self) -> str:
        raise self.error

    def __reduce__(self) -> Any:
        raise self.error


class SpinningKey(Key):
    def __repr__(self) -> str:
        while True:
            pass


class SpinningDict(dict):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        while True:
            pass

    def items(self) -> Any:
        return iter(self)


class OtherClass:
    @property
    def __class__(self) -> Any:
        raise SystemExit("no class")


def nothing() -> list[Any]:
    held: list[Any] = []
    for _ in range(100_000):
        held = [held]
    return held


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: {Key(RuntimeError("no")): 1}, (RuntimeError, BlockError, EncodeError)),
        (lambda: [Key(RuntimeError("no"))], EncodeError),
        (lambda: OtherClass(), BlockError),
        (nothing, EncodeError),
        (lambda: {Key(SystemExit("no")): 1}, BlockError),
        (lambda: {SpinningKey(ValueError()): 1}, BlockTimeout),
        (lambda: SpinningDict(a=1), BlockTimeout),
    ],
    ids=["repr", "reduce", "class", "depth", "exit", "spin", "items"],
)
def test_what_misbehaves_when_it_is_saved(gpt2: Any, normal: Any, make: Any, error: Any) -> None:
    def saves(model: Any, tracer: Any) -> Any:
        for _ in tracer.iter[:2]:
            model.transformer.h[3].output
        return make()

    assert isinstance(assert_beside(gpt2, normal, saves), error)


@pytest.mark.parametrize("kind", [NoText, ExitText])
def test_an_error_that_has_no_text(gpt2: Any, normal: Any, kind: type[Exception]) -> None:
    def raises(model: Any, tracer: Any) -> None:
        model.transformer.h[3].output
        raise kind

    assert isinstance(assert_beside(gpt2, normal, raises), NoText | BlockError)


def test_containers_that_hold_themselves(gpt2: Any, normal: Any) -> None:
    def saves(model: Any, tracer: Any) -> Any:
        held: list[Any] = [model.transformer.h[3].output]
        held.append({"again": (held,)})
        return held

    held = assert_beside(gpt2, normal, saves)
    assert held[0].shape[1] == 96 and held[1]["again"][0] is held


class Reducing:
    """Runs a function where it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.how = (function, args)

    def __reduce__(self) -> Any:
        return self.how


class Loaded:
    """Its body runs where the class is made: here, and again on the engine."""

    if hasattr(sys, "_attack"):
        sys.exit("while it is loaded")


CATCHES = """
while True:
    try:
        [0 for _ in iter(int, 1)]
    except BaseException:
        continue
"""


@pytest.mark.parametrize("way", ["exit", "spin", "catch", "class"])
def test_what_is_loaded_with_a_block_is_a_part_of_it(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    brought = {
        "exit": lambda: [Reducing(sys.exit, 3)],
        "spin": lambda: [Reducing(eval, "[0 for _ in iter(int, 1)]")],
        "catch": lambda: [Reducing(exec, CATCHES)],
        "class": lambda: [Loaded],
    }[way]()
    monkeypatch.setattr(sys, "_attack", True, raising=False)
    with pytest.raises(BlockTimeout if way in ("spin", "catch") else BlockError):
        with gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
            with tracer.invoke(READER):
                count = len(brought).save()
            with tracer.invoke(READER):
                logits = gpt2.logits.save()
    assert logits.shape[0] == 1
