"""Lowering: a block's writes in the forward pass as data, where they surely are what Python does.

A write is lowered if it is affine in the value and its constants are known before the block runs.
Either every write of a block is, or none: what stays interleaved would stop a step all the same.
The text is followed statement by statement, loops over known things round by round, loops over
steps once for all their steps; see `nnsight_core.lowering.symbols` for what expressions come to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nnsight_core.code import Code
from nnsight_core.effects import effects_of, statements_of
from nnsight_core.loops import StepChoice, StepLoop
from nnsight_core.lowering.affine import EVERY, Affine, Lowered, NotLowered, Steps
from nnsight_core.lowering.happenings import Order, conflicts
from nnsight_core.lowering.remainder import code_without, loaded
from nnsight_core.lowering.symbols import NONE, Known, Made, Part, Refused
from nnsight_core.lowering.writes import Writes
from nnsight_core.names import is_save
from nnsight_core.tree import ModelTree

__all__ = ["Affine", "Lowered", "NotLowered", "Steps", "lower"]

_MOST = 2000
"""Statements up to which loops are followed round by round."""


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


class _Lowering(Writes):
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

    def loop(self, node: ast.For) -> None:
        over = self.symbols.of(node.iter)
        straight = not node.orelse and not _leaves(node.body)
        value = self.symbols.spread(over.value) if isinstance(over, Known) else None
        if type(value) is torch.Tensor and value.dim():
            value = value.unbind(0)
        if isinstance(value, StepLoop | StepChoice):
            steps = (value[:] if isinstance(value, StepChoice) else value).steps
            self.over_steps(node, steps, straight)
        elif isinstance(value, list | tuple | range) and straight and self.may_unroll(node, value):
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

    def may_unroll(self, node: ast.For, value: Sequence[Any]) -> bool:
        return self.turn + len(value) * len(node.body) <= _MOST

    def over_steps(self, node: ast.For, steps: Steps, straight: bool) -> None:
        self.steps, self.late = steps, False
        if not straight or self.inside:
            self.keep(
                node, "in a loop over steps " + ("in another" if straight else "with a way out")
            )
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

    def compare(self, body: list[ast.stmt], gone: set[ast.stmt], order: Order) -> None:
        """Hold the writes against everything else that the block does."""
        for affine, of in self.used:
            for one in (of | self.symbols.indexed) & self.changed.keys():
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


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a loop's rounds may end before their last statement."""
    return any(isinstance(p, ast.Break | ast.Continue) for s in body for p in ast.walk(s))
