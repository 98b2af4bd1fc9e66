"""Lowering: a block's writes in the forward pass as data, where they surely are what Python does.

A write is lowered if it is affine in the value and its constants are known before the block runs.
Either every write of a block is, or none: what stays interleaved would stop a step all the same.
The text is followed statement by statement, loops over known things round by round, loops over
steps once for all their steps; see `nnsight_core.symbols` for what expressions come to.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nnsight_core.affine import EVERY, FIRST, Affine, Lowered, NotLowered, Steps
from nnsight_core.block_tracer import BLOCK_TRACER
from nnsight_core.code import Code, may_change
from nnsight_core.effects import Access, Effects, Walk, effects_of, statements_of
from nnsight_core.happenings import Happening, Order, conflicts
from nnsight_core.loops import StepChoice, StepLoop
from nnsight_core.names import analyse, is_save
from nnsight_core.remainder import code_without, loaded
from nnsight_core.symbols import (
    NONE,
    Ids,
    Known,
    Made,
    Module,
    Part,
    Refused,
    Symbol,
    Symbols,
    Unknown,
    locations_of,
    why_not,
)
from nnsight_core.tree import ModelTree

_ROUNDS = 4096


def lower(
    code: Code,
    names: Mapping[str, Any],
    tree: ModelTree,
    targets: Iterable[str] = (),
    *,
    tokens: int | None = None,
    order: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> Lowered | NotLowered:
    """Lower a block's writes in the forward pass.

    A block without such writes is lowered as it stands. Nothing is raised: what would raise an
    error when the block runs is not lowered, so that it still does.

    Args:
        code: the block's code.
        names: the values that it takes along, on the engine's device.
        tree: the model's tree, with what each output holds; without it, nothing can be lowered.
        targets: the names that `as` binds to the tracer.
        tokens: how many rows the prefill has; rows counted from either end need it, but for the
            first and the last.
        order: the paths of modules in the order in which a step makes their outputs. Without it,
            that is known only of numbered modules (layers) and of a module and its own parts.
        device: where the values of locations lie.

    Example:
        >>> lowered = lower(code, {"model": model, "v": v}, model.tree)
        >>> print(*lowered.writes, sep="\\n")
        line 3: model.layers.3.output gets a tensor of 4096 added, at step 0
    """
    body = statements_of(code)
    written = effects_of(code, names, tree, targets := tuple(targets)).writes_forward
    walk = _Lowering(code, names, tree, targets, tokens, torch.device(device))
    for statement in body:
        walk.statement(statement)
    if not written and not walk.writes:
        return Lowered((), code, alone=not walk.active)
    gone = walk.removable(body)
    walk.compare(body, gone, Order(tree, order))
    if walk.reasons:
        return NotLowered(tuple(dict.fromkeys(walk.reasons)))
    rest = code_without(code, gone) if gone else code
    effects = effects_of(rest, names, tree, walk.targets)
    if effects.writes_forward or effects.reads_anywhere:
        left = [a for a in effects.writes if a.side not in ("logits", "samples")]
        line = abs(left[0].line) if left else code.line
        return NotLowered(((line, "what is left of the block may read or write anything"),))
    alone = not any(node not in gone for node in walk.active)
    return Lowered(tuple(walk.writes), rest, alone)


@dataclass(slots=True)
class _Binding:
    """A statement that gives a name to what only lowered statements may use."""

    node: ast.stmt
    names: list[str]
    symbol: Symbol
    happening: Happening


class _Lowering:
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
        self.effects = Walk(code, names, tree, targets)
        self.symbols = Symbols(names, tree, device)
        self.symbols.names.update(dict.fromkeys(targets, Known(BLOCK_TRACER)))
        self.steps: Steps = FIRST
        self.turn = 0
        self.late = False  # after a loop over steps, where the step is not known
        self.inside: list[Ids] = []  # what the loops around this statement go through
        self.writes: list[Affine] = []
        self.happenings: list[Happening] = []
        self.bindings: list[_Binding] = []
        self.used: list[tuple[Affine, Ids]] = []
        self.changed: dict[int, int] = {}  # what the block changes in place, and the line
        self.stale: dict[str, Affine] = {}  # names of values that are no longer their location's
        self.lowered: set[ast.stmt] = set()
        self.kept: set[ast.stmt] = set()
        self.active: set[ast.stmt] = set()  # statements that do more than bind what is known
        self.reasons: list[tuple[int, str]] = []

    # -- statements ------------------------------------------------------------------------------

    def statement(self, node: ast.stmt) -> None:
        self.turn += 1
        match node:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return
            case ast.For():
                self.loop(node)
                return
        try:
            with torch.no_grad():
                done = self.recognise(node)
        except Refused as refused:
            self.refuse(node, str(refused))
            return
        except Exception as error:  # PyTorch's, of the shapes; it comes again when the block runs
            self.refuse(node, f"is written by what raises {type(error).__name__}: {error}")
            return
        if done:
            self.effects_of(node)
        else:
            self.keep(node)

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

    def augment(
        self, node: ast.stmt, target: ast.expr, op: ast.operator, value: ast.expr
    ) -> bool:
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
        if isinstance(symbol, Known):  # else it was refused
            axes = symbol.value.dim() if isinstance(symbol.value, torch.Tensor) else None
            # `copy_` takes a tensor of no more axes, `fill_` a number.
            if name == "copy_" and (axes is None or axes > _like(part).dim()) or (
                name == "fill_" and axes
            ):
                raise Refused(f"is written by `{name}` with what it does not take")
            self.try_store(part, symbol.value)
        return self.write(node, part, Made(part, "set", number, _like(part), symbol.of))

    def in_place(self, node: ast.stmt, part: Part, op: Any, value: ast.expr) -> bool:
        if op is None:
            raise Refused("is written by an operator that is not lowered")
        symbol = self.symbols.of(value)
        made = self.symbols.operate(op, part, symbol)
        made = self.made(part, symbol if made is None else made)
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
            value = value.detach().to("meta")
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
        if isinstance(target, ast.Tuple) and not self.unpack(target, symbol):
            return False
        if isinstance(target, ast.Name):
            self.symbols.names[target.id] = symbol
        names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
        path = locations_of(symbol) or touches
        happening = self.happen(node, path[0].removesuffix(".output"), "output")
        self.bindings.append(_Binding(node, names, symbol, happening))
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
                self.symbols.names[name] = symbol
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

    # -- loops -----------------------------------------------------------------------------------

    def loop(self, node: ast.For) -> None:
        over = self.symbols.of(node.iter)
        straight = not node.orelse and not _leaves(node.body)
        value = self.symbols.spread(over.value) if isinstance(over, Known) else None
        if type(value) is torch.Tensor and value.dim():
            value = value.unbind(0)
        if isinstance(value, StepLoop | StepChoice):
            steps = (value[:] if isinstance(value, StepChoice) else value).steps
            self.over_steps(node, steps, straight)
        elif isinstance(value, list | tuple | range) and straight and len(value) <= _ROUNDS:
            assert isinstance(over, Known)
            self.kept.add(node)
            self.inside.append(over.of)
            for each in value:
                self.bind(node.target, Known(each, over.of))
                for statement in node.body:
                    self.statement(statement)
            self.inside.pop()
        else:
            why = "in a loop whose rounds are not known" if straight else "in a loop with a way out"
            self.keep(node, why)

    def over_steps(self, node: ast.For, steps: Steps, straight: bool) -> None:
        self.steps, self.late = steps, False
        if not straight or self.inside:
            self.keep(node, "in a loop over steps " + ("in another" if straight else "with a way out"))
        else:
            self.kept.add(node)
            self.forget(node, "changes from step to step")
            self.forget(node.target, "depends on the step number")
            self.effects.bind(node.target, None)
            self.symbols.visit += 1
            self.inside.append(NONE)
            for statement in node.body:
                self.statement(statement)
            self.inside.pop()
        self.symbols.visit += 1
        self.forget(node, "was bound in a loop over steps")
        self.steps, self.late = EVERY, True

    # -- what stays ------------------------------------------------------------------------------

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
        for part in ast.walk(node):
            match part:
                case ast.AugAssign(target=ast.Name() as owner):
                    pass
                case (ast.Subscript(value=owner) | ast.Attribute(value=owner)) if not isinstance(
                    part.ctx, ast.Load
                ):
                    pass
                case ast.Call(func=ast.Attribute(value=owner, attr=name), keywords=keywords):
                    if name not in _GROWING and not name.endswith("_") or keywords:
                        if not may_change(part):
                            continue
                        owner = part
                case _:
                    continue
            held = self.symbols.opaque(owner).of
            self.changed.update(dict.fromkeys(held, self.line(node)))
            if isinstance(part, ast.Call) and owner is not part:  # a container may hold from now on what it is given
                more = self.symbols.opaque(part)
                for name in (n.id for n in ast.walk(owner) if isinstance(n, ast.Name)):
                    was = self.symbols.names.get(name)
                    if isinstance(was, Unknown | Known) and more.of:
                        self.symbols.names[name] = Unknown("", more.of | was.of)

    def forget(self, node: ast.AST, why: str) -> None:
        """What these statements bind is not known here; it may be what it was."""
        body = [node] if isinstance(node, ast.stmt) else [ast.Assign([node], ast.Constant(0))]  # type: ignore[list-item]
        for name in analyse(body).binds:
            was = self.symbols.names.get(name)
            held = isinstance(was, Part) or (isinstance(was, Unknown) and was.held)
            at = locations_of(was) if was is not None and held else ()
            of = was.of if isinstance(was, Known | Unknown | Made) else NONE
            self.symbols.names[name] = Unknown(why, of, at, held)

    # -- notes -----------------------------------------------------------------------------------

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

    # -- at the end ------------------------------------------------------------------------------

    def compare(self, body: list[ast.stmt], gone: set[ast.stmt], order: Order) -> None:
        """Hold the writes against everything else that the block does."""
        for affine, of in self.used:
            for one in of & self.changed.keys():
                words = f"with what line {self.changed[one]} may change"
                self.reasons.append((affine.line, f"{affine.path}.output is written {words}"))
        for node in self.lowered & self.kept:
            self.reason(node, "this is a lowered write in one round of a loop and not in another")
        for binding in self.bindings:
            if binding.node not in gone and isinstance(binding.symbol, Made):
                binding.happening.read = True
        names = loaded(body, gone)
        for name, affine in self.stale.items():
            if name in names:
                words = f"{affine.path}.output is assigned, and {name!r} holds what it was before"
                self.reasons.append((affine.line, words))
        for happening in self.happenings:
            happening.gone = happening.node in gone
        self.reasons += conflicts(self.happenings, order, self.tree)

    def removable(self, body: list[ast.stmt]) -> set[ast.stmt]:
        """The statements that the rest does without."""
        free = [b for b in self.bindings if b.node not in self.kept]
        saves = any(is_save(part) for statement in body for part in ast.walk(statement))
        read = {h.path for h in self.happenings if h.read}
        gone = self.lowered | {b.node for b in free}
        while True:
            names = loaded(body, gone)
            back = {
                b.node
                for b in free
                if b.node in gone
                and (
                    names & {*b.names}
                    or (isinstance(b.symbol, Known) and saves)
                    or (isinstance(b.symbol, Part) and b.symbol.path in read)
                )
            }
            if not back:
                return gone
            gone -= back


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


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a loop's rounds may end before their last statement."""
    return any(isinstance(p, ast.Break | ast.Continue) for s in body for p in ast.walk(s))


def _is_result(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "result"


def _text(access: Access) -> str:
    return f"{access.path}.{access.side}" if access.path else access.side


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
_GROWING = (
    "add append clear extend insert pop popitem remove reverse setdefault sort update".split()
)
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
