"""Held requests in the scheduler alone, beside a runner that only keeps count.

vLLM's CPU backend never schedules a step before the last has ended; here that can be tried, and
any order of holding, ending and running short of memory. `tests/processes/test_holding.py` has the
engine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from nnsight_vllm_worker.vllm_ports.scheduling import KEY, scheduler

BLOCKS, BLOCK, SEATS = 20, 16, 4


class Runner:
    """Runs what is scheduled: the token at a place is the place, and blocks have one owner."""

    def __init__(self, second: bool) -> None:
        self.second = second
        self.known: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.last: set[str] = set()

    def run(self, step: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        gone = set(step.finished_req_ids) | set(step.preempted_req_ids or ())
        for key in gone:
            self.blocks.pop(key, None)
            if self.second or key in step.finished_req_ids:
                self.known.pop(key, None)
        computed = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.known
            tokens = new.prefill_token_ids if self.second else new.prompt_token_ids
            self.known[new.req_id] = len(tokens)
            self.blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, key in enumerate(cached.req_ids):
            blocks = list((cached.new_block_ids[index] or ([],))[0])
            again = key in cached.resumed_req_ids
            self.blocks[key] = blocks if again else self.blocks[key] + blocks
            computed[key] = cached.num_computed_tokens[index]
            if not self.second and key not in self.last:
                # Without its last token the runner would have nothing to go on from.
                tokens = len(cached.all_token_ids[key])
                assert tokens >= computed[key] + step.num_scheduled_tokens[key]
                self.known[key] = tokens
        drawn = []
        for key, count in step.num_scheduled_tokens.items():
            end = computed[key] + count
            assert end <= self.known[key] and len(self.blocks[key]) * BLOCK >= end
            drawn.append([self.known[key]] if end == self.known[key] else [])
            self.known[key] += len(drawn[-1])
        owned = [block for blocks in self.blocks.values() for block in blocks]
        assert len(owned) == len(set(owned)) < BLOCKS
        self.last = set(step.num_scheduled_tokens)
        keys = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(keys, {k: i for i, k in enumerate(keys)}, drawn)


class Engine:
    """The loop of vLLM's engine core around our scheduler, one step ahead of the runner or not."""

    def __init__(self, config: Any, ahead: bool, second: bool) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config.scheduler_config.async_scheduling = ahead
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        # vLLM's second runner is not for CPUs, its part of the scheduler is.
        self.scheduler.use_v2_model_runner = second
        self.holding = self.scheduler.holding
        self.tokens: dict[str, list[int]] = {}
        self.steps = 0
        self._runner = Runner(second)
        self._ahead = ahead
        self._flying: deque[tuple[Any, Any]] = deque()

    def add(self, name: str, key: str, prompt: int, length: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=length, ignore_eos=True, extra_args={KEY: key})
        self.tokens[name] = []
        self.scheduler.add_request(Request(name, list(range(prompt)), params, None))

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self._flying)

    def step(self) -> None:
        if self.scheduler.has_requests():
            made = self.scheduler.schedule()
            self.steps += 1
            held = [r.request_id for r in self.scheduler.requests.values() if self._held(r)]
            assert not set(held) & set(made.num_scheduled_tokens)
            assert len(self.scheduler.running) <= SEATS == self.scheduler.max_num_running_reqs
            self._flying.append((made, self._runner.run(made)))
            if self._ahead and len(self._flying) < 2:
                return
        made, output = self._flying.popleft()
        for outputs in self.scheduler.update_from_output(made, output).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids

    def _held(self, request: Any) -> bool:
        return request.sampling_params.extra_args[KEY] in self.holding.keys


@pytest.fixture(params=["in turn", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return request.param == "ahead"


@pytest.fixture(params=["first runner", "second runner"])
def second(request: pytest.FixtureRequest) -> bool:
    return request.param == "second runner"


@pytest.fixture
def engine(gpt2_path: str, ahead: bool, second: bool) -> Callable[..., Engine]:
    from vllm.engine.arg_utils import EngineArgs

    def make(**arguments: Any) -> Engine:
        room = {"max_num_seqs": SEATS, "max_num_batched_tokens": 64, "max_model_len": 256}
        config = EngineArgs(
            model=gpt2_path, enable_prefix_caching=False, **room, **arguments
        ).create_engine_config()
        return Engine(config, ahead, second)

    return make


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_whatever_is_held_when_all_come_to_their_end(
    engine: Callable[..., Engine], policy: str
) -> None:
    chance = random.Random(0)
    made = engine(scheduling_policy=policy)
    for round_ in range(20):
        keys = [f"{round_} {index}" for index in range(chance.randint(2, 8))]
        wanted = {}
        for key in keys:
            prompt, length = chance.randint(1, 90), chance.randint(60, 150)
            for child in range(chance.choice([1, 1, 2])):
                wanted[f"{key} {child}"] = list(range(prompt, prompt + length))
                made.add(f"{key} {child}", key, prompt, length)
        first, since, hold = keys.pop(), chance.randint(0, 150), chance.random()
        for count in range(3000):
            if not made.has_work and not made.holding.keys:
                break
            # One is held from some step on: the others get to their end beside it.
            if chance.random() < 0.3 * hold:
                made.holding.hold(chance.sample(keys, chance.randint(1, len(keys))))
            if chance.random() < 0.3 or not made.has_work:
                made.holding.go_on(keys)
            if count == since:
                made.holding.hold([first])
            if count == 2000:
                made.holding.go_on([first])
            if chance.random() < 0.002:
                name = chance.choice(list(wanted))
                made.abort(name)
                wanted[name] = wanted[name][: len(made.tokens[name])]
            if made.has_work:
                made.step()
            if count == 2000:
                others = [name for name in wanted if not name.startswith(f"{first} ")]
                assert all(made.tokens[name] == wanted[name] for name in others)
        assert {name: made.tokens[name] for name in wanted} == wanted
        assert not made.scheduler.requests and not made.holding.keys
        assert not made.scheduler.has_requests()


def test_where_all_are_held_no_step_is_asked_for(engine: Callable[..., Engine]) -> None:
    made = engine()
    for key in "ab":
        made.add(key, key, 10, 20)
    for _ in range(5):
        made.step()
    made.holding.hold("ab")
    steps = made.steps
    while made.has_work:
        made.step()
    assert made.steps == steps and made.scheduler.get_num_unfinished_requests() == 2
    made.holding.go_on("a")
    while made.has_work:
        made.step()
    assert len(made.tokens["a"]) == 20 > len(made.tokens["b"]) > 0
    made.abort("b")
    while made.has_work:
        made.step()
    assert not made.scheduler.requests and not made.holding.keys
