"""The V1 model runner: when requests come and go, what the rows are, where logits and ids pass.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/worker/gpu_model_runner.py` and its CPU subclass):
- `execute_model(scheduler_output)` updates the batch, asks
  `_determine_batch_execution_and_padding(force_eager=)` once per step that has tokens how it is to
  run, and runs the model and its `compute_logits`; it leaves `execute_model_state` with `logits`,
  or None where there is nothing to sample.
- `sample_tokens(grammar_output)` samples from that state through `_sample(logits, ...)`. That calls
  `sampler.sample(logits, sampling_metadata)`, which gives the ids (`[requests]`) first, and then
  looks up their logprobs and gives both to the engine.
- `input_batch.req_ids` is the batch's order; `scheduler_output.num_scheduled_tokens` the tokens,
  which follow the `input_batch.num_computed_tokens_cpu` first ones of the request, of which
  `requests[id].num_tokens` are known. A pass that runs all of these draws the next.
- `_dummy_run(num_tokens, is_profile=True)` runs the model without requests, graphs and keys and
  values, and gives back its hidden states. With LoRA, `_set_active_loras(per logits row, per token,
  adapters)` says what the next rows are adapted by; 0 is nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_vllm_worker.record import SIZES
from nnsight_vllm_worker.steady import Repeats
from nnsight_vllm_worker.step import Passes
from nnsight_vllm_worker.traced import Part
from nnsight_vllm_worker.vllm_ports import ending
from nnsight_vllm_worker.vllm_ports.arrivals import arrivals
from nnsight_vllm_worker.vllm_ports.checks import (
    check_attributes,
    check_kind,
    check_methods,
    check_room,
)
from nnsight_vllm_worker.vllm_ports.drawn import Drawn
from nnsight_vllm_worker.vllm_ports.sampling import Sampling
from nnsight_vllm_worker.vllm_ports.scheduling import end_requests

_METHODS = {
    "execute_model": ("scheduler_output",),
    "sample_tokens": ("grammar_output",),
    "_determine_batch_execution_and_padding": ("force_eager",),
    "_sample": ("logits",),
    "_dummy_run": ("num_tokens", "is_profile"),
    "_set_active_loras": ("prompt_lora_mapping", "token_lora_mapping"),
    "get_model": (),
}


class RunnerV1:
    """Calls `Passes` from one V1 runner, by wrapping methods on the instance."""

    def __init__(self, runner: Any) -> None:
        check_methods(runner, _METHODS)
        check_attributes(runner, ("input_batch", "execute_model_state", "device", "vllm_config"))
        check_attributes(runner, ("requests", "lora_config", "is_pooling_model", "sampler"))
        check_attributes(runner.input_batch, ("req_ids", "num_computed_tokens_cpu"))
        ending.check()
        check_kind(runner.vllm_config.model_config, pooling=runner.is_pooling_model)
        check_room(runner.vllm_config.scheduler_config, max(tokens for tokens, _ in SIZES))
        self._runner = runner
        self._scheduled: dict[str, int] | None = None
        self._sampling = Sampling(runner, "_sample", ("logits", "sampling_metadata"))
        self._repeats = Repeats()
        self._drawn = Drawn()

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
        hidden, _ = self._runner._dummy_run(tokens, is_profile=True)
        if self._runner.lora_config is not None:
            self._runner._set_active_loras((0,) * requests, (0,) * tokens, set())
        model: Any = self.model
        model.compute_logits(hidden[:requests])

    def attach(self, steps: Passes) -> None:
        """From now on, report every step."""
        runner = self._runner
        execute, determine = runner.execute_model, runner._determine_batch_execution_and_padding
        sample_tokens = runner.sample_tokens

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._drawn.gone(scheduler_output.finished_req_ids)
            steps.requests(arrivals(scheduler_output), scheduler_output.finished_req_ids)
            self._scheduled = scheduler_output.num_scheduled_tokens
            try:
                output = execute(scheduler_output, *args, **kwargs)
            finally:
                self._scheduled = None
            steps.forwarded()
            return output

        def determine_batch(*args: Any, **kwargs: Any) -> Any:
            # Dummy runs, for which nothing is scheduled, ask as well.
            if self._scheduled and steps.busy:
                self._begin(steps, self._scheduled)
                steps.listen()
                kwargs["force_eager"] = kwargs.get("force_eager", False) or not steps.graphs
            return determine(*args, **kwargs)

        def sample_all(*args: Any, **kwargs: Any) -> Any:
            state = runner.execute_model_state
            if state is not None:
                steps.logits(state.logits)
            output = sample_tokens(*args, **kwargs)
            ended = steps.end()
            if ended:
                end_requests(output, ended)
            return output

        runner.execute_model = execute_model
        runner._determine_batch_execution_and_padding = determine_batch
        runner.sample_tokens = sample_all
        self._sampling.attach(steps.samples)

    def _begin(self, steps: Passes, scheduled: dict[str, int]) -> None:
        held = self._runner.input_batch
        tokens = [(request, scheduled[request]) for request in held.req_ids]
        computed = held.num_computed_tokens_cpu[: len(tokens)]
        if steps.lasting and self._repeats.goes_on(tokens, computed):
            self._drawn.again()
            steps.again()
            return
        batch = self._drawn.begin(self._batch(scheduled))
        self._repeats.begin(tokens, [part.computed for part in batch])
        steps.begin(batch)

    def _batch(self, scheduled: dict[str, int]) -> list[Part]:
        """Each request's part in the pass that is about to run, in the order of its rows."""
        runner = self._runner
        batch = runner.input_batch
        return [
            Part(
                request,
                scheduled[request],
                int(batch.num_computed_tokens_cpu[row]),
                runner.requests[request].num_tokens,
            )
            for row, request in enumerate(batch.req_ids)
        ]
