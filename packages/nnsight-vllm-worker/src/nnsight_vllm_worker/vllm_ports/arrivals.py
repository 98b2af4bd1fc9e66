"""The requests that come with a step, as both model runners are told of them.

Relies on (vLLM 0.26.0 and 0.27.1): `SchedulerOutput.scheduled_new_reqs`, each with `req_id`,
`sampling_params`, `prompt_token_ids` and `num_computed_tokens`. A prompt of embeddings alone has no
token ids, and its rows in `prompt_embeds`; one that is mixed has token ids for all of its rows.
"""

from __future__ import annotations

from typing import Any

from nnsight_vllm_worker.traced import Arrival
from nnsight_vllm_worker.vllm_ports.ending import EMBEDDED


def arrivals(scheduler_output: Any) -> list[Arrival]:
    """The requests that are new in a step."""
    return [
        Arrival(
            request.req_id,
            request.prompt_token_ids or _embedded(request.prompt_embeds),
            request.sampling_params,
            request.num_computed_tokens,
        )
        for request in scheduler_output.scheduled_new_reqs
    ]


def _embedded(rows: Any) -> list[int]:
    return [] if rows is None else [EMBEDDED] * len(rows)
