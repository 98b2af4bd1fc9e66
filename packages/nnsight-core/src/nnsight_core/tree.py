"""The module tree as data: what a block can name on a model, with dtypes and symbolic shapes.

A worker records it from the model that it runs; a server hands it out; a client keeps it. The tree
that users touch (`nnsight_core.node`) is built from it.
"""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

TOKENS = "tokens"
"""A dimension with one entry per token of the request's step."""
REQUESTS = "1"
"""A dimension with one entry per request, so 1 for the request that a block runs for."""

Dim = int | str


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorInfo(_Data):
    """One tensor of a location's value.

    Attributes:
        at: how it is reached in the value: empty for a bare tensor, `[0]`, `['hidden_states']`.
        dtype: its dtype's name, such as `bfloat16`.
        shape: its dimensions; `tokens` for the one that counts tokens, `1` for one that counts
            requests, and `?` for one that varies in some other way (which cannot be served).
        shared: how the ranks of an engine hold it, where not each holds all of it: its `columns`,
            or summands of it. A block sees the whole.
    """

    at: str = ""
    dtype: str
    shape: tuple[Dim, ...]
    shared: Literal["columns", "sum"] | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {' × '.join(str(d) for d in self.shape) or 'scalar'}"


class ModuleInfo(_Data):
    """One module.

    Attributes:
        cls: the class's name.
        children: names of its children, in order.
        same_as: the path under which the same module object was met first, if it was.
        repeats: whether one forward pass runs it more than once.
        output: the tensors of its output; None if it was not recorded or never runs.
        input: the tensors of `(args, kwargs)`.
        operations: names of its `.source` operations, in order; None if its source cannot be had.
    """

    cls: str
    children: tuple[str, ...] = ()
    same_as: str | None = None
    repeats: bool = False
    output: tuple[TensorInfo, ...] | None = None
    input: tuple[TensorInfo, ...] | None = None
    operations: tuple[str, ...] | None = None


class ModelTree(_Data):
    """A model's modules by path (the root's path is empty), and what made the record.

    Attributes:
        model: the name under which the model was loaded.
        engine: what ran it, such as `vllm 0.27.1`.
        provisional: whether it was read from classes without running them, so that an engine has
            still to confirm it.
        compiled: whether steps run compiled where nothing keeps them from it.
        taps: the locations that are reachable where they do, such as `model.layers.3.output`.
        ranks: over how many ranks its layers are split.

    Example:
        >>> tree = ModelTree.model_validate_json(text)
        >>> tree.modules["model.layers.3.mlp"].output[0].shape
        ('tokens', 4096)
    """

    version: Literal[1] = 1
    model: str
    engine: str
    provisional: bool = False
    compiled: bool = False
    taps: tuple[str, ...] = ()
    ranks: int = 1
    modules: dict[str, ModuleInfo] = Field(default_factory=dict)

    def nearest(self, path: str, most: int = 3) -> list[str]:
        """The paths most like one that does not exist."""
        parent, _, name = path.rpartition(".")
        known = self.modules.get(parent)
        if known is not None:
            close = difflib.get_close_matches(name, known.children, most, 0.4) or list(
                known.children[:most]
            )
            return [f"{parent}.{child}" if parent else child for child in close]
        return difflib.get_close_matches(path, self.modules, most, 0.4)

    def __str__(self) -> str:
        lines: list[str] = []
        _draw(self, "", "", lines, 0)
        return "\n".join(lines)


def _draw(tree: ModelTree, path: str, name: str, lines: list[str], depth: int) -> None:
    info = tree.modules[path]
    label = f"({name}): {info.cls}" if name else info.cls
    if info.same_as is not None:
        label += f" (the same module as {info.same_as})"
    shown = ", ".join(str(t) for t in info.output or ())
    if shown:
        label += f" → {shown}"
    lines.append("  " * depth + label)
    drawn: dict[str, str] = {}
    runs: list[tuple[str, str]] = []
    for child in info.children:
        inner = f"{path}.{child}" if path else child
        text = _shape_of(tree, inner)
        if runs and child.isdigit() and drawn.get(runs[-1][0]) == text:
            runs[-1] = (runs[-1][0], child)
        else:
            runs.append((child, child))
            drawn[child] = text
    for first, last in runs:
        inner = f"{path}.{first}" if path else first
        _draw(tree, inner, first if first == last else f"{first}-{last}", lines, depth + 1)


def _shape_of(tree: ModelTree, path: str) -> str:
    """A text that is the same for two modules which look alike, such as two layers."""
    parts: list[str] = []
    for inner, info in tree.modules.items():
        if inner == path or inner.startswith(path + "."):
            parts.append(f"{inner[len(path) :]}:{info.cls}:{info.output}")
    return "|".join(parts)
