"""How a port checks what it relies on."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from nnsight_core.errors import EngineError


def check_methods(owner: Any, methods: Mapping[str, Iterable[str]]) -> None:
    """Refuse an object whose methods are not those that a port was written for.

    Args:
        methods: names of methods, each with the parameters that it must have.

    Raises:
        EngineError: one is missing, or has other parameters.
    """
    for name, wanted in methods.items():
        method = getattr(owner, name, None)
        if not callable(method):
            raise EngineError(_lacks(owner, f"the method `{name}`"))
        known = inspect.signature(method).parameters
        missing = [p for p in wanted if p not in known]
        if missing:
            raise EngineError(_lacks(owner, f"the parameter `{missing[0]}` of `{name}`"))


def check_attributes(owner: Any, names: Iterable[str]) -> None:
    """Refuse an object that lacks attributes which a port reads.

    Raises:
        EngineError: one is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            raise EngineError(_lacks(owner, f"the attribute `{name}`"))


def check_kind(config: Any, pooling: bool) -> None:
    """Refuse models whose requests are no sequences of steps that draw one token each.

    Raises:
        EngineError: the model is of such a kind.
    """
    kinds = {
        "makes embeddings and draws no tokens, so a trace has no steps": pooling,
        "has an encoder, which runs apart from the steps of a request": config.is_encoder_decoder,
        "draws many tokens at once, so a step is not a token": getattr(
            config, "is_diffusion", False
        ),
    }
    for kind, found in kinds.items():
        if found:
            raise EngineError(f"{config.model} {kind}: it cannot be traced yet.")


def check_room(config: Any, tokens: int) -> None:
    """Refuse an engine whose passes are too small for the one that its locations are recorded with.

    Raises:
        EngineError: they are.
    """
    most = config.max_num_batched_tokens
    if most < tokens:
        raise EngineError(
            f"max_num_batched_tokens={most} cannot be had: when the engine starts, its model is "
            f"run on {tokens} tokens to see what its locations hold. Give it {tokens} or more."
        )


def _lacks(owner: Any, what: str) -> str:
    import vllm

    name = getattr(owner, "__name__", type(owner).__name__)
    return (
        f"vLLM {vllm.__version__}'s {name} lacks {what}, on which nnsight relies. "
        "Versions 0.26.0 and 0.27.1 are known to work."
    )
