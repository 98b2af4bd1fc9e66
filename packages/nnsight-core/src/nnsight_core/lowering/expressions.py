"""Expressions: the symbol of each, from those of the names in it."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nnsight_core.block_tracer import BlockTracer
from nnsight_core.loops import ALL_STEPS, StepChoice
from nnsight_core.lowering.arithmetic import Arithmetic, as_column, number_or_tensor
from nnsight_core.lowering.pure import FUNCTIONS, METHODS, may_run, moderate
from nnsight_core.lowering.symbols import (
    NONE,
    ROWS,
    Ids,
    Known,
    Made,
    Module,
    Part,
    Refused,
    Symbol,
    Unknown,
    blank,
    ids_of,
    locations_of,
    nodes_as_modules,
    rows_and_columns,
    why_unknown,
)
from nnsight_core.tracer import Captured
from nnsight_core.tree import TOKENS, ModelTree


class Symbols(Arithmetic):
    """The symbols of a block's names, and of its expressions.

    Args:
        names: the values that the block takes along.
        tree: the model's tree, with what its locations hold.
        device: where values lie when the block runs.
    """

    def __init__(self, names: Mapping[str, Any], tree: ModelTree, device: torch.device) -> None:
        super().__init__(device)
        self.tree = tree
        self.visit = 0
        self.indexed: Ids = NONE  # what any index was computed from
        self.names: dict[str, Symbol] = {}
        for name, value in names.items():
            self.names[name] = Known(nodes_as_modules(value), ids_of(value))

    def of(self, node: ast.expr) -> Symbol:
        """What an expression is."""
        try:
            found = self._of(node)
        except Refused as refused:
            return self.opaque(node, str(refused))
        except Exception as error:  # the user's arithmetic; it raises again where the block runs
            return self.opaque(node, f"raises {type(error).__name__}: {error}")
        return self.opaque(node) if found is None else found

    def opaque(self, node: ast.AST, why: str = "") -> Unknown:
        """An expression that is not followed."""
        of: Ids = NONE
        at: dict[str, None] = {}
        reasons = [why] if why else []
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                symbol = self.names.get(part.id)
                if isinstance(symbol, Unknown):
                    reasons.append(symbol.why)
                    at.update(dict.fromkeys(symbol.at))
            elif isinstance(part, ast.Attribute):
                symbol = self._location(part)
            else:
                continue
            if isinstance(symbol, Part | Made):
                at[locations_of(symbol)[0]] = None
            if isinstance(symbol, Known | Unknown | Made):
                of |= symbol.of
        return Unknown(next(filter(None, reasons), ""), of, tuple(at))

    def select(self, part: Part, index: Any) -> Part:
        """A part of a value: `value[index]`."""
        if part.index is None:
            return self._tensor(part, index)
        assert part.base is not None and part.like is not None
        if index == slice(None) or index is Ellipsis:
            return part
        if not part.whole:
            raise Refused("is indexed twice")
        rows, columns = rows_and_columns(index)
        if isinstance(columns, list):
            width = part.base.shape[1]
            if any(not -width <= c < width for c in columns):
                raise Refused(f"has {width} columns, and is indexed by {columns}")
            if len({c % width for c in columns}) < len(columns):
                raise Refused("is indexed by a column that comes twice")
        if isinstance(rows, int) and not -ROWS <= rows < ROWS:
            like = part.base[0, columns]  # rows are counted where the steps are known
        else:
            like = part.base[rows, columns]
        own = not isinstance(columns, list)
        return replace(part, rows=rows, columns=columns, like=like, own=own)

    def index(self, node: ast.expr) -> Any:
        """What stands in brackets, with its numbers known."""
        match node:
            case ast.Slice(lower=lower, upper=upper, step=step):
                parts = [None if p is None else self.index(p) for p in (lower, upper, step)]
                return slice(*[None if p is None else operator.index(p) for p in parts])
            case ast.Tuple(elts=elements):
                return tuple([self.index(e) for e in elements])
        symbol = self.of(node)
        if not isinstance(symbol, Known):
            raise Refused(f"is indexed by `{ast.unparse(node)}`, which {why_unknown(symbol)}")
        value = symbol.value
        self.indexed |= symbol.of
        if type(value) is Tensor and value.dtype == torch.int64 and value.dim() == 1:
            return value.tolist()
        if isinstance(value, Tensor):
            raise Refused("is indexed by a tensor")
        return value

    # -- inside ----------------------------------------------------------------------------------

    def _of(self, node: ast.expr) -> Symbol | None:
        match node:
            case ast.Constant(value=value):
                return Known(value)
            case ast.Name(id=name):
                if name in self.names:
                    return self.names[name]
                found = getattr(builtins, name, None)
                return Known(found) if id(found) in FUNCTIONS else None
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.of(owner), name)
            case ast.Subscript(value=owner, slice=index):
                return self._subscript(self.of(owner), index)
            case ast.BinOp(left=left, op=op, right=right):
                return self.operate(_OPERATORS.get(type(op)), self.of(left), self.of(right))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                symbol = self.of(inner)
                if isinstance(symbol, Known):
                    return Known(-number_or_tensor(symbol.value), symbol.of)
                return self.operate(operator.mul, Known(-1), symbol)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                parts = [self.of(e) for e in elements]
                known = [p for p in parts if isinstance(p, Known)]
                if len(known) < len(parts):
                    return None
                values = [p.value for p in known]
                of = NONE.union(*(p.of for p in known))
                return Known(values if isinstance(node, ast.List) else tuple(values), of)
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._call(function, args, keywords)
        return None

    def _location(self, node: ast.Attribute) -> Symbol | None:
        if node.attr not in ("output", "input", "inputs", "source", "logits", "samples"):
            return None
        owner = self.of(node.value)
        if not isinstance(owner, Known) or not isinstance(owner.value, Module):
            return None
        return self._of_module(owner.value.path, node.attr)

    def _attribute(self, owner: Symbol, name: str) -> Symbol | None:
        if isinstance(owner, Part) and owner.like is not None:
            found = {"dtype": owner.like.dtype, "device": self.device}.get(name)
            return None if found is None else Known(found)
        if not isinstance(owner, Known):
            return None
        value = owner.value
        if isinstance(value, Module):
            return self._of_module(value.path, name)
        if isinstance(value, _TRACERS) and name == "iter":
            return Known(StepChoice())
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in ("torch", "math"):
            return Known(getattr(value, name))
        if type(value) in (Tensor, Parameter) and name in ("shape", "dtype", "device", "T", "ndim"):
            return Known(getattr(value, name), owner.of)
        return None

    def _of_module(self, path: str, name: str) -> Symbol:
        if name == "output":
            return self._output(path)
        if name in ("input", "inputs"):
            return Unknown("", at=(f"{path}.{name}",))
        if name == "source":
            return Unknown("depends on an operation inside a module", at=(f"{path}.source",))
        if not path and name in ("logits", "samples"):
            return Unknown("", at=(name,))
        child = f"{path}.{name}" if path else name
        if child not in self.tree.modules:
            return Unknown(f"depends on {child}, which is no module")
        return Known(Module(child))

    def _output(self, path: str) -> Symbol:
        """The output of a module, if it is one whose rows are those of the request."""
        where = (f"{path}.output",)
        info = self.tree.modules[path]
        if info.same_as is not None or info.repeats:
            return Unknown("belongs to a module that runs more than once in a step", at=where)
        if not info.output:
            return Unknown("is not recorded, so that it may have any shape", at=where)
        if [t.at for t in info.output] != [""]:
            return Part(path, None, None, None, self.visit)
        try:
            return self._recorded(path, 0, "")
        except Refused as refused:
            return Unknown(str(refused), at=where)

    def _recorded(self, path: str, index: int, at: str) -> Part:
        info = next((t for t in self.tree.modules[path].output or () if t.at == at), None)
        if info is None:
            raise Refused(f"has no tensor {at}")
        dtype = getattr(torch, info.dtype, None)
        if len(info.shape) != 2 or info.shape[0] != TOKENS or not isinstance(info.shape[1], int):
            raise Refused("is not one row of numbers for each token")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise Refused("does not hold floats")
        like = blank((ROWS, info.shape[1]), dtype)
        return Part(path, index, like, like, self.visit)

    def _tensor(self, part: Part, index: Any) -> Part:
        if type(index) is not int or index < 0:
            raise Refused("holds several tensors, of which one is written: `output[0][:]`")
        return replace(self._recorded(part.path, index, f"[{index}]"), visit=part.visit)

    def _subscript(self, owner: Symbol, index: ast.expr) -> Symbol | None:
        if isinstance(owner, Part):
            return self.select(owner, self.index(index))
        if isinstance(owner, Made):
            if owner.kind == "dot" and self.index(index) in ((slice(None), None), (Ellipsis, None)):
                return as_column(owner)
            return None
        if not isinstance(owner, Known):
            raise Refused(owner.why)
        chosen, value = self.index(index), owner.value
        if isinstance(value, Module):
            return self._child(value.path, chosen)
        if isinstance(value, StepChoice):
            return Known(value[chosen])
        if type(value) in (list, tuple, dict, Tensor, Parameter, range, torch.Size):
            return Known(value[chosen], owner.of)
        return None

    def _child(self, path: str, chosen: Any) -> Symbol | None:
        children = self.children(path)
        if isinstance(chosen, str):
            return self._of_module(path, chosen)
        return Known(children[chosen])

    def children(self, path: str) -> list[Module]:
        """The modules in a module, in order."""
        names = self.tree.modules[path].children
        return [Module(f"{path}.{name}" if path else name) for name in names]

    def _call(self, function: ast.expr, args: list[ast.expr], keywords: Any) -> Symbol | None:
        given = [self.of(a) for a in args]
        named = {k.arg: self.of(k.value) for k in keywords}
        if None in named:
            return None
        if isinstance(function, ast.Attribute):
            owner = self.of(function.value)
            if isinstance(owner, Part | Made):
                return self._method(owner, function.attr, given, named)
            if not isinstance(owner, Known):
                raise Refused(owner.why)
            if not isinstance(owner.value, ModuleType):
                return self._known_method(owner, function.attr, given, named)
            called = self._attribute(owner, function.attr)
        else:
            called = self.of(function)
        if not isinstance(called, Known) or id(called.value) not in FUNCTIONS:
            return None
        if isinstance(given[0] if given else None, Part | Made):
            return self._function(called.value, given, named)
        return self._run(called.value, given, named)

    def _run(self, function: Callable[..., Any], given: Any, named: Any) -> Known | None:
        every = [*given, *named.values()]
        if not all(isinstance(s, Known) for s in every):
            return None
        values = [self.spread(s.value) for s in given]
        options = {name: s.value for name, s in named.items()}
        if not may_run(function, values, options):
            return None
        made = function(*values, **options)
        if isinstance(made, zip | enumerate | reversed):
            made = list(made)
        return Known(made, NONE.union(*(s.of for s in every)))

    def spread(self, value: Any) -> Any:
        """A module as the list that a loop over it goes through; anything else as it is."""
        return self.children(value.path) if isinstance(value, Module) else value

    def _known_method(self, owner: Known, name: str, given: Any, named: Any) -> Symbol | None:
        value = owner.value
        if isinstance(value, _TRACERS) and name == "all" and not given:
            return Known(ALL_STEPS)
        if value == Module("") and name == "get" and len(given) == 1:
            path = given[0].value if isinstance(given[0], Known) else None
            return Known(Module(path)) if path in self.tree.modules else None
        if type(value) is dict and name in ("items", "keys", "values") and not given:
            return Known(list(getattr(value, name)()), owner.of)
        if type(value) in (Tensor, Parameter) and name in METHODS and moderate(value):
            if name in ("to", "type_as"):
                given = [
                    Known(g.like.dtype) if isinstance(g, Part) and g.like is not None else g
                    for g in given
                ]
                name = "to"
            made = self._run(getattr(value, name), given, named)
            return None if made is None else replace(made, of=made.of | owner.of)
        return None

    def _method(self, owner: Part | Made, name: str, given: Any, named: Any) -> Symbol | None:
        if name == "sum" and isinstance(owner, Made) and owner.kind == "scale":
            values = [s.value for s in given if isinstance(s, Known)]
            options = {k: s.value for k, s in named.items() if isinstance(s, Known)}
            return self._sum(owner, *values, **options)
        if named:
            return None
        if name in _AS_OPERATORS and len(given) == 1:
            return self.operate(_AS_OPERATORS[name], owner, given[0])
        shape = [s.value for s in given if isinstance(s, Known)]
        as_one = name == "unsqueeze" and shape in ([-1], [1])
        as_one |= name in ("view", "reshape") and shape in ([-1, 1], [(-1, 1)])
        if as_one and isinstance(owner, Made) and owner.kind == "dot":
            return as_column(owner)
        return None

    def _sum(self, made: Made, dim: Any = None, keepdim: bool = False) -> Symbol | None:
        """`(x * d).sum(-1)`, which is `x @ d`."""
        if dim not in (-1, made.like.dim() - 1) or not isinstance(made.operand, Tensor):
            return None
        like = made.like.sum(-1, keepdim=keepdim)
        return replace(made, kind="dot", like=like, column=bool(keepdim) or not like.dim())

    def _function(self, function: Any, given: Any, named: Any) -> Symbol | None:
        if named:
            return None
        first, rest = given[0], given[1:]
        if function in (torch.matmul, torch.mv, torch.dot) and len(rest) == 1:
            return self.operate(operator.matmul, first, rest[0])
        if function is torch.outer and isinstance(first, Made) and len(rest) == 1:
            column = as_column(first) if first.kind == "dot" else None
            return None if column is None else self.operate(operator.mul, column, rest[0])
        if function in (torch.zeros_like, torch.ones_like, torch.full_like):
            if not isinstance(first, Part) or first.like is None:
                return None
            given = [Known(0.0 if function is torch.zeros_like else 1.0), *rest][-1]
            return Made(first, "set", self.operand(first, given), first.like, given.of)
        return None


_TRACERS = (Captured, BlockTracer)
_OPERATORS: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
}
_AS_OPERATORS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "matmul": operator.matmul,
    "mv": operator.matmul,
}
