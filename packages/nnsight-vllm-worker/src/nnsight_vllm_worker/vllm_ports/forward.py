"""The model's plain Python forward on a compiled engine, in the passes that need it.

A compiled model runs no Python of its modules. vLLM lets one pass by: a flag of the forward context
says that this pass is not to run the compiled code.

What the compiled code is made of must be part of the key under which vLLM keeps it: the taps are in
`additional_config`, which vLLM hashes.

Relies on (vLLM 0.26.0 and 0.27.1):
- `vllm.forward_context.get_forward_context().skip_compiled`, which a compiled module's `__call__`
  reads before it enters what was compiled (`vllm/compilation/decorators.py`).
- the module that is compiled lies within the model that the runner calls, so that the flag can be
  set where the model's own forward begins.
- `compilation_config.mode` is `CompilationMode.NONE` on an engine that compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from nnsight_core.errors import EngineError
from nnsight_vllm_worker.vllm_ports.checks import check_attributes

CONFIG = "nnsight"
"""Our entry of vLLM's `additional_config`."""


def compiles(config: Any) -> bool:
    """Whether an engine compiles its model; one that does not runs every pass as plain Python."""
    return config.compilation_config.mode.name != "NONE"


def taps_of(config: Any) -> list[str]:
    """The patterns of an engine's taps; none where every pass runs plain Python anyway."""
    if not compiles(config):
        return []
    return list((config.additional_config or {}).get(CONFIG, {}).get("taps", ()))


def plain_when(model: nn.Module, wanted: Callable[[], bool]) -> None:
    """Run a model's plain forward in the passes for which `wanted()` is true.

    Raises:
        EngineError: this vLLM lacks what the port relies on.
    """
    from vllm import forward_context

    check_attributes(forward_context.ForwardContext, ("skip_compiled",))
    if not getattr(model, "do_not_compile", True):
        raise EngineError(
            f"{type(model).__name__} is compiled as a whole, so no pass of it can run as plain "
            "Python. Build the engine with enforce_eager=True."
        )
    forward = model.forward

    def plain_or_not(*args: Any, **kwargs: Any) -> Any:
        if wanted():
            forward_context.get_forward_context().skip_compiled = True
        return forward(*args, **kwargs)

    model.forward = plain_or_not
