"""Taps: the locations that are reachable where the model runs compiled, by pattern.

A pattern is a location's name, `model.layers.3.mlp.output` or `.input`, in which `*` stands for one
part of the path or a piece of it. `"resid"` stands for the output of every decoder layer, which is
where the residual stream can be read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from nnsight_core.tree import ModelTree

RESID = "resid"
"""The default: the residual stream after every layer."""
_SIDES = (".output", ".input")


def resolve(tree: ModelTree, patterns: str | Iterable[str]) -> list[str]:
    """The locations that patterns name, in the tree's order.

    Raises:
        ValueError: a pattern names nothing on this model; the nearest names are in the message.

    Example:
        >>> resolve(tree, ["resid", "model.layers.*.mlp.output"])
    """
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = _residual(tree) if pattern == RESID else _matching(tree, pattern)
        found.update(dict.fromkeys(names))
    order = {path: number for number, path in enumerate(tree.modules)}
    return sorted(found, key=lambda name: (order[name.rpartition(".")[0]], name))


def _residual(tree: ModelTree) -> list[str]:
    lists = [path for path, info in tree.modules.items() if info.cls == "ModuleList"]
    if not lists:
        return []
    layers = min(lists, key=lambda path: (path.count("."), -len(tree.modules[path].children)))
    return [f"{layers}.{child}.output" for child in tree.modules[layers].children]


def _matching(tree: ModelTree, pattern: str) -> list[str]:
    path, dot, side = pattern.rpartition(".")
    if dot + side not in _SIDES or ".source." in pattern:
        raise ValueError(
            f"taps: {pattern!r} does not name a side. A tap is 'path.output' or 'path.input', in "
            f"which * stands for one part of the path, or {RESID!r}."
        )
    wanted = re.compile(re.escape(path).replace(r"\*", "[^.]*"))
    names = [
        f"{at}.{side}"
        for at, info in tree.modules.items()
        if wanted.fullmatch(at) and info.same_as is None
    ]
    if not names:
        known = {re.sub(r"\.\d+(?=\.|$)", ".*", at): None for at in tree.modules if at}
        near = difflib.get_close_matches(path, [*known, *tree.modules], 3, 0.3)
        raise ValueError(
            f"taps: {pattern!r} names no module of {tree.model}. Nearest: "
            f"{', '.join(f'{at}.{side}' for at in near) or 'none'}."
        )
    return names
