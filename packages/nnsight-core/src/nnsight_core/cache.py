"""An activation cache: what chosen modules give back in every step, without naming each visit.

A cache looks on after the block's own reads and writes, so it holds what the model went on with. It
goes on looking when the block has ended, until its request has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnsight_core.errors import LocationError, NotSupportedError, OutOfOrderError
from nnsight_core.locations import Location
from nnsight_core.node import Node, Places, no_such
from nnsight_core.visit import Visit, outside_inference

if TYPE_CHECKING:
    from nnsight_core.run import Run

_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class CachedVisit:
    """One visit of one module: its `output`, and its `inputs` (`(args, kwargs)`) if asked for."""

    __slots__ = ("inputs", "output")

    def __init__(self, output: Any = None, inputs: Any = None) -> None:
        self.output = output
        self.inputs = inputs

    @property
    def input(self) -> Any:
        """The first argument."""
        if self.inputs is None:
            return None
        args, kwargs = self.inputs
        return args[0] if args else next(iter(kwargs.values()), None)

    def __repr__(self) -> str:
        return f"CachedVisit(output={self.output!r}, inputs={self.inputs!r})"


class CachedModule:
    """The visits of one module, and the way to those below it.

    `output`, `input` and `inputs` are the value of the one visit, or a list with one per visit (one
    per step, for most modules). `len()` counts the visits and `[i]` is the i-th.
    """

    def __init__(self, cache: Cache, path: str) -> None:
        self._cache = cache
        self._path = path

    @property
    def visits(self) -> list[CachedVisit]:
        """The visits, in the order of the steps."""
        return self._cache._visits.get(self._path, [])

    def __getattr__(self, name: str) -> Any:
        if name in ("output", "input", "inputs"):
            values = [getattr(visit, name) for visit in self._cache._seen(self._path)]
            return values[0] if len(values) == 1 else values
        if name.startswith("__"):
            raise AttributeError(name)
        return self._cache._below(self._path, name)

    def __len__(self) -> int:
        return len(self.visits)

    def __getitem__(self, index: int) -> Any:
        return self.visits[index] if self.visits else self._cache._below(self._path, str(index))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{self._path}: {len(self)} visits>"


class Cache(Mapping[str, CachedModule]):
    """What `tracer.cache()` gives: the visits of modules, by path.

    Attributes:
        missing: modules that ran and could not be kept, with the reason.

    Example:
        >>> with model.trace("Hello", max_tokens=3) as tracer:
        ...     cache = tracer.cache(modules=[model.transformer.h[0]])
        >>> len(cache["transformer.h.0"])
        3
        >>> cache.transformer.h[0].output[0].shape  # the prefill's
        torch.Size([5, 768])
    """

    def __init__(self) -> None:
        self._visits: dict[str, list[CachedVisit]] = {}
        self.missing: dict[str, str] = {}

    @classmethod
    def of(cls, data: dict[str, Any]) -> Cache:
        """The cache that `data()` was made of."""
        cache = cls()
        cache.missing = dict(data["missing"])
        for path, visits in data["visits"].items():
            cache._visits[path] = [CachedVisit(*visit) for visit in visits]
        return cache

    def data(self) -> dict[str, Any]:
        """The cache as plain containers."""
        visits = {p: [(v.output, v.inputs) for v in seen] for p, seen in self._visits.items()}
        return {"visits": visits, "missing": self.missing}

    def __getitem__(self, path: str) -> CachedModule:
        for known in (path, path.removeprefix("model.")):
            if known in self._visits:
                return CachedModule(self, known)
        raise KeyError(self.missing.get(path, f"{path} is not in the cache"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._visits)

    def __len__(self) -> int:
        return len(self._visits)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._below("", name)

    def __repr__(self) -> str:
        return f"Cache({', '.join(self._visits)})"

    def _below(self, path: str, name: str) -> CachedModule:
        child = f"{path}.{name}" if path else name
        if any(known == child or known.startswith(f"{child}.") for known in self._visits):
            return CachedModule(self, child)
        raise LocationError(self.missing.get(child, f"{child} is not in the cache."))

    def _seen(self, path: str) -> list[CachedVisit]:
        if path not in self._visits:
            raise LocationError(self.missing.get(path, f"{path} is not in the cache."))
        return self._visits[path]


class Recorder:
    """Fills one cache of one run.

    Attributes:
        locations: where it looks on.
    """

    def __init__(
        self, run: Run, cache: Cache, paths: list[str], every: bool, options: dict[str, Any]
    ) -> None:
        assert run.interleaver is not None and run.interleaver.places is not None
        places = run.interleaver.places
        self._run = run
        self._cache = cache
        self._every = every
        self._options = options
        sides = [s for s, on in (("input", options["inputs"]), ("output", options["output"])) if on]
        self.locations = [places.location(path, side) for path in paths for side in sides]
        self._inputs: dict[str, list[Any]] = {}

    def see(self, location: Location, value: Any) -> Any:
        """Keep what a location holds; it is handed on as it is."""
        path = location.path
        if path in self._cache.missing:
            return value
        assert self._run.interleaver is not None
        try:
            with outside_inference():
                visit = Visit(self._run.interleaver.rows, self._run, location, value)
                kept = self._plain(visit.value)
        except Exception as error:
            if not self._every:
                self._run.error = self._run.error or error
            self._cache.missing[path] = f"{error}"
            return value
        if location.side == "output":
            inputs = self._inputs.pop(path, None)
            visits = self._cache._visits.setdefault(path, [])
            visits.append(CachedVisit(kept, inputs and inputs[-1]))
        elif self._options["output"]:
            self._inputs.setdefault(path, []).append(kept)
        else:
            self._cache._visits.setdefault(path, []).append(CachedVisit(None, kept))
        return value

    def _plain(self, value: Any) -> Any:
        """The value as data where the cache is to hold it; a module in it becomes its name."""
        if isinstance(value, Tensor):
            device, dtype = self._options["device"], self._options["dtype"]
            dtype = dtype if value.is_floating_point() or value.is_complex() else None
            return value.to(device, dtype, non_blocking=self._options["non_blocking"])
        if isinstance(value, tuple) and hasattr(type(value), "_fields"):
            return type(value)(*[self._plain(part) for part in value])
        if isinstance(value, tuple | list):
            return type(value)([self._plain(part) for part in value])
        if isinstance(value, dict):
            return {key: self._plain(part) for key, part in value.items()}
        return value if isinstance(value, _DATA) else f"<{type(value).__name__}>"


def open_cache(
    run: Run,
    modules: Any = None,
    *,
    device: Any = "cpu",
    dtype: torch.dtype | None = None,
    detach: bool = True,
    include_output: bool = True,
    include_inputs: bool = False,
    non_blocking: bool = False,
) -> Cache:
    """Start a cache in a block; it comes home under the name that holds it.

    Args:
        modules: modules or their paths; every module of the model if left out.
        device: where values wait until the request ends; None leaves them where they are.
        dtype: what they are converted to; whole numbers (token ids) stay as they are.
        include_output: keep what the modules give back.
        include_inputs: keep what they are handed, as `(args, kwargs)`.
        non_blocking: do not wait for the copies.

    Raises:
        OutOfOrderError: the block has asked for a location before.
        LocationError: there is no such module.
    """
    if not detach:
        raise NotSupportedError("detach=False: vLLM computes no gradients, so there are none.")
    if run.asked:
        raise OutOfOrderError(
            "tracer.cache() came too late: it sees every visit, so it stands before the block's "
            "first read, write or loop."
        )
    assert run.interleaver is not None and run.interleaver.places is not None
    places = run.interleaver.places
    assert places.tree is not None
    every = modules is None
    if every:
        paths = [path for path, info in places.tree.modules.items() if info.same_as is None]
    else:
        given = modules if isinstance(modules, list | tuple | set) else [modules]
        paths = [_path(places, module) for module in given]
    options = {
        "device": None if device is None else torch.device(device),
        "dtype": dtype,
        "non_blocking": non_blocking,
        "output": include_output,
        "inputs": include_inputs,
    }
    cache = Cache()
    if every:
        for path, info in places.tree.modules.items():
            if info.same_as is not None:
                cache.missing[path] = f"{path} is the same module object as {info.same_as}."
    recorder = Recorder(run, cache, list(dict.fromkeys(paths)), every, options)
    run.recorders.append(recorder)
    run.interleaver.observe([(location, recorder) for location in recorder.locations])
    return run.save(cache)


def _path(places: Places, module: Any) -> str:
    assert places.tree is not None
    path = module._path if isinstance(module, Node) else module
    if not isinstance(path, str):
        raise LocationError(f"tracer.cache takes modules or their paths, not {module!r}.")
    for known in (path, path.removeprefix("model.")):
        if known in places.tree.modules:
            return known
    raise LocationError(no_such(places.tree, path))
