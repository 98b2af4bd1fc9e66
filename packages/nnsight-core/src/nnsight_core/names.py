"""Which names a block needs from outside, which it binds, and which it saves.

A name is needed if some path through the block may read it before the block itself has bound it.
Reading that precisely matters twice: a value left over from an earlier trace under a name that the
block binds anew is not shipped, and a value that cannot be shipped is complained about only where
it could have been used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

Span = tuple[tuple[int, int], tuple[int, int]]
"""Lines and columns of the beginning and the end of an expression."""


@dataclass(slots=True)
class Names:
    """The names of one block, in the order in which they first appear."""

    needs: dict[str, int] = field(default_factory=dict)
    """Names that may be read before they are bound, with the line that does."""
    binds: dict[str, None] = field(default_factory=dict)
    """Names that the block itself binds, deletes included."""
    saved: dict[str, set[int]] = field(default_factory=dict)
    """Names that hold what `save` or `keep` was given or gave back, with the lines of the calls."""
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """Where the expressions stand that give each name its value."""


def analyse(body: list[ast.stmt], lazy: bool = False) -> Names:
    """Read the names of a block from its statements; `lazy` leaves annotations out."""
    names = Names()
    _Flow(names, lazy).block(body, set())
    for node in ast.walk(ast.Module(body=body, type_ignores=[])):
        _note_saves(node, names)
    return names


def is_save(node: ast.AST) -> bool:
    """Whether a node is `x.save()`, `save(x)` or `module.save(x)`, or the same with `keep`."""
    if not isinstance(node, ast.Call):
        return False
    match node.func:
        case ast.Attribute(attr="save" | "keep"):
            return True
        case ast.Name(id="save" | "keep"):
            return True
    return False


def _note_saves(node: ast.AST, names: Names) -> None:
    match node:
        case ast.Assign(targets=targets, value=value):
            given = [pair for target in targets for pair in _given(target, value)]
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            given = _given(target, value)
        case ast.NamedExpr(target=target, value=value):
            given = _given(target, value)
        case (
            ast.Call(func=ast.Attribute(ast.Name(name)), args=[])
            | ast.Call(args=[ast.Name(id=name), *_])
        ) if is_save(node):
            names.saved.setdefault(name, set()).add(node.lineno)
            return
        case _:
            return
    for name, value in given:
        for result in _results(value):
            names.spans.setdefault(name, []).extend(_spans(result))
            if is_save(result):
                names.saved.setdefault(name, set()).add(result.lineno)


def _given(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """The names that an assignment binds, each with what its value comes from."""
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
        if len(target.elts) == len(value.elts) and not starred:
            pairs = zip(target.elts, value.elts, strict=True)
            return [pair for part, given in pairs for pair in _given(part, given)]
    # `a, b = pair.save()` saves what both names hold.
    parts = ast.walk(target)
    return [(part.id, value) for part in parts if isinstance(part, ast.Name) and _stores(part)]


def _results(value: ast.expr) -> list[ast.expr]:
    """The expressions of which one is what an expression gives."""
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            parts = [body, orelse]
        case ast.BoolOp(values=values):
            parts = values
        case ast.NamedExpr(value=inner):
            parts = [inner]
        case _:
            return [value]
    return [result for part in parts for result in _results(part)]


def _spans(node: ast.expr) -> list[Span]:
    """Where an expression stands: nowhere if it is none of the user's."""
    end = getattr(node, "end_lineno", None), getattr(node, "end_col_offset", None)
    if end[0] is None or end[1] is None:
        return []
    return [((node.lineno, node.col_offset), (end[0], end[1]))]


def _stores(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


class _Flow:
    """Walks statements in order, with the set of names that are surely bound by then."""

    def __init__(self, names: Names, lazy: bool, of_class: str | None = None) -> None:
        self.names = names
        self.lazy = lazy
        self.of_class = of_class
        self.outward: dict[str, None] = {}

    def block(self, body: Iterable[ast.stmt], bound: set[str]) -> set[str]:
        for statement in body:
            bound = self.statement(statement, bound)
        return bound

    def statement(self, node: ast.stmt, bound: set[str]) -> set[str]:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                bound = self.reads(test, bound)
                return self.block(body, set(bound)) & self.block(orelse, set(bound))
            case ast.For() | ast.AsyncFor():
                target, body, orelse = node.target, node.body, node.orelse
                bound = self.reads(node.iter, bound)
                self.block(body, self.binds(target, set(bound)))
                self.block(orelse, set(bound))
                return bound
            case ast.While(test=test, body=body, orelse=orelse):
                bound = self.reads(test, bound)
                self.block(body, set(bound))
                self.block(orelse, set(bound))
                return bound
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    bound = self.reads(item.context_expr, bound)
                    if item.optional_vars:
                        bound = self.binds(item.optional_vars, bound)
                # The context manager may swallow an error, so nothing of the body is certain.
                self.block(node.body, set(bound))
                return bound
            case ast.Try() | ast.TryStar():
                after = self.block(node.body, set(bound))
                self.block(node.orelse, set(after))
                for handler in node.handlers:
                    self.reads(handler.type, bound)
                    inner = set(bound)
                    if handler.name:
                        self.bind(handler.name, inner)
                    self.block(handler.body, inner)
                return self.block(node.finalbody, set(bound))
            case ast.Match(subject=subject, cases=cases):
                bound = self.reads(subject, bound)
                for case in cases:
                    inner = set(bound)
                    for part in ast.walk(case.pattern):
                        for name in (getattr(part, "name", None), getattr(part, "rest", None)):
                            if isinstance(name, str):
                                self.bind(name, inner)
                    self.reads(case.pattern, bound)
                    self.reads(case.guard, inner)
                    self.block(case.body, inner)
                return bound
            case ast.Assign(targets=targets, value=value):
                bound = self.reads(value, bound)
                for target in targets:
                    bound = self.binds(target, bound)
                return bound
            case ast.AugAssign(target=target, value=value):
                bound = self.reads(value, self.loads(target, bound))
                return self.binds(target, bound)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                # Only in a class does Python look at what a variable is annotated with.
                looked_at = annotation if self.of_class and not self.lazy else None
                bound = self.reads(value, self.reads(looked_at, bound))
                return self.binds(target, bound) if value else bound
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                hints = [] if self.lazy else _hints(node)
                for part in [*node.decorator_list, *_defaults(node.args), *hints]:
                    bound = self.reads(part, bound)
                self.inner(node.args, node.body, bound | {node.name})
                return self.bind(node.name, bound)
            case ast.ClassDef():
                for part in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
                    bound = self.reads(part, bound)
                # What a class body binds is the class's own, so it is read as a scope of its own.
                scope = _Flow(Names(), self.lazy, of_class=node.name)
                scope.block(node.body, set())
                for name, line in scope.names.needs.items():
                    self.need(name, line, bound)
                for name in scope.outward:
                    self.names.binds[name] = None
                return self.bind(node.name, bound)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    self.bind(alias.asname or alias.name.partition(".")[0], bound)
                return bound
            case ast.Delete(targets=targets):
                for target in targets:
                    bound = self.loads(target, bound)
                    if isinstance(target, ast.Name):
                        bound = bound - {target.id}
                        self.names.binds[target.id] = None
                return bound
            case ast.Assert(test=test, msg=message):
                # `python -O` leaves it out.
                self.reads(message, self.reads(test, set(bound)))
                return bound
            case _:
                for child in ast.iter_child_nodes(node):
                    bound = self.reads(child, bound)
                return bound

    def reads(self, node: ast.AST | None, bound: set[str]) -> set[str]:
        """The reads of an expression; what `:=` binds in it is bound from there on."""
        match node:
            case None:
                return bound
            case ast.Name(id=name, ctx=ast.Load()):
                return self.need(name, node.lineno, bound)
            case ast.NamedExpr(target=target, value=value):
                return self.binds(target, self.reads(value, bound))
            case ast.Lambda(args=args, body=body):
                for default in _defaults(args):
                    bound = self.reads(default, bound)
                self.inner(args, [ast.Expr(body)], bound)
                return bound
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                inner = set(bound)
                for generator in node.generators:
                    self.reads(generator.iter, inner)
                    inner |= {n.id for n in ast.walk(generator.target) if isinstance(n, ast.Name)}
                    for test in generator.ifs:
                        inner = self.reads(test, inner)
                parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                for part in parts:
                    self.reads(part, inner)
                return bound
            case ast.IfExp(test=test, body=body, orelse=orelse):
                bound = self.reads(test, bound)
                return self.reads(body, set(bound)) & self.reads(orelse, set(bound))
            case ast.BoolOp(values=[first, *rest]):
                bound = self.reads(first, bound)
                inner = set(bound)
                for value in rest:
                    inner = self.reads(value, inner)
                return bound
            case ast.Compare(left=left, comparators=[right, *rest]):
                bound = self.reads(right, self.reads(left, bound))
                inner = set(bound)  # `a < b < c` looks at `c` only if the first is so
                for value in rest:
                    inner = self.reads(value, inner)
                return bound
            case _:
                for child in ast.iter_child_nodes(node):
                    bound = self.reads(child, bound)
                return bound

    def inner(self, args: ast.arguments, body: list[ast.stmt], bound: set[str]) -> None:
        """A nested function reads from here whatever it does not bind itself."""
        scope = _Flow(Names(), self.lazy)
        scope.block(body, set())
        outward = declared_outside(body)
        own = arguments_of(args) | (scope.names.binds.keys() - outward)
        # Methods do not see what the body of their class binds.
        seen = {self.of_class} if self.of_class else bound
        for name, line in scope.names.needs.items():
            if name not in own:
                self.need(name, line, seen)
        for name in outward & scope.names.binds.keys():
            (self.outward if self.of_class else self.names.binds)[name] = None

    def loads(self, target: ast.expr, bound: set[str]) -> set[str]:
        if isinstance(target, ast.Name):
            return self.need(target.id, target.lineno, bound)
        return self.reads(target, bound)

    def binds(self, target: ast.expr, bound: set[str]) -> set[str]:
        match target:
            case ast.Name(id=name):
                return self.bind(name, bound)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    bound = self.binds(element, bound)
                return bound
            case ast.Starred(value=value):
                return self.binds(value, bound)
            case _:
                return self.reads(target, bound)

    def bind(self, name: str, bound: set[str]) -> set[str]:
        self.names.binds[name] = None
        bound.add(name)
        return bound

    def need(self, name: str, line: int, bound: set[str]) -> set[str]:
        if name not in bound:
            self.names.needs.setdefault(name, line)
        return bound


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def declared_outside(body: list[ast.stmt]) -> set[str]:
    """Names that a function itself says are not its own (`nonlocal`, `global`)."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Nonlocal | ast.Global):
            found.update(node.names)
        elif not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def arguments_of(args: ast.arguments) -> set[str]:
    """The names of a function's parameters."""
    plain = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return {a.arg for a in [*plain, args.vararg, args.kwarg] if a is not None}


def _defaults(args: ast.arguments) -> list[ast.expr]:
    return [*args.defaults, *(d for d in args.kw_defaults if d is not None)]


def _hints(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    args = node.args
    plain = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [h for h in [*(a.annotation for a in plain if a), node.returns] if h is not None]
