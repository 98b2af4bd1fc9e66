"""Policies: what whoever runs blocks asks, and of whom."""

from __future__ import annotations

import ast
import builtins

import pytest

from nnsight_core.code import compile_block
from nnsight_core.errors import PolicyError
from nnsight_core.policy import TRUSTED, TRUSTED_PATH, Policy, policy_at
from nnsight_core.traceback import no_file, users_file


class NoImports(Policy):
    """A policy of somebody's own."""

    guards = True

    def guard(self, module: ast.Module, filename: str) -> ast.Module:
        for node in ast.walk(module):
            if isinstance(node, ast.Import | ast.ImportFrom):
                raise PolicyError(f"{filename}:{node.lineno}: no imports here")
        return module


NO_IMPORTS = NoImports()


def test_a_policy_is_found_by_its_path():
    assert policy_at(TRUSTED_PATH) is TRUSTED
    assert policy_at("tests.core.test_policy:NO_IMPORTS") is NO_IMPORTS


@pytest.mark.parametrize("path", ["nnsight_core.policy", "nnsight_core.policy:Policy", "math:pi"])
def test_what_is_no_policy_is_refused(path):
    with pytest.raises(ValueError, match="is no policy"):
        policy_at(path)


def test_a_trusted_block_is_compiled_as_without_policies():
    source = "    x = 1\n    import os\n"
    code = compile_block(source, "a.py", 3, "f")
    assert code.policy is TRUSTED and code is compile_block(source, "a.py", 3, "f")
    assert not code.snapshots and code.compiled.co_filename == "a.py"
    assert TRUSTED.scope({"print": print}) == {"__builtins__": builtins, "print": print}
    readers = {"int": int}
    assert TRUSTED.readers(readers) is readers


def test_a_policy_sees_the_text_with_the_lines_of_the_user():
    with pytest.raises(PolicyError, match=r"^a\.py:4: no imports here"):
        compile_block("    x = 1\n    import os\n", "a.py", 3, "f", False, NO_IMPORTS)
    code = compile_block("    x = 1\n", "a.py", 3, "f", False, NO_IMPORTS)
    assert code.policy is NO_IMPORTS and code.filename == "a.py"


def test_what_is_guarded_copies_what_it_could_change_and_names_no_file():
    code = compile_block("    x = 1\n", "a.py", 3, "f", False, NO_IMPORTS)
    assert code.snapshots
    assert code.compiled.co_filename == no_file("a.py") != "a.py"
    assert users_file(code.compiled.co_filename) == "a.py" == users_file("a.py")
