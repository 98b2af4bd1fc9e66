"""Engines whose holder is killed: they end with it, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nnsight_vllm_worker.vllm_ports import orphans
from tests.fixtures.server import ENVIRONMENT

ROOT = Path(__file__).parents[2]


class Holder:
    """A process with an engine of its own; see `tests.fixtures.holder`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.below: list[psutil.Process] = []

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return self.says()

    @property
    def engine(self) -> psutil.Process:
        (found,) = (p for p in self.below if "EngineCore" in "".join(p.cmdline()))
        return found


@contextmanager
def holding(model: str, how: str) -> Iterator[Holder]:
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fixtures.holder", model, how],
        cwd=ROOT,
        env={**environment, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    holder = Holder(process)
    try:
        while (said := holder.says()) != "ready":
            assert process.poll() is None, said
        holder.below = psutil.Process(process.pid).children(recursive=True)
        yield holder
    finally:
        process.kill()
        process.wait()
        for left in holder.below:
            if left.is_running():
                left.kill()


def outlived(holder: Holder) -> list[psutil.Process]:
    """What is left of an engine whose holder is killed now."""
    holder.process.kill()
    holder.process.wait()
    return psutil.wait_procs(holder.below, 10)[1]


@pytest.mark.parametrize("how", ["main", "thread", "async"])
def test_an_engine_ends_with_the_process_that_built_it(gpt2_path: str, how: str) -> None:
    with holding(gpt2_path, how) as holder:
        assert holder.engine.is_running()
        assert not outlived(holder)


def test_an_engine_that_hangs_ends_as_well(gpt2_path: str) -> None:
    with holding(gpt2_path, "main") as holder:
        holder.engine.send_signal(signal.SIGSTOP)
        assert not outlived(holder)


def test_an_interrupt_is_the_holders_business_and_the_engine_goes_on(gpt2_path: str) -> None:
    with holding(gpt2_path, "main") as holder:
        assert holder.ask() == "made 2"
        # Until it waits for its next line: a signal just before that is seen with the line only.
        time.sleep(1)
        os.killpg(holder.process.pid, signal.SIGINT)
        assert holder.says() == "interrupted"
        assert holder.ask() == "made 2"


def test_an_engine_in_its_holders_own_process_watches_nobody() -> None:
    with orphans.holding():
        assert orphans._parent() == (None, False)
        orphans.end_with_parent()
    assert orphans._watching is None and orphans.HOLDER not in os.environ
