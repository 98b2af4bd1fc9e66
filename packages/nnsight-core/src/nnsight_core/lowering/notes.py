"""Notes: what the statements of a block do that stay in it, and what they change."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nnsight_core.block_tracer import BLOCK_TRACER
from nnsight_core.code import Code, may_change
from nnsight_core.effects import Access, Effects, Walk, text_of
from nnsight_core.loops import StepChoice, StepLoop
from nnsight_core.lowering.affine import EVERY, FIRST, Affine, Steps
from nnsight_core.lowering.expressions import Symbols
from nnsight_core.lowering.happenings import Happening
from nnsight_core.lowering.symbols import (
    NONE,
    Ids,
    Known,
    Made,
    Part,
    Symbol,
    Unknown,
    locations_of,
)
from nnsight_core.names import analyse
from nnsight_core.tree import ModelTree


@dataclass(slots=True)
class Binding:
    """A statement that gives a name to what only lowered statements may use."""

    node: ast.stmt
    names: list[str]
    symbol: Symbol
    happening: Happening


class Notes:
    """What is known of a block up to the statement that is looked at."""

    def __init__(
        self,
        code: Code,
        names: Mapping[str, Any],
        tree: ModelTree,
        targets: tuple[str, ...],
        tokens: int | None,
        device: torch.device,
    ) -> None:
        self.tree, self.tokens, self.targets = tree, tokens, targets
        self.shift = code.line - 2
        self.effects = Walk(text_of(code, names, targets), tree)
        self.symbols = Symbols(names, tree, device)
        self.symbols.names.update(dict.fromkeys(targets, Known(BLOCK_TRACER)))
        self.steps: Steps = FIRST
        self.turn = 0
        self.late = False  # after a loop over steps, where the step is not known
        self.inside: list[Ids] = []  # what the loops around this statement go through
        self.writes: list[Affine] = []
        self.happenings: list[Happening] = []
        self.bindings: list[Binding] = []
        self.used: list[tuple[Affine, Ids]] = []
        self.changed: dict[int, int] = {}  # what the block changes in place, and the line
        self.stale: dict[str, Affine] = {}  # names of values that are no longer their location's
        self.lowered: set[ast.stmt] = set()
        self.kept: set[ast.stmt] = set()
        self.active: set[ast.stmt] = set()  # statements that do more than bind what is known
        self.reasons: list[tuple[int, str]] = []

    def keep(self, node: ast.stmt, why: str = "", quiet: bool = False) -> None:
        """A statement stays as it is; take note of what it touches."""
        why = why or _WHERE.get(type(node), "")
        self.kept.add(node)
        if not quiet:
            self.active.add(node)
        if not quiet and any(map(self.is_steps, ast.walk(node))):
            self.steps, self.late = EVERY, True
        effects = self.effects_of(node)
        for access in effects.writes:
            if access.side not in ("logits", "samples"):
                self.refused_access(node, access, why)
        if effects.opaque:
            self.reason(node, "hands values to code that cannot be seen, which may write anything")
        self.touched(node, effects.reads)
        self.change(node)
        held = self.symbols.opaque(node)
        for name in analyse([node]).binds:
            self.symbols.names[name] = Unknown(held.why, held.of, held.at)

    def effects_of(self, node: ast.stmt) -> Effects:
        """The effects of one statement."""
        found = self.effects.effects = Effects()
        self.effects.visit(node)
        return found

    def is_steps(self, node: ast.AST) -> bool:
        """Whether a node is steps that may be gone through."""
        if not isinstance(node, ast.Name | ast.Attribute | ast.Call):
            return False
        symbol = self.symbols.of(node)
        return isinstance(symbol, Known) and isinstance(symbol.value, StepLoop | StepChoice)

    def touched(self, node: ast.stmt, reads: list[Access]) -> None:
        lazy = any(isinstance(part, _LAZY) for part in ast.walk(node))
        for access in reads:
            if access.line == 0:
                if self.writes or self.bindings or self.inside:
                    self.reason(node, "opens a cache after something was read or written")
                continue
            if lazy:
                self.reason(node, f"may read {_text(access)} later")
            self.happen(node, access.path, access.side, read=True)
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Store):
                symbol = self.symbols.names.get(part.id)
                if isinstance(symbol, Made):
                    self.symbols.names[part.id] = Unknown("", symbol.of, locations_of(symbol))
                elif isinstance(symbol, Part) or (isinstance(symbol, Unknown) and symbol.held):
                    for at in locations_of(symbol):
                        path = at.removesuffix(".output")
                        self.happen(node, path, "output", read=True, named=True)
            elif isinstance(part, ast.Attribute) and part.attr == "stop":
                self.happen(node, "", "stop")
            elif isinstance(part, ast.Attribute) and _is_result(part.value) and part.attr != "save":
                self.happen(node, "", "result", read=True)

    def change(self, node: ast.stmt) -> None:
        """Take note of what a statement changes in place."""
        within = _bound_in(node)
        for part in ast.walk(node):
            given: ast.AST | None = None  # what a container may hold from now on
            match part:
                case ast.AugAssign(target=ast.Name() as owner):
                    pass
                case ast.Subscript(value=owner) | ast.Attribute(value=owner) if not isinstance(
                    part.ctx, ast.Load
                ):
                    given = getattr(node, "value", None) or node
                case ast.Call(func=ast.Attribute(value=holder, attr=name), keywords=keywords):
                    growing = name in _GROWING and not keywords
                    if not growing and not name.endswith("_") and not may_change(part):
                        continue
                    # `init.normal_(v)` changes what it is given, and not what it is found in.
                    owner, given = holder if growing else part, part
                case _:
                    continue
            names = {n.id for n in ast.walk(owner) if isinstance(n, ast.Name)}
            # What a name stands for that the statement itself binds is not known here.
            held = self.symbols.opaque(node if names & within else owner).of
            self.changed.update(dict.fromkeys(held, self.line(node)))
            more = self.symbols.opaque(given).of - held if given is not None else NONE
            for name in names if more else ():
                was = self.symbols.names.get(name)
                if isinstance(was, Unknown | Known):
                    self.symbols.names[name] = Unknown("", more | was.of)

    def forget(self, node: ast.stmt | ast.expr, why: str) -> None:
        """What a statement or a target binds is not known here; it may be what it was."""
        if isinstance(node, ast.expr):
            node = ast.Assign([node], ast.Constant(None))
        for name in analyse([node]).binds:
            was = self.symbols.names.get(name)
            held = isinstance(was, Part) or (isinstance(was, Unknown) and was.held)
            at = locations_of(was) if was is not None and held else ()
            of = was.of if isinstance(was, Known | Unknown | Made) else NONE
            self.symbols.names[name] = Unknown(why, of, at, held)

    def line(self, node: ast.stmt) -> int:
        return node.lineno + self.shift

    def happen(
        self,
        node: ast.stmt,
        path: str,
        side: str,
        write: Affine | None = None,
        read: bool = False,
        named: bool = False,
    ) -> Happening:
        steps = EVERY if self.late else self.steps
        visit = self.symbols.visit
        line, turn = self.line(node), self.turn
        found = Happening(line, path, side, steps, visit, write, read, named, node, turn)
        self.happenings.append(found)
        return found

    def reason(self, node: ast.stmt, words: str) -> None:
        self.reasons.append((self.line(node), words))

    def refuse(self, node: ast.stmt, words: str) -> None:
        """A write is not lowered; the words follow the location."""
        written = self.effects_of(node).writes
        if not written:
            self.keep(node)
            return
        self.reason(node, f"{_text(written[-1])} {words}")
        for name in analyse([node]).binds:
            self.symbols.names[name] = Unknown("", self.symbols.opaque(node).of)

    def refused_access(self, node: ast.stmt, access: Access, why: str) -> None:
        where = why or "in a way that is not lowered"
        if access.side == "input":
            where = "where it goes in: only outputs are lowered"
        elif ".source." in access.path:
            where = "inside a module's forward (`.source`)"
        elif any(isinstance(p, ast.Attribute) and p.attr == "skip" for p in ast.walk(node)):
            where = "by `skip`"
        self.reasons.append((abs(access.line), f"{_text(access)} is written {where}"))


def _bound_in(node: ast.stmt) -> set[str]:
    """The names that a statement binds, those of comprehensions and patterns among them."""
    found: set[str] = set()
    augmented = {id(part.target) for part in ast.walk(node) if isinstance(part, ast.AugAssign)}
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name, ctx=ast.Store()) if id(part) not in augmented:
                found.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)) | ast.ExceptHandler(name=str(name)):
                found.add(name)
    return found


def _is_result(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "result"


def _text(access: Access) -> str:
    return f"{access.path}.{access.side}" if access.path else access.side


_CHANGING = """
    add append clear extend insert pop popitem remove reverse setdefault sort update
"""
_GROWING = frozenset(_CHANGING.split())
_LAZY = (ast.GeneratorExp, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WHERE: dict[type[ast.stmt], str] = {
    ast.If: "under `if`",
    ast.While: "under `while`",
    ast.With: "under `with`",
    ast.Try: "under `try`",
    ast.TryStar: "under `try`",
    ast.Match: "under `match`",
    ast.FunctionDef: "in a function",
    ast.ClassDef: "in a class",
}
