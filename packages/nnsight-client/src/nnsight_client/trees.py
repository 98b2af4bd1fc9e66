"""What a client knows of a model's tree: the server's, as it was earlier, or a provisional one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from nnsight_core.errors import ProtocolError
from nnsight_core.tree import ModelTree
from nnsight_core.tree_cache import keep_tree, load_tree

AGAIN = 30.0
"""Seconds in which a server that could not be reached is not asked again."""
_unreachable: dict[str, float] = {}


def learn(
    repo: str, url: str | None, backend_for: Callable[[dict[str, Any]], Any]
) -> tuple[ModelTree, bool]:
    """The tree of a model, and whether it is surely the engine's own.

    Args:
        url: the model's server, if it has one.
        backend_for: gives the backend that reaches it, or raises.

    Raises:
        ValueError: no server is named, and transformers has no such model.
        ProtocolError: the server cannot be reached, and nothing else knows the tree; or it is none.
    """
    try:
        if url is not None and time.monotonic() - _unreachable.get(url, -AGAIN) < AGAIN:
            found = recalled(repo, url)
            if found is not None:
                return found, False
        tree = backend_for({}).describe()
    except (ValueError, ProtocolError) as error:
        if isinstance(error, ProtocolError) and not _is_unreachable(error):
            raise
        found = recalled(repo, url) or _provisional(repo)
        if found is None:
            raise
        if url is not None:
            _unreachable[url] = time.monotonic()
        return found, False
    if url is not None:
        _unreachable.pop(url, None)
        keep_tree(tree, repo, url, {})
    return tree, True


def recalled(repo: str, url: str | None) -> ModelTree | None:
    """The tree that a server said when it was last asked."""
    return None if url is None else load_tree(repo, url, {})


def _is_unreachable(error: ProtocolError) -> bool:
    """Whether nobody answered, rather than somebody who is no server of ours."""
    return isinstance(error.__cause__, httpx.TransportError)


def _provisional(repo: str) -> ModelTree | None:
    from nnsight_client.provisional import provisional_tree

    try:
        return provisional_tree(repo)
    except (OSError, ValueError, ImportError):
        return None  # names are then taken as they come, and checked where the model runs
