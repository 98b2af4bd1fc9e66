"""From an invoke to the run that executes it: the scope that its code sees."""

from __future__ import annotations

import ast
from typing import Any

from nnsight_core.backend import Ended, Invoke, Noted
from nnsight_core.block_tracer import BLOCK_TRACER
from nnsight_core.capture import Block
from nnsight_core.code import compile_block
from nnsight_core.errors import NotSupportedError, UnboundSaveWarning
from nnsight_core.kept import handles_in
from nnsight_core.run import Run
from nnsight_core.traceback import CALL, show_user_lines
from nnsight_core.tracer import Captured

_UNBOUND = (
    "A value was saved, but no name holds it at the end of the block, so it does not come home. "
    "Bind it: `name = value.save()`. In a loop, append values to a list and save the list."
)
_UNBOUND_KEPT = (
    "A value was kept, but no name holds it at the end of the block, so its handle does not come "
    "home and it is let go. Bind it: `name = value.keep()`. In a loop, append values to a list and "
    "save the list."
)
_UNCLEAR = (
    "{place}: what was saved here has changed since, and containers that come home hold it more or "
    "less often than it was saved, so that it cannot be told what they are to hold. Save a clone "
    "for each: `x.clone().save()`."
)
_CLASH = (
    "{place}: {name!r} was both saved and kept, and one name cannot hold the value and its handle. "
    "Bind them to two names: `here = x.save()`, `there = x.keep()`."
)
VALUE = "__nnsight_value__"
_FUNCTION, _TRACER = "__nnsight_function__", "__nnsight_tracer__"
_CALL = f"    {VALUE} = {_FUNCTION}({_TRACER}).save()\n"


def run_of(invoke: Invoke, key: Any) -> Run | None:
    """The run of an invoke, in the process of the user; None if it has no block."""
    block = call_block(invoke.function) if invoke.function is not None else invoke.block
    if block is None:
        return None
    run = Run(block.code, scope_of(block), key)
    share(run, block.shared)
    return run


def share(run: Run, names: list[str]) -> None:
    """Make names that hold what was saved above the invokes come home."""
    run.saves.shared = {name: run.scope[name] for name in names}


def call_block(function: Any) -> Block:
    """The block that calls a function given instead of a body, and saves what it returns."""
    name = getattr(function, "__name__", "fn")
    code = compile_block(_CALL, CALL, 1, name)
    return Block(code, {_FUNCTION: function, _TRACER: BLOCK_TRACER})


def scope_of(block: Block) -> dict[str, Any]:
    """A block's names as its code sees them, with the block's own tracer in place of the user's."""
    scope = {
        name: BLOCK_TRACER if isinstance(value, Captured) else value
        for name, value in block.names.items()
    }
    for name in target_names(block.target):
        scope[name] = BLOCK_TRACER
    return scope


def target_names(target: ast.expr | None) -> list[str]:
    """The plain names that an `as` binds to the tracer; in a pair, the first one."""
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return [target.id] if isinstance(target, ast.Name) else []


def _leave_handles(run: Run, saves: dict[str, Any]) -> None:
    """After `here = there.save()`, where `there` is a handle outside, it goes on being one."""
    scope, binds = run.scope, run.code.names.binds
    for value in run.keeper.given if run.keeper is not None else ():
        names = [name for name in saves if scope.get(name) is value]
        if any(name in binds for name in names):
            for name in names:
                if name not in binds:
                    del saves[name]


def ended(run: Run, invoke: int, sequence: int = 0) -> Ended:
    """What a run that has ended brings home, its error with the user's own lines."""
    if run.error is not None:
        # Whoever handles the error has no use for what would stay on the engine.
        run.saves.forget_kept()
    keeper = run.keeper
    saves, lost = run.saves.outcome(run.scope, keeper.parts if keeper is not None else None)
    _leave_handles(run, saves)
    value = saves.pop(VALUE, None)
    filename = run.code.filename
    notes = [Noted(category, text, filename, line) for category, text, line in run.notes]
    # A name that a loop binds anew holds the last of what was saved there, as in any loop.
    gone = set(map(id, lost))
    home = {
        saved.line for kept in run.saves.made.values() for saved in kept if id(saved) not in gone
    }
    lines = {
        s.line: _UNBOUND if s.handle is None else _UNBOUND_KEPT for s in lost if s.line not in home
    }
    notes += [Noted(UnboundSaveWarning, text, filename, line) for line, text in lines.items()]
    error = run.error
    if error is None and run.saves.clashes:
        name = run.saves.clashes[0]
        line = max(run.code.names.saved.get(name, {run.code.line}))
        error = NotSupportedError(_CLASH.format(place=f"{filename}:{line}", name=name))
        run.error = error
        saves = {n: value for n, value in saves.items() if not handles_in(value)}
    if error is None and run.saves.unclear:
        place = f"{filename}:{run.saves.unclear[0].line}"
        error = run.error = NotSupportedError(_UNCLEAR.format(place=place))
    if error is not None:
        show_user_lines(error, run.code.compiled)
    return Ended(invoke, sequence, saves, value=value, error=error, warnings=notes)
