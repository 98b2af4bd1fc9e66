"""Remainder: a block's code without some of its statements, line for line where it was."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from nnsight_core.code import Code, compile_block


def loaded(body: Iterable[ast.stmt], gone: set[ast.stmt]) -> set[str]:
    """The names that a body uses without some of its statements."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if node in gone:
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def code_without(code: Code, gone: set[ast.stmt]) -> Code:
    """The code with `pass` in place of some statements, which `statements_of(code)` gave."""
    lines = code.source.split("\n")
    for node in sorted(gone, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = node.lineno - 2, node.end_lineno - 2
        before = lines[first].encode()[: node.col_offset].decode()
        after = lines[last].encode()[node.end_col_offset :].decode()
        # Brackets may span lines wherever a statement may stand, which `pass` may not.
        if first == last:
            lines[first] = f"{before}pass{after}"
        else:
            lines[first : last + 1] = [f"{before}(", *[""] * (last - first - 1), f"){after}"]
    place = (code.filename, code.line, code.function, code.lazy)
    return compile_block("\n".join(lines), *place, code.policy)
