"""The tokens that a sampler draws, reported before vLLM looks up their logprobs.

Relies on (vLLM 0.26.0 and 0.27.1): the runner's method that samples for requests calls
`sampler.sample(logits, ...)`, which gives the ids (`[requests]`) first. Dummy runs call the sampler
without that method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nnsight_vllm_worker.vllm_ports.checks import check_methods


class Sampling:
    """The sampling of one runner.

    Args:
        method: the name of the runner's method that samples for requests.
        arguments: what its sampler's `sample` takes first.

    Attributes:
        running: whether it samples for requests.
    """

    def __init__(self, runner: Any, method: str, arguments: tuple[str, ...]) -> None:
        check_methods(runner.sampler, {"sample": arguments})
        self.running = False
        self._runner = runner
        self._method = method

    def attach(self, samples: Callable[[Tensor], None]) -> None:
        """From now on, report the ids, `[requests, 1]`; what is written to them counts."""
        sampler = self._runner.sampler
        sample, draw = getattr(self._runner, self._method), sampler.sample

        def sample_ids(*args: Any, **kwargs: Any) -> Any:
            self.running = True
            try:
                return sample(*args, **kwargs)
            finally:
                self.running = False

        def draw_ids(*args: Any, **kwargs: Any) -> Any:
            drawn, processed = draw(*args, **kwargs)
            if self.running:
                samples(drawn.view(-1, 1))
            return drawn, processed

        setattr(self._runner, self._method, sample_ids)
        sampler.sample = draw_ids
