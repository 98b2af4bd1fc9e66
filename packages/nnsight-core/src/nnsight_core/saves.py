"""What a block saves, and under which names it comes home."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nnsight_core.code import SAVE, Code
from nnsight_core.values import flat, map_tensors, plain

SCALARS = (bool, int, float, complex, str, bytes, type(None))


class Saved:
    """What `save` was given: the object, and its state then if it may change later."""

    __slots__ = ("_versions", "_was", "line", "value")

    def __init__(self, value: Any, was: Any, line: int, counted: bool) -> None:
        self.value = value
        self.line = line
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
    """

    def __init__(self, code: Code) -> None:
        self.made: dict[int, list[Saved]] = {}
        self.shared: dict[str, Any] = {}
        self._code = code

    def add(self, value: Any, line: int) -> None:
        """Keep a value, and its state if it may change later in the block."""
        was = value
        if self._code.snapshots and isinstance(value, Tensor | tuple):
            made: dict[int, Tensor] = {}
            was = map_tensors(value, lambda t: made.setdefault(id(t), t.clone()))
        saved = Saved(value, was, line, not self._code.unseen)
        self.made.setdefault(id(value), []).append(saved)

    def outcome(self, scope: dict[str, Any]) -> tuple[dict[str, Any], list[Saved]]:
        """What comes home by name, and what was saved but is held by no name."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for name, value in scope.items():
            saved = self.made.get(id(value))
            if not saved or name == SAVE:
                continue
            # Small numbers and texts are shared between unrelated names, so there the name counts.
            lines = self._code.names.saved.get(name)
            if isinstance(value, SCALARS) and lines is None:
                continue
            # Of an object that was saved again after it had changed, a name gets its own state.
            mine = [s for s in saved if lines is not None and s.line in lines]
            found[name] = (mine or saved)[-1].was
            seen.add(id(value))
        found.update(self.shared)
        homes = [*(self.made[key][0].value for key in seen), *self.shared.values()]
        seen.update(map(id, self.shared.values()))
        lost = [s[-1] for key, s in self.made.items() if s and key not in seen]
        if not lost:
            return found, lost
        self._unpack(found, lost, scope)
        held = {id(part) for home in homes for part in _parts(home)}
        return found, [s for s in lost if id(s.value) not in held]

    def _unpack(self, found: dict[str, Any], lost: list[Saved], scope: dict[str, Any]) -> None:
        """`a, b = layer.output.save()` saves a pair that no name holds; its parts have names."""
        for saved in [s for s in lost if isinstance(s.value, tuple | list)]:
            parts = {id(p): w for p, w in zip(saved.value, saved.was, strict=True)}
            names = {
                name: parts[id(value)]
                for name, value in scope.items()
                if id(value) in parts
                and (name in self._code.names.saved or not isinstance(value, SCALARS))
            }
            if names:
                found.update(names)
                lost.remove(saved)


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
