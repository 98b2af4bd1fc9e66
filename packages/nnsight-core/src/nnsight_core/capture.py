"""Capture: from a `with` statement that is being entered to the block that it holds.

`capture` finds the body of the `with` statement that a frame is entering and takes along the values
of the names that it needs. `Skip` keeps Python from running that body where it stands, and `push`
binds names in the user's frame when their values have come home.

CPython offers no way to skip a body, so `Skip` makes the frame's trace function raise at the first
instruction after `__enter__`, before the body (and before the `as` target is bound, which `push`
does instead); `__exit__` swallows it and restores whatever tracer was there, a debugger's or a
coverage tool's.
"""

from __future__ import annotations

import ast
import ctypes
import dis
import linecache
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from nnsight_core.code import Code, compile_block, is_lazy
from nnsight_core.edited import compiled, edit_in
from nnsight_core.errors import CaptureError
from nnsight_core.kept import Kept
from nnsight_core.lookup import names_around, own_names, variables_around
from nnsight_core.parsing import parse
from nnsight_core.private import mangled, mangled_target

_With = tuple[ast.With | ast.AsyncWith, str]
"""A statement, and the class in whose text it stands."""
WAY_OUT = "Give the block as a function instead: `model.trace(prompt, fn=function)`."


@dataclass(slots=True)
class Block:
    """A block's code with the values of the names that it needs.

    Attributes:
        code: what to run.
        names: the values, by name; a name that has none is left to fail where it is used.
        target: the names bound by `as`, if they are plain names.
        shared: the names that hold what was saved above the invokes.
    """

    code: Code
    names: dict[str, Any]
    target: ast.expr | None = None
    shared: list[str] = field(default_factory=list)

    def sign(self) -> tuple[Any, ...]:
        """What tells the block from any other while both are held, but for the tracer's names."""
        own = self.target.id if isinstance(self.target, ast.Name) else ""
        held = [(name, id(value)) for name, value in self.names.items() if name != own]
        return (id(self.code), own, *held, *self.shared)


def capture(frame: FrameType) -> Block:
    """Capture the body of the `with` statement that `frame` is entering.

    Args:
        frame: the user's frame, in the middle of calling `__enter__`.

    Raises:
        CaptureError: the body cannot be had; the message says why and what to do.
    """
    found = _find(frame)
    local, global_ = frame.f_locals, frame.f_globals
    names = {}
    for name in found.code.names.needs:
        if name in local:
            names[name] = local[name]
        elif name in found.closed:
            around = variables_around(frame, name)
            if name in around:
                names[name] = around[name]
        elif name in global_ and name not in found.own:
            names[name] = global_[name]
    names["__name__"] = global_.get("__name__", "__main__")
    return Block(found.code, names, found.target)


@dataclass(slots=True)
class _Found:
    """The block at one place of some running code.

    Attributes:
        running: that code, which is held so that its id is not given to another meanwhile.
        own: needed names that are never global there, whether they have a value or not.
        closed: needed names of a class body that belong to a function around it.
    """

    running: CodeType
    code: Code
    target: ast.expr | None
    own: frozenset[str]
    closed: frozenset[str]


_FOUND: OrderedDict[tuple[int, int], _Found] = OrderedDict()
_FOUND_MAX = 4096


def _find(frame: FrameType) -> _Found:
    key = (id(frame.f_code), frame.f_lasti)
    known = _FOUND.get(key)
    if known is not None:
        return known
    code, target = _search(frame)
    own = own_names(frame.f_code, code.names.needs)
    closed = names_around(frame.f_code, code.names.needs)
    found = _FOUND[key] = _Found(frame.f_code, code, target, own, closed)
    if len(_FOUND) > _FOUND_MAX:
        _FOUND.popitem(last=False)
    return found


def _search(frame: FrameType) -> tuple[Code, ast.expr | None]:
    filename, line = frame.f_code.co_filename, frame.f_lineno
    where = f"{filename}:{line}"
    lines = _lines(frame)
    if not lines:
        raise CaptureError(
            f"The source of the block at {where} cannot be had (code typed into `exec` or standard "
            f"input has none). {WAY_OUT}"
        )
    whole = "".join(lines)
    found = _with_at(_withs(whole, filename), frame)
    if found is None:
        raise CaptureError(
            f"No `with` statement with this call stands at {where}: it was entered some other way "
            f"(an ExitStack?), or the file was changed since it was imported. {WAY_OUT}"
        )
    statement, owner = found
    body = statement.body
    edit = edit_in(frame, whole, body)
    if edit is not None:
        raise CaptureError(
            f"The source of the block at {where} {edit}: the file was changed since it was "
            "imported. Restart, or reload the module."
        )
    first = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", []))])
    last = body[-1].end_lineno or first
    text = lines[first - 1 : last]
    head = text[0].encode()[: body[0].col_offset].decode()
    if head.strip():  # a body on the header's own line
        text[0] = " " * len(head) + text[0][len(head) :]
    running = frame.f_code
    lazy = is_lazy(running.co_flags)
    source = mangled("".join(text), owner)
    code = compile_block(source, filename, first, running.co_name, lazy)
    return code, mangled_target(statement.items[-1].optional_vars, owner)


@lru_cache(maxsize=64)
def _withs(text: str, filename: str) -> dict[int, list[_With]]:
    """The `with` statements of a file, by the lines on which they and their items start."""
    try:
        tree = parse(text, filename)
    except SyntaxError as error:
        raise CaptureError(
            f"{filename} cannot be read as Python ({error.msg}, line {error.lineno}): it was "
            "changed since it was imported."
        ) from error
    found: dict[int, list[_With]] = {}
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, owner = waiting.pop()
        if isinstance(node, ast.With | ast.AsyncWith):
            for line in {node.lineno, *(item.context_expr.lineno for item in node.items)}:
                found.setdefault(line, []).append((node, owner))
        if isinstance(node, ast.ClassDef):
            owner = node.name
        waiting += [(child, owner) for child in ast.iter_child_nodes(node)]
    return found


def _with_at(withs: dict[int, list[_With]], frame: FrameType) -> _With | None:
    positions = list(frame.f_code.co_positions())
    here = positions[frame.f_lasti // 2]
    if here[2] is None:  # Python runs without column numbers (-X no_debug_ranges)
        nodes = withs.get(frame.f_lineno, [])
        return nodes[0] if len(nodes) == 1 else None
    for node, owner in withs.get(here[0] or -1, []):
        # Entering is placed at the statement up to Python 3.12, at the item from 3.13 on.
        if here == _place(node):
            opcodes = frame.f_code.co_code
            entries = [
                2 * i
                for i, position in enumerate(positions)
                if position == here and opcodes[2 * i] == opcodes[frame.f_lasti]
            ]
            last = entries.index(frame.f_lasti) == len(node.items) - 1
        elif here in [_place(item.context_expr) for item in node.items]:
            last = here == _place(node.items[-1].context_expr)
        else:
            continue
        if not last:
            raise CaptureError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: a trace must be the last item of "
                "its `with` statement, since the items after it would be part of its body."
            )
        return node, owner
    return None


def _place(node: ast.stmt | ast.expr) -> tuple[int | None, int | None, int | None, int | None]:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


# Names of code that many texts go by: of `python -c` and of whatever is typed into `exec`; of every
# cell of a notebook under `%%time`.
_COMMAND, _TIMED = "<string>", "<timed exec>"


def _lines(frame: FrameType) -> list[str]:
    code = frame.f_code
    name = code.co_filename
    lines = linecache.getlines(name, frame.f_globals)
    if name not in (_COMMAND, _TIMED):
        return lines
    given = _command() if name == _COMMAND else _timed(frame)
    if given is not None:
        lines = given.splitlines(keepends=True)
    # IPython compiles a timed cell's last expression apart, so its module is not that of the text.
    module = name == _TIMED and code.co_name == "<module>"
    if not module and not _holds("".join(lines), code):
        return []
    if given is not None:
        linecache.cache[name] = (len(given), None, lines, name)  # for tracebacks
    return lines


def _command() -> str | None:
    """What `python -c` was given, if this process was started so."""
    if sys.argv[:1] != ["-c"]:
        return None
    given = sys.orig_argv
    for index, argument in enumerate(given[:-1]):
        if argument.startswith("-") and not argument.startswith("--") and argument.endswith("c"):
            return given[index + 1]
    return None


def _timed(frame: FrameType) -> str | None:
    """The cell under `%%time` that is running, which IPython keeps nowhere but in a variable."""
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_globals.get("__name__") == "IPython.core.magics.execution":
            text = caller.f_locals.get("expr")
            return text if isinstance(text, str) else None
        caller = caller.f_back
    return None


def _holds(text: str, code: CodeType) -> bool:
    """Whether a text is the one that some code was compiled from."""
    return any(_sign(c) == _sign(code) for c in compiled(text, code.co_filename))


def _sign(code: CodeType) -> tuple[Any, ...]:
    # Codes that are equal are not always so once they have run.
    return (code.co_qualname, code.co_firstlineno, code.co_varnames, code.co_code)


class Skipped(BaseException):
    """Raised by the trace function in place of the first instruction after `__enter__`."""


_BEFORE_BODY = {dis.opmap[name] for name in ("SEND", "END_SEND") if name in dis.opmap}
"""What an `async with` does once its context was entered, where `__aexit__` does not see errors."""


def _raise(frame: FrameType, _event: str, _argument: Any) -> Any:
    if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _BEFORE_BODY:
        return _raise
    raise Skipped


def _pass(_frame: FrameType, _event: str, _argument: Any) -> None:
    return None


class Skip:
    """Keeps one frame from running the body of the `with` statement it is entering."""

    __slots__ = ("_frame", "_previous")

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._previous = (sys.gettrace(), frame.f_trace, frame.f_trace_opcodes)
        frame.f_trace = _raise
        frame.f_trace_opcodes = True
        sys.settrace(_pass)

    def undo(self) -> None:
        """Put back the tracer that was there before."""
        tracer, local, opcodes = self._previous
        self._frame.f_trace_opcodes = opcodes
        self._frame.f_trace = local
        sys.settrace(tracer)
        unhold(self._frame)


if sys.version_info < (3, 13):
    # Up to Python 3.12, `f_locals` of a function is a copy, which this writes back.
    _LOCALS_TO_FAST = ctypes.pythonapi.PyFrame_LocalsToFast
    _LOCALS_TO_FAST.argtypes = (ctypes.py_object, ctypes.c_int)


def push(frame: FrameType, values: dict[str, Any]) -> None:
    """Bind names in a user's frame."""
    if not values:
        return
    code = frame.f_code
    local = frame.f_locals
    if local is frame.f_globals or not code.co_flags & 1:  # a module or a class body
        local.update(values)
        return
    for name, value in values.items():
        own = name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars
        (local if own else frame.f_globals)[name] = value
    if sys.version_info < (3, 13):
        _LOCALS_TO_FAST(frame, 0)
    unhold(frame)


def unhold(frame: FrameType) -> None:
    """Forget the handles of kept values in the copy that Python makes of a function's variables.

    They would live there after the user's own names no longer hold them.
    """
    if sys.version_info < (3, 13) and frame.f_code.co_flags & 1:
        local = frame.f_locals
        for name in [name for name, value in local.items() if _shows_handle(value)]:
            del local[name]


def _shows_handle(value: Any) -> bool:
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple):
        return type(value) is Kept
    return any(type(part) is Kept for part in islice(value, 8))


def bind_target(frame: FrameType, target: ast.expr | None, value: Any) -> None:
    """Bind what stands after `as`, which the skipped frame did not come to do itself."""
    if isinstance(target, ast.Name):
        push(frame, {target.id: value})
    elif target is not None:
        held = "__nnsight_entered__"
        assign = ast.Assign([target], ast.Name(held, ast.Load()))
        module = ast.fix_missing_locations(ast.Module([assign], []))
        scope = {held: value}
        exec(  # the user's own target, in the user's own names
            compile(module, frame.f_code.co_filename, "exec"),
            {**frame.f_globals, **frame.f_locals},
            scope,
        )
        del scope[held]
        push(frame, scope)
