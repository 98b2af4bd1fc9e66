"""The V1 model runner: when requests come and go, what the rows are, where logits and ids pass.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/worker/gpu_model_runner.py` and its CPU subclass):
- `execute_model(scheduler_output)` updates the batch, then calls `_model_forward(...)` once per
  step that has tokens, then the model's `compute_logits`; it leaves `execute_model_state` with
  `logits`, or None where there is nothing to sample.
- `sample_tokens(grammar_output)` samples from that state through `_sample(logits, ...)`, whose
  `sampled_token_ids` (`[requests, 1]`) the engine goes on with.
- `input_batch.req_ids` is the batch's order; `scheduler_output.num_scheduled_tokens` the tokens,
  which follow the `input_batch.num_computed_tokens_cpu` first ones of the request, of which
  `requests[id].num_tokens` are known. A pass that runs all of these draws the next.
- A new request shows `req_id`, `sampling_params`, `prompt_token_ids`, `num_computed_tokens`.
- `_dummy_run(num_tokens)` runs the model without requests and gives back its hidden states. With
  LoRA, `_set_active_loras(per logits row, per token, adapters)` says what the next rows are adapted
  by; 0 is nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_core.errors import EngineError
from nnsight_vllm_worker.step import Steps
from nnsight_vllm_worker.traced import Arrival, Part
from nnsight_vllm_worker.vllm_ports import ending
from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods
from nnsight_vllm_worker.vllm_ports.scheduling import end_requests

_METHODS = {
    "execute_model": ("scheduler_output",),
    "sample_tokens": ("grammar_output",),
    "_model_forward": (),
    "_sample": ("logits",),
    "_dummy_run": ("num_tokens",),
    "get_model": (),
}


class RunnerV1:
    """Calls `Steps` from one V1 runner, by wrapping methods on the instance."""

    def __init__(self, runner: Any) -> None:
        check_methods(runner, _METHODS)
        check_attributes(runner, ("input_batch", "execute_model_state", "device", "vllm_config"))
        check_attributes(runner, ("requests", "lora_config", "is_pooling_model"))
        check_methods(runner, {"_set_active_loras": ("prompt_lora_mapping", "token_lora_mapping")})
        check_attributes(runner.input_batch, ("req_ids", "num_computed_tokens_cpu"))
        ending.check()
        if getattr(runner, "use_v2_model_runner", False):
            raise EngineError("This port is for vLLM's V1 model runner.")
        _check_kind(runner)
        self._runner = runner
        self._scheduled: dict[str, int] = {}

    @property
    def model(self) -> torch.nn.Module:
        """The loaded model."""
        return self._runner.get_model()

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._runner.device

    @torch.inference_mode()
    def run_once(self, tokens: int, requests: int) -> None:
        """Run the model on so many tokens, and the logits of so many requests, for nobody."""
        hidden, _ = self._runner._dummy_run(tokens)
        if self._runner.lora_config is not None:
            self._runner._set_active_loras((0,) * requests, (0,) * tokens, set())
        model: Any = self.model
        model.compute_logits(hidden[:requests])

    def attach(self, steps: Steps) -> None:
        """From now on, report every step."""
        runner = self._runner
        execute, forward = runner.execute_model, runner._model_forward
        sample_tokens, sample = runner.sample_tokens, runner._sample

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            new = [
                Arrival(
                    request.req_id,
                    request.prompt_token_ids or [],
                    request.sampling_params,
                    request.num_computed_tokens,
                )
                for request in scheduler_output.scheduled_new_reqs
            ]
            steps.requests(new, scheduler_output.finished_req_ids)
            self._scheduled = scheduler_output.num_scheduled_tokens
            return execute(scheduler_output, *args, **kwargs)

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            if self._scheduled and steps.tracing.requests:
                steps.begin(self._batch())
            return forward(*args, **kwargs)

        def sample_all(*args: Any, **kwargs: Any) -> Any:
            state = runner.execute_model_state
            if state is not None:
                steps.logits(state.logits)
            output = sample_tokens(*args, **kwargs)
            ended = steps.end()
            if ended:
                end_requests(output, ended)
            return output

        def sample_ids(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            steps.samples(output.sampled_token_ids)
            return output

        runner.execute_model, runner._model_forward = execute_model, model_forward
        runner.sample_tokens, runner._sample = sample_all, sample_ids

    def _batch(self) -> list[Part]:
        """Each request's part in the pass that is about to run, in the order of its rows."""
        runner = self._runner
        batch = runner.input_batch
        return [
            Part(
                request,
                self._scheduled[request],
                int(batch.num_computed_tokens_cpu[row]),
                runner.requests[request].num_tokens,
            )
            for row, request in enumerate(batch.req_ids)
        ]


def _check_kind(runner: Any) -> None:
    config = runner.vllm_config.model_config
    kinds = {
        "makes embeddings and draws no tokens, so a trace has no steps": runner.is_pooling_model,
        "has an encoder, which runs apart from the steps of a request": config.is_encoder_decoder,
        "draws many tokens at once, so a step is not a token": getattr(
            config, "is_diffusion", False
        ),
    }
    for kind, found in kinds.items():
        if found:
            raise EngineError(f"{config.model} {kind}: it cannot be traced yet.")
