"""What a block saves or keeps, and under which names it comes home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nnsight_core.code import KEEP, SAVE, Code
from nnsight_core.kept import Kept
from nnsight_core.values import flat, map_tensors, plain

SCALARS = (bool, int, float, complex, str, bytes, type(None))


class Saved:
    """What `save` was given: the object, and its state then if it may change later.

    Of what `keep` was given, that state is on the engine, and `handle` stands for it.
    """

    __slots__ = ("_versions", "_was", "handle", "line", "value")

    def __init__(
        self, value: Any, was: Any, line: int, counted: bool = False, handle: Kept | None = None
    ) -> None:
        self.value = value
        self.line = line
        self.handle = handle
        self._was = was
        self._versions = _versions(value) if counted and was is not value else None

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
    """

    def __init__(self, code: Code) -> None:
        self.made: dict[int, list[Saved]] = {}
        self.shared: dict[str, Any] = {}
        self.clashes: list[str] = []
        self._code = code

    def add(self, value: Any, line: int) -> None:
        """Keep a value, and its state if it may change later in the block."""
        was = value
        if self._code.snapshots and isinstance(value, Tensor | tuple):
            made: dict[int, Tensor] = {}
            was = map_tensors(value, lambda t: made.setdefault(id(t), t.clone()))
        saved = Saved(value, was, line, not self._code.unseen)
        self.made.setdefault(id(value), []).append(saved)

    def add_kept(self, value: Any, handle: Kept, line: int) -> None:
        """Note that a value stays on the engine, and what stands for it."""
        self.made.setdefault(id(value), []).append(Saved(value, handle, line, handle=handle))

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
            if isinstance(value, SCALARS) and lines is None:
                continue
            # Of an object that was saved again after it had changed, a name gets its own state.
            mine = [s for s in saved if lines is not None and s.line in lines]
            mine = mine or saved
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
        if not lost and not kept:
            return found, lost
        self._unpack(found, lost, scope, parts_of)
        held = {id(part) for home in homes for part in _parts(home)}
        inside = {id(s.value): s.was for s in kept if id(s) not in named and id(s.value) in held}
        if inside:
            made: dict[int, Any] = {}
            for name, value in found.items():
                origin = states[name].value if name in states else value
                found[name] = _with_handles(origin, value, inside, made)
        return found, [s for s in lost if id(s.value) not in held]

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
                and (name in self._code.names.saved or not isinstance(value, SCALARS))
            }
            if names:
                was = saved.was
                if saved.handle is not None:
                    assert parts_of is not None
                    was = parts_of(saved.handle)
                found.update({name: was[index] for name, index in names.items()})
                lost.remove(saved)


def _with_handles(value: Any, state: Any, handles: dict[int, Any], made: dict[int, Any]) -> Any:
    """A saved state in which handles stand for the parts that were kept.

    Args:
        value: what was saved, whose parts are those that `handles` knows.
        made: what has become of containers, so that one in two places stays one.
    """
    kind = type(value)
    if kind is not type(state) or kind not in (list, tuple, dict):
        return state
    if id(state) in made:
        return made[id(state)]
    if kind is tuple:
        pairs = zip(value, state, strict=True)
        new: Any = tuple([_part(a, b, handles, made) for a, b in pairs])
        return made.setdefault(id(state), new)
    new = made[id(state)] = kind()
    if kind is list:
        new += [_part(a, b, handles, made) for a, b in zip(value, state, strict=True)]
    else:
        new |= {key: _part(value[key], part, handles, made) for key, part in state.items()}
    return new


def _part(value: Any, state: Any, handles: dict[int, Any], made: dict[int, Any]) -> Any:
    handle = handles.get(id(value))
    return _with_handles(value, state, handles, made) if handle is None else handle


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
