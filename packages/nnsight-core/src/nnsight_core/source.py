"""The operations inside a module's forward, from its source.

Each call and each assignment to a plain name is an operation: a call of `self.c_attn(x)` is
`self_c_attn_0`, the second assignment to `q` is `q_1`. The forward is compiled anew with a probe
around each, keeping its file and lines; what runs inside a kernel is not reachable this way.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from nnsight_core.edited import asserted, difference
from nnsight_core.parsing import parse

_CALL, _BIND = "__nnsight_call__", "__nnsight_bind__"
_BY_DYNAMO = ("__compiled_fn", "__resume_at", "__import_")


@dataclass(frozen=True, slots=True)
class _Probed:
    names: tuple[str, ...]
    code: CodeType


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one bound forward, or of a function that it calls.

    Attributes:
        names: their names, in the order of the source.
    """

    names: tuple[str, ...]
    _forward: MethodType | FunctionType
    _code: CodeType

    def build(self, call: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., Any]:
        """The forward with `call(name, function, *args)` and `bind(name, value)` in it."""
        function = _function(self._forward)
        assert function is not None
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells[_CALL], cells[_BIND] = CellType(call), CellType(bind)
        probed = FunctionType(
            self._code,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(cells[name] for name in self._code.co_freevars),
        )
        probed.__kwdefaults__ = function.__kwdefaults__
        if isinstance(self._forward, FunctionType):
            return probed
        return MethodType(probed, self._forward.__self__)


def operations_of(forward: Callable[..., Any]) -> Operations | None:
    """The operations of a bound method or a function; None if its source cannot be had."""
    function = _function(forward)
    if function is None:
        return None
    probed = _probe(function.__code__)
    return None if probed is None else Operations(probed.names, forward, probed.code)  # type: ignore[arg-type]


def _function(forward: Any) -> FunctionType | None:
    plain = forward.__func__ if isinstance(forward, MethodType) else forward
    return plain if isinstance(plain, FunctionType) else None


@lru_cache(maxsize=1024)
def _probe(code: CodeType) -> _Probed | None:
    try:
        lines, first = inspect.getsourcelines(code)
        text = "".join(lines)
        # What is indented stays so, which texts over several lines are part of.
        inner = text[:1] in (" ", "\t")
        tree = parse(("if 1:\n" if inner else "") + text, code.co_filename)
    except (OSError, TypeError, SyntaxError):
        return None
    body = tree.body[0].body if inner else tree.body
    function = body[0]
    if not isinstance(function, ast.FunctionDef) or len(body) != 1:
        return None
    if function.name != code.co_name:
        return None
    function.decorator_list = []
    ast.increment_lineno(tree, first - (2 if inner else 1))
    plain = _compiled(function, code)
    if plain is None or _was_edited(code, plain, function):
        return None
    probes = _Probes()
    function.body = [probes.visit(statement) for statement in function.body]
    new = _compiled(function, code)
    if new is None:
        return None
    if new.co_argcount != code.co_argcount or new.co_varnames[0:1] != code.co_varnames[0:1]:
        return None
    return _Probed(tuple(probes.names), new)


def _compiled(function: ast.FunctionDef, code: CodeType) -> CodeType | None:
    """A function's code, made from its text where `code` was: in a class of the same name."""
    # The probes and whatever the function closes over become free names of the new code.
    free = [_CALL, _BIND, *code.co_freevars]
    outer = parse(f"def outer({', '.join(dict.fromkeys(free))}): pass")
    wrapper = outer.body[0]
    assert isinstance(wrapper, ast.FunctionDef)
    around = code.co_qualname.split(".")[-2:-1]
    names = ["outer", code.co_name]
    wrapper.body = [function]
    if around not in ([], ["<locals>"]):
        # Private names (`self.__scale`) are those of the class.
        holder = ast.ClassDef(around[0], [], [], [], [])
        holder.body, wrapper.body = [function], [holder]
        names.insert(1, around[0])
    ast.fix_missing_locations(outer)
    try:
        found = compile(outer, code.co_filename, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    for name in names:
        found = _inner(found, name)
    return found


def _was_edited(running: CodeType, told: CodeType, function: ast.FunctionDef) -> bool:
    if any(name.startswith(_BY_DYNAMO) for name in running.co_names):
        return False  # the code of the moment; the text is what it was made from
    last = function.end_lineno or function.lineno
    lines = set(range(function.body[0].lineno, last + 1)) - asserted(ast.walk(function))
    return difference(running, told, lines, exact=False) is not None


def _inner(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


class _Probes(ast.NodeTransformer):
    def __init__(self) -> None:
        self.names: list[str] = []
        self._counts: dict[str, int] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # A bare `super()` finds its class through the frame that calls it.
        if isinstance(node.func, ast.Name) and node.func.id in ("super", "locals"):
            return node
        self.generic_visit(node)
        name = self._name(_callee(node.func))
        arguments = [ast.Constant(name), node.func, *node.args]
        return ast.copy_location(
            ast.Call(ast.Name(_CALL, ast.Load()), arguments, node.keywords), node
        )

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)
        match node.targets:
            case [ast.Name(id=target)]:
                name = self._name(target)
                call = ast.Call(ast.Name(_BIND, ast.Load()), [ast.Constant(name), node.value], [])
                node.value = ast.copy_location(call, node.value)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _name(self, stem: str) -> str:
        count = self._counts.get(stem, 0)
        self._counts[stem] = count + 1
        name = f"{stem}_{count}"
        self.names.append(name)
        return name


def _callee(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_callee(value)}_{name}"
        case ast.Subscript(value=value):
            return _callee(value)
        case ast.Call(func=function):
            return _callee(function)
    return "call"
