"""Which model a server runs, and whether it is the one that was asked for."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from urllib.parse import unquote

from nnsight_core.errors import NNsightWarning

HEADER = "X-Nnsight-Model"
"""Says in an answer by which names the server knows its model; the first is the usual one."""
_HUB = re.compile(r"models--(?:.*--)?(.+)")


class Served:
    """The model of one server, as its answers name it.

    Args:
        repo: the name or folder that was asked for; None for any.
        url: the server's address, for messages.

    Attributes:
        names: by which the server knows its model; empty before it has said so.

    Example:
        >>> served = Served("openai-community/gpt2", "http://127.0.0.1:6677")
        >>> served.take({"X-Nnsight-Model": "/models/gpt2"})
        >>> served.names
        ('/models/gpt2',)
    """

    def __init__(self, repo: str | None, url: str) -> None:
        self.names: tuple[str, ...] = ()
        self._repo = repo
        self._url = url

    def take(self, headers: Mapping[str, str]) -> None:
        """An answer has come; warns once of each other model that it names."""
        said = headers.get(HEADER, "")
        names = tuple(unquote(name) for name in said.split(",") if name)
        if not names or names == self.names:
            return
        self.names = names
        if self._repo is not None and not _same(self._repo, names):
            warnings.warn(
                f"The server at {self._url} runs {names[0]!r}, and {self._repo!r} was asked for. "
                "Token ids and locations mean something else in another model: give its name, or "
                "the address of the other server.",
                NNsightWarning,
                stacklevel=2,
            )


def _same(repo: str, names: tuple[str, ...]) -> bool:
    """Whether a name or folder may be the model of these names, which the last parts decide."""
    # A folder may be named by a dot or a link, and then be called otherwise.
    asked = {repo, os.path.abspath(repo), os.path.realpath(repo)} if os.path.isdir(repo) else {repo}
    return not {_last(name) for name in asked}.isdisjoint(_last(name) for name in names)


def _last(name: str) -> str:
    """The last part of a name or folder; of one in the hub's cache, that of the repository."""
    parts = [part for part in re.split(r"[/\\]", name) if part] or [name]
    hub = [found[1] for part in parts if (found := _HUB.fullmatch(part))]
    return (hub or parts)[-1].casefold()
