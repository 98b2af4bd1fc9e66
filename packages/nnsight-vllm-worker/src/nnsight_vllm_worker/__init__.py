"""nnsight on vLLM, in process: the `VLLM` model, and what runs inside vLLM's workers."""

from nnsight_vllm_worker.model import VLLM

__all__ = ["VLLM"]
