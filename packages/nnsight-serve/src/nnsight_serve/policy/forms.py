"""What the names of restricted blocks may hold, as it comes over the wire.

Data of every kind; functions by their source, under the same restrictions; functions and classes of
libraries from a list, by their import paths; PyTorch's own modules as class and state. A class, a
method, an enum's member, a record or a pickled value is refused, and so is what nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from nnsight_core.errors import PolicyError
from nnsight_core.policy import Readers
from nnsight_serve.policy.allowed import LAYERS, MODULES, PATHS
from nnsight_serve.policy.bounds import MAX_ITEMS
from nnsight_serve.policy.text import MAX_SOURCE, refused, valid_name
from nnsight_serve.policy.values import OUTSIDE

_PLAIN = """
    ref int float text result list tuple set frozenset dict named tensor tensors array scalar size
    bytes bytearray complex dtype device slice range ellipsis plain node source operation tracer
    tokenizer kept partial
"""
_DATA = frozenset(_PLAIN.split())
_KNOWN = _DATA | {"path", "pymodule", "function", "nn"}
_WHAT = {
    "class": ("a class of your own is", "Use functions and dicts."),
    "record": (
        "an object of a dataclass is",
        "Make a dict of it above the block: `dataclasses.asdict(...)`.",
    ),
    "member": ("a member of an enum is", "Take its `.value` above the block."),
    "method": ("a bound method is", "Use a function, and what it needs as its arguments."),
    "pickle": ("a pickled value is", ""),
    "cache": ("an activation cache is", ""),
}
_HOOKS = "_hooks"
_INNER = ("_parameters", "_buffers", "_modules")
_SCALARS = (bool, int, float, str, type(None))


def check_form(form: dict[str, Any]) -> None:
    """Look at one typed value, and not at those in it.

    Raises:
        PolicyError: it is not allowed.
    """
    tag = form["$"]
    if tag not in _KNOWN:
        other = (f"a value of type {str(tag)[:40]!r} is", "")
        what, advice = _WHAT.get(tag, other) if isinstance(tag, str) else other
        raise refused(f"{what} not allowed", advice)
    if tag == "path":
        named(form.get("module"), form.get("name"))
    elif tag == "pymodule":
        module_named(form.get("name"))
    elif tag == "function":
        check_function(form)
    elif tag == "named":
        _check_named(form.get("module"))
    elif tag == "range":
        _check_range(form.get("v"))
    elif tag == "nn":
        cls = _check_class(form["class"])
        check_state(form.get("state"), cls)


def named(module: Any, name: Any) -> Any:
    """What an import path names.

    Raises:
        PolicyError: it is not allowed.
    """
    plain = isinstance(module, str) and isinstance(name, str)
    if not plain or (module, name) not in PATHS:
        raise refused(f"`{str(module)[:80]}.{str(name)[:80]}` is not allowed")
    return PATHS[module, name]


def module_named(name: Any) -> None:
    """Refuse a module of Python's that is not on the list."""
    if not isinstance(name, str) or name not in MODULES:
        raise refused(f"the module `{str(name)[:80]}` is not allowed")


def check_function(form: dict[str, Any]) -> None:
    """Refuse a function whose parts are no such things; its text is looked at when compiled."""
    parts = (form.get("source"), form.get("filename"), form.get("module"), form.get("name"))
    if not all(isinstance(part, str) for part in parts[:2]) or len(parts[0] or "") > MAX_SOURCE:
        raise refused(f"a function of more than {MAX_SOURCE} characters is not allowed")
    if not isinstance(parts[2], str | None) or type(form.get("line")) is not int:
        raise refused("a function without its module and line is not allowed")
    if parts[3] != "<lambda>" and not valid_name(parts[3]):
        raise refused(f"a function of the name {str(parts[3])[:40]!r} is not allowed")
    check_names(form.get("names"))


def check_names(names: Any) -> None:
    """Refuse names that would take the place of what every block sees."""
    given = names if isinstance(names, dict | list) else [names]
    odd = next((name for name in given if not valid_name(name) and name != "__name__"), None)
    if odd is not None:
        raise refused(
            f"the name {str(odd)[:40]!r} is not allowed: it begins with an underscore",
            "Call it otherwise.",
        )


def _check_named(module: Any) -> None:
    # It is made anew for a script's own, and PyTorch's hold tensors and nothing else.
    if module not in ("__main__", "torch.return_types"):
        raise refused(
            f"a named tuple of the module {str(module)[:40]!r} is not allowed", "Use a plain tuple."
        )


def _check_range(bounds: Any) -> None:
    first, last, step = bounds
    if abs((last - first) // (step or 1)) > MAX_ITEMS:
        raise refused(f"a range of more than {MAX_ITEMS} numbers is not allowed")


def _check_class(form: dict[str, Any]) -> type[nn.Module]:
    """Refuse a module whose class is none of PyTorch's own layers, as far as that is said here."""
    if form["$"] != "path":
        return nn.Module
    cls = named(form["module"], form["name"])
    if cls not in LAYERS:
        raise _other_class(form["name"])
    return cls


def check_state(state: Any, cls: type[nn.Module]) -> None:
    """Refuse the state of a module that holds more than a fresh one of its class would."""
    for name, held in state.items() if isinstance(state, dict) else [("", None)]:
        if name.endswith(_HOOKS) or "_hooks_" in name:
            if isinstance(held, dict) and (held.get("k") or held.get("v")):
                raise refused("an nn.Module with hooks is not allowed", "Remove them first.")
        elif isinstance(held, dict) and held.get("$") in ("function", "path", "partial"):
            raise refused(f"an nn.Module whose {name!r} is a function is not allowed")
        elif name in _INNER and isinstance(held, dict):
            _check_hidden(cls, held.get("k", ()))
        elif not name.startswith("_") and name != "training":
            _check_hidden(cls, (name,))


def check_layer(module: Any) -> nn.Module:
    """Refuse a module that is not one of PyTorch's own layers, built as these are.

    Raises:
        PolicyError: it is something else, or holds what no such layer holds.
    """
    if type(module) not in LAYERS:
        raise _other_class(type(module).__name__)
    fresh = vars(nn.Module())
    for name, held in vars(module).items():
        if name not in fresh:
            _check_hidden(type(module), (name,))
        if name in _INNER:
            if type(held) is not type(fresh[name]):
                raise _odd(name)
            for key, part in held.items():
                if not isinstance(key, str) or not (part is None or _is_part(name, part)):
                    raise _odd(f"{name}[{str(key)[:40]!r}]")
            _check_hidden(type(module), held)
        elif name.endswith(_HOOKS) or "_hooks_" in name:
            if held or name not in fresh:
                raise _odd(name)
        elif (name.startswith("_") and name not in (*fresh, "_size")) or not _is_plain(held):
            raise _odd(name)
    OUTSIDE.add(module)
    return module


def _check_hidden(cls: type[nn.Module], names: Iterable[Any]) -> None:
    """Refuse names of values that the class has methods of."""
    for name in names:
        if not isinstance(name, str) or hasattr(cls, name):
            raise _odd(str(name)[:40])


def _is_part(name: str, part: Any) -> bool:
    if name == "_modules":
        return type(part) in LAYERS  # each was looked at when it was made
    return isinstance(part, Tensor)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list | set):
        return all(isinstance(part, _SCALARS) for part in value)
    return isinstance(value, _SCALARS)


def _other_class(name: str) -> PolicyError:
    return refused(
        f"an nn.Module of the class {name} is not allowed",
        "Build it of torch.nn's own layers (nn.Sequential, nn.Linear, ...), or write a function "
        "that takes its weights.",
    )


def _odd(name: str) -> PolicyError:
    return refused(f"an nn.Module with {name!r} like that is not allowed")


def allowed_readers(given: Readers) -> Readers:
    """How the values of names are decoded, given how they would be."""

    def function(form: dict[str, Any]) -> Any:
        check_function(form)
        return given["function"](form)

    def pymodule(form: dict[str, Any]) -> ModuleType:
        module_named(form["name"])
        return given["pymodule"](form)

    def bounded_range(form: dict[str, Any]) -> Any:
        _check_range(form["v"])
        return given["range"](form)

    def named_tuple(form: dict[str, Any]) -> Any:
        _check_named(form["module"])
        return given["named"](form)

    kept = {tag: _refusing(tag) for tag in given} | {tag: given[tag] for tag in _DATA & {*given}}
    return kept | {
        "function": function,
        "pymodule": pymodule,
        "range": bounded_range,
        "named": named_tuple,
        "path": lambda form: named(form["module"], form["name"]),
        "nn": lambda form: check_layer(given["nn"](form)),
    }


def _refusing(tag: str) -> Any:
    def refuse(form: dict[str, Any]) -> Any:
        check_form({"$": tag})

    return refuse
