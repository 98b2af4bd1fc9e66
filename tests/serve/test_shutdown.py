"""A server that is told to end: what is running ends in order, and nothing is left of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nnsight_client import VLLM
from nnsight_core import BusyError, EngineDeadError
from tests.fixtures.server import Server, serving, started
from tests.serve.test_limits import asking, measured, stopped

PROMPT = "The Eiffel Tower is in the city of"


class Running(threading.Thread):
    """A trace of two invokes that is running, in a thread; `error` is what became of it."""

    def __init__(self, server: Server, path: str) -> None:
        super().__init__()
        self._server = server
        self._model = VLLM(path, serve=server.url)
        self.texts: list[Any] = []
        self.error: BaseException | None = None
        self.start()
        while measured(server)["nnsight_engine_requests",] < 2:
            time.sleep(0.05)

    def run(self) -> None:
        model = self._model
        try:
            with model.trace(ignore_eos=True, max_tokens=200) as tracer:
                for _ in range(2):
                    with tracer.invoke(PROMPT):
                        texts = tracer.result.outputs[0].text.save()
            self.texts = texts
        except Exception as error:
            self.error = error


@contextmanager
def told_to_end(folder: Path, path: str, grace: float) -> Iterator[tuple[Server, Running]]:
    """A server that has been told to end, whose engine stands still in the middle of a trace."""
    with serving(folder, path, "--grace", str(grace)) as server:
        below = server.processes()
        with stopped(server):
            running = Running(server, path)
            server.process.send_signal(signal.SIGTERM)
            yield server, running
        running.join()
        assert server.process.wait(60) == 0, server.log.read_text()
        assert not psutil.wait_procs(below, 10)[1]


def until(happens: Callable[[], bool]) -> None:
    while not happens():
        time.sleep(0.05)


def test_what_is_running_may_end_and_nothing_new_begins(gpt2_path: str, tmp_path: Path) -> None:
    with told_to_end(tmp_path, gpt2_path, 100.0) as (server, running):
        until(lambda: httpx.get(f"{server.url}/ready", timeout=30).status_code == 503)
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = asking(server, "nobody", 1)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 100
        with pytest.raises(BusyError, match="shutting down"):
            VLLM(gpt2_path, serve=server.url).generate(PROMPT)
    assert running.error is None and len(running.texts) == 2 and all(running.texts)


def test_what_goes_on_beyond_the_grace_is_told(gpt2_path: str, tmp_path: Path) -> None:
    with told_to_end(tmp_path, gpt2_path, 0.5) as (_, running):
        running.join()
    assert_told(running)


def test_who_is_told_twice_waits_no_longer(gpt2_path: str, tmp_path: Path) -> None:
    with told_to_end(tmp_path, gpt2_path, 1000.0) as (server, running):
        until(lambda: httpx.get(f"{server.url}/ready", timeout=30).status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        running.join()
    assert_told(running)


def assert_told(running: Running) -> None:
    """Each invoke has an error that says why, and the connection did not break."""
    assert isinstance(running.error, ExceptionGroup)
    errors = running.error.exceptions
    assert [type(error) for error in errors] == [EngineDeadError] * 2
    assert all("The server is shutting down" in str(error) for error in errors)


def test_an_interrupt_of_all_processes_is_an_orderly_end(gpt2_path: str, tmp_path: Path) -> None:
    with serving(tmp_path, gpt2_path, "--grace", "100") as server:
        below = server.processes()
        running = Running(server, gpt2_path)
        # As Ctrl-C in a terminal does it.
        for process in below:
            process.send_signal(signal.SIGINT)
        running.join()
        assert running.error is None and all(running.texts)
        assert server.process.wait(60) == 0, server.log.read_text()
        assert not psutil.wait_procs(below, 10)[1]


def builds(server: Server) -> bool:
    """Whether there is a process of an engine."""
    try:
        return any("EngineCore" in "".join(p.cmdline()) for p in server.processes())
    except psutil.Error:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_told_while_it_loads_ends_at_once(
    gpt2_path: str, tmp_path: Path, number: signal.Signals
) -> None:
    with started(tmp_path, gpt2_path) as (process, log):
        server = Server("", process, log)
        until(lambda: process.poll() is not None or builds(server))
        below = server.processes()
        process.send_signal(number)
        assert process.wait(60) == 0, log.read_text()
        assert not psutil.wait_procs(below, 10)[1]
        assert "Traceback" not in log.read_text()
