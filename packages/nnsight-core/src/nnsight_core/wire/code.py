"""Typed values that are code: what a block's names may hold besides data.

Functions and classes travel by import path where the receiver surely has the same library, else as
source with the names they need; a `torch.nn.Module` as its class and state; a module of Python by
name; nodes and tracers by what they name. What none of these covers goes by cloudpickle, and only
where both sides allow it. Decoding runs code, so it belongs where blocks are run.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import io
import linecache
import pickle
import site
import sys
import sysconfig
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nnsight_core.block_tracer import BLOCK_TRACER, BlockTracer
from nnsight_core.code import KEEP, SAVE, compile_block, is_lazy
from nnsight_core.current import need_run
from nnsight_core.errors import (
    CaptureError,
    EncodeError,
    EngineError,
    LocationError,
    PolicyError,
    ProtocolError,
)
from nnsight_core.kept import Kept
from nnsight_core.node import Node, Operation, Root, Source
from nnsight_core.parsing import parse
from nnsight_core.policy import TRUSTED, Policy
from nnsight_core.run import own_method
from nnsight_core.tracer import Captured
from nnsight_core.wire.data import Decoder, Encoder, Json, tensor_bytes
from nnsight_core.wire.frames import Buffer

BLOB = 1 << 14
"""Tensors of at least this many bytes travel apart from the block, once per content."""


class CodeEncoder(Encoder):
    """Encodes what a block's names hold.

    Args:
        pickle: whether the receiver takes cloudpickle for what the types do not cover.
        tokenizer: the model's own tokenizer, which is named instead of being shipped.

    Attributes:
        blobs: the large tensors' bytes by content; they must be with the receiver before it
            decodes.
        handles: those of kept values among what was encoded; they must be held until the receiver
            has decoded it.
    """

    def __init__(self, pickle: bool = False, tokenizer: Any = None) -> None:
        super().__init__()
        self._pickle = pickle
        self._tokenizer = tokenizer
        self.blobs: dict[str, memoryview] = {}
        self.handles: list[Kept] = []

    def form(self, value: Any) -> dict[str, Json]:
        for kinds, method in _FORMS:
            if isinstance(value, kinds):
                return method(self, value)
        if value is self._tokenizer and value is not None:
            return {"$": "tokenizer"}
        if dataclasses.is_dataclass(value) and _base(type(value)) in (object, dict, OrderedDict):
            return self._record(value)
        known = _library_name(value)
        if known is not None:
            return known
        try:
            return super().form(value)
        except EncodeError:
            if type(value) in (list, tuple, dict, set, frozenset) or isinstance(value, Tensor):
                raise
            return self._pickled(value)

    def refusal(self, value: Any) -> EncodeError:
        kind = type(value)
        return EncodeError(
            f"{self.where()} is a {kind.__module__}.{kind.__qualname__}, which cannot be shipped "
            "to the engine. Use tensors, arrays, numbers, texts, containers of them, functions, "
            "classes or nn.Modules in the block, or make the object inside the block."
        )

    def tensor(self, tensor: Tensor) -> dict[str, Json]:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < BLOB or tensor.layout is not torch.strided or tensor.is_meta:
            form = super().tensor(tensor)
        else:
            digest, data = content_of(tensor)
            self.blobs[digest] = data
            dtype = str(tensor.dtype).removeprefix("torch.")
            form = {"$": "tensor", "dtype": dtype, "shape": list(tensor.shape), "h": digest}
        if isinstance(tensor, nn.Parameter):
            form["parameter"] = tensor.requires_grad
        return form

    # -- one method per kind ---------------------------------------------------------------------

    def _node(self, node: Node) -> dict[str, Json]:
        return {"$": "node", "path": node._path}

    def _place(self, place: Source | Operation) -> dict[str, Json]:
        return {"$": type(place).__name__.lower(), "path": place._path}

    def _tracer(self, _: Any) -> dict[str, Json]:
        return {"$": "tracer"}

    def kept(self, handle: Kept) -> dict[str, Json]:
        self.handles.append(handle)
        return {"$": "kept", "id": handle.id, "name": handle.name}

    def _pymodule(self, module: ModuleType) -> dict[str, Json]:
        return {"$": "pymodule", "name": module.__name__}

    def _function(self, function: FunctionType) -> dict[str, Json]:
        if _installed(function.__module__) and "<locals>" not in function.__qualname__:
            return _path(function.__module__, function.__qualname__)
        plain, decorated = _defined(function)
        try:
            source, line, filename, lazy, names = _source_of(plain, decorated)
        except CaptureError as error:
            return self._pickled(function, str(error))
        return {
            "$": "function",
            "name": plain.__code__.co_name,
            "source": source,
            "filename": filename,
            "line": line,
            "lazy": lazy,
            "names": self._names(names),
            "module": plain.__module__,
        }

    def _names(self, names: dict[str, Any]) -> dict[str, Json]:
        return {name: self.encode(value, f" → {name}") for name, value in names.items()}

    def _builtin(self, function: Any) -> dict[str, Json]:
        owner = getattr(function, "__self__", None)
        name = function.__name__
        if isinstance(owner, ModuleType):
            return _path(owner.__name__, name)
        for module in ("torch", "torch.nn.functional", "torch._C._nn", "torch.special"):
            if getattr(sys.modules.get(module), name, None) is function:
                return _path(module, name)
        if owner is not None and not isinstance(owner, type):
            return {"$": "method", "self": self.encode(owner, " → self"), "name": name}
        return self._pickled(function)

    def _method(self, method: MethodType) -> dict[str, Json]:
        owner = self.encode(method.__self__, " → self")
        return {"$": "method", "self": owner, "name": method.__name__}

    def _class(self, cls: type) -> dict[str, Json]:
        if _installed(cls.__module__) and "<locals>" not in cls.__qualname__:
            return _path(cls.__module__, cls.__qualname__)
        try:
            source, line, filename, lazy, names = _source_of(cls)
        except CaptureError as error:
            return self._pickled(cls, str(error))
        # A method that speaks of its own class finds it in the scope where the class is made.
        names.pop(cls.__name__, None)
        return {
            "$": "class",
            "name": cls.__name__,
            "qualname": cls.__qualname__,
            "source": source,
            "filename": filename,
            "line": line,
            "lazy": lazy,
            "names": self._names(names),
            "module": cls.__module__,
        }

    def _partial(self, value: functools.partial[Any]) -> dict[str, Json]:
        parts = (value.func, value.args, value.keywords)
        return {"$": "partial", "v": [self.encode(p, " → partial") for p in parts]}

    def _member(self, value: enum.Enum) -> dict[str, Json]:
        form = {"$": "member", "class": self.encode(type(value))}
        if value.name in type(value).__members__:
            return {**form, "name": value.name}
        return {**form, "value": self.encode(value.value)}  # several flags together, or none

    def _record(self, value: Any) -> dict[str, Json]:
        form = {"$": "record", "class": self._encode(type(value))}
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        form["v"] = self._names(parts)
        if isinstance(value, dict):
            form["items"] = self._dict(value)
        return form

    def _nn(self, module: nn.Module) -> dict[str, Json]:
        state = dict(vars(module))
        return {
            "$": "nn",
            "class": self.encode(type(module)),
            "state": {k: self.encode(v, f".{k.lstrip('_')}") for k, v in state.items()},
        }

    def _pickled(self, value: Any, why: str = "") -> dict[str, Json]:
        error = self.refusal(value)
        if why:
            error = EncodeError(f"{error.args[0]} ({why})")
        if not self._pickle:
            raise error
        import cloudpickle  # type: ignore[import-untyped]

        encoder = self

        class Pickler(cloudpickle.Pickler):
            """Names nodes, tracers and the tokenizer instead of pickling them."""

            def persistent_id(self, obj: Any) -> Json:
                for kinds, method in _NAMED:
                    if isinstance(obj, kinds):
                        return method(encoder, obj)
                known = obj is encoder._tokenizer and obj is not None
                return {"$": "tokenizer"} if known else None

        pickled = io.BytesIO()
        try:
            Pickler(pickled).dump(value)
        except Exception as cause:
            raise error from cause
        return {"$": "pickle", "b": self.buffer(pickled.getvalue())}


_Forms = list[tuple[Any, Callable[[CodeEncoder, Any], dict[str, Json]]]]
_NAMED: _Forms = [
    (Node, CodeEncoder._node),
    (Source | Operation, CodeEncoder._place),
    (Captured | BlockTracer, CodeEncoder._tracer),
    (Kept, CodeEncoder.kept),
]
_FORMS: _Forms = [
    *_NAMED,
    (ModuleType, CodeEncoder._pymodule),
    (nn.Module, CodeEncoder._nn),
    (type, CodeEncoder._class),
    (FunctionType, CodeEncoder._function),
    (MethodType, CodeEncoder._method),
    (BuiltinFunctionType | type(len), CodeEncoder._builtin),
    (functools.partial, CodeEncoder._partial),
    (enum.Enum, CodeEncoder._member),
]


class CodeDecoder(Decoder):
    """Decodes what a block's names hold, on the side that runs the block.

    Args:
        root: the root of the model's tree here.
        blob: gives the tensor of a content, on the engine's device.
        place: puts a tensor on the engine's device.
        kept: gives the value of a handle, by its id and the name that it came home under.
        pickle: whether cloudpickle is taken.
        extra: names that every function and block sees besides its own (`print`, `save`).
        policy: what the names may hold.
    """

    def __init__(
        self,
        buffers: list[Buffer],
        root: Root,
        *,
        blob: Callable[[str, str, list[int]], Tensor] | None = None,
        place: Callable[[Tensor], Tensor] | None = None,
        kept: Callable[[str, str], Any] | None = None,
        pickle: bool = False,
        extra: dict[str, Any] | None = None,
        policy: Policy = TRUSTED,
    ) -> None:
        super().__init__(buffers)
        self._policy = policy
        self._root = root
        self._blob = blob
        self._place = place
        self._value_of = kept
        self._pickle = pickle
        self._extra = extra or {}

    def readers(self) -> dict[str, Callable[[dict[str, Json]], Any]]:
        root = self._root
        readers = {
            **super().readers(),
            "node": lambda f: root.get(f["path"]) if f["path"] else root,
            "source": lambda f: Source(root._places, f["path"]),
            "operation": lambda f: Operation(root._places, f["path"]),
            "tracer": lambda _: BLOCK_TRACER,
            "tokenizer": lambda _: root.tokenizer,
            "kept": self._kept,
            "pymodule": lambda f: _import(f["name"]),
            "path": _from_path,
            "function": self._function,
            "class": self._class,
            "method": lambda f: getattr(self.decode(f["self"]), f["name"]),
            "partial": self._partial,
            "member": self._member,
            "nn": self._nn,
            "record": self._record,
            "pickle": self._unpickle,
        }
        return self._policy.readers(readers)

    def tensor(self, form: dict[str, Json]) -> Tensor:
        if "h" in form:
            assert self._blob is not None
            tensor = self._blob(form["h"], form["dtype"], form["shape"])
        else:
            tensor = super().tensor(form)
            if self._place is not None:
                tensor = self._place(tensor)
        if "parameter" in form:
            tensor = nn.Parameter(tensor, requires_grad=bool(form["parameter"]))
        return tensor

    def _function(self, form: dict[str, Json]) -> Any:
        return self._run_source(form, form["name"])

    def _class(self, form: dict[str, Json]) -> Any:
        cls = self._run_source(form, form["name"])
        cls.__qualname__ = form["qualname"]
        return cls

    def _kept(self, form: dict[str, Json]) -> Any:
        if self._value_of is None:
            raise ProtocolError("A kept value was named where none are.")
        return self._value_of(str(form["id"]), str(form["name"]))

    def _run_source(self, form: dict[str, Json], name: str) -> Any:
        place = (form["filename"], form["line"], "<module>", form["lazy"])
        code = compile_block(form["source"], *place, self._policy)
        scope: dict[str, Any] = {**self._extra, **_MARKING, "__name__": form["module"]}
        late = _Late(scope, name)
        # A function may name itself, or one that names it, before it exists.
        self._made[form["#"]] = late
        for needed, value in form["names"].items():
            scope[needed] = self.decode(value)
        exec(code.compiled, scope)
        made = scope[_RESULT] if _RESULT in scope else scope[name]
        for needed, value in list(scope.items()):
            if value is late:
                scope[needed] = made
        self._made[form["#"]] = made
        return made

    def _partial(self, form: dict[str, Json]) -> Any:
        function, args, keywords = (self.decode(part) for part in form["v"])
        return functools.partial(function, *args, **keywords)

    def _nn(self, form: dict[str, Json]) -> nn.Module:
        cls = self.decode(form["class"])
        module = self._made[form["#"]] = cls.__new__(cls)
        nn.Module.__init__(module)
        for name, value in form["state"].items():
            made = self.decode(value)
            # Hooks are registered in ordered dicts, which travel as plain ones.
            ordered = isinstance(module.__dict__.get(name), OrderedDict)
            module.__dict__[name] = OrderedDict(made) if ordered else made
        return module

    def _record(self, form: dict[str, Json]) -> Any:
        cls = self.decode(form["class"])
        base: Any = _base(cls)
        record = self._made[form["#"]] = base.__new__(cls)
        for name, value in form["v"].items():
            object.__setattr__(record, name, self.decode(value))
        for key, value in self._dict(form["items"]).items() if "items" in form else ():
            base.__setitem__(record, key, value)
        return record

    def _member(self, form: dict[str, Json]) -> Any:
        cls = self.decode(form["class"])
        return cls[form["name"]] if "name" in form else cls(self.decode(form["value"]))

    def _unpickle(self, form: dict[str, Json]) -> Any:
        if not self._pickle:
            raise PolicyError("A pickled value came, which this server does not take.")
        unpickler = pickle.Unpickler(io.BytesIO(self._buffer(form)))
        unpickler.persistent_load = self.decode  # type: ignore[method-assign]
        return unpickler.load()


def _base(cls: type) -> type:
    """The type of Python's own that says what objects of a class hold besides attributes."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _MADE_HERE)


_MADE_HERE = 1 << 9
"""Python's flag of classes that a `class` statement made."""
_RESULT = "__nnsight_lambda__"


def _save_method(value: Any) -> Any:
    """What `x.save()` in a shipped function calls."""
    own = own_method(value, "save")
    return need_run("`x.save()`").save(value) if own is None else own(value)


def _keep_method(value: Any) -> Any:
    own = own_method(value, "keep")
    return need_run("`x.keep()`").keep(value) if own is None else own(value)


_MARKING = {SAVE: _save_method, KEEP: _keep_method}
"""Their text is rewritten as a block's is, but they outlive the run that they were shipped with."""


class _Late:
    """Stands for a function that is being made, where it is named by itself."""

    def __init__(self, scope: dict[str, Any], name: str) -> None:
        self._scope = scope
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._scope[self._name](*args, **kwargs)


def _defined(function: FunctionType) -> tuple[FunctionType, bool]:
    """The function whose text says what this one is, and whether its decorators belong to that.

    One that was decorated where it is defined travels as that text. Any other travels as it is, and
    what it wraps is among the values that it needs.
    """
    plain: Any = function
    layers = 0
    while isinstance(getattr(plain, "__wrapped__", None), FunctionType):
        plain = plain.__wrapped__
        layers += 1
    if layers:
        try:
            lines, _ = inspect.getsourcelines(plain.__code__)
            node = _definition("".join(lines))
        except (OSError, TypeError, SyntaxError):
            node = None
        if isinstance(node, ast.FunctionDef) and len(node.decorator_list) == layers:
            return plain, True
    return function, False


def _definition(text: str) -> ast.AST:
    """The statement that a function's or class's text is, with lines counted from 1."""
    if text[:1] not in (" ", "\t"):
        return parse(text).body[0]
    wrapper = parse("if 1:\n" + text)
    ast.increment_lineno(wrapper, -1)
    return wrapper.body[0].body[0]  # type: ignore[attr-defined]


def _source_of(
    thing: FunctionType | type, decorated: bool = True
) -> tuple[str, int, str, bool, dict[str, Any]]:
    """A function's or class's source, its first line and its file, whether it leaves annotations
    alone, and the values that it needs."""
    is_function = isinstance(thing, FunctionType)
    given: dict[str, Any] = {}
    try:
        lines, line, filename = _lines_of(thing)
        text = "".join(lines)
        if is_function and thing.__code__.co_name == "<lambda>":
            text, given = _lambda_text(thing)
            text = f"    {_RESULT} = {text}\n"
        elif is_function:
            node = _definition(text)
            if getattr(node, "name", None) != thing.__code__.co_name:
                raise CaptureError("its file was changed since it was imported")
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            text, given = _with_defaults(text, node.args, thing)
            if not decorated:
                text = "".join(text.splitlines(keepends=True)[node.lineno - 1 :])
                line += node.lineno - 1
    except CaptureError:
        raise
    except (OSError, TypeError, SyntaxError):
        raise CaptureError("its source cannot be had") from None
    functions = [thing] if is_function else _methods(thing)
    # Annotations of a function are for its readers, and may name what cannot be shipped.
    lazy = is_function or any(is_lazy(f.__code__.co_flags) for f in functions)
    code = compile_block(text, filename, line, "<module>", lazy)
    known: dict[str, Any] = dict(vars(sys.modules.get(thing.__module__, builtins)))
    for function in functions:
        known |= {**function.__globals__, **_cells(function)}
    known |= given
    names = {name: known[name] for name in code.names.needs if name in known}
    return text, line, filename, lazy, names


def _lines_of(thing: FunctionType | type) -> tuple[list[str], int, str]:
    """The lines of a function's or class's definition, its first line and its file.

    Raises:
        OSError, TypeError, SyntaxError: they cannot be had.
    """
    if isinstance(thing, FunctionType):
        return *inspect.getsourcelines(thing.__code__), thing.__code__.co_filename
    try:
        return *inspect.getsourcelines(thing), inspect.getsourcefile(thing) or "<unknown>"
    except (OSError, TypeError):
        # The cell of a notebook is no file of its module; but a method knows where it stands.
        for method in _methods(thing):
            found = _around(method.__code__, thing.__name__)
            if found is not None and method.__qualname__.startswith(f"{thing.__qualname__}."):
                return *found, method.__code__.co_filename
        raise


def _around(code: CodeType, name: str) -> tuple[list[str], int] | None:
    """The definition of the class in whose text some code stands."""
    lines = linecache.getlines(code.co_filename)
    line = code.co_firstlineno
    found: ast.ClassDef | None = None
    classes = [n for n in ast.walk(parse("".join(lines))) if isinstance(n, ast.ClassDef)]
    for node in classes:
        if node.name == name and node.lineno <= line <= (node.end_lineno or 0):
            found = node  # what is walked to later lies deeper
    if found is None:
        return None
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    return lines[first - 1 : found.end_lineno], first


def _methods(cls: type) -> list[FunctionType]:
    return [f for f in vars(cls).values() if isinstance(f, FunctionType)]


def _with_defaults(
    text: str, args: ast.arguments, function: FunctionType
) -> tuple[str, dict[str, Any]]:
    """A function's text with names for its parameters' defaults, and what these held when it was
    made: an expression may give another value later (`lambda x, i=i: x * i` in a loop)."""
    plain = [*args.posonlyargs, *args.args]
    pairs = list(zip(reversed(plain), reversed(args.defaults), strict=False))
    pairs += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d]
    made = dict(
        zip(reversed([a.arg for a in plain]), reversed(function.__defaults__ or ()), strict=False)
    )
    made |= function.__kwdefaults__ or {}
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    names: dict[str, Any] = {}
    for argument, default in sorted(pairs, key=lambda p: (-p[1].lineno, -p[1].col_offset)):
        if isinstance(default, ast.Constant) or argument.arg not in made:
            continue
        name = f"default_of_{argument.arg}"
        names[name] = made[argument.arg]
        first, last = default.lineno - 1, (default.end_lineno or default.lineno) - 1
        before, after = lines[first][: default.col_offset], lines[last][default.end_col_offset :]
        # Lines that the expression took stay, so that those below keep their numbers.
        one = before + name.encode() + b"\n" * (last - first) + after
        lines[first : last + 1] = [one, *[b""] * (last - first)]
    return b"".join(lines).decode(), names


def _cells(function: FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":
            continue
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return found


def _lambda_text(function: FunctionType) -> tuple[str, dict[str, Any]]:
    """A lambda's own text, found by where its code stands in the file, and its defaults."""
    code = function.__code__
    source = "".join(linecache.getlines(code.co_filename)) or inspect.getsource(function)
    places = {p[:1] + p[2:3] for p in code.co_positions() if p[2] is not None}
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Lambda) and (node.body.lineno, node.body.col_offset) in places:
            text = ast.get_source_segment(source, node)
            if text is not None:
                found = parse(text := f"({text})", mode="eval").body
                assert isinstance(found, ast.Lambda)
                return _with_defaults(text, found.args, function)
    raise CaptureError("the lambda cannot be found in its source")


_CONTENTS: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], str]] = {}


def content_of(tensor: Tensor) -> tuple[str, memoryview]:
    """The digest of a tensor's bytes, kept while the tensor lives unchanged, and the bytes."""
    data = tensor_bytes(tensor)
    key = id(tensor)
    known = _CONTENTS.get(key)
    version = (-1 if tensor.is_inference() else tensor._version, _check(data))
    if known is not None and known[0]() is tensor and known[1] == version and version[0] >= 0:
        return known[2], data
    digest = digest_of(data)
    _CONTENTS[key] = (weakref.ref(tensor, lambda _: _CONTENTS.pop(key, None)), version, digest)
    return digest, data


def _check(data: memoryview) -> int:
    """A checksum that shows what PyTorch does not count, such as a shuffle of the numpy array whose
    memory it is; several times as fast as a digest."""
    return zlib.crc32(data)


def digest_of(data: Buffer) -> str:
    """The name of some content: BLAKE2b of 20 bytes, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def check_content(digest: str, data: Buffer) -> None:
    """Refuse content that may have changed since it was named, and has.

    Raises:
        EngineError: it has.
    """
    if not isinstance(data, bytes) and digest_of(data) != digest:
        raise EngineError(
            "A tensor that a block uses has changed while its request was on the way, and the "
            "engine no longer holds what it was. Run the trace again."
        )


def _library_name(value: Any) -> dict[str, Json] | None:
    """The path of what is no function or class but known by name: `Optional`, `np.exp`."""
    kind = type(value).__module__
    if kind in ("typing", "numpy"):
        name = getattr(value, "_name" if kind == "typing" else "__name__", None)
        if isinstance(name, str) and getattr(sys.modules[kind], name, None) is value:
            return _path(kind, name)
    return None


def _path(module: str, name: str) -> dict[str, Json]:
    return {"$": "path", "module": module, "name": name}


def _from_path(form: dict[str, Json]) -> Any:
    found: Any = _import(form["module"])
    for part in form["name"].split("."):
        found = getattr(found, part)
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LocationError(
            f"The block uses the module {name!r}, which the engine's side does not have ({error}). "
            "Install it there, or define what the block needs in the script itself."
        ) from None


@functools.cache
def _installed(module: str | None) -> bool:
    """Whether a module is part of Python or an installed library, so that the receiver has it."""
    if module is None or module == "__main__":
        return False
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("builtins", "nnsight_core"):
        return True
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        return False
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_site_folders()}
    return any(Path(root) in Path(file).parents for root in roots)


def _site_folders() -> list[str]:
    folders = site.getsitepackages() if hasattr(site, "getsitepackages") else []
    return [*folders, site.getusersitepackages()]
