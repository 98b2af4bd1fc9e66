"""The scheduler: prompts that run in one piece, requests that a block has ended, held requests.

`scheduler_cls` names `scheduler` below, which makes vLLM's own scheduler with these additions; the
last is in `holding`.

Relies on (vLLM 0.26.0 and 0.27.1, `vllm/v1/core/sched/scheduler.py`):
- `SchedulerConfig.scheduler_cls` may name a function, which is called with what the class would be;
  `async_scheduling` says whether `AsyncScheduler` or `Scheduler` is the default.
- `schedule` asks `kv_cache_manager.get_computed_blocks(request)` about a waiting request before it
  looks at `scheduler_config.enable_chunked_prefill` and `long_prefill_token_threshold`, with which
  it decides how much of the prompt to run. Without chunks, a prompt that finds no room waits.
- `update_from_output` hands each request's new tokens to `_update_request_with_output`, which says
  whether the request has ended, with `status` and `stop_reason` set on it.
- attributes of a `ModelRunnerOutput` reach the scheduler, also from another process.
"""

from __future__ import annotations

import logging
from typing import Any

from nnsight_core.outputs import STOPPED
from nnsight_vllm_worker.vllm_ports import orphans
from nnsight_vllm_worker.vllm_ports.checks import check_attributes, check_methods
from nnsight_vllm_worker.vllm_ports.holding import Holding, listen

KEY = "nnsight_key"
"""The entry of `extra_args` that names a request; its sequences share it."""
WHOLE = "nnsight_whole"
"""The entry of `extra_args` that says that a prompt has to run in one piece."""
_ENDED = "nnsight_ended"


def end_requests(output: Any, requests: list[str]) -> None:
    """Say with a step's output which requests blocks have ended in it."""
    if not hasattr(output, "get_output"):
        setattr(output, _ENDED, requests)
        return
    take = output.get_output

    def get_output() -> Any:
        taken = take()
        setattr(taken, _ENDED, requests)
        return taken

    output.get_output = get_output


def silence() -> None:
    """Keep vLLM from warning of a scheduler that is not its own; ours is, but for what is above."""
    logging.getLogger("vllm.config.scheduler").addFilter(
        lambda record: "custom scheduler class" not in str(record.msg)
    )


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's scheduler for this configuration, with our additions.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    config = kwargs.get("vllm_config") or args[0]
    base: Any = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler

    class Ours(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_methods(self, {"schedule": (), "update_from_output": ("model_runner_output",)})
            check_methods(self, {"_update_request_with_output": ("request", "new_token_ids")})
            check_attributes(self, ("scheduler_config", "max_num_scheduled_tokens"))
            check_methods(self.kv_cache_manager, {"get_computed_blocks": ("request",)})
            settings = self.scheduler_config
            self._chunks = settings.enable_chunked_prefill
            self._threshold = settings.long_prefill_token_threshold
            self._ended: list[str] = []
            find = self.kv_cache_manager.get_computed_blocks

            def get_computed_blocks(request: Any) -> Any:
                self._in_pieces(not self._whole(request))
                return find(request)

            self.kv_cache_manager.get_computed_blocks = get_computed_blocks
            self.holding = Holding(self, KEY)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            try:
                with self.holding.kept_out():
                    return super().schedule(*args, **kwargs)
            finally:
                self._in_pieces(True)

        def has_requests(self) -> bool:
            # For held ones alone there is no step to make, and steps of nothing would burn a core.
            return super().has_requests() and not self.holding.is_all()

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            self._ended = getattr(model_runner_output, _ENDED, [])
            return super().update_from_output(scheduler_output, model_runner_output)

        def _update_request_with_output(
            self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
        ) -> tuple[list[int], bool]:
            made, over = super()._update_request_with_output(
                request, new_token_ids, *args, **kwargs
            )
            if not over and request.request_id in self._ended:
                # Of a request that "stopped", vLLM leaves the last token out of the text, as if it
                # were an end token; `convert` gives the reason its name.
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                request.stop_reason = STOPPED
                over = True
            return made, over

        def _whole(self, request: Any) -> bool:
            extra = request.sampling_params and request.sampling_params.extra_args
            # What has drawn a token was preempted: its prompt has been seen. What does not fit into
            # any step is refused where it is submitted; here it must not wait for ever.
            return (
                bool(extra)
                and WHOLE in extra
                and request.num_output_tokens == 0
                and request.num_tokens <= self.max_num_scheduled_tokens
            )

        def _in_pieces(self, may: bool) -> None:
            self.scheduler_config.enable_chunked_prefill = may and self._chunks
            self.scheduler_config.long_prefill_token_threshold = self._threshold if may else 0

    orphans.end_with_parent()
    orphans.core_ignores_interrupts()
    listen()
    return Ours(*args, **kwargs)
