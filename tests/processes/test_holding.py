"""Holding requests: whose stream is not read makes no steps, and slows nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
import pytest_asyncio
import torch

from nnsight_vllm_worker.settings import apply
from nnsight_vllm_worker.vllm_ports import async_startup
from nnsight_vllm_worker.vllm_ports.scheduling import KEY
from tests.fixtures import looking

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST = "The Eiffel Tower is in the city of"
SECOND = "Count up to ten:"
THIRD = "The capital of Japan is"
# 19 blocks can be had: 304 tokens in all.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "seed": 0,
    "block_size": 16,
    "num_gpu_blocks_override": 20,
    "max_num_seqs": 3,
}
if torch.cuda.is_available():
    SETTINGS["gpu_memory_utilization"] = 0.1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(gpt2_path: str) -> AsyncIterator[Any]:
    arguments = {**apply(dict(SETTINGS)), "scheduler_cls": looking.NAME}
    llm = async_startup.build_async_llm(gpt2_path, arguments)
    yield llm
    async_startup.shut_down(llm)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(llm: Any) -> AsyncIterator[None]:
    """After each test nothing is left, and what comes then runs."""
    yield
    for task in Reading.tasks:
        task.cancel()
    if Reading.tasks:
        # Of a test that has failed.
        await asyncio.wait(Reading.tasks, timeout=10)
        await async_startup.go_on(llm, (await look(llm))["held"])
    reading = Reading(llm, "after", FIRST, 2)
    await reading.end()
    state = await look(llm)
    assert state["held"] == [] and state["requests"] == 0


async def look(llm: Any) -> dict[str, Any]:
    return await llm.engine_core.call_utility_async("nnsight_look")


class Reading:
    """A request, with the tokens of its sequences as they come."""

    tasks: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(self, llm: Any, key: str, prompt: str, length: int, **sampling: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.key = key
        self.tokens: dict[int, list[int]] = {}
        self._params = SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={KEY: key},
            **{"temperature": 0.0, **sampling},
        )
        self._came = asyncio.Condition()
        self.task = asyncio.create_task(self._read(llm, prompt))
        self.tasks.add(self.task)
        self.task.add_done_callback(self.tasks.discard)

    async def _read(self, llm: Any, prompt: str) -> None:
        async for output in llm.generate(prompt, self._params, self.key):
            async with self._came:
                for sequence in output.outputs:
                    self.tokens.setdefault(sequence.index, []).extend(sequence.token_ids)
                self._came.notify_all()

    @property
    def counts(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens.values()]

    async def until(self, count: int) -> None:
        """Wait until every sequence has so many tokens."""
        async with asyncio.timeout(60), self._came:
            await self._came.wait_for(
                lambda: len(self.counts) == self._params.n and min(self.counts) >= count
            )

    async def end(self) -> None:
        async with asyncio.timeout(60):
            await self.task


async def alone(llm: Any, prompt: str, length: int, **sampling: Any) -> dict[int, list[int]]:
    reading = Reading(llm, "alone", prompt, length, **sampling)
    await reading.end()
    return reading.tokens


async def test_a_held_request_makes_no_step_while_another_finishes(llm: Any) -> None:
    wanted = await alone(llm, FIRST, 60), await alone(llm, SECOND, 120)
    slow, other = Reading(llm, "slow", FIRST, 60), Reading(llm, "other", SECOND, 120)
    await slow.until(5)
    await async_startup.hold(llm, ["slow"])
    # One step may have been on its way.
    await other.until(len(other.tokens[0]) + 3)
    held_at = slow.counts
    await other.end()
    assert slow.counts == held_at and held_at[0] < 60
    assert (await look(llm))["held"] == ["slow"]
    await async_startup.go_on(llm, ["slow"])
    await slow.end()
    assert (slow.tokens, other.tokens) == wanted
    assert (await look(llm))["preempted"] == []


async def test_a_request_is_held_again_and_again(llm: Any) -> None:
    wanted = await alone(llm, FIRST, 60), await alone(llm, SECOND, 120)
    slow, other = Reading(llm, "slow", FIRST, 60), Reading(llm, "other", SECOND, 120)
    for count in range(2, 50, 4):
        await slow.until(count)
        await async_startup.hold(llm, ["slow"])
        if count % 3:
            await asyncio.sleep(0.005)
        await async_startup.go_on(llm, ["slow"])
    await asyncio.gather(slow.end(), other.end())
    assert (slow.tokens, other.tokens) == wanted


async def test_all_sequences_of_a_request_are_held(llm: Any) -> None:
    sampling: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 3}
    wanted = await alone(llm, FIRST, 40, **sampling)
    slow, other = Reading(llm, "slow", FIRST, 40, **sampling), Reading(llm, "other", SECOND, 120)
    await slow.until(3)
    await async_startup.hold(llm, ["slow"])
    await other.until(len(other.tokens[0]) + 3)
    held_at = slow.counts
    await other.end()
    assert slow.counts == held_at and max(held_at) < 40
    await async_startup.go_on(llm, ["slow"])
    await slow.end()
    assert slow.tokens == wanted and len(wanted) == 2


async def test_while_all_are_held_the_engine_makes_no_steps(llm: Any) -> None:
    prompts = [FIRST, SECOND, THIRD]
    wanted = [await alone(llm, prompt, 40) for prompt in prompts]
    readings = [Reading(llm, prompt, prompt, 40) for prompt in prompts]
    for reading in readings:
        await reading.until(4)
    await async_startup.hold(llm, prompts)
    before = await look(llm)
    assert before["held"] == sorted(prompts) and not before["has_requests"]
    await asyncio.sleep(0.2)
    assert await look(llm) == before
    # Each goes on by itself, and the rest still stays.
    for reading, tokens in zip(readings, wanted, strict=True):
        counts = [other.counts for other in readings if other is not reading]
        await async_startup.go_on(llm, [reading.key])
        await reading.end()
        assert reading.tokens == tokens
        assert counts == [other.counts for other in readings if other is not reading]


async def test_what_comes_while_all_are_held_runs(llm: Any) -> None:
    wanted = await alone(llm, FIRST, 30), await alone(llm, SECOND, 30)
    slow = Reading(llm, "slow", FIRST, 30)
    await slow.until(4)
    await async_startup.hold(llm, ["slow"])
    other = Reading(llm, "other", SECOND, 30)
    await other.end()
    await async_startup.go_on(llm, ["slow"])
    await slow.end()
    assert (slow.tokens, other.tokens) == wanted


@pytest.mark.parametrize("beside", [False, True])
async def test_nothing_is_left_of_a_request_that_is_aborted_while_held(
    llm: Any, beside: bool
) -> None:
    other = Reading(llm, "other", SECOND, 100) if beside else None
    slow = Reading(llm, "slow", FIRST, 60, n=2, temperature=1.0)
    await slow.until(4)
    await async_startup.hold(llm, ["slow"])
    slow.task.cancel()
    await asyncio.wait([slow.task])
    if other is not None:
        await other.end()
    # Its end is said to the workers with a step.
    async with asyncio.timeout(10):
        while (state := await look(llm))["requests"] or state["held"]:
            await asyncio.sleep(0.01)
    assert not state["has_requests"]


async def test_a_request_that_ends_while_it_is_held_is_forgotten(llm: Any) -> None:
    # Held with its last token on its way, or already gone.
    for length in range(1, 9):
        slow = Reading(llm, "slow", FIRST, length)
        await slow.until(max(1, length - 1))
        await async_startup.hold(llm, ["slow"])
        await async_startup.hold(llm, ["never there"])
        assert set((await look(llm))["held"]) <= {"slow"}
        await async_startup.go_on(llm, ["slow"])
        await slow.end()
        await async_startup.hold(llm, ["slow"])
        assert (await look(llm))["held"] == []


@pytest.mark.parametrize("late", [False, True], ids=["beside", "later"])
async def test_what_a_held_request_has_is_given_to_others(llm: Any, late: bool) -> None:
    wanted = await alone(llm, FIRST, 160), await alone(llm, SECOND, 230)
    slow = Reading(llm, "slow", FIRST, 160)
    other = None if late else Reading(llm, "other", SECOND, 230)
    await slow.until(120)
    await async_startup.hold(llm, ["slow"])
    other = other or Reading(llm, "other", SECOND, 230)
    await other.end()
    state = await look(llm)
    assert state["preempted"] == ["slow"] and state["held"] == ["slow"]
    assert slow.counts[0] < 125
    await async_startup.go_on(llm, ["slow"])
    await slow.end()
    assert (slow.tokens, other.tokens) == wanted


async def test_a_prompt_gets_the_memory_of_a_held_request(llm: Any) -> None:
    prompt = " and".join([FIRST] * 20)
    wanted = await alone(llm, FIRST, 200), await alone(llm, prompt, 20)
    slow = Reading(llm, "slow", FIRST, 200)
    await slow.until(160)
    await async_startup.hold(llm, ["slow"])
    other, third = Reading(llm, "other", prompt, 20), Reading(llm, "third", THIRD, 20)
    await asyncio.gather(other.end(), third.end())
    assert (await look(llm))["preempted"] == ["slow"]
    await async_startup.go_on(llm, ["slow"])
    await slow.end()
    assert (slow.tokens, other.tokens) == wanted


async def test_held_requests_give_their_seats_to_others(llm: Any) -> None:
    prompts = [FIRST, SECOND, THIRD]
    wanted = [await alone(llm, prompt, 40) for prompt in prompts]
    readings = [Reading(llm, prompt, prompt, 40) for prompt in prompts]
    for reading in readings:
        await reading.until(4)
    await async_startup.hold(llm, prompts)
    others = [Reading(llm, f"other {index}", FIRST, 40) for index in range(2)]
    await asyncio.gather(*(other.end() for other in others))
    assert sorted((await look(llm))["preempted"]) == sorted([SECOND, THIRD])
    await async_startup.go_on(llm, prompts)
    await asyncio.gather(*(reading.end() for reading in readings))
    assert [reading.tokens for reading in readings] == wanted
    assert [other.tokens for other in others] == [wanted[0]] * 2
