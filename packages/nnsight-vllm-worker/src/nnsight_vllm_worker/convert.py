"""vLLM's outputs as ours."""

from __future__ import annotations

from typing import Any

from nnsight_core.outputs import STOPPED, CompletionOutput, Logprob, RequestOutput


def output_of(output: Any) -> RequestOutput:
    """A `vllm.RequestOutput` as the one that every backend gives."""
    return RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=list(output.prompt_token_ids or ()),
        prompt_logprobs=_logprobs(output.prompt_logprobs),
        outputs=[
            CompletionOutput(
                index=part.index,
                text=part.text,
                token_ids=list(part.token_ids),
                cumulative_logprob=part.cumulative_logprob,
                logprobs=_logprobs(part.logprobs),  # type: ignore[arg-type]
                finish_reason="stop" if part.stop_reason == STOPPED else part.finish_reason,
                stop_reason=part.stop_reason,
            )
            for part in output.outputs
        ],
        finished=output.finished,
    )


def _logprobs(steps: Any) -> list[dict[int, Logprob] | None] | None:
    if steps is None:
        return None
    return [
        None
        if step is None
        else {
            token: Logprob(logprob=p.logprob, rank=p.rank, decoded_token=p.decoded_token)
            for token, p in step.items()
        }
        for step in steps
    ]
