"""What a block saves or keeps, and under which names it comes home."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from nnsight_core.code import KEEP, SAVE, Code
from nnsight_core.kept import Kept
from nnsight_core.values import flat, map_tensors, plain

SCALARS = (bool, int, float, complex, str, bytes, type(None))
_COMMON = (*SCALARS, torch.dtype, torch.layout, torch.memory_format, type)
"""Objects that names have in common which have nothing to do with each other."""


class Saved:
    """What `save` was given: the object, and its state then if it may change later.

    Of what `keep` was given, that state is on the engine, and `handle` stands for it.
    """

    __slots__ = ("_versions", "_was", "handle", "place", "value")

    def __init__(
        self,
        value: Any,
        was: Any,
        place: tuple[int, int],
        counted: bool = False,
        handle: Kept | None = None,
    ) -> None:
        self.value = value
        self.place = place
        self.handle = handle
        self._was = was
        self._versions = _versions(value) if counted else None

    @property
    def line(self) -> int:
        """The line of the block that saved it."""
        return self.place[0]

    @property
    def was(self) -> Any:
        """The state then: the object itself, if it has not changed since."""
        unchanged = self._versions is not None and _versions(self.value) == self._versions
        return self.value if unchanged else self._was


def _versions(value: Any) -> list[int] | None:
    """How often each tensor of a value was written, if PyTorch counts that."""
    held = [plain(tensor) for tensor in flat(value)]
    return None if any(t.is_inference() for t in held) else [t._version for t in held]


class Saves:
    """The saves of one run.

    Attributes:
        made: what `save` was given, by the id of the object, in the order of the calls.
        shared: the values saved above the invokes, by the names that hold them.
        clashes: the names under which values were both saved and kept, and so could not come home
            as both.
        unclear: what was saved more than once, of which it cannot be told which of its states the
            containers that hold it are to have.
    """

    def __init__(self, code: Code) -> None:
        self.made: dict[int, list[Saved]] = {}
        self.shared: dict[str, Any] = {}
        self.clashes: list[str] = []
        self.unclear: list[Saved] = []
        self._code = code
        self._within: dict[int, dict[int, Saved]] = {}

    def add(self, value: Any, place: tuple[int, int]) -> None:
        """Keep a value, and its state if it may change later in the block.

        Args:
            place: the line and column of the block that saves it.
        """
        if self._code.snapshots and isinstance(value, list | dict):
            # The container is saved with all that it will hold, what it holds by now as it is.
            self._within[id(value)] = {
                id(part): self._state(part, place)
                for part in _parts(value)
                if isinstance(part, _CHANGING)
            }
        self.made.setdefault(id(value), []).append(self._state(value, place))

    def _state(self, value: Any, place: tuple[int, int]) -> Saved:
        was = value
        if self._code.snapshots and isinstance(value, Tensor | tuple):
            made: dict[int, Tensor] = {}
            was = map_tensors(value, lambda t: made.setdefault(id(t), t.clone()))
        elif isinstance(value, numpy.ndarray):
            return Saved(value, value.copy(), place)
        return Saved(value, was, place, not self._code.unseen and was is not value)

    def add_kept(self, value: Any, handle: Kept, place: tuple[int, int]) -> None:
        """Note that a value stays on the engine, and what stands for it."""
        self.made.setdefault(id(value), []).append(Saved(value, handle, place, handle=handle))

    def values(self) -> list[Any]:
        """What may come home, as far as it is known before the block's names are looked at."""
        return [saved.was for made in self.made.values() for saved in made]

    def forget_kept(self) -> None:
        """Let no handle come home."""
        for key, made in list(self.made.items()):
            self.made[key] = [saved for saved in made if saved.handle is None]

    def outcome(
        self, scope: dict[str, Any], parts_of: Callable[[Kept], list[Any]] | None = None
    ) -> tuple[dict[str, Any], list[Saved]]:
        """What comes home by name, and what was saved but is held by no name.

        Args:
            parts_of: the handles of the parts of a kept pair.
        """
        found: dict[str, Any] = {}
        states: dict[str, Saved] = {}
        seen: set[int] = set()
        for name, value in scope.items():
            saved = self.made.get(id(value))
            if not saved or name in (SAVE, KEEP):
                continue
            # Small numbers and texts are shared between unrelated names, so there the name counts.
            lines = self._code.names.saved.get(name)
            if isinstance(value, _COMMON) and lines is None:
                continue
            # Of an object that was saved again after it had changed, a name gets its own state.
            spans = self._code.names.spans.get(name, ()) if len(saved) > 1 else ()
            mine = [s for s in saved if any(a <= s.place < b for a, b in spans)] or saved
            # What is both comes home as the value, which can be used anywhere; but what a function
            # given as `fn=` gives back is saved without its asking.
            asked = not name.startswith("__nnsight")
            states[name] = ([s for s in mine if (s.handle is None) == asked] or mine)[-1]
            found[name] = states[name].was
            seen.add(id(value))
        self._clash(scope, states)
        found.update(self.shared)
        homes = [*(self.made[key][0].value for key in seen), *self.shared.values()]
        seen.update(map(id, self.shared.values()))
        lost = [s[-1] for key, s in self.made.items() if s and key not in seen]
        named = set(map(id, states.values()))
        kept = [s for made in self.made.values() for s in made if s.handle is not None]
        if not lost and not kept and not self._within:
            return found, lost
        self._unpack(found, lost, scope, parts_of)
        held = {id(part) for home in homes for part in _parts(home)}
        handles = {id(s.value): s.was for s in kept if id(s) not in named and id(s.value) in held}
        stands = _Stands(handles, self._changed(homes) if held else {})
        for name, value in found.items():
            origin = states[name].value if name in states else value
            inside = self._within.get(id(origin), {})
            within = {key: s.was for key, s in inside.items() if s.was is not s.value}
            found[name] = stands.put_in(origin, value, within)
        return found, [s for s in lost if id(s.value) not in held]

    def _changed(self, homes: list[Any]) -> dict[int, list[Any]]:
        """Of parts of saved containers that were saved and have changed since, their states."""
        if not (self._code.snapshots or self._code.unseen):
            return {}
        found: dict[int, list[Any]] = {}
        counts = [Counter(map(id, _parts(home))) for home in homes]
        for key in {key for count in counts for key in count} & self.made.keys():
            saved = [s for s in self.made[key] if s.handle is None]
            if all(s.was is s.value for s in saved):
                continue
            # What a name was given is that name's.
            saved = [s for s in saved if not self._named(s)]
            times = [count[key] for count in counts if key in count]
            if times == [len(saved)]:
                found[key] = [s.was for s in saved]
            elif saved:
                self.unclear += saved[-1:]
        return found

    def _named(self, saved: Saved) -> bool:
        spans = self._code.names.spans.values()
        return any(saved.place == begin for of_name in spans for begin, _ in of_name)

    def _clash(self, scope: dict[str, Any], states: dict[str, Saved]) -> None:
        """Note the names whose values were kept as well, where no name holds the handle."""
        home = set(map(id, states.values()))
        for name, state in states.items():
            lines = self._code.names.saved.get(name, ())
            made = [s for s in self.made[id(scope[name])] if s.line in lines]
            kept = [id(s) for s in made if s.handle is not None]
            if state.handle is None and kept and home.isdisjoint(kept):
                self.clashes.append(name)

    def _unpack(
        self,
        found: dict[str, Any],
        lost: list[Saved],
        scope: dict[str, Any],
        parts_of: Callable[[Kept], list[Any]] | None,
    ) -> None:
        """`a, b = layer.output.save()` saves a pair that no name holds; its parts have names."""
        for saved in [s for s in lost if isinstance(s.value, tuple | list)]:
            parts = {id(part): index for index, part in enumerate(saved.value)}
            names = {
                name: parts[id(value)]
                for name, value in scope.items()
                if id(value) in parts
                and (name in self._code.names.saved or not isinstance(value, _COMMON))
            }
            if names:
                was = saved.was
                if saved.handle is not None:
                    assert parts_of is not None
                    was = parts_of(saved.handle)
                found.update({name: was[index] for name, index in names.items()})
                lost.remove(saved)


class _Stands:
    """What stands for parts of saved containers.

    Args:
        handles: for what was kept, by the id of the part.
        states: for what was saved and has changed since, once for each time that it was saved.
    """

    def __init__(self, handles: dict[int, Any], states: dict[int, list[Any]]) -> None:
        self._handles = handles
        self._states = {key: iter(each) for key, each in states.items()}
        self._within: dict[int, Any] = {}
        # What has become of containers, so that one in two places stays one.
        self._made: dict[int, Any] = {}

    def put_in(self, value: Any, state: Any, within: dict[int, Any]) -> Any:
        """A saved state with what stands for its parts.

        Args:
            value: what was saved, whose parts are those that are known.
            within: what stands for what it held already when it was saved itself.
        """
        self._within = within
        return self.put(value, state) if self._handles or self._states or within else state

    def put(self, value: Any, state: Any) -> Any:
        """The same of a part, or of all of it."""
        kind = type(value)
        if kind is not type(state) or kind not in (list, tuple, dict):
            return state
        if id(state) in self._made:
            return self._made[id(state)]
        if kind is tuple:
            parts = [self._part(a, b) for a, b in zip(value, state, strict=True)]
            return self._made.setdefault(id(state), tuple(parts))
        new: Any = kind()
        self._made[id(state)] = new
        if kind is list:
            new += [self._part(a, b) for a, b in zip(value, state, strict=True)]
        else:
            new |= {key: self._part(value[key], part) for key, part in state.items()}
        return new

    def _part(self, value: Any, state: Any) -> Any:
        if id(value) in self._handles:
            return self._handles[id(value)]
        # A tuple holds what it held when it was saved.
        if state is value and id(value) in self._states:
            return next(self._states[id(value)])
        if state is value and id(value) in self._within:
            return self._within.pop(id(value))
        return self.put(value, state)


_CHANGING = (Tensor, numpy.ndarray)


def _parts(value: Any) -> list[Any]:
    """What a saved container holds, all the way down."""
    parts: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, list | tuple | set | dict) and id(held) not in seen:
            seen.add(id(held))
            inner = list(held.values() if isinstance(held, dict) else held)
            parts += inner
            waiting += inner
    return parts
