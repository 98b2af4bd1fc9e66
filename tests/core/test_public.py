"""What the package exports."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import nnsight_core

FOLDER = Path(nnsight_core.__file__).parent


def test_what_is_imported_at_the_top_is_what_is_exported() -> None:
    tree = ast.parse((FOLDER / "__init__.py").read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    ours = {a.name: n.module for n in imports for a in n.names if n.module != "typing"}
    assert set(nnsight_core.__all__) == set(ours)
    assert nnsight_core.__all__ == sorted(nnsight_core.__all__)
    for name, module in ours.items():
        assert getattr(nnsight_core, name) is getattr(importlib.import_module(module), name)
    assert set(nnsight_core.__all__) <= set(dir(nnsight_core))
    with pytest.raises(AttributeError, match="has no attribute 'kepe'"):
        nnsight_core.kepe


def test_every_error_and_warning_is_exported() -> None:
    raised = {n for n, v in vars(nnsight_core.errors).items() if isinstance(v, type)}
    assert raised <= set(nnsight_core.__all__)


def test_the_package_is_typed_and_every_module_says_what_it_is() -> None:
    assert (FOLDER / "py.typed").exists()
    for info in pkgutil.walk_packages([str(FOLDER)], "nnsight_core."):
        assert (importlib.import_module(info.name).__doc__ or "").strip(), info.name


def test_everything_exported_says_what_it_is() -> None:
    for name in nnsight_core.__all__:
        thing = getattr(nnsight_core, name)
        assert name == "Event" or (thing.__doc__ or "").strip(), name
