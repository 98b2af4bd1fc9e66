"""Clients, servers and workers that are killed at any moment: the others notice, nothing is left.

`NNSIGHT_KILLS=50` kills that many of each, where a few are enough day by day.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nnsight_client import VLLM
from nnsight_core import EngineDeadError, ProtocolError
from tests.fixtures.server import Server, serving

KILLS = int(os.environ.get("NNSIGHT_KILLS", "0"))
SEEDS = range(KILLS or 6)
SERVERS = range(KILLS or 2)
"""A server takes long to start, so fewer of them die."""
WITHIN = 2.0
ROOT = Path(__file__).parents[2]
PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="module")
def lasting(gpt2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("lasting"), gpt2_path) as server:
        yield server


def ask(url: str, path: str, requests: int) -> Any:
    """A trace of some requests that save in each of many steps."""
    model = VLLM(path, serve=url)
    with model.trace(ignore_eos=True, max_tokens=200) as tracer:
        for _ in range(requests):
            with tracer.invoke(PROMPT):
                hidden = [].save()
                for _ in tracer.all():
                    hidden.append(model.transformer.h[3].output)
    return hidden


class Asking(threading.Thread):
    """Asks again and again until there is an error, and notes when that came."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(daemon=True)
        self._asked = url, path
        self.error: BaseException | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            while True:
                ask(*self._asked, requests=4)
        except BaseException as error:
            self.error, self.ended = error, time.monotonic()


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaves(member)]
    return [error]


def kill(victim: int, asking: list[Asking], seed: int) -> None:
    """Kill a process in the middle of what is asked; everyone who asks gets an error for it."""
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    for thread in asking:
        thread.join(60)
        assert thread.error is not None
        found = leaves(thread.error)
        assert all(isinstance(e, EngineDeadError | ProtocolError) for e in found), found
        # A machine with other things to do proves nothing about time.
        assert not KILLS or thread.ended - killed < WITHIN


@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_client_that_is_killed_nothing_is_left(
    lasting: Server, gpt2_path: str, seed: int
) -> None:
    code = f"from tests.serve.test_killed import ask; ask({lasting.url!r}, {gpt2_path!r}, 4)"
    client = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not lasting.live():
        assert client.poll() is None
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0.0, 0.5))
    client.kill()
    client.wait()
    assert lasting.empty()
    assert len(ask(lasting.url, gpt2_path, 2)) == 2


@pytest.mark.parametrize("seed", SERVERS)
def test_a_server_that_is_killed_is_an_error_at_once(
    gpt2_path: str, tmp_path: Path, seed: int
) -> None:
    # That nothing outlives the server is seen to by `serving`.
    with serving(tmp_path, gpt2_path) as server:
        asking = [Asking(server.url, gpt2_path) for _ in range(3)]
        kill(server.process.pid, asking, seed)
        # Its connections end before it does.
        server.process.wait(60)


@pytest.mark.parametrize("seed", SERVERS)
@pytest.mark.parametrize("name", ["Worker", "EngineCore"])
def test_an_engine_that_is_killed_is_an_error_at_once(
    gpt2_path: str, tmp_path: Path, name: str, seed: int
) -> None:
    with serving(tmp_path, gpt2_path) as server:
        parts = ("Worker", "EngineCore")
        engine = {part: p for p in server.processes() for part in parts if part in _name(p)}
        # There may be no process of its own for the worker.
        victim = engine.get(name, engine["EngineCore"])
        kill(victim.pid, [Asking(server.url, gpt2_path) for _ in range(3)], seed)
        assert not psutil.wait_procs(engine.values(), 10)[1]


def _name(process: psutil.Process) -> str:
    return "".join(process.cmdline())
