"""A block's code: its text, compiled as a unit of its own with the user's line numbers.

The text is compiled as a module whose globals are the block's scope, so that a nested function, a
comprehension or a class in it sees the block's names, and so that what the block bound is still
there to be read when it stops in the middle. Three things are rewritten first: `x.save()` and
`x.keep()` become calls of ours (nothing outside the block is patched), `nonlocal` becomes `global`
where the name is the block's own, and the file name and lines stay the user's, so tracebacks do.
"""

from __future__ import annotations
import __future__

import ast
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from nnsight_core.errors import CaptureError, NotSupportedError
from nnsight_core.names import Names, analyse, arguments_of, declared_outside
from nnsight_core.parsing import parse
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.traceback import first_line, no_file

SAVE = "__nnsight_save__"
"""The name under which a block's scope holds the function that `x.save()` calls."""
KEEP = "__nnsight_keep__"
"""The same for `x.keep()`."""
_CALLS = {"save": SAVE, "keep": KEEP}


class OwnCall(ast.Call):
    """A call of `SAVE` or `KEEP` that the rewriting put there; no text parses to one."""


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """A block's code, without the values of the names that it uses.

    Attributes:
        source: whole lines of the user's file; a one-line body has blanks before it.
        filename: the user's file, for tracebacks.
        line: number of the first line of `source` in that file.
        function: name of the function that holds the block, for tracebacks.
    """

    source: str
    filename: str
    line: int
    function: str
    lazy: bool
    """Whether annotations are not evaluated (`from __future__ import annotations`)."""
    names: Names
    compiled: CodeType
    places: tuple[tuple[int | None, int | None], ...]
    """The line and column of each instruction."""
    snapshots: bool
    """Whether a saved tensor may be changed in place later in the block."""
    unseen: bool
    """Whether the block may write in a way that PyTorch does not count (`.data`, NumPy)."""
    policy: Policy = TRUSTED
    """What it was compiled under."""


@lru_cache(maxsize=1024)
def compile_block(
    source: str,
    filename: str,
    line: int,
    function: str,
    lazy: bool = False,
    policy: Policy = TRUSTED,
) -> Code:
    """Compile a block's text.

    Raises:
        CaptureError: the text cannot be run as a block, with the line that stands against it.
        PolicyError: the policy does not allow it.
    """
    # A block is indented, as it stands in the file; a function's text may not be.
    indented = source[:1] in (" ", "\t")
    try:
        tree = parse(("if 1:\n" if indented else "") + source, filename)
    except SyntaxError as error:
        raise CaptureError(
            f"The block at {filename}:{line} cannot be read as Python: {error.msg}."
        ) from error
    ast.increment_lineno(tree, line - (2 if indented else 1))
    body = tree.body
    if indented:
        wrapper = body[0]
        assert isinstance(wrapper, ast.If)
        body = wrapper.body
    for node in _own_statements(body):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Await | _ASYNC):
            word = type(node).__name__.lower().removesuffix("from")
            raise CaptureError(
                f"{filename}:{node.lineno}: `{word}` cannot stand in a block: its body runs on "
                "the engine, not in the function around it. Save the value and use it after "
                "the block."
            )
    _refuse_gradients(body, filename)
    names = analyse(body, lazy)
    # What is guarded may have been written so as to look harmless.
    snapshots = policy.guards or any(
        may_change(node) for statement in body for node in ast.walk(statement)
    )
    unseen = any(
        isinstance(node, ast.Attribute) and node.attr in _UNSEEN
        for statement in body
        for node in ast.walk(statement)
    )
    module = _Rewrite(names).visit(ast.Module(body=body, type_ignores=[]))
    module = policy.guard(module, filename)
    ast.fix_missing_locations(module)
    # The code is to begin where the user's function does, and a module begins at line 1, so that it
    # can only be moved there.
    above = (line if policy.guards else first_line(filename, line, function)) - 1
    ast.increment_lineno(module, -above)
    try:
        flags = __future__.annotations.compiler_flag if lazy else 0
        # What is guarded names any file that it likes, and whoever shows its lines would open it.
        named = no_file(filename) if policy.guards else filename
        compiled = compile(module, named, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        place = f"{filename}:{(error.lineno or 1) + above}"
        raise CaptureError(f"{place}: {error.msg} of the block.") from error
    compiled = _moved(compiled, above).replace(co_name=function, co_qualname=function)
    places = tuple((line, column) for line, _, column, _ in compiled.co_positions())
    return Code(
        source, filename, line, function, lazy, names, compiled, places, snapshots, unseen, policy
    )


def _refuse_gradients(body: list[ast.stmt], filename: str) -> None:
    nodes = [node for statement in body for node in ast.walk(statement)]
    names = {n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in nodes}
    if names & {"enable_grad", "set_grad_enabled"}:  # gradients of a computation of the block's own
        return
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("backward", "grad", "requires_grad_"):
            raise NotSupportedError(
                f"{filename}:{node.lineno}: `.{node.attr}`: the engine computes no gradients, so "
                "none flow through the model. Take them on the PyTorch backend of a library that "
                "trains, or, for a computation of the block's own, under `torch.enable_grad()`."
            )


def _moved(code: CodeType, lines: int) -> CodeType:
    """The code some lines further down in its file."""
    constants = tuple(_moved(c, lines) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_firstlineno=code.co_firstlineno + lines, co_consts=constants)


_ASYNC = ast.AsyncFor | ast.AsyncWith


def _own_statements(body: list[ast.stmt]) -> list[ast.expr | ast.stmt]:
    """Every node of the block itself, not those of functions and lambdas in it."""
    found: list[ast.expr | ast.stmt] = []
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr | ast.stmt):
            found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def may_change(node: ast.AST) -> bool:
    """Whether a node may change a tensor in place: a store into it, or a call not known as pure."""
    match node:
        case ast.AugAssign() | ast.Subscript(ctx=ast.Store() | ast.Del()):
            return True
        case ast.Attribute(ctx=ast.Store()):
            return True
        case ast.Call(keywords=keywords) if any(k.arg in _IN_PLACE for k in keywords):
            return True
        case ast.Call(func=ast.Attribute(attr=name, value=owner), args=args):
            torchlike = isinstance(owner, ast.Name) and owner.id in ("torch", "F")
            if name.endswith("_") or not (name in PURE_METHODS or torchlike):
                return True
            most = _BEFORE_IN_PLACE.get(name)
            return most is not None and (len(args) > most or any(map(_starred, args)))
        case ast.Call(func=ast.Name(id=name)):
            return name not in PURE_CALLS
        case ast.Call():
            return True
    return False


def _starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


_IN_PLACE = ("out", "inplace", "max_norm", None)
"""Keywords of calls that write what they are given; `**` may hold any."""
_BEFORE_IN_PLACE = {
    **dict.fromkeys(("hardsigmoid", "hardswish", "mish", "relu", "relu6", "selu", "silu"), 1),
    **dict.fromkeys(("celu", "elu", "leaky_relu"), 2),
    **dict.fromkeys(("alpha_dropout", "dropout", "feature_alpha_dropout"), 3),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "hardtanh", "threshold"), 3),
    **dict.fromkeys(("embedding", "embedding_bag"), 2),
    **dict.fromkeys(("batch_norm", "fused_moving_avg_obs_fake_quant", "instance_norm"), 0),
    "rrelu": 4,
}
"""Functions of torch that may write an argument: how many come before the one that says so."""
_UNSEEN = ("data", "data_ptr", "numpy", "storage", "untyped_storage", "__array__", "__dlpack__")
_PURE_CALLS = """
    abs all any bool dict enumerate float int isinstance keep len list max min print range repr
    round save set sorted str sum tuple type zip
"""
_PURE_METHODS = """
    abs append argmax argmin argsort bfloat16 bool chunk clone contiguous cpu cuda detach diff
    dim double exp expand flatten float format gather half int item items keep keys log log_softmax
    long max mean min narrow norm numel permute pow reshape save select sigmoid size softmax
    sort split sqrt squeeze std sum tanh to tolist topk transpose type unbind unsqueeze values
    var view
"""
PURE_CALLS = frozenset(_PURE_CALLS.split())
PURE_METHODS = frozenset(_PURE_METHODS.split())


class _Rewrite(ast.NodeTransformer):
    def __init__(self, names: Names) -> None:
        self.names = names
        self.functions: list[set[str]] = []
        self.annotated: set[ast.AnnAssign] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=value, attr="save" | "keep" as what), args=[], keywords=[]
            ):
                name = ast.copy_location(ast.Name(_CALLS[what], ast.Load()), node.func)
                return ast.copy_location(OwnCall(name, [value], []), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        own = arguments_of(node.args) | analyse(node.body).binds.keys()
        self.functions.append(own - declared_outside(node.body))
        self.generic_visit(node)
        self.functions.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # A class keeps the annotations of its body, a function (as the block is one) does not.
        kept = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        self.annotated.update(kept)
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node in self.annotated:
            return node
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST | list[ast.AST]:
        inner = [n for n in node.names if any(n in own for own in self.functions[:-1])]
        outer = [n for n in node.names if n not in inner]
        parts: list[ast.AST] = []
        if inner:
            parts.append(ast.copy_location(ast.Nonlocal(inner), node))
        if outer:
            parts.append(ast.copy_location(ast.Global(outer), node))
        return parts


def is_lazy(flags: int) -> bool:
    """Whether code with these `co_flags` was compiled with annotations left alone."""
    return bool(flags & __future__.annotations.compiler_flag)
