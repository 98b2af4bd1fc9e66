"""The restricted policy: blocks may do what a list allows. Its parts are put together here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from nnsight_core.code import Code, compile_block
from nnsight_core.errors import CaptureError, PolicyError
from nnsight_core.policy import Policy, Readers
from nnsight_core.wire.blocks import code_of
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.messages import BlockData
from nnsight_serve.policy import bounds, texts
from nnsight_serve.policy.allowed import MODULES, REFUSED_BUILTINS
from nnsight_serve.policy.forms import allowed_readers, check_form, check_names
from nnsight_serve.policy.guards import BUILTINS, GUARDS, allow
from nnsight_serve.policy.text import MAX_SOURCE, Guarding, refused

Forms = dict[str, Any]


class Restricted(Policy):
    """Lets blocks compute: what `nnsight_serve.policy.allowed` lists, and nothing else.

    Text and names are looked at before anything runs (`check`), and every step of a block that a
    text does not decide is guarded while it runs.

    Example:
        >>> RESTRICTED.check(block)
        PolicyError: script.py:12: the attribute '__class__' is not allowed: it is a private one ...
    """

    guards = True

    def check(self, block: BlockData) -> None:
        if len(block.source) > MAX_SOURCE:
            raise refused(
                f"{block.filename}: a block of more than {MAX_SOURCE} characters is not allowed"
            )
        check_names(block.names)
        check_names(block.targets)
        check_names(block.shared)
        code = _compiled(block.filename, block.line, lambda: code_of(block, self))
        for name, form in block.names.items():
            place = f"{block.filename}:{code.names.needs.get(name, block.line)}: {name!r}"
            for part in tagged(form):
                _say(place, check_form, part)
        functions = [part for part in tagged(*block.names.values()) if part["$"] == "function"]
        if sum(len(part["source"]) for part in functions) > MAX_SOURCE:
            raise refused(
                f"{block.filename}: functions of more than {MAX_SOURCE} characters are not allowed"
            )
        for part in functions:
            self._check_function(part)
        _check_builtins(code, block.names)
        _check_modules(code, block.names)

    def _check_function(self, form: Forms) -> None:
        place = (form["filename"], form["line"], "<module>", bool(form.get("lazy")))
        made = lambda: compile_block(form["source"], *place, self)  # noqa: E731
        code = _compiled(form["filename"], form["line"], made)
        _check_builtins(code, form["names"])
        _check_modules(code, form["names"])

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        if "lora_request" in sampling:
            raise refused(
                "`lora_request` is not allowed: it names a file of the server",
                "Ask whoever runs it for a server that loads the adapter.",
            )

    def guard(self, module: ast.Module, filename: str) -> ast.Module:
        return Guarding(filename).visit(module)

    def readers(self, readers: Readers) -> Readers:
        return allowed_readers(readers)

    def scope(self, extra: dict[str, Any]) -> dict[str, Any]:
        given = {
            name: _plain_print(made) if name == "print" else made for name, made in extra.items()
        }
        return {**GUARDS, "__builtins__": BUILTINS, **given}


def _plain_print(printed: Any) -> Any:
    def block_print(
        *values: Any, sep: str | None = None, end: str | None = None, flush: bool = False
    ) -> None:
        bounds.items(sum(map(texts.measured, values)))
        printed(*values, sep=sep, end=end)

    return allow(block_print)


def _compiled(filename: str, line: int, compiling: Any) -> Code:
    try:
        return compiling()
    except (RecursionError, MemoryError, ValueError, OverflowError) as error:
        raise CaptureError(
            f"The block at {filename}:{line} cannot be read as Python: {error or 'nested too deep'}"
        ) from None


def _say(place: str, check: Any, *args: Any) -> None:
    """Check something, with its place before what is said against it."""
    try:
        check(*args)
    except PolicyError as error:
        raise PolicyError(f"{place}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise PolicyError(f"{place}: a value that is not well formed came: {error!r}") from None


def _check_builtins(code: Code, names: Forms) -> None:
    """Refuse a builtin that is not there before the block runs into it."""
    for name, line in code.names.needs.items():
        if name in REFUSED_BUILTINS and name not in names:
            raise refused(f"{code.filename}:{line}: `{name}` is not allowed")


def _check_modules(code: Code, names: Forms) -> None:
    """Refuse what a module does not offer, where the text says the module's name."""
    modules = {
        name: form["name"]
        for name, form in names.items()
        if isinstance(form, dict) and form.get("$") == "pymodule" and name not in code.names.binds
    }
    for path, line in _chains(code, modules):
        module, _, name = path.rpartition(".")
        if module in MODULES and name not in MODULES[module]:
            raise refused(f"{code.filename}:{line}: `{path}` is not allowed")


def _chains(code: Code, modules: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Each `module.name` in a text, with its line."""
    indented = code.source[:1] in (" ", "\t")
    tree = ast.parse(("if 1:\n" if indented else "") + code.source)
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in modules:
            line = node.lineno + code.line - (2 if indented else 1)  # type: ignore[attr-defined]
            yield ".".join((modules[inner.id], *reversed(parts))), line
