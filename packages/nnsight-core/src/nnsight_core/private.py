"""Private names of a class (`self.__vector`), as Python calls them in the text of that class.

A block is compiled apart from its class, so that its text has to say `self._Probe__vector`.
"""

from __future__ import annotations

import ast
import copy
import io
import tokenize

from nnsight_core.parsing import parse


def mangled(text: str, owner: str) -> str:
    """A text of whole statements, with private names as they are in a class of that name."""
    if "__" not in text or not owner.lstrip("_"):
        return text
    lines = text.splitlines(keepends=True)
    head = "if 1:\n" if text[:1] in (" ", "\t") else ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(head + text).readline))
        tree = parse(head + text)
    except (SyntaxError, tokenize.TokenError):
        return text  # whoever compiles it says what is wrong
    inner, keywords = _lines_of_classes(tree), _keywords(tree, (head + text).split("\n"))
    for token in reversed(tokens):
        name = private(token.string, owner)
        if token.type != tokenize.NAME or name == token.string:
            continue
        if token.start[0] in inner or token.start in keywords:
            continue
        line = token.start[0] - (2 if head else 1)
        before, after = lines[line][: token.start[1]], lines[line][token.end[1] :]
        lines[line] = before + name + after
    return "".join(lines)


def mangled_target(target: ast.expr | None, owner: str) -> ast.expr | None:
    """The same of what stands after `as`."""
    if target is None or not owner:
        return target
    target = copy.deepcopy(target)
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            node.id = private(node.id, owner)
        elif isinstance(node, ast.Attribute):
            node.attr = private(node.attr, owner)
    return target


def private(name: str, owner: str) -> str:
    """A name as Python calls it in a class of that name."""
    owner = owner.lstrip("_")
    if not owner or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{owner}{name}"


def _lines_of_classes(tree: ast.AST) -> set[int]:
    """The lines of the bodies of classes in a text, whose private names are their own."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        line for c in classes for line in range(c.body[0].lineno, (c.end_lineno or c.lineno) + 1)
    }


def _keywords(tree: ast.AST, lines: list[str]) -> set[tuple[int, int]]:
    """Where the keywords of calls stand, which Python leaves as they are."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    return {(k.lineno, len(lines[k.lineno - 1].encode()[: k.col_offset].decode())) for k in found}
