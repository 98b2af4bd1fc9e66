"""What we force or default on vLLM's engine, each with its reason.

Everything else is vLLM's own default. The table in the docs and `engine_settings()` are made from
this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnsight_core.taps import RESID
from nnsight_vllm_worker.vllm_ports.forward import CONFIG

SCHEDULER = "nnsight_vllm_worker.vllm_ports.scheduling.scheduler"
EXTENSION = "nnsight_vllm_worker.worker.WorkerExtension"


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine argument that is not left to vLLM.

    Attributes:
        forced: whether another value is refused; otherwise the caller's wins.
    """

    name: str
    value: Any
    forced: bool
    reason: str


SETTINGS = (
    Setting(
        "scheduler_cls",
        SCHEDULER,
        True,
        "vLLM's own scheduler, which runs the prompt of a block that writes in one piece, and ends "
        "a request at its block's word",
    ),
    Setting(
        "worker_extension_cls",
        EXTENSION,
        True,
        "brings blocks into vLLM's workers",
    ),
)


def apply(arguments: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with ours among them.

    Args:
        arguments: vLLM's, and `taps`: patterns of the locations that stay reachable where the model
            runs compiled.

    Raises:
        ValueError: the caller asks for another value of a forced setting.
    """
    chosen = dict(arguments)
    for setting in SETTINGS:
        given = chosen.setdefault(setting.name, setting.value)
        if setting.forced and given not in (setting.value, None):
            raise ValueError(
                f"{setting.name}={given!r} cannot be had: it is {setting.value!r} here, because "
                f"{setting.reason}."
            )
        chosen[setting.name] = setting.value if setting.forced else given
    taps = chosen.pop("taps", RESID)
    patterns = [taps] if isinstance(taps, str) else list(taps)
    chosen["additional_config"] = {
        **(chosen.get("additional_config") or {}),
        CONFIG: {"taps": patterns},
    }
    for refused, reason in REFUSED.items():
        value = chosen.get(refused)
        if value is True or value not in (None, 1, False):
            raise ValueError(f"{refused}={value!r} cannot be had yet: {reason}.")
    compilation = chosen.get("compilation_config")
    passes = compilation.get("pass_config") if isinstance(compilation, dict) else None
    for refused in ("enable_sp", "fuse_gemm_comms"):
        if isinstance(passes, dict) and passes.get(refused):
            raise ValueError(
                f"pass_config.{refused}=True cannot be had yet: tokens that are dealt out over "
                "ranks are not yet put together for a block."
            )
    return chosen


REFUSED = {
    "speculative_config": "a block cannot yet see steps that verify several tokens at once",
    "pipeline_parallel_size": "a block cannot yet reach locations of several stages",
    "data_parallel_size": "values of several replicas are not yet told apart",
    "decode_context_parallel_size": "values of several ranks are not yet put together for a block",
    "prefill_context_parallel_size": "values of several ranks are not yet put together for a block",
    "enable_dbo": "a forward pass cut in two does not hold a request's rows together",
    "kv_transfer_config": "a prompt whose keys and values come from elsewhere does not run here",
    "kv_sharing_fast_prefill": "layers that leave out tokens have no rows for them",
}
