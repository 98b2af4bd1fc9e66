"""Trees kept on disk, so that a model's names are known before its engine runs.

A tree is kept by model, engine and the engine arguments that shape it; a model in a folder is known
by its `config.json`, so that another model in the same folder is not taken for it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nnsight_core.tree import ModelTree


def load_tree(model: str, engine: str, arguments: Mapping[str, Any]) -> ModelTree | None:
    """The tree kept for a model, if there is one."""
    try:
        return ModelTree.model_validate_json(_file(model, engine, arguments).read_bytes())
    except (OSError, ValidationError):
        return None


def keep_tree(tree: ModelTree, model: str, engine: str, arguments: Mapping[str, Any]) -> None:
    """Keep a tree; a disk that does not take it is no error."""
    file = _file(model, engine, arguments)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(tree.model_dump_json())
        new.replace(file)
    except OSError:
        return


def _file(model: str, engine: str, arguments: Mapping[str, Any]) -> Path:
    config = Path(model) / "config.json"
    identity = config.read_bytes() if config.is_file() else b""
    said = f"{model}\0{engine}\0{sorted((k, repr(v)) for k, v in arguments.items())}\0".encode()
    name = hashlib.blake2b(said + identity, digest_size=16).hexdigest()
    return cache_folder("trees") / f"{name}.json"


def cache_folder(what: str) -> Path:
    """Where things of one kind are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nnsight" / what
