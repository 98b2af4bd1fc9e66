"""A text that is fine is parsed, whatever runs in the middle of it."""

from __future__ import annotations

import ast

import pytest

from nnsight_core import parsing


def test_a_fault_of_pythons_own_is_not_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = ast.parse, []

    def upset(*args: object) -> ast.AST:
        calls.append(args)
        if len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=144, after=201)")
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ast, "parse", upset)
    assert isinstance(parsing.parse("x = 1"), ast.Module) and len(calls) == 3
    calls.clear()
    monkeypatch.setattr(parsing, "_TRIES", 2)
    with pytest.raises(SystemError, match="mismatch"):
        parsing.parse("x = 1")
    with pytest.raises(SyntaxError):
        parsing.parse("x = ")
