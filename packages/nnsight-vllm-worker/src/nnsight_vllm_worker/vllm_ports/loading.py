"""When a model has been loaded, and nothing has been compiled yet.

Relies on (vLLM 0.26.0 and 0.27.1): the extension's module is imported when the worker's class is
known and before it loads the model; `vllm.v1.worker.gpu_worker.Worker.load_model` (the CPU worker
inherits it) loads it, and what compiles, profiles and captures it comes later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnsight_vllm_worker.vllm_ports.checks import check_methods


def when_loaded(extension: str, call: Callable[[Any], None]) -> None:
    """Call `call(worker)` after a worker with this extension class has loaded its model."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_worker import Worker

    check_methods(Worker, {"load_model": ("load_dummy_weights",)})
    plain = Worker.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.vllm_config.parallel_config.worker_extension_cls == extension:
            with set_current_vllm_config(self.vllm_config):
                call(self)

    Worker.load_model = load_model  # type: ignore[method-assign]
