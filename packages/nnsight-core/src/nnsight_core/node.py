"""The attribute tree that users touch: `model.transformer.h[6].mlp.output`.

A node names a module by its path. In a block its sides are values; outside one it is only a name.
Where the tree is not known yet (a client that has not met its server), every name is accepted and
checked when the trace is submitted.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from nnsight_core.current import current_run, need_run
from nnsight_core.errors import LocationError, WriteError
from nnsight_core.locations import LOGITS, SAMPLES, Location

# A model is held, and its tree looked at, by processes that never load PyTorch. What a block does
# with the modules themselves imports it.
if TYPE_CHECKING:
    from torch import nn

    from nnsight_core.tree import ModelTree

SIDES = ("output", "input", "inputs", "source")


class Places:
    """What the nodes of one tree share.

    Attributes:
        tree: the tree as data, or None while it is not known.
        modules: the modules by path, where the tree belongs to a model that is loaded here.
        locations: the locations by name, made when first asked for.
        prepare: called before an operation inside a module's forward is asked for.
        learn: gives the tree where it is not known, or in doubt, and something needs it.
        recall: gives the tree that was known earlier, which may be in doubt; asked once.
        call: runs a module of this path on values of a block, where calling it is not enough.
        lent: makes of what a module holds beside its children (a weight, a number, a method) what a
            block may see of it; called with the module's path, the name and the value.
        sure: whether the tree is the engine's own. No name is refused, and nothing counted, by
            one that is in doubt while the engine can be asked.
    """

    def __init__(
        self,
        tree: ModelTree | None = None,
        modules: dict[str, nn.Module] | None = None,
        prepare: Callable[[str], None] | None = None,
    ) -> None:
        self.tree = tree
        self.modules = modules or {}
        self.prepare = prepare
        self.learn: Callable[[], ModelTree] | None = None
        self.call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.lent: Callable[[str, str, Any], Any] | None = None
        self.recall: Callable[[], ModelTree | None] | None = None
        self.sure = True
        self.locations: dict[tuple[str, str], Location] = {}
        self.nodes: dict[str, Node] = {}
        self._stateful: dict[str, str | None] = {}

    def has(self, path: str) -> bool:
        """Whether there may be a module at a path."""
        if self.tree is None and self.recall is not None:
            self.recall, recall = None, self.recall
            self.tree = recall()
        if self.tree is None or path in self.tree.modules:
            return True
        if self.sure or self.learn is None:
            return False
        self.tree = self.learn()
        # A tree that no engine has ever confirmed lacks names that there are.
        doubted = self.tree.provisional and not self.sure
        return doubted or path in self.tree.modules

    def location(self, path: str, side: str) -> Location:
        """The one `Location` object of a path and side.

        Raises:
            LocationError: the module is met first under another path, so that a visit would not be
                the one that this path speaks of.
        """
        found = self.locations.get((path, side))
        if found is None:
            module, source, _ = path.partition(".source.")
            info = self.tree.modules.get(module) if self.tree else None
            if info is not None and info.same_as is not None:
                raise LocationError(
                    f"{module} is the same module object as {info.same_as}, so its visits cannot "
                    f"be told apart by path. Ask for {info.same_as}, or for the operation that "
                    "calls it (`.source` of the module around it)."
                )
            found = self.locations[path, side] = Location(path, side)
            # How often an operation runs in one forward (a loop around it) is not recorded.
            found.repeats = bool(source) or (info is not None and info.repeats)
        return found

    def node(self, path: str) -> Node:
        """The node at a path.

        Raises:
            LocationError: there is none, with the nearest ones in the message.
        """
        found = self.nodes.get(path)
        if found is None:
            if not self.has(path):
                assert self.tree is not None
                raise LocationError(no_such(self.tree, path))
            found = self.nodes[path] = Node(self, path)
        return found

    def stateful(self, path: str) -> str | None:
        """The part of a module, or it itself, that keeps state of every request of the batch.

        Such layers (attention, Mamba) find that state beside their arguments: by what the pass that
        runs says of all its rows. They are told by the method with which vLLM asks each of them for
        the form of its cache, or by that cache.
        """
        if path not in self._stateful:
            parts = self.modules[path].named_modules(prefix=path)
            signs = ("get_kv_cache_spec", "kv_cache")
            found = (name for name, part in parts if any(hasattr(part, sign) for sign in signs))
            self._stateful[path] = next(found, None)
        return self._stateful[path]


def no_such(tree: ModelTree, path: str) -> str:
    """The message for a path that does not exist."""
    parent, _, name = path.rpartition(".")
    near = [f"{parent}.{s}" for s in difflib.get_close_matches(name, SIDES, 1, 0.8)]
    near += tree.nearest(path)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    return f"{tree.model} has no module {path!r}.{hint}"


class Node:
    """A module of a model, as users name it.

    In a block: `.output`, `.input` (the first argument), `.inputs` (all of them) are this request's
    values and can be assigned; `.source` leads to the operations inside its forward;
    `.skip(value)` replaces what it gives back; calling it runs it on values of the block.

    Example:
        >>> layer = model.transformer.h[6]
        >>> with model.trace("Hello"):
        ...     mlp = layer.mlp.output.save()
    """

    __slots__ = ("_children", "_path", "_places")

    def __init__(self, places: Places, path: str) -> None:
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_children", {})

    # The sides are found here and not as properties: Python turns an AttributeError of a property
    # (our location errors are such) into another look-up.
    def __getattr__(self, name: str) -> Any:
        known = self._children.get(name)
        if known is not None:
            return known
        if name in SIDES:
            return self._side(name)
        if name.startswith("__"):
            raise AttributeError(name)
        return self._child(name)

    def _side(self, name: str) -> Any:
        places, path = self._places, self._path
        if name == "source":
            return Source(places, path)
        run = need_run(path or "The model", name)
        if name == "output":
            return run.read(places.location(path, "output"))
        args, kwargs = run.read(places.location(path, "input"))
        if name == "inputs":
            return args, kwargs
        return _first(args, kwargs)

    def _child(self, name: str) -> Any:
        places = self._places
        path = f"{self._path}.{name}" if self._path else name
        if places.has(path):
            child = self._children[name] = places.node(path)
            return child
        module = places.modules.get(self._path)
        if module is not None:
            from torch import nn

            from nnsight_core.values import map_tensors

            run = current_run()
            if run is not None and name in vars(nn.Module):
                raise LocationError(
                    f"{path}: this method of every module hands out, or changes, what all requests "
                    "share. Read weights by name (`layer.ln.weight`), and call a module to run it."
                )
            try:
                value = getattr(module, name)
            except AttributeError:
                pass
            else:
                if run is None:
                    return value
                if places.lent is not None:
                    value = places.lent(self._path, name, value)
                return map_tensors(value, partial(run.lend, path))
        assert places.tree is not None
        raise LocationError(no_such(places.tree, path))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "output":
            location = self._places.location(self._path, "output")
            need_run(f"{self._path}.output").write(location, value)
        elif name in ("input", "inputs"):
            location = self._places.location(self._path, "input")
            run = need_run(f"{self._path}.{name}")
            if name == "input":
                value = _with_first(location, *run.read(location), value)
            run.write(location, (tuple(value[0]), dict(value[1])))
        else:
            raise LocationError(
                f"{self._path or 'the model'}.{name} cannot be assigned: of a module, `output`, "
                "`input` and `inputs` can."
            )

    def skip(self, value: Any) -> None:
        """Replace this request's rows of what the module gives back by `value`.

        The module still runs for the other requests of the step; for this one nothing inside it can
        be read or written.

        Raises:
            WriteError: `value` is not built like the output, with this request's rows and width.
        """
        places, path = self._places, self._path
        entry, output = places.location(path, "input"), places.location(path, "output")
        need_run(f"{path}.skip").skip(path, entry, output, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        need_run(f"Calling {self._path}")
        module = self._places.modules.get(self._path)
        if module is None:
            raise LocationError(f"{self._path} is not loaded here, so it cannot be called.")
        stateful = self._places.stateful(self._path)
        if stateful is not None:
            raise LocationError(
                f"{self._path or 'The model'} cannot be called in a block: {stateful} keeps keys "
                "and values, or other state, of every request of the batch, and a call would write "
                "over theirs. Ask for what it gives this request (`.output`), or for the "
                "operations inside its forward (`.source`); call the modules in it that keep "
                "nothing."
            )
        from torch import Tensor

        from nnsight_core.values import map_tensors

        # Kernels may write into their arguments without telling PyTorch, which would look like
        # values that nobody changed.
        args, kwargs = map_tensors((args, kwargs), Tensor.clone)
        if self._places.call is not None:
            return self._places.call(self._path, args, kwargs)
        return module(*map(bare, args), **{k: bare(v) for k, v in kwargs.items()})

    def __getitem__(self, index: SupportsIndex | slice | str) -> Any:
        if not isinstance(index, str | slice):
            try:
                index = operator.index(index)
            except TypeError:
                raise TypeError(
                    f"{self._path or 'The model'} is indexed by a number, a slice or a name, not "
                    f"by {type(index).__name__}."
                ) from None
        names = self._numbered(needed=not isinstance(index, int) or index < 0)
        if isinstance(index, slice):
            if names is None:
                raise LocationError(f"The length of {self._path} is not known yet.")
            return [getattr(self, name) for name in names[index]]
        if isinstance(index, int) and names is not None:
            try:
                return getattr(self, names[index])
            except IndexError:
                raise LocationError(
                    f"{self._path}[{index}] does not exist: it has {len(names)} entries."
                ) from None
        return getattr(self, str(index))

    def __iter__(self) -> Iterator[Node]:
        return iter(self[:])

    def __len__(self) -> int:
        names = self._numbered()
        if names is None:
            raise LocationError(f"The length of {self._path} is not known yet.")
        return len(names)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        tree = self._places.tree
        info = tree.modules.get(self._path) if tree else None
        children = list(info.children) if info else []
        return [*SIDES, "skip", *children]

    def __repr__(self) -> str:
        return f"<{self._path or 'model'}>"

    def _numbered(self, needed: bool = True) -> tuple[str, ...] | None:
        places = self._places
        if needed and places.learn is not None and (places.tree is None or not places.sure):
            places.tree = places.learn()
        if places.tree is None or not (needed or places.sure):
            return None
        if not places.has(self._path):
            raise LocationError(no_such(places.tree, self._path))
        info = places.tree.modules.get(self._path)
        return info.children if info is not None else None


class Source:
    """The operations inside a module's forward, by name: `layer.attn.source.self_c_attn_0.output`.

    `print(layer.attn.source)` lists them.
    """

    __slots__ = ("_path", "_places")

    def __init__(self, places: Places, path: str) -> None:
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Operation:
        if name.startswith("__"):
            raise AttributeError(name)
        known = self._names()
        if known is not None and name not in known and self._places.sure:
            raise LocationError(
                f"The forward of {self._path} has no operation {name!r}. It has: "
                f"{', '.join(known)}."
            )
        if self._places.prepare is not None:
            self._places.prepare(self._path)
        return Operation(self._places, f"{self._path}.source.{name}")

    def _names(self) -> tuple[str, ...] | None:
        tree = self._places.tree
        if tree is None or ".source." in self._path:
            return None  # what an operation calls is found out when it runs
        info = tree.modules.get(self._path)
        if info is None:
            return None
        if info.operations is None and not tree.provisional and self._places.sure:
            raise LocationError(f"The source of {self._path} ({info.cls}) cannot be had.")
        return info.operations

    def __dir__(self) -> list[str]:
        return list(self._names() or ())

    def __repr__(self) -> str:
        names = self._names()
        listed = "\n".join(f"  {name}" for name in names) if names else "  (not known yet)"
        return f"operations of {self._path}:\n{listed}"


class Operation:
    """One call or assignment inside a module's forward, with the sides that a module has.

    Of a call of a Python function, `source` leads to the operations inside that function.
    """

    __slots__ = ("_path", "_places")

    def __init__(self, places: Places, path: str) -> None:
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        if name == "source":
            return Source(self._places, self._path)
        if name not in ("output", "input", "inputs"):
            raise LocationError(
                f"{self._path} is an operation; it has `output`, `input`, `inputs` and `source`, "
                f"not {name!r}."
            )
        run = need_run(f"{self._path}.{name}")
        if name == "output":
            return run.read(self._places.location(self._path, "output"))
        args, kwargs = run.read(self._places.location(self._path, "input"))
        return (args, kwargs) if name == "inputs" else _first(args, kwargs)

    __setattr__ = Node.__setattr__
    skip = Node.skip


class Root(Node):
    """The root of a tree: the model itself, with the engine's own values."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            return need_run("logits").read(LOGITS)
        if name == "samples":
            return need_run("samples").read(SAMPLES)
        if name in ("trace", "generate") and current_run() is not None:
            raise LocationError(f"{name}: a block runs inside one request and starts no other.")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("logits", "samples"):
            need_run(name).write(LOGITS if name == "logits" else SAMPLES, value)
        else:
            super().__setattr__(name, value)

    def get(self, path: str) -> Node:
        """The node at a dotted path, such as `"model.layers.3.mlp"`."""
        if not isinstance(path, str):
            raise TypeError(f"A path is a text, not a value of type {type(path).__name__}.")
        return self._places.node(path)


def bare(value: Any) -> Any:
    """The module that a node names; anything else as it is."""
    if isinstance(value, Node):
        return value._places.modules[value._path]
    return value


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return args[0]
    return next(iter(kwargs.values()), None)


def _with_first(
    location: Location, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (value, *args[1:]), kwargs
    name = next(iter(kwargs), None)
    if name is None:
        raise WriteError(f"{location} has no arguments, so there is none to replace.")
    return args, {**kwargs, name: value}
