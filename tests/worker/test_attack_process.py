"""Attacks on what a process has once: threads, greenlets, modes, settings, seeds, signals."""

from __future__ import annotations

import decimal
import io
import signal
import sys
import threading
import time
import warnings
from contextlib import redirect_stdout
from typing import Any

import greenlet
import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight_core import LateWriteError, LocationError, NotSupportedError
from tests.fixtures.attack import READER, STEPS, assert_beside, beside, harmless, tracing

pytest_plugins = ["tests.fixtures.attack"]
pytestmark = [pytest.mark.usefixtures("unharmed"), pytest.mark.local]


# -- threads, greenlets and what holds for the process --------------------------------------------


def test_a_thread_of_a_block_has_no_values(gpt2: Any, normal: Any) -> None:
    def asks_in_a_thread(model: Any, tracer: Any) -> str:
        got: list[str] = []

        def ask() -> None:
            try:
                got.append(repr(model.transformer.h[3].output))
            except LocationError as error:
                got.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        model.transformer.h[4].output
        return got[0]

    assert "only inside a block" in assert_beside(gpt2, normal, asks_in_a_thread)


def test_a_thread_that_outlives_its_block_reaches_nothing(gpt2: Any, normal: Any) -> None:
    before = threading.active_count()

    def leaves_threads(model: Any, tracer: Any) -> Any:
        hidden = model.transformer.h[3].output
        until = time.monotonic() + 1

        def work() -> None:
            while time.monotonic() < until:
                hidden.mul_(0)
                try:
                    model.logits
                except LocationError:
                    continue

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
        for _ in tracer.iter[1:STEPS]:
            model.transformer.h[4].output

    assert isinstance(assert_beside(gpt2, normal, leaves_threads), LateWriteError)
    assert_beside(gpt2, normal, harmless)
    while threading.active_count() > before:
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("when", "way"),
    [
        ("late", "switch"),
        ("at once", "switch"),
        ("late", "throw"),
        ("at once", "throw"),
    ],
)
def test_a_block_that_switches_greenlets_itself(
    gpt2: Any, normal: Any, when: str, way: str
) -> None:
    def switches(model: Any, tracer: Any) -> int:
        if when == "late":
            model.transformer.h[3].output
        parent = greenlet.getcurrent().parent
        parent.switch(5) if way == "switch" else parent.throw(ValueError("thrown"))
        return 1

    error = assert_beside(gpt2, normal, switches)
    assert isinstance(error, NotSupportedError | LocationError | ValueError)


def test_a_greenlet_of_a_blocks_own_has_no_values(gpt2: Any, normal: Any) -> None:
    def switches(model: Any, tracer: Any) -> Any:
        inner = greenlet.greenlet(lambda: 2 * greenlet.getcurrent().parent.switch(1))
        assert (inner.switch(), inner.switch(4)) == (1, 8)
        return greenlet.greenlet(lambda: model.transformer.h[3].output).switch()

    assert "only inside a block" in str(assert_beside(gpt2, normal, switches))


class Doubling(TorchFunctionMode):
    """Doubles what the model's norms give back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.layer_norm else out


class Raising(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("dispatched")


def _modes() -> dict[str, Any]:
    return {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "device": lambda: torch.device("meta"),
        "function mode": Doubling,
        "dispatch mode": Raising,
        "grad": torch.enable_grad,
        "inference": torch.inference_mode,
        "filters": lambda: warnings.catch_warnings(record=True),
        "stdout": lambda: redirect_stdout(io.StringIO()),
        "decimal": lambda: decimal.localcontext(prec=3),
        "numpy": lambda: numpy.errstate(all="raise"),
    }


SETTERS: dict[str, Any] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(2),
    "grad": lambda: torch.set_grad_enabled(True),
    "inference": lambda: torch.inference_mode(True).__enter__(),
    "filters": lambda: warnings.simplefilter("error"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "trace": lambda: sys.settrace(lambda *_: None),
    "profile": lambda: sys.setprofile(lambda *_: None),
    "recursion": lambda: sys.setrecursionlimit(400),
    "decimal": lambda: setattr(decimal.getcontext(), "prec", 3),
    "numpy": lambda: numpy.seterr(all="raise"),
}


def settings() -> dict[str, Any]:
    """What holds in this thread."""
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": torch.empty(0).device,
        "dtype": torch.get_default_dtype(),
        "filters": list(warnings.filters),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "profile": sys.getprofile(),
        "recursion": sys.getrecursionlimit(),
        "showwarning": warnings.showwarning,
        "stdout": sys.stdout,
        "threads": torch.get_num_threads(),
        "trace": sys.gettrace(),
    }


@pytest.mark.parametrize("mode", _modes())
def test_a_mode_in_which_a_block_waits_is_its_own(gpt2: Any, normal: Any, mode: str) -> None:
    def waits(model: Any, tracer: Any) -> int:
        with _modes()[mode]():
            for _ in tracer.iter[:STEPS]:
                model.transformer.h[3].output
                model.logits
        return 1

    before = settings()
    assert assert_beside(gpt2, normal, waits) == 1
    assert settings() == before


@pytest.mark.parametrize("name", SETTERS)
def test_what_a_block_sets_is_its_own(gpt2: Any, normal: Any, name: str) -> None:
    set_it = SETTERS[name]

    def sets(model: Any, tracer: Any) -> int:
        set_it()
        for _ in tracer.iter[:STEPS]:
            model.transformer.h[3].output
        return 1

    def own(model: Any, tracer: Any) -> list[Any]:
        import decimal

        import numpy

        return [
            decimal.getcontext().prec,
            numpy.geterr()["over"],
            str(torch.get_default_dtype()),
            sys.getrecursionlimit(),
        ]

    before, other = settings(), assert_beside(gpt2, normal, own)
    assert assert_beside(gpt2, normal, sets) == 1
    assert settings() == before
    # The next block may run where this one did.
    assert assert_beside(gpt2, normal, own) == other == [28, "warn", "torch.float32", other[3]]


def test_a_seed_that_a_block_sets_draws_no_others_tokens(gpt2: Any) -> None:
    # All are seeded: on a CPU, vLLM draws for all from one generator if any request is not.
    def seeds(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:STEPS]:
            torch.manual_seed(7)
            torch.rand(3)
            model.transformer.h[3].output

    sampling = {"temperature": 2.0, "seed": 3}
    plain, _, _ = beside(gpt2, harmless, **sampling)
    seeded, _, error = beside(gpt2, seeds, **sampling)
    assert error is None and seeded["drawn"] == plain["drawn"]
    assert seeded["chosen"] == plain["chosen"]


def test_a_seed_that_a_block_sets_is_not_what_others_draw_from(gpt2: Any) -> None:
    with gpt2.trace(temperature=1.0, max_tokens=20, ignore_eos=True) as tracer:
        with tracer.invoke(READER):
            tokens = [].save()
            for _ in tracer.all():
                gpt2.logits[:] *= 0
                tokens.append(gpt2.samples.item())
        with tracer.invoke(READER):
            numbers = [].save()
            for _ in tracer.all():
                torch.manual_seed(7)
                gpt2.transformer.h[3].output
                numbers.append(torch.rand(1).item())
    # Every step with the same random numbers would draw the same token.
    assert len(set(tokens)) > 10 and len(set(numbers)) == 1


def test_signal_handlers_are_the_process_own(gpt2: Any, normal: Any) -> None:
    """What a block sets there stays, as in any function: it is not undone, and harms nobody."""

    def handles(model: Any, tracer: Any) -> int:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        for _ in tracer.iter[:STEPS]:
            model.transformer.h[3].output
        return 1

    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert assert_beside(gpt2, normal, handles) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forward_pass_that_is_interrupted_leaves_nothing(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tracing(gpt2)._watch._modules["transformer.h.5"]

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            with gpt2.trace(max_tokens=3) as tracer:
                for _ in range(4):
                    with tracer.invoke(READER):
                        hidden = gpt2.transformer.h[3].output.save()
    (output,) = gpt2.generate(READER, temperature=0.0, max_tokens=1)
    assert output.outputs[0].text == " Paris"
