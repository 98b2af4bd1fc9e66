"""Requests on their way into the engine, ours and those of others on the same engine.

Every request passes here once per sequence, in the process that holds the engine, when everything
about it is known and it has not been sent yet.

Relies on (vLLM 0.26.0 and 0.27.1): `LLMEngine.add_request` and `AsyncLLM._add_request` hand each
`EngineCoreRequest` to `output_processor.add_request(request, prompt, parent_req, ...)` before they
send it on. Its `request_id`, `sampling_params` and `cache_salt` are what the engine works with, its
parameters may be another request's as well. `output_processor.request_states` holds the ids of the
requests that are under way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from nnsight_vllm_worker.vllm_ports import token_ids
from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods
from nnsight_vllm_worker.vllm_ports.scheduling import WHOLE


class Marks(NamedTuple):
    """What is said of a request before it is sent, of whose prompt none may come from the cache.

    Attributes:
        extra: entries for its `extra_args`.
        whole: whether its prompt has to run in one piece.
        salt: what its part of the prefix cache is kept apart by; None for everyone's.
    """

    extra: dict[str, Any]
    whole: bool
    salt: str | None


def mark_requests(engine: Any, marks: Callable[[str, str, dict[str, Any]], Marks | None]) -> None:
    """Have each request checked and marked before it is sent.

    Args:
        engine: `LLM.llm_engine`, or an `AsyncLLM`.
        marks: is called with a sequence's id, its request's id and its `extra_args`.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    processor = engine.output_processor
    check_methods(processor, {"add_request": ("request", "prompt", "parent_req")})
    check_attributes(processor, ("request_states",))
    add, check = processor.add_request, token_ids.checker(engine)

    def add_request(
        request: Any, prompt: Any, parent_req: Any = None, *rest: Any, **named: Any
    ) -> Any:
        check(request)
        params = request.sampling_params
        if params is not None:
            parent = request.request_id if parent_req is None else parent_req.request_id
            found = marks(request.request_id, parent, params.extra_args or {})
            if found is not None:
                _mark(request, found)
        return add(request, prompt, parent_req, *rest, **named)

    processor.add_request = add_request


def _mark(request: Any, marks: Marks) -> None:
    params = request.sampling_params = copy.copy(request.sampling_params)
    params.extra_args = {**(params.extra_args or {}), **marks.extra}
    if marks.whole:
        params.extra_args[WHOLE] = True
    params.skip_reading_prefix_cache = True
    if marks.salt is not None:
        request.cache_salt = f"{request.cache_salt or ''}{marks.salt}"


def under_way(engine: Any) -> Callable[[], Collection[str]]:
    """What gives the ids of the sequences that have not finished."""
    # Not the engine itself, which ends when nobody refers to it any more.
    states = engine.output_processor.request_states
    return lambda: states.keys()
