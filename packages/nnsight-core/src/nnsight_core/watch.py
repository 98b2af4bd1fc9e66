"""Watching a loaded model: each module reports its visits to the interleaver.

A module's `forward` is replaced on the instance by a function that looks at one attribute when
nothing is traced. Hooks would do the same for several times the price, and would not see the
operations inside a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nnsight_core.interleaver import Interleaver
from nnsight_core.locations import Location
from nnsight_core.node import Places
from nnsight_core.source import Operations, operations_of
from nnsight_core.tree import ModelTree, ModuleInfo

Forward = Callable[..., Any]


class Watch:
    """The watched modules of one model.

    Args:
        around: makes of a module's path and forward the forward that runs within its visits.

    Attributes:
        places: the locations and nodes of the model.
        interleaver: what visits are reported to.
    """

    def __init__(
        self,
        model: nn.Module,
        interleaver: Interleaver,
        tree: ModelTree,
        around: Callable[[str, Forward], Forward] = lambda path, forward: forward,
    ) -> None:
        self.interleaver = interleaver
        self._around = around
        self._plain: dict[str, Callable[..., Any]] = {}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._watched: dict[str, nn.Module] = {}
        self._sourced: set[str] = set()
        self._inner: dict[str, dict[Any, Callable[..., Any]]] = {}
        self.places = interleaver.places = Places(tree, self._modules, self.watch_source)
        for path, module in self._modules.items():
            if tree.modules[path].same_as is None:
                self._plain[path] = module.forward
                self._watched[path] = module
                self._install(path, module.forward)

    def watch_source(self, path: str) -> None:
        """Make the operations inside a module's forward report their visits, too.

        Args:
            path: a module, or (`module.source.operation`) an operation in one, whose function's own
                operations are meant.
        """
        outer, nested, _ = path.rpartition(".source.")
        if nested:
            self.watch_source(outer)
            self._inner.setdefault(path, {})
            return
        path = self.places.tree.modules[path].same_as or path if self.places.tree else path
        if path not in self._sourced:
            self._sourced.add(path)
            operations = operations_of(self._plain[path])
            if operations is not None:
                self._install(path, self._with_operations(path, operations))

    def unwatch_sources(self) -> None:
        """Let every forward run as it was written again."""
        for path in self._sourced:
            self._install(path, self._plain[path])
        self._sourced.clear()

    def remove(self) -> None:
        """Give every module its own forward back."""
        for path, module in self._watched.items():
            del module.forward
            if self._plain[path] != module.forward:
                module.forward = self._plain[path]

    def _install(self, path: str, forward: Callable[..., Any]) -> None:
        entry = self.places.location(path, "input")
        output = self.places.location(path, "output")
        module = self._watched[path]
        around = self._around(path, forward)
        module.forward = _reporting(around, self.interleaver, entry, output)

    def _with_operations(self, path: str, operations: Operations) -> Callable[..., Any]:
        interleaver, places = self.interleaver, self.places

        def at(name: str) -> tuple[Location, Location, str]:
            inner = f"{path}.source.{name}"
            return places.location(inner, "input"), places.location(inner, "output"), inner

        where = {name: at(name) for name in operations.names}

        def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not interleaver.watching:
                return function(*args, **kwargs)
            entry, output, inner = where[name]
            if inner in self._inner:
                function = self._with_inner(inner, function)
            return _visit(function, interleaver, entry, output, args, kwargs)

        def bind(name: str, value: Any) -> Any:
            output = where[name][1]
            if interleaver.watching and (
                output in interleaver.waiting or output in interleaver.observers
            ):
                return interleaver.arrive(output, value)
            interleaver.passed.add(output)
            return value

        return operations.build(call, bind)

    def _with_inner(self, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of an operation, reporting the operations in it where that is possible."""
        operations = operations_of(function)
        if operations is None:
            return function
        # A method is bound anew at each call, so what it is bound to is part of what it is.
        key = (function.__code__, id(getattr(function, "__self__", None)))
        made = self._inner[path]
        if key not in made:
            made.clear()
            made[key] = self._with_operations(path, operations)
        return made[key]


def _reporting(
    forward: Callable[..., Any], interleaver: Interleaver, entry: Location, output: Location
) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not interleaver.watching:
            return forward(*args, **kwargs)
        return _visit(forward, interleaver, entry, output, args, kwargs)

    watched.__wrapped__ = forward  # type: ignore[attr-defined]
    return watched


def _visit(
    function: Callable[..., Any],
    interleaver: Interleaver,
    entry: Location,
    output: Location,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    waiting, passed, observers = interleaver.waiting, interleaver.passed, interleaver.observers
    if entry in waiting or entry in observers:
        args, kwargs = interleaver.arrive(entry, (args, kwargs))
    else:
        passed.add(entry)
    value = function(*args, **kwargs)
    if output in waiting or output in interleaver.skips or output in observers:
        return interleaver.arrive(output, value)
    passed.add(output)
    return value


@contextmanager
def recording(interleaver: Interleaver, record: Callable[[Location, Any], None]) -> Iterator[None]:
    """While it lasts, every visit goes to `record` instead of to runs."""

    def arrive(location: Location, value: Any) -> Any:
        record(location, value)
        return value

    waiting, watching = interleaver.waiting, interleaver.watching
    interleaver.waiting = _Everywhere()
    interleaver.arrive = arrive  # type: ignore[method-assign]
    interleaver.watching = True
    try:
        yield
    finally:
        interleaver.waiting, interleaver.watching = waiting, watching
        del interleaver.arrive
        interleaver.passed.clear()


class _Everywhere(dict[Location, list[Any]]):
    def __contains__(self, _key: object) -> bool:
        return True


def bare_tree(model: nn.Module, name: str, engine: str, provisional: bool = False) -> ModelTree:
    """The tree of a model that has not run: paths, classes and operations, no shapes."""
    first: dict[int, str] = {}
    modules: dict[str, ModuleInfo] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        same_as = first.setdefault(id(module), path)
        operations = operations_of(module.forward)
        modules[path] = ModuleInfo(
            cls=type(module).__name__,
            children=tuple(child for child, part in module._modules.items() if part is not None),
            same_as=None if same_as == path else same_as,
            operations=None if operations is None else operations.names,
        )
    return ModelTree(model=name, engine=engine, provisional=provisional, modules=modules)
