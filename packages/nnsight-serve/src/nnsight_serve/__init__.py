"""nnsight served: one vLLM engine over HTTP, whose requests may carry blocks."""

from nnsight_serve.app import create_app
from nnsight_serve.settings import Settings

__all__ = ["Settings", "create_app"]
