"""What blocks may do where they run.

Whoever runs blocks that came over the wire asks a policy: when a block arrives, when its text is
compiled, when its names are decoded, and for the names that every block sees. The policy of this
module lets blocks do anything, and costs nothing. Another one (nnsight-serve has one) derives from
it; it is named by its import path, so that every worker process can find it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_core.wire.messages import BlockData

Readers = dict[str, Callable[[dict[str, Any]], Any]]
"""How each type of value on the wire is decoded."""
TRUSTED_PATH = "nnsight_core.policy:TRUSTED"


class Policy:
    """A policy under which blocks may do anything.

    Attributes:
        guards: whether blocks are guarded while they run. Those that are get copies of everything
            that they could change, and no file that they name is looked into.

    Example:
        >>> class NoImports(Policy):
        ...     def guard(self, module, filename):
        ...         if any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(module)):
        ...             raise PolicyError(f"{filename}: no imports here")
        ...         return module
    """

    guards = False

    def check(self, block: BlockData) -> None:
        """Look at a block that has come; nothing of it has been decoded or run.

        Raises:
            PolicyError: it is not allowed.
        """

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        """Look at the sampling arguments of a request, as typed values.

        Raises:
            PolicyError: one of them is not allowed.
        """

    def guard(self, module: ast.Module, filename: str) -> ast.Module:
        """The text of a block, or of a function that it uses, as it is to be compiled.

        Raises:
            PolicyError: it is not allowed, with the line.
        """
        return module

    def readers(self, readers: Readers) -> Readers:
        """How the values of names are decoded, given how they would be."""
        return readers

    def scope(self, extra: dict[str, Any]) -> dict[str, Any]:
        """The names that every block and function sees besides its own.

        Args:
            extra: what whoever runs blocks has for them (`print`).
        """
        return {"__builtins__": builtins, **extra}


TRUSTED = Policy()


def policy_at(path: str) -> Policy:
    """The policy at an import path, `package.module:NAME`.

    Raises:
        ValueError: there is none.
    """
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, Policy):
        raise ValueError(f"{path!r} is no policy: it is written `package.module:NAME`.")
    return found
