"""The text of restricted blocks: what may stand in it, and where guards are put in.

RestrictedPython walks the text and refuses every kind of node that it does not know, and every name
and attribute that begins with an underscore. What it does not check where the text is read is
checked where the block runs: each attribute, item, call and operator becomes a call of a guard (see
`nnsight_serve.policy.guards`). In place of its own guards for loops, unpacking and `print` there
are fewer here, since every value that a block can get hold of is guarded where it is used.
"""

from __future__ import annotations

import ast
from typing import Any

from RestrictedPython.transformer import RestrictingNodeTransformer

from nnsight_core.code import OwnCall
from nnsight_core.errors import PolicyError

OURS = frozenset(
    ("__nnsight_lambda__", "__nnsight_value__", "__nnsight_function__", "__nnsight_tracer__")
)
"""Names with underscores that a front end of ours puts into texts; they hold values like others."""
MAX_SOURCE = 1 << 18
"""How many characters a text may have."""
_SYMBOLS: dict[type[ast.operator] | type[ast.cmpop], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.MatMult: "@",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.BitAnd: "&",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}
_ADVICE = {
    ast.Import: "Import above the block: modules that are allowed travel by their names.",
    ast.ImportFrom: "Import above the block: functions that are allowed travel by their names.",
    ast.ClassDef: "Write functions instead, or keep the class on your side.",
    ast.Yield: "Collect in a list what you would yield.",
    ast.YieldFrom: "Collect in a list what you would yield.",
    ast.Match: "Write `if`s instead.",
}


def refused(what: str, advice: str = "") -> PolicyError:
    """The error for what this policy does not allow."""
    advice = advice or "Do that part outside the block."
    return PolicyError(
        f"{what} under the policy `restricted`, which blocks run under here. {advice} (The "
        "documentation's page on policies lists what is allowed.)"
    )


def valid_name(name: Any) -> bool:
    """Whether a block may have a name for its values."""
    plain = isinstance(name, str) and name.isidentifier()
    return plain and (name in OURS or name == "_" or not name.startswith("_"))


class Guarding(RestrictingNodeTransformer):
    """Puts the guards into one text.

    Args:
        filename: the user's file, for messages.

    Raises:
        PolicyError: something in it is not allowed, with the line.
    """

    def __init__(self, filename: str) -> None:
        super().__init__()
        self._filename = filename

    def error(self, node: ast.AST, info: str) -> None:
        place = f"{self._filename}:{getattr(node, 'lineno', 0)}"
        raise refused(f"{place}: {info.rstrip('.')} -", _ADVICE.get(type(node), ""))

    def warn(self, node: ast.AST, info: str) -> None:
        """RestrictedPython's advice about its own way to print, which is not used here."""

    # -- names -----------------------------------------------------------------------------------

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:
        if name is not None and not valid_name(name):
            self.error(node, f"the name {name!r} is not allowed: it begins with an underscore")

    def visit_Name(self, node: ast.Name) -> Any:
        self.check_name(node, node.id)
        return node

    def visit_Global(self, node: ast.Global) -> Any:
        for name in node.names:
            self.check_name(node, name)
        return node

    visit_Nonlocal = visit_Global  # type: ignore[assignment]

    # -- statements ------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> Any:
        return self.node_contents_visit(node)

    def visit_With(self, node: ast.With) -> Any:
        return self.node_contents_visit(node)

    def visit_Module(self, node: ast.Module) -> Any:
        return self.node_contents_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.check_name(node, node.name)
        self.check_function_argument_names(node)
        node = self.node_contents_visit(node)
        node.decorator_list = [_call("_call_", part, part) for part in node.decorator_list]
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """`x[i] += v` keeps Python's order: `x`, `i`, `x[i]`, `v`, then the store."""
        symbol = _SYMBOLS[type(node.op)]
        value: ast.expr = self.visit(node.value)
        match node.target:
            case ast.Name() as name:
                self.check_name(name, name.id)
                held = ast.copy_location(ast.Name(name.id, ast.Load()), name)
                made = _call("_inplacevar_", node, ast.Constant(symbol), held, value)
                return ast.copy_location(ast.Assign([name], made), node)
            case ast.Subscript(value=owner, slice=index):
                place = [self.visit(owner), self.visit(index)]
                begun = _call("_augment_item_", node, *place, ast.Constant(symbol))
            case ast.Attribute(value=owner, attr=attribute):
                self._check_attribute(node.target)
                place = [self.visit(owner), ast.Constant(attribute)]
                begun = _call("_augment_side_", node, *place, ast.Constant(symbol))
        ended = ast.copy_location(ast.Call(begun, [value], []), node)
        return ast.copy_location(ast.Expr(ended), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self.not_allowed(node)

    def visit_Import(self, node: ast.Import) -> Any:
        self.not_allowed(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        self.not_allowed(node)

    def visit_Yield(self, node: ast.Yield) -> Any:
        # A generator's `finally` may run when it is let go, where no time limit holds.
        self.not_allowed(node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> Any:
        self.not_allowed(node)

    def guard_iter(self, node: Any) -> Any:
        node = self.node_contents_visit(node)
        node.iter = _call("_getiter_", node.iter, node.iter)
        return node

    # -- expressions -----------------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self._check_attribute(node)
        owner = self.visit(node.value)
        name = ast.Constant(node.attr)
        if isinstance(node.ctx, ast.Load):
            return _call("_getattr_", node, owner, name)
        if isinstance(node.ctx, ast.Del):
            self.error(node, "to delete an attribute is not allowed")
        node.value = _call("_side_", node, owner, name)
        return node

    def _check_attribute(self, node: ast.Attribute) -> None:
        if node.attr.startswith("_"):
            self.error(node, f"the attribute {node.attr!r} is not allowed: it is a private one")

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        node = self.node_contents_visit(node)
        if isinstance(node.ctx, ast.Load):
            return _call("_getitem_", node, node.value, node.slice)
        node.value = _call("_item_", node, node.value)
        node.slice = _call("_index_", node, node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        node = self.node_contents_visit(node)
        node.func = _call("_call_", node, node.func)
        return node

    def visit_OwnCall(self, node: OwnCall) -> Any:
        """What it calls stays as it is: no text can bind that name, or read it."""
        node.args = [self.visit(part) for part in node.args]
        return node

    def visit_Starred(self, node: ast.Starred) -> Any:
        node = self.node_contents_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = _call("_spread_", node, node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        node = self.node_contents_visit(node)
        symbol = ast.Constant(_SYMBOLS[type(node.op)])
        return _call("_operate_", node, symbol, node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> Any:
        node = self.node_contents_visit(node)
        if len(node.ops) > 1:
            node.left = _call("_single_", node, node.left)
            node.comparators = [_call("_single_", node, part) for part in node.comparators]
            return node
        symbol = _SYMBOLS.get(type(node.ops[0]))
        if symbol is None:  # `is`
            return node
        return _call("_operate_", node, ast.Constant(symbol), node.left, node.comparators[0])

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        node = self.node_contents_visit(node)
        spec = node.format_spec or ast.Constant("")
        made = _call("_text_", node, node.value, ast.Constant(node.conversion), spec)
        return ast.copy_location(ast.FormattedValue(made, -1, None), node)

    def visit_TemplateStr(self, node: ast.AST) -> Any:
        self.not_allowed(node)


def _call(name: str, at: ast.AST, *args: ast.expr) -> ast.Call:
    """The call of a guard, which stands where `at` does."""
    guard = ast.copy_location(ast.Name(name, ast.Load()), at)
    for part in args:
        if not hasattr(part, "lineno"):
            ast.copy_location(part, at)
    return ast.copy_location(ast.Call(guard, list(args), []), at)
