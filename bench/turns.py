"""Engines that take turns, so that whatever slows the machine down slows all of them down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Engine:
    """How an engine is started.

    Attributes:
        module: the engine's module; see `bench.engines`.
        packages: the packages whose versions go into the results.
        python: the interpreter of its environment.
        environment: variables that it needs besides ours.
    """

    module: str
    packages: Sequence[str]
    python: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One case as it is asked for: how often it is called in one turn, and who knows it."""

    case: str
    calls: int
    engines: Sequence[str]


@dataclass
class Measured:
    """What a workload gave.

    Attributes:
        versions: of each engine, by package.
        seconds: of one call, by case and engine, one number per round.
    """

    versions: dict[str, dict[str, str]]
    seconds: dict[str, dict[str, list[float]]]


def take_turns(
    engines: Mapping[str, Engine],
    turns: Sequence[Turn],
    rounds: int,
    pause: float = 0.0,
    at_once: bool = False,
) -> Measured:
    """Ask every engine for every case, round after round; a first round is not counted.

    Args:
        at_once: start the engines beside each other; none is asked before all are there.
        pause: seconds to wait before each turn, in which an engine's idle threads go to sleep.
    """
    with ExitStack() as stack:
        running = {}
        for name, engine in engines.items():
            running[name] = stack.enter_context(_Process(engine))
            if not at_once:
                running[name].wait()
        versions = {name: process.wait() for name, process in running.items()}
        seconds: dict[str, dict[str, list[float]]] = {
            turn.case: {engine: [] for engine in turn.engines} for turn in turns
        }
        for number in range(rounds + 1):
            for turn in turns:
                # Who comes first changes, in case a turn leaves the machine warmer than it was.
                for engine in turn.engines if number % 2 else reversed(turn.engines):
                    time.sleep(pause)
                    took = running[engine].ask((turn.case, turn.calls))
                    print(f"{number} {turn.case}, {engine}: {took:.4f} s", file=sys.stderr)
                    if number:
                        seconds[turn.case][engine].append(took)
        return Measured(versions, seconds)


class _Process:
    """A started engine; see `bench.child` for what is said."""

    def __init__(self, engine: Engine) -> None:
        command = [engine.python, "-m", "bench.child", engine.module, *engine.packages]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as this does
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **engine.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self._versions: dict[str, str] | None = None

    def wait(self) -> dict[str, str]:
        """Wait until it has started; gives the versions of its packages."""
        if self._versions is None:
            self._versions = self._answer()
        return self._versions

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RuntimeError(f"An engine ended; it said:\n{self._said.read()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()
