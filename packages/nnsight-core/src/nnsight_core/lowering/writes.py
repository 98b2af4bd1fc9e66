"""Writes: the statements that write a location's value, or name what such a write needs."""

from __future__ import annotations

import ast
import operator
from typing import Any

import torch

from nnsight_core.lowering.affine import Affine
from nnsight_core.lowering.expressions import Symbols
from nnsight_core.lowering.notes import Binding, Notes
from nnsight_core.lowering.symbols import (
    NONE,
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
    why_not,
)


class Writes(Notes):
    """Takes statements as writes, or as names for what a write may use."""

    def recognise(self, node: ast.stmt) -> bool:
        """Take a statement as a write or as a name for what a write may use."""
        match node:
            case ast.Assign(targets=[target], value=value):
                return self.assign(node, target, value)
            case ast.AugAssign(target=target, op=op, value=value):
                return self.augment(node, target, op, value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=name)) as call):
                if not name.endswith("_") or name.endswith("__"):
                    return False
                part = self.part(owner)
                return part is not None and self.call(node, part, name, call)
        return False

    def part(self, owner: ast.expr) -> Part | None:
        """The location's value that is written in."""
        symbol = self.symbols.of(owner)
        if isinstance(symbol, Unknown) and symbol.at and symbol.why:
            raise Refused(symbol.why)
        return symbol if isinstance(symbol, Part) else None

    def chosen(self, part: Part, index: ast.expr) -> Part:
        """`part[index]`, to be assigned to."""
        chosen = self.symbols.select(part, self.symbols.index(index))
        if part.index is None:
            raise Refused("is a tuple, whose parts cannot be assigned")
        return chosen

    def assign(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> bool:
        match target:
            case ast.Name() | ast.Tuple():
                return self.name(node, target, value)
            case ast.Attribute(attr="output"):
                part = self.part(target)
                if part is None:
                    return False
                return self.replace(node, part, value)
            case ast.Subscript(value=owner, slice=index):
                part = self.part(owner)
                if part is None:
                    return False
                part = self.owned(self.chosen(part, index))
                symbol = self.symbols.of(value)
                if isinstance(symbol, Known):
                    number = self.symbols.operand(part, symbol, sets=True)
                    self.try_store(part, symbol.value)
                    symbol = Made(part, "set", number, _like(part), symbol.of)
                made = self.made(part, symbol)
                self.try_store(part, made.like)
                return self.write(node, part, made)
        return False

    def replace(self, node: ast.stmt, part: Part, value: ast.expr) -> bool:
        """`location.output = value`."""
        symbol = self.symbols.of(value)
        if isinstance(symbol, Part) and symbol.same(part) and symbol.whole and not self.late:
            # What was changed in place is assigned to where it is; the visit may be another's.
            self.happen(node, part.path, "output")
            self.lowered.add(node)
            return True
        if part.index is None:
            raise Refused("is a tuple, which is not lowered when it is assigned as a whole")
        made, like = self.made(part, symbol), _like(part)
        if (made.like.shape, made.like.dtype) != (like.shape, like.dtype):
            raise Refused(
                f"is written with {made.like.dtype} of width {made.like.shape[-1]}, and holds "
                f"{like.dtype} of width {like.shape[-1]}"
            )
        self.write(node, part, made)
        for name, held in list(self.symbols.names.items()):
            if isinstance(held, Part) and held.path == part.path:
                self.symbols.names[name] = Unknown("is what a location held before it was assigned")
                self.stale[name] = self.writes[-1]
        if isinstance(value, ast.Name):
            self.symbols.names[value.id] = Unknown("was assigned to a location")
            self.stale[value.id] = self.writes[-1]
        return True

    def augment(self, node: ast.stmt, target: ast.expr, op: ast.operator, value: ast.expr) -> bool:
        match target:
            case ast.Name() | ast.Attribute(attr="output"):
                part = self.part(_loading(target))
                if part is not None and not part.own:
                    return False
            case ast.Subscript(value=owner, slice=index):
                part = self.part(owner)
                part = part and self.chosen(part, index)
            case _:
                return False
        if part is None:
            return False
        return self.in_place(node, self.owned(part), _IN_PLACE.get(type(op)), value)

    def call(self, node: ast.stmt, part: Part, name: str, call: ast.Call) -> bool:
        """`part.add_(v)` and its like."""
        part = self.owned(part)
        if not part.own:
            raise Refused("is indexed by a list of columns, which makes a copy")
        if call.keywords or len(call.args) != (name != "zero_") or name not in _METHODS:
            raise Refused(f"is written by `{name}` with what is not lowered")
        if _METHODS[name] is not None:
            return self.in_place(node, part, _METHODS[name], call.args[0])
        symbol = self.symbols.of(call.args[0]) if call.args else Known(0.0)
        number = self.symbols.operand(part, symbol, sets=True)
        of = NONE
        if isinstance(symbol, Known):  # else it was refused
            of = symbol.of
            axes = symbol.value.dim() if isinstance(symbol.value, torch.Tensor) else None
            # `copy_` takes a tensor of no more axes, `fill_` a number.
            if (
                name == "copy_"
                and (axes is None or axes > _like(part).dim())
                or (name == "fill_" and axes)
            ):
                raise Refused(f"is written by `{name}` with what it does not take")
            self.try_store(part, symbol.value)
        return self.write(node, part, Made(part, "set", number, _like(part), of))

    def in_place(self, node: ast.stmt, part: Part, op: Any, value: ast.expr) -> bool:
        if op is None:
            raise Refused("is written by an operator that is not lowered")
        symbol = self.symbols.of(value)
        made = None if isinstance(symbol, Unknown) else self.symbols.operate(op, part, symbol)
        if made is None:
            raise Refused(why_not(part, symbol))
        made = self.made(part, made)
        # In place, PyTorch does not let the right side have more axes than the left.
        if made.like.shape != _like(part).shape:
            raise Refused(f"is written with a shape of {list(made.like.shape)}")
        return self.write(node, part, made)

    def made(self, part: Part, symbol: Symbol) -> Made:
        """One operation on just this part, or the reason why it is none."""
        if not isinstance(symbol, Made) or symbol.kind in ("dot", "along"):
            raise Refused(why_not(part, symbol))
        if not symbol.part.same(part):
            other = symbol.part.path != part.path
            raise Refused(why_not(part, symbol) if other else "is written with another part of it")
        return symbol

    def owned(self, part: Part) -> Part:
        if part.index is None:
            raise Refused("is a tuple of tensors, not one")
        if part.visit != self.symbols.visit:
            raise Refused("is written in another step than the one in which it was read")
        return part

    def try_store(self, part: Part, value: Any) -> None:
        """Let PyTorch refuse what does not fit."""
        if isinstance(value, torch.Tensor):
            if not part.own and value.dim() > _like(part).dim():
                raise Refused(f"is written with a tensor of shape {list(value.shape)}")
            value = blank(value.shape, value.dtype)
        torch.empty_like(_like(part))[...] = value

    def write(self, node: ast.stmt, part: Part, made: Made) -> bool:
        if self.late:
            raise Refused("is written after a loop over steps, in a step that is not known")
        self.check_rows(part.rows)
        index = part.index
        assert index is not None
        kind: Any = made.kind
        affine = Affine(
            path=part.path,
            index=index,
            steps=self.steps,
            rows=part.rows,
            columns=part.columns,
            kind=kind,
            operand=made.operand,
            line=self.line(node),
            along=made.along,
            factor=made.factor,
        )
        self.writes.append(affine)
        self.used.append((affine, made.of.union(*self.inside)))
        self.happen(node, part.path, "output", affine)
        self.lowered.add(node)
        return True

    def check_rows(self, rows: slice | int) -> None:
        if isinstance(rows, slice) or rows in (0, -1):
            return
        if self.tokens is None or any(self.steps):
            raise Refused(f"is written in row {rows}, which a step may not have")
        if not -self.tokens <= rows < self.tokens:
            raise Refused(f"is written in row {rows} of {self.tokens}")

    def name(self, node: ast.stmt, target: ast.Name | ast.Tuple, value: ast.expr) -> bool:
        """A name for a known value, a location's value, or something made from one."""
        symbol = self.symbols.of(value)
        if isinstance(symbol, Unknown) or (isinstance(symbol, Part) and not symbol.own):
            return False
        if isinstance(symbol, Made) and isinstance(value, ast.Name):
            return False  # two names of one new tensor, which either may change
        touches = [*_loads(value, self.symbols), *locations_of(symbol)]
        if isinstance(symbol, Known) and not touches:
            self.keep(node, quiet=True)
            self.bind(target, symbol)
            return True
        if self.late or (isinstance(target, ast.Tuple) and not self.unpack(target, symbol)):
            return False
        if isinstance(target, ast.Name):
            self.symbols.names[target.id] = symbol
        names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
        path = locations_of(symbol) or touches
        happening = self.happen(node, path[0].removesuffix(".output"), "output")
        self.bindings.append(Binding(node, names, symbol, happening))
        self.active.add(node)
        return True

    def unpack(self, target: ast.Tuple, symbol: Symbol) -> bool:
        """`hidden, residual = layer.output`."""
        if not isinstance(symbol, Part) or symbol.index is not None:
            return False
        count = len(self.tree.modules[symbol.path].output or ())
        if len(target.elts) != count or not all(isinstance(e, ast.Name) for e in target.elts):
            return False
        for index, element in enumerate(target.elts):
            assert isinstance(element, ast.Name)
            self.symbols.names[element.id] = self.symbols.select(symbol, index)
        return True

    def bind(self, target: ast.expr, symbol: Known) -> None:
        """Names get parts of a known value; those that cannot be told get nothing."""
        match target:
            case ast.Name(id=name):
                # What has a name may be changed, here and under its other names.
                of = symbol.of | ids_of(symbol.value)
                self.symbols.names[name] = Known(symbol.value, of)
                path = symbol.value.path if isinstance(symbol.value, Module) else None
                self.effects.bind(target, path)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = self.symbols.spread(symbol.value)
                if isinstance(values, list | tuple) and len(values) == len(parts):
                    for part, value in zip(parts, values, strict=True):
                        self.bind(part, Known(value, symbol.of))
                else:
                    self.forget(target, "could not be told apart")
            case _:
                self.forget(target, "could not be told apart")


def _like(part: Part) -> torch.Tensor:
    assert part.like is not None
    return part.like


def _loads(node: ast.expr, symbols: Symbols) -> list[str]:
    """The locations that an expression touches, if only to ask for a dtype."""
    found = symbols.opaque(node).at
    return [at for at in found if at.endswith(".output")]


def _loading(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    assert isinstance(target, ast.Attribute)
    return ast.Attribute(target.value, target.attr, ast.Load())


_IN_PLACE: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_METHODS: dict[str, Any] = {
    "add_": operator.add,
    "sub_": operator.sub,
    "mul_": operator.mul,
    "div_": operator.truediv,
    **dict.fromkeys(("copy_", "fill_", "zero_")),
}
