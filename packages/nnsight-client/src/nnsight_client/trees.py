"""What a client knows of a model's tree: the server's, as it was earlier, or a provisional one."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

import httpx

from nnsight_core.errors import ProtocolError
from nnsight_core.tree import ModelTree
from nnsight_core.tree_cache import keep_tree, load_tree

AGAIN = 30.0
"""Seconds in which a server that could not be reached is not asked again."""
_unreachable: dict[str, float] = {}


def learn(repo: str, url: str, ask: Callable[[], ModelTree]) -> tuple[ModelTree, bool]:
    """The tree of a served model, and whether it is surely the engine's own.

    Args:
        ask: asks the server at `url` for it.

    Raises:
        ProtocolError: the server cannot be reached, and nothing else knows the tree; or it is none.
    """
    since = time.monotonic() - _unreachable.get(url, -AGAIN)
    known = recalled(repo, url) if since < AGAIN else None
    if known is not None:
        return known, False
    try:
        tree = ask()
    except ProtocolError as error:
        if not _is_away(error):
            raise
        known = recalled(repo, url) or provisional(repo)
        if known is None:
            raise
        _unreachable[url] = time.monotonic()
        return known, False
    _unreachable.pop(url, None)
    keep_tree(tree, repo, url, {})
    return tree, True


def recalled(repo: str, url: str) -> ModelTree | None:
    """The tree as a server said it when it was last asked."""
    return load_tree(repo, url, {})


def _is_away(error: ProtocolError) -> bool:
    """Whether nobody answered, and not somebody who is no server of ours or cannot be trusted."""
    cause = error.__cause__
    if not isinstance(cause, httpx.TransportError):
        return False
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause is None


def provisional(repo: str) -> ModelTree | None:
    """The tree as transformers' classes have it; None where it has none, or cannot be asked."""
    from nnsight_client.provisional import provisional_tree

    try:
        return provisional_tree(repo)
    except (OSError, ValueError, ImportError):
        return None  # names are then taken as they come, and checked where the model runs
