"""The V2 model runner: when requests come and go, what the rows are, where logits and ids pass.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/worker/gpu/model_runner.py`):
- `execute_model(scheduler_output, dummy_run=)` updates the requests' states, asks
  `cudagraph_manager.dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras=)` once
  how the step is to run, and runs the model. A description of mode NONE, with the numbers as they
  are, is a step without graphs. A step of mode FULL runs `cudagraph_manager.run_fullgraph(desc)`.
- the batch's order is `sort_batch_req_ids(num_scheduled_tokens, decode_query_len)`. Of a request,
  `req_states.num_computed_tokens_np` tokens have run and `req_states.prefill_len.np` were known
  when it came; each later one is known when it is drawn.
- `sample_tokens` calls `sample(hidden_states, input_batch, grammar_output)`, which calls the
  model's `compute_logits` (`[requests, vocab]`) and then `sampler.sample(logits, ...)`. That gives
  the ids (`[requests]`) first; what is made of them, their logprobs among it, comes later.
- a request that was preempted comes again among the new ones, under its old id.
- `_dummy_run(num_tokens, skip_attn=True, is_profile=True)` runs the model without requests, graphs
  and keys and values, and gives back its hidden states.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_vllm_worker.record import SIZES
from nnsight_vllm_worker.steady import Repeats
from nnsight_vllm_worker.step import Passes
from nnsight_vllm_worker.traced import Part
from nnsight_vllm_worker.vllm_ports import breaks, ending
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
    "execute_model": ("scheduler_output", "dummy_run"),
    "sample_tokens": ("grammar_output",),
    "sample": ("hidden_states", "input_batch", "grammar_output"),
    "_dummy_run": ("num_tokens", "skip_attn", "is_profile"),
    "_set_active_loras": ("prompt_lora_mapping", "token_lora_mapping"),
    "get_model": (),
}


class RunnerV2:
    """Calls `Passes` from one V2 runner, by wrapping methods on the instance."""

    def __init__(self, runner: Any) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu import cudagraph_utils, model_runner

        check_methods(runner, _METHODS)
        check_methods(model_runner, {"sort_batch_req_ids": ("decode_query_len",)})
        check_methods(cudagraph_utils, {"BatchExecutionDescriptor": ("cg_mode", "num_reqs")})
        check_attributes(runner, ("req_states", "decode_query_len", "device", "vllm_config"))
        check_attributes(runner, ("lora_config", "is_pooling_model"))
        states = ("num_computed_tokens_np", "prefill_len", "req_id_to_index")
        check_attributes(runner.req_states, states)
        ending.check()
        breaks.keep_forwards()
        check_kind(runner.vllm_config.model_config, pooling=runner.is_pooling_model)
        check_room(runner.vllm_config.scheduler_config, max(tokens for tokens, _ in SIZES))
        self._runner = runner
        self._modes = CUDAGraphMode
        self._sort = model_runner.sort_batch_req_ids
        self._describe = cudagraph_utils.BatchExecutionDescriptor
        self._scheduled: dict[str, int] | None = None
        self._breaks: breaks.At = ()
        self._repeats = Repeats()
        self._drawn = Drawn()
        self._indices: list[int] = []

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
        hidden, _ = self._runner._dummy_run(tokens, skip_attn=True, is_profile=True)
        if self._runner.lora_config is not None:
            self._runner._set_active_loras((0,) * requests, (0,) * tokens, set())
        model: Any = self.model
        model.compute_logits(hidden[:requests])

    def attach(self, steps: Passes) -> None:
        """From now on, report every step."""
        runner, graphs = self._runner, self._runner.cudagraph_manager
        model: Any = self.model
        modes = self._modes
        check_methods(graphs, {"dispatch": ("num_reqs", "num_tokens", "num_active_loras")})
        check_attributes(graphs, ("graphs", "pool", "device"))
        broken = breaks.Breaks(graphs, steps.taps)
        execute, dispatch, full = runner.execute_model, graphs.dispatch, graphs.run_fullgraph
        sampling = Sampling(runner, "sample", ("logits",))
        sample_tokens, head = runner.sample_tokens, model.compute_logits

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run") or len(args) > 1:
                return execute(scheduler_output, *args, **kwargs)
            self._drawn.gone(scheduler_output.finished_req_ids)
            steps.requests(arrivals(scheduler_output), scheduler_output.finished_req_ids)
            self._scheduled = scheduler_output.num_scheduled_tokens
            try:
                output = execute(scheduler_output, *args, **kwargs)
            finally:
                self._scheduled = None
            steps.forwarded()
            return output

        def dispatch_step(
            num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int
        ) -> Any:
            self._breaks = ()
            if self._scheduled and steps.busy:
                self._begin(steps, self._scheduled)
            desc = dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras)
            if steps.graphs or not self._scheduled:
                return desc
            at = steps.breaks
            if at and desc.cg_mode == modes.FULL and broken.ready(desc, at):
                self._breaks = at
                return desc
            steps.listen()
            return self._describe(
                cg_mode=modes.NONE,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                num_active_loras=desc.num_active_loras,
            )

        def run_fullgraph(desc: Any) -> Any:
            if not self._breaks:
                return full(desc)
            return broken.run(desc, self._breaks, steps.visit, full)

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = head(*args, **kwargs)
            # Outside of it, they are for logprobs of prompts.
            if sampling.running:
                steps.logits(logits)
            return logits

        def sample_all(*args: Any, **kwargs: Any) -> Any:
            output = sample_tokens(*args, **kwargs)
            ended = steps.end()
            if ended:
                end_requests(output, ended)
            return output

        runner.execute_model, graphs.dispatch = execute_model, dispatch_step
        graphs.run_fullgraph = run_fullgraph
        runner.sample_tokens, model.compute_logits = sample_all, compute_logits
        sampling.attach(steps.samples)

    def _begin(self, steps: Passes, scheduled: dict[str, int]) -> None:
        tokens, computed = [*scheduled.items()], self._runner.req_states.num_computed_tokens_np
        if steps.lasting and self._repeats.goes_on(tokens, computed[self._indices]):
            self._drawn.again()
            steps.again()
            return
        batch = self._drawn.begin(self._batch(scheduled))
        indices = self._runner.req_states.req_id_to_index
        self._indices = [indices[part.request] for part in batch]
        self._repeats.begin(tokens, [part.computed for part in batch])
        steps.begin(batch)

    def _batch(self, scheduled: dict[str, int]) -> list[Part]:
        """Each request's part in the pass that is about to run, in the order of its rows."""
        states = self._runner.req_states
        parts = []
        for request in self._sort(scheduled, self._runner.decode_query_len):
            index = states.req_id_to_index[request]
            tokens = scheduled[request]
            computed = int(states.num_computed_tokens_np[index])
            known = max(int(states.prefill_len.np[index]), computed + tokens)
            parts.append(Part(request, tokens, computed, known))
        return parts
