"""Effects: which locations a block may read and which it may write, from its text alone.

A path may hold `*` where the text does not say which part (a loop over layers), is `**` for every
path (an activation cache), and holds `?` where nothing is known. Whatever is not understood counts
as a write, never as nothing: the runs themselves are guarded, so a mistake here costs speed or is
an error, but loses no value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from nnsight_core.block_tracer import BlockTracer
from nnsight_core.code import PURE_CALLS, PURE_METHODS, Code
from nnsight_core.errors import LocationError
from nnsight_core.node import Node, Operation, Source
from nnsight_core.parsing import parse
from nnsight_core.tracer import Captured
from nnsight_core.tree import ModelTree

FIRST, LOOP, AFTER = 0, 1, 2
_SIDES = ("output", "input", "inputs")
_VALUES = ("logits", "samples")
_EVERY, _UNKNOWN = "**", "?"
_CHANGING = (
    "clear extend insert pop popitem remove reverse setdefault update "
    "backward data_ptr numpy register_hook storage untyped_storage __array__ __dlpack__"
)
"""Methods of a value that may change it, or hand its memory to what may, without a last `_`."""
_KEEPING = ("add", "append", "extend", "insert", "setdefault", "update")
"""Methods after which a container holds what they were given."""


@dataclass(frozen=True, slots=True)
class Access:
    """One location that a block may touch.

    Attributes:
        path: the module's or operation's path, with `*` for what is not known.
        side: `output`, `input`, `logits`, `samples`, or `module` if it is only named or called.
        line: where the block says so.
        when: in which steps: `FIRST` before any loop over steps, `LOOP` in one, `AFTER` behind one.
    """

    path: str
    side: str
    line: int
    when: int = 0


@dataclass(slots=True)
class Effects:
    """What a block may touch, in the order of its text."""

    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    opaque: bool = False
    """Whether the block hands nodes or values to code that cannot be seen."""
    calls: bool = False
    """Whether the block runs modules of the model itself."""
    weights: bool = False
    """Whether the block may look at a module's own tensors."""
    stops: bool = False
    """Whether the block may end its request."""
    skips: bool = False
    """Whether the block may put something in the place of what a module gives back."""
    loops: bool = False
    """Whether the block loops over steps of its request."""
    loose: bool = False
    """Whether the text does not show which part of it runs in which steps."""

    def sources(self) -> list[str]:
        """The modules and operations whose `.source` is surely touched, outer ones first.

        Of those that the text does not name, the block itself asks when it comes to them.
        """
        found: dict[str, None] = {}
        for access in self.reads:
            if "*" in access.path or _UNKNOWN in access.path:
                continue
            parts = access.path.split(".source.")
            for depth in range(1, len(parts)):
                found[".source.".join(parts[:depth])] = None
        return sorted(found, key=len)

    @property
    def writes_forward(self) -> bool:
        """Whether the block may change something in the forward pass itself."""
        return self.opaque or any(access.side not in _VALUES for access in self.writes)

    @property
    def reads_anywhere(self) -> bool:
        """Whether it is not known what the block reads in the forward pass."""
        return self.opaque or any(_UNKNOWN in access.path for access in self.reads)

    def forward_reads(self) -> list[str]:
        """What the block may read in the forward pass: `path.output`, `path.input`."""
        found = [f"{a.path}.{a.side}" for a in self.reads if a.side in _SIDES]
        return list(dict.fromkeys(found))

    def check(self, tree: ModelTree, code: Code) -> None:
        """Refuse what cannot exist on this tree, before anything runs.

        Raises:
            LocationError: a module or operation that the text surely names does not exist.
        """
        for access in self.reads:
            path, source, operation = access.path.partition(".source.")
            if "*" in path or _UNKNOWN in path or access.line <= 0:
                continue
            if path not in tree.modules:
                raise LocationError(
                    f"{code.filename}:{access.line}: {tree.model} has no module {path!r}. "
                    f"Nearest: {', '.join(tree.nearest(path)) or 'none'}."
                )
            names = tree.modules[path].operations
            operation = operation.partition(".source.")[0]
            if source and names is not None and operation not in names:
                raise LocationError(
                    f"{code.filename}:{access.line}: the forward of {path} has no operation "
                    f"{operation!r}. It has: {', '.join(names)}."
                )


def effects_of(
    code: Code,
    names: Mapping[str, Any],
    tree: ModelTree | None = None,
    targets: Iterable[str] = (),
) -> Effects:
    """Read a block's effects.

    Args:
        code: the block's code.
        names: the values that it takes along; those that are nodes are where paths begin.
        tree: the model's tree, which tells a module's child from one of its other attributes.
        targets: the names that `as` binds to the tracer.
    """
    return text_of(code, names, targets).effects(tree)


class Text(NamedTuple):
    """A block's text, with what its names say about it: all that its effects are read from."""

    code: Code
    known: tuple[tuple[str, Any], ...]

    def effects(self, tree: ModelTree | None = None) -> Effects:
        """Its effects, which nobody may change: they are kept for the next one who asks."""
        return _read(self, _Same(tree))


def text_of(code: Code, names: Mapping[str, Any], targets: Iterable[str] = ()) -> Text:
    """A block's text. See `effects_of`."""
    known = {name: _of_value(value) for name, value in names.items()}
    known.update(dict.fromkeys(targets, _Tracer()))
    return Text(code, tuple((name, thing) for name, thing in known.items() if thing is not None))


@dataclass(frozen=True, slots=True)
class _Same:
    """A tree, which is taken for another one only if it is the same object."""

    tree: ModelTree | None

    def __hash__(self) -> int:
        return id(self.tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tree is other.tree


def statements_of(code: Code) -> list[ast.stmt]:
    """A block's statements; their lines are `code.line - 2` before the user's."""
    wrapper = parse("if 1:\n" + code.source).body[0]
    assert isinstance(wrapper, ast.If)
    return wrapper.body


@lru_cache(maxsize=1024)
def _read(text: Text, tree: _Same) -> Effects:
    walk = Walk(text, tree.tree)
    walk.block(statements_of(text.code))
    return walk.effects


@dataclass(frozen=True, slots=True)
class _Node:
    path: str


@dataclass(frozen=True, slots=True)
class _Source:
    path: str


@dataclass(frozen=True, slots=True)
class _Value:
    """Something that came from a location, or from several."""

    at: tuple[Access, ...]


@dataclass(frozen=True, slots=True)
class _Many:
    """A list of nodes that all match one path, or of such lists (`deep` of them)."""

    path: str
    deep: int = 1


@dataclass(frozen=True, slots=True)
class _Tracer:
    """The block's tracer, or a part of it."""


_Thing = _Node | _Source | _Value | _Many | _Tracer | None


def _of_value(value: Any) -> _Thing:
    if isinstance(value, Node):
        return _Node(value._path)
    if isinstance(value, Operation):
        return _Node(value._path)
    if isinstance(value, Source):
        return _Source(value._path)
    if isinstance(value, Captured | BlockTracer):
        return _Tracer()
    if isinstance(value, list | tuple) and value and all(isinstance(v, Node) for v in value):
        return _Many(_common([v._path for v in value]))
    return None


def _common(paths: Iterable[str]) -> str:
    """One pattern for several paths, `*` where they differ."""
    split = [path.split(".") for path in paths]
    if len({len(parts) for parts in split}) != 1:
        return _UNKNOWN
    return ".".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*split, strict=True))


class Walk(ast.NodeVisitor):
    """Reads the effects of statements, one after the other. See `effects_of`."""

    def __init__(self, text: Text, tree: ModelTree | None = None) -> None:
        self.tree = tree
        self.shift = text.code.line - 2
        self.known: dict[str, _Thing] = dict(text.known)
        self.effects = Effects()
        self.maybe = 0  # how many statements lie around this one that may not run
        self.when = FIRST

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def bind(self, target: ast.expr, path: str | None) -> None:
        """A name gets the node at a path, or something that is none."""
        self.store(target, None if path is None else _Node(path))

    # -- statements ------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.thing(node.value)
        for target in node.targets:
            self.store(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.store(node.target, self.thing(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.store(node.target, self.thing(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.thing(node.value)
        held = self.thing(_loading(node.target))
        self.wrote(held)
        if not isinstance(node.target, ast.Name):
            self.store(node.target, None)

    def visit_For(self, node: ast.For) -> None:
        over = self.thing(node.iter)
        steps = isinstance(over, _Tracer)
        self.effects.loops |= steps
        if steps and self.when == LOOP:
            self.effects.loose = True
        self.when = LOOP if steps else self.when
        each = None if steps else _each(over)
        # What the loop leaves behind is there in its next round.
        for _ in range(2):
            self.store(node.target, each)
            self.branch(node.body)
        self.when = AFTER if steps else self.when
        self.branch(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        for _ in range(2):
            self.thing(node.test)
            self.branch(node.body)
        self.branch(node.orelse)

    def visit_If(self, node: ast.If) -> None:
        self.thing(node.test)
        self.branch(node.body)
        self.branch(node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self.branch(node.body)
        for handler in node.handlers:
            self.branch(handler.body)
        self.branch(node.orelse)
        self.block(node.finalbody)

    visit_TryStar = visit_Try  # type: ignore[assignment]

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self.thing(node.guard)
        self.branch(node.body)

    def branch(self, body: list[ast.stmt]) -> None:
        """Statements that may not run: what a name held before, it may hold after them."""
        self.maybe += 1
        self.block(body)
        self.maybe -= 1

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.thing(item.context_expr)
        self.block(node.body)

    def visit_Expr(self, node: ast.Expr) -> None:
        self.thing(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.thing(child)
            else:
                self.visit(child)

    def store(self, target: ast.expr, value: _Thing) -> None:
        match target:
            case ast.Name(id=name):
                before = self.known.get(name) if self.maybe else None
                self.known[name] = self.either(before, value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                of_each = _each(value) if isinstance(value, _Many) else value
                for part in parts:
                    self.store(part, value if isinstance(part, ast.Starred) else of_each)
            case ast.Starred(value=inner):
                self.store(inner, value)
            case ast.Attribute(value=owner, attr=name):
                held = self.thing(owner)
                if isinstance(held, _Node) and name in (*_SIDES, *_VALUES):
                    self.wrote(self.side(held, name, target.lineno))
                else:
                    self.wrote(held)
            case ast.Subscript(value=owner, slice=index):
                self.thing(index)
                self.wrote(self.thing(owner))

    # -- expressions -----------------------------------------------------------------------------

    def thing(self, node: ast.expr) -> _Thing:
        match node:
            case ast.Name(id=name):
                return self.known.get(name)
            case ast.NamedExpr():
                self.visit_NamedExpr(node)
                return self.thing(ast.Name(node.target.id, ast.Load()))
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.thing(owner), name, node.lineno)
            case ast.Subscript(value=owner, slice=index):
                held = self.thing(owner)
                if isinstance(index, ast.Slice):
                    self.thing(index)
                    return _Many(_join(held.path, "*")) if isinstance(held, _Node) else held
                if isinstance(held, _Node):
                    return _Node(_join(held.path, self.index(held.path, index)))
                self.thing(index)
                return _each(held) if isinstance(held, _Many) else held
            case ast.Call():
                return self.call(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.thing(test)
                return self.either(self.thing(body), self.thing(orelse))
            case ast.Lambda(body=body):
                return self.thing(body)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for part in node.generators:
                    over = self.thing(part.iter)
                    self.effects.loose |= isinstance(over, _Tracer)
                    self.store(part.target, _each(over))
                    for test in part.ifs:
                        self.thing(test)
                if isinstance(node, ast.DictComp):
                    self.thing(node.key)
                    return _many(self.thing(node.value))
                return _many(self.thing(node.elt))
        held: _Thing = None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                held = self.either(held, _many(self.thing(child)))
        # A sum of values is a new tensor, but a tuple of them still holds them.
        return held if isinstance(node, ast.Tuple | ast.List | ast.Dict | ast.Starred) else None

    def attribute(self, held: _Thing, name: str, line: int) -> _Thing:
        if isinstance(held, _Source):
            return _Node(f"{held.path}.source.{name}")
        if held is None and name in _SIDES:
            # A module that came from somewhere the text does not show.
            return self.side(_Node(_UNKNOWN), name, -self.shift)
        if isinstance(held, _Many):
            held = _Node(held.path)
        if not isinstance(held, _Node):
            return held
        if name in _SIDES or (name in _VALUES and not held.path):
            return self.side(held, name, line)
        if name == "source":
            return _Source(held.path)
        # An attribute that is no module is only found out to be wrong where a side of it is asked.
        path = _join(held.path, name)
        if self.tree is not None and "*" not in path and path not in self.tree.modules:
            self.effects.weights = True
        elif self.tree is not None and "*" in path:
            self.effects.weights |= not any(name in i.children for i in self.tree.modules.values())
        return _Node(path)

    def side(self, held: _Node, name: str, line: int) -> _Value:
        side = "input" if name == "inputs" else name
        path = held.path if side in ("output", "input") else ""
        access = Access(path, side, line + self.shift, self.when)
        self.effects.reads.append(access)
        return _Value((access,))

    def index(self, path: str, index: ast.expr) -> str:
        match index:
            case ast.Constant(value=int(number)):
                return str(number)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
                info = self.tree.modules.get(path) if self.tree else None
                if info is not None and number <= len(info.children):
                    return info.children[-number]
        self.thing(index)
        return "*"

    def call(self, node: ast.Call) -> _Thing:
        arguments = [self.thing(a) for a in node.args]
        arguments += [self.thing(k.value) for k in node.keywords]
        self.effects.loose |= any(isinstance(argument, _Tracer) for argument in arguments)
        for keyword in node.keywords:
            if keyword.arg == "out":
                self.wrote(self.thing(keyword.value))
        changes = any(keyword.arg == "inplace" for keyword in node.keywords)
        held = None
        for argument in arguments:
            held = self.either(held, argument)
        if changes:
            self.wrote(held)
        match node.func:
            case ast.Attribute(value=owner, attr=name):
                base = self.thing(owner)
                if isinstance(base, _Tracer):
                    if name == "cache":
                        self.cache(node)
                    self.effects.stops |= name == "stop"
                    return base if name == "all" else None
                if isinstance(base, _Node):
                    if name == "get" and not base.path:
                        return self.named(node)
                    if name == "skip":
                        self.effects.skips = True
                        line = node.lineno + self.shift
                        self.effects.reads.append(Access(base.path, "input", line, self.when))
                        self.effects.writes.append(Access(base.path, "output", line, self.when))
                    else:
                        self.effects.calls = True
                        self.attribute(base, name, node.lineno)
                    return None
                if name.endswith("_") and not name.endswith("__"):
                    self.wrote(self.either(base, held))
                elif isinstance(base, _Value) and name not in _CHANGING.split():
                    pass
                elif name not in PURE_METHODS and not _of_torch(owner):
                    self.wrote(self.either(base, held))
                    self.effects.opaque |= base is None
                both = self.either(base, _many(held))
                if isinstance(owner, ast.Name) and name in _KEEPING:
                    self.known[owner.id] = both
                return both
            case ast.Name(id=name) if name in PURE_CALLS:
                return held
        called = self.thing(node.func)
        self.effects.calls |= isinstance(called, _Node)
        if not isinstance(called, _Node):
            self.effects.opaque = True
            self.wrote(held)
        return held

    def cache(self, node: ast.Call) -> None:
        """`tracer.cache(modules)` reads what it is given, or everything, in every step."""
        self.effects.loops = True
        given = [k.value for k in node.keywords if k.arg == "modules"] or node.args[:1]
        paths = [path for part in given for path in self.paths(part)] or [_EVERY]
        for path in paths:
            for side in ("output", "input"):
                self.effects.reads.append(Access(path, side, 0, LOOP))

    def paths(self, node: ast.expr) -> list[str]:
        match node:
            case ast.Constant(value=None):
                return [_EVERY]
            case ast.Constant(value=str(path)):
                return [path, path.removeprefix("model.")]
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [path for part in parts for path in self.paths(part)]
        held = self.thing(node)
        return [held.path] if isinstance(held, _Node | _Many) else [_EVERY]

    def named(self, node: ast.Call) -> _Node:
        """`model.get(path)`."""
        match node.args:
            case [ast.Constant(value=str(path))]:
                return _Node(path)
        return _Node(_UNKNOWN)

    def either(self, one: _Thing, other: _Thing) -> _Thing:
        if one is None or other is None:
            return one or other
        if isinstance(one, _Tracer) or isinstance(other, _Tracer):
            return one if isinstance(other, _Tracer) else other
        if isinstance(one, _Value) and isinstance(other, _Value):
            return _Value(tuple(dict.fromkeys((*one.at, *other.at))))
        if isinstance(one, _Value) or isinstance(other, _Value):
            return one if isinstance(one, _Value) else other
        if isinstance(one, _Source) or isinstance(other, _Source):
            return _Source(_UNKNOWN) if one != other else one
        if isinstance(one, _Node) and isinstance(other, _Node):
            return _Node(_common([one.path, other.path]))
        many = [_join(t.path, "*") if isinstance(t, _Node) else t.path for t in (one, other)]
        deep = {t.deep if isinstance(t, _Many) else 1 for t in (one, other)}
        return _Many(_common(many) if len(deep) == 1 else _UNKNOWN, max(deep))

    def wrote(self, held: _Thing) -> None:
        if isinstance(held, _Value):
            self.effects.writes += [a for a in held.at if a not in self.effects.writes]


def _each(held: _Thing) -> _Thing:
    """What a loop over something gets in each round."""
    if isinstance(held, _Node):
        return _Node(_join(held.path, "*"))
    if not isinstance(held, _Many):
        return held
    return _Node(held.path) if held.deep == 1 else _Many(held.path, held.deep - 1)


def _many(held: _Thing) -> _Thing:
    """What a list of something is."""
    if isinstance(held, _Many):
        return _Many(held.path, held.deep + 1)
    return _Many(held.path) if isinstance(held, _Node) else held


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _loading(target: ast.expr) -> ast.expr:
    match target:
        case ast.Name(id=name):
            return ast.copy_location(ast.Name(name, ast.Load()), target)
    return target


def _of_torch(owner: ast.expr) -> bool:
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return isinstance(owner, ast.Name) and owner.id in ("torch", "F")
