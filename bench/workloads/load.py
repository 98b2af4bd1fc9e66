"""Many clients of one server for a while: traces, edits, generations, and clients that leave.

    python -m bench load --seconds 600 --clients 64

Tells how long each kind takes, every error that nobody asked for, and how the memory of the
server's processes goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import httpx
import psutil

from bench.machine import machine
from bench.results import FOLDER
from bench.serving import serving
from bench.table import Table
from bench.workloads.vllm_cpu import PROMPTS, model_path
from nnsight_client import VLLM

SHOWN = 20
"""How many of the errors are kept, each with how often it came."""
FLAGS = ("--dtype", "float32", "--max-model-len", "256")
PACKAGES = ("nnsight-serve", "vllm-cpu", "torch")


@dataclass
class Load:
    """What a run gave.

    Attributes:
        seconds: how long each request took, by kind.
        left: how many requests were left by their clients on purpose.
        errors: what nobody asked for, and how often.
        memory: MiB of each of the server's processes, every so many seconds from the start.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, float]] = field(default_factory=list)


async def reads(model: VLLM, rng: random.Random) -> None:
    """A read of one layer at the prompt."""
    with model.trace(rng.choice(PROMPTS), max_tokens=rng.randint(1, 16)) as tracer:
        hidden = model.transformer.h[6].output.save()
    await tracer.backend
    assert hidden.shape[1] == 96


async def streams(model: VLLM, rng: random.Random) -> None:
    """A read in each step, taken as it is made."""
    tokens = rng.randint(2, 32)
    with model.trace(rng.choice(PROMPTS), max_tokens=tokens, ignore_eos=True) as tracer:
        hidden = [].save()
        for _ in tracer.all():
            hidden.append(model.transformer.h[3].output[-1])
    came = 0
    async for output in tracer.backend:
        came += len(output.new_saves.get("hidden", ()))
    assert came == tokens, f"{came} of {tokens} steps came"


async def writes(model: VLLM, rng: random.Random) -> None:
    """Four prompts, each steered in every step."""
    scale = rng.uniform(0.5, 1.5)
    with model.trace(max_tokens=8, ignore_eos=True) as tracer:
        for prompt in rng.sample(PROMPTS, 4):
            with tracer.invoke(prompt):
                for _ in tracer.all():
                    model.transformer.h[5].output[:] *= scale
                    logits = model.logits.save()
    outputs = await tracer.backend
    assert len(outputs) == len(logits) == 4


async def fails(model: VLLM, rng: random.Random) -> None:
    """A block that raises in the middle."""
    step = rng.randint(0, 4)
    try:
        with model.trace(rng.choice(PROMPTS), max_tokens=8, ignore_eos=True) as tracer:
            for at in tracer.iter[step : step + 1]:
                raise ValueError(f"asked for at {at}")
        await tracer.backend
    except ValueError as error:
        assert "asked for" in str(error)
    else:
        raise AssertionError("the error of a block did not come")


async def generates(model: VLLM, rng: random.Random) -> None:
    """Plain generations."""
    outputs = await model.generate(rng.sample(PROMPTS, 2), max_tokens=16, use_tqdm=False)
    assert len(outputs) == 2


async def edits(model: VLLM, rng: random.Random) -> None:
    """An edit is installed, used and cleared."""
    name = f"edit{rng.getrandbits(32)}"
    async with model.edit(name) as (_, edit):
        norm = model.transformer.h[4].output[-1].norm().save()  # noqa: F841 - comes with outputs
    try:
        [output] = await model.generate(PROMPTS[:1], max_tokens=4, edits=[name], use_tqdm=False)
        assert "norm" in output.saves
    finally:
        await edit.aclear()


async def leaves(model: VLLM, rng: random.Random) -> None:
    """A client that goes away in the middle of what it asked for."""
    with model.trace(max_tokens=200, ignore_eos=True) as tracer:
        for prompt in rng.sample(PROMPTS, 2):
            with tracer.invoke(prompt):
                hidden = [].save()
                for _ in tracer.all():
                    hidden.append(model.transformer.h[3].output)
    waiting = asyncio.ensure_future(_all_of(tracer))
    await asyncio.sleep(rng.uniform(0.0, 1.0))
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting


async def _all_of(tracer: Any) -> None:
    await tracer.backend


KINDS: dict[str, tuple[int, Callable[[VLLM, random.Random], Awaitable[None]]]] = {
    "trace, one read": (6, reads),
    "trace, streamed": (4, streams),
    "trace, 4 prompts written": (3, writes),
    "trace that fails": (1, fails),
    "generation": (3, generates),
    "edit": (1, edits),
    "client that leaves": (2, leaves),
}


def main(arguments: list[str]) -> None:
    """Run, keep the result as JSON and print the table."""
    parser = argparse.ArgumentParser(prog="bench load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    chosen = parser.parse_args(arguments)
    load = asyncio.run(measure(chosen.seconds, chosen.clients))
    held = {
        "workload": "load",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": {package: version(package) for package in PACKAGES},
        "asked": vars(chosen),
        "took": summary(load),
        "left": load.left,
        "errors": dict(load.errors.most_common(SHOWN)),
        "memory": load.memory,
    }
    (FOLDER / "load.json").write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n")
    print(f"\n{table(load).text()}\n\nmemory: {load.memory[0]} to {load.memory[-1]}")
    print(f"errors that were not asked for: {load.errors.total()}", *load.errors.items(), sep="\n")
    if load.errors:
        sys.exit(1)


async def measure(seconds: float, clients: int) -> Load:
    """What a server does under so many clients for so long."""
    load = Load()
    path = model_path()
    with serving(path, *FLAGS) as (process, url):
        deadline = time.monotonic() + seconds
        watching = asyncio.create_task(_watch(load, process, seconds / 60))
        asking = [_ask(load, url, path, number, deadline) for number in range(clients)]
        await asyncio.gather(*asking)
        watching.cancel()
        await _settle(load, url)
        load.memory.append(_memory(process, seconds))
    return load


def summary(load: Load) -> dict[str, dict[str, float]]:
    """How many of each kind there were, and how long half and nearly all of them took."""
    found = {}
    for kind in [*KINDS, "OpenAI completion"]:
        took = sorted(load.seconds.get(kind, []))
        if took:
            half, most = took[len(took) // 2], took[int(len(took) * 0.99)]
            found[kind] = {"count": len(took), "p50": round(half, 4), "p99": round(most, 4)}
    return found


def table(load: Load) -> Table:
    """The summary as a table."""
    rows = [
        [kind, str(it["count"]), f"{it['p50'] * 1e3:.0f}", f"{it['p99'] * 1e3:.0f}"]
        for kind, it in summary(load).items()
    ]
    return Table(["", "requests", "p50, ms", "p99, ms"], rows)


async def _ask(load: Load, url: str, path: str, number: int, deadline: float) -> None:
    """One client, which asks for one thing after the other."""
    rng = random.Random(number)
    kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    async with _client(url, path) as (model, http):
        openai = "/v1/completions" in (await http.get("/openapi.json")).json()["paths"]
        if openai:
            kinds, weights = [*kinds, "OpenAI completion"], [*weights, 3]
        while time.monotonic() < deadline:
            [kind] = rng.choices(kinds, weights)
            began = time.perf_counter()
            try:
                if kind in KINDS:
                    await KINDS[kind][1](model, rng)
                else:
                    await _complete(http, path, rng)
            except Exception as error:
                load.errors[f"{kind}: {type(error).__name__}: {str(error)[:300]}"] += 1
            else:
                load.seconds[kind].append(time.perf_counter() - began)
                load.left += kind == "client that leaves"


async def _complete(http: httpx.AsyncClient, path: str, rng: random.Random) -> None:
    body = {"model": path, "prompt": rng.choice(PROMPTS), "max_tokens": 16}
    answer = await http.post("/v1/completions", json=body)
    assert answer.raise_for_status().json()["choices"][0]["text"]


@asynccontextmanager
async def _client(url: str, path: str) -> AsyncIterator[tuple[VLLM, httpx.AsyncClient]]:
    model = VLLM(path, serve=url, mode="async")
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        try:
            yield model, http
        finally:
            await model.aclose()


async def _watch(load: Load, process: subprocess.Popen[bytes], every: float) -> None:
    began = time.monotonic()
    while True:
        load.memory.append(_memory(process, time.monotonic() - began))
        await asyncio.sleep(every)


def _memory(process: subprocess.Popen[bytes], at: float) -> dict[str, float]:
    server = psutil.Process(process.pid)
    found = {"at": round(at, 1), "server": _mebibytes(server)}
    for below in server.children(recursive=True):
        with suppress(psutil.Error):
            name = "".join(below.cmdline())
            for part in ("EngineCore", "Worker"):
                if part in name:
                    found[part] = _mebibytes(below)
    return found


def _mebibytes(process: psutil.Process) -> float:
    return round(process.memory_info().rss / 2**20, 1)


async def _settle(load: Load, url: str) -> None:
    """Note what is left in a server that nobody asks for anything."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for _ in range(100):
            described = (await http.get("/v1/model")).json()["counts"]
            left = {name: described[name] for name in ("live", "edits", "entries")}
            if not any(left.values()):
                return
            await asyncio.sleep(0.1)
    load.errors[f"left in the engine: {left}"] += 1
