"""The engine for asyncio: starting it, giving it requests, ending it.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/engine/async_llm.py`):
- `AsyncLLM.from_engine_args(AsyncEngineArgs(...))` starts the engine's process, and a task on the
  running loop that brings its outputs.
- `generate(prompt, params, id, lora_request=...)` yields one output when `output_kind` is
  FINAL_ONLY, and whenever there is more when it is CUMULATIVE, the newest if several wait;
  cancelled or closed, it aborts its request. What it refuses is raised as it is, or as the cause of
  an `EngineGenerateError`.
- `renderer.render_cmpl_async([prompt dict])` makes of prompts what `generate` takes as well, with
  their `prompt_token_ids`.
- `abort(ids)` takes the ids that `generate` was given, and knows them from before the engine does.
- `collective_rpc(method, args=...)` runs on every worker, after what was sent to the engine before.
- `engine_core.call_utility_async(method, keys)` calls a method of the engine core, after what was
  sent to it before; `holding` adds ours.
- `get_supported_tasks()` asks the engine once, and remembers; `generate` begins with it.
- `errored` says whether the engine has ended, and the task `output_handler` ends when it does;
  `shutdown()` ends its processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from nnsight_vllm_worker.submission import Request
from nnsight_vllm_worker.vllm_ports import scheduling
from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods
from nnsight_vllm_worker.vllm_ports.startup import check_room, refusals

_METHODS = {
    "generate": ("prompt", "sampling_params", "request_id", "lora_request"),
    "abort": ("request_id",),
    "collective_rpc": ("method", "args"),
    "shutdown": (),
    "get_supported_tasks": (),
}


def build_async_llm(model: str, arguments: dict[str, Any]) -> Any:
    """An `AsyncLLM` on the running loop.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    scheduling.silence()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
    check_methods(llm, _METHODS)
    check_attributes(llm, ("errored", "output_handler", "dead_error", "vllm_config"))
    check_methods(llm.renderer, {"render_cmpl_async": ("prompts",)})
    check_methods(llm.engine_core, {"call_utility_async": ("method",)})
    return llm


async def ask_once(llm: Any) -> None:
    """Have the engine answer what every request asks it, and only the first one waits for.

    That one would wait for ever if the engine ended meanwhile.

    Raises:
        vllm's EngineDeadError: as `call_workers` does.
    """
    await _answer(llm, llm.get_supported_tasks)


async def generate(llm: Any, request: Request) -> AsyncGenerator[Any, None]:
    """Run a request to its end; gives vLLM's outputs: the last one, or all if it streams.

    Raises:
        ValueError: vLLM refuses it (a prompt that is too long).
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineGenerateError

    kinds = RequestOutputKind
    request.params.output_kind = kinds.CUMULATIVE if request.streams else kinds.FINAL_ONLY
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    try:
        with refusals():
            if request.whole:
                [prompt] = await llm.renderer.render_cmpl_async([prompt])
                check_room(llm.vllm_config, request, prompt)
            outputs = llm.generate(prompt, request.params, request.key, lora_request=request.lora)
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
    except EngineGenerateError as error:
        raise error.__cause__ or error from None


async def abort(llm: Any, keys: list[str]) -> None:
    """End requests; those that have ended already are none of its business."""
    await llm.abort(keys)


async def hold(llm: Any, keys: list[str]) -> None:
    """Let requests make no further step; one that is being made still comes.

    Those that have ended already are none of its business.

    Raises:
        vllm's EngineDeadError: as `call_workers` does.
    """
    await _answer(llm, lambda: llm.engine_core.call_utility_async("nnsight_hold", keys))


async def go_on(llm: Any, keys: list[str]) -> None:
    """Let held requests go on.

    Raises:
        vllm's EngineDeadError: as `call_workers` does.
    """
    await _answer(llm, lambda: llm.engine_core.call_utility_async("nnsight_go_on", keys))


async def call_workers(llm: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """Call a method of every worker.

    Raises:
        vllm's EngineDeadError: the engine has ended, or ends before it has answered (for which vLLM
            would wait for ever).
    """
    return await _answer(llm, lambda: llm.collective_rpc(method, args=args))


def is_alive(llm: Any) -> bool:
    """Whether the engine runs."""
    return not llm.errored


def when_dead(llm: Any, call: Callable[[], Any]) -> None:
    """Have something called when the engine ends."""
    llm.output_handler.add_done_callback(lambda _: call())


def shut_down(llm: Any) -> None:
    """End the engine and its processes."""
    llm.shutdown()


async def _answer(llm: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
    if llm.errored:
        raise llm.dead_error
    call = asyncio.ensure_future(ask())
    try:
        await asyncio.wait((call, llm.output_handler), return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise llm.dead_error
        return call.result()
    finally:
        call.cancel()
