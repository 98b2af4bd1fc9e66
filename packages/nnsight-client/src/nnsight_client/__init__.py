"""nnsight without an engine: traces run on a server, with the front end of every backend."""

from nnsight_client.configuration import configure
from nnsight_client.model import VLLM

__all__ = ["VLLM", "configure"]
