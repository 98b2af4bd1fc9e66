"""The requests that come with a step, as both model runners are told of them.

Relies on (vLLM 0.26.0 and 0.27.1): `SchedulerOutput.scheduled_new_reqs`, each with `req_id`,
`sampling_params`, `prompt_token_ids` and `num_computed_tokens`.
"""

from __future__ import annotations

from typing import Any

from nnsight_vllm_worker.traced import Arrival


def arrivals(scheduler_output: Any) -> list[Arrival]:
    """The requests that are new in a step."""
    return [
        Arrival(
            request.req_id,
            request.prompt_token_ids or [],
            request.sampling_params,
            request.num_computed_tokens,
        )
        for request in scheduler_output.scheduled_new_reqs
    ]
