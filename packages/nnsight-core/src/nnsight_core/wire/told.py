"""What was told of a run's saves, so that each is told once while a request goes on.

A saved list that grows is told by what it grew by, a saved dict by its new keys, and everything
else when its name holds another object. What changes in any other way (an element that is replaced,
a tensor that is written in place) is told again when the run ends, so that what has come home by
then is what a run that was never streamed brings home.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from nnsight_core.values import plain


class News(NamedTuple):
    """What is new of a run's saves; see `nnsight_core.backend.Saved`."""

    saves: dict[str, Any]
    more: dict[str, Any]
    gone: list[str]


class _Sent:
    """One name's value as it was told, and what it held then."""

    __slots__ = ("held", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held = _state(value)


class Told:
    """What was told of one run's saves."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}

    def news(self, found: dict[str, Any]) -> News:
        """What is new by now, as far as a look at each name shows it."""
        saves: dict[str, Any] = {}
        more: dict[str, Any] = {}
        for name, value in found.items():
            sent = self._sent.get(name)
            if sent is None or not _same(sent.value, value):
                saves[name] = value
                self._sent[name] = _Sent(value)
            else:
                added = _growth(sent, value)
                if added:
                    more[name] = added
        return News(saves, more, self._gone(found))

    def rest(self, found: dict[str, Any]) -> News:
        """What is still to be told when the run has ended, found by looking at everything."""
        news = self.news(found)
        for name, value in found.items():
            if name not in news.saves and not _equal(self._sent[name].held, _state(value)):
                news.more.pop(name, None)
                news.saves[name] = value
        return news

    def _gone(self, found: dict[str, Any]) -> list[str]:
        gone = [name for name in self._sent if name not in found]
        for name in gone:
            del self._sent[name]
        return gone


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _SCALARS and type(one) is type(other) and one == other)


def _growth(sent: _Sent, value: Any) -> Any:
    """What a list or dict that was told has got since; None if that does not say it."""
    _, parts = sent.held
    if type(value) is list and len(value) > len(parts):
        added: Any = value[len(parts) :]
        parts.extend(map(_state, added))
        return added
    if type(value) is dict and len(value) > len(parts):
        added = {key: part for key, part in value.items() if key not in parts}
        if len(added) + len(parts) == len(value):
            parts.update({key: _state(part) for key, part in added.items()})
            return added
    return None


_DEEPEST = 100
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def _state(value: Any, within: frozenset[int] = frozenset()) -> tuple[Any, Any]:
    """What a value holds, as far as that can be compared later: its kind and its parts."""
    kind = type(value)
    if kind in _SCALARS:
        return kind, value
    if isinstance(value, Tensor):
        tensor = plain(value)
        return Tensor, (value, -1 if tensor.is_inference() else tensor._version)
    inner = within | {id(value)}
    if id(value) in within or len(inner) > _DEEPEST:
        return object, object()
    if kind is list or kind is tuple:
        return kind, [_state(part, inner) for part in value]
    if kind is dict:
        return kind, {key: _state(part, inner) for key, part in value.items()}
    # Of what else it may be (an array, a set, an activation cache), changes are not seen.
    return object, object()


def _equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    kind, held = one
    if kind is not other[0]:
        return False
    if kind is Tensor:
        return held[0] is other[1][0] and held[1] == other[1][1] >= 0
    if kind is list or kind is tuple:
        return len(held) == len(other[1]) and all(map(_equal, held, other[1]))
    if kind is dict:
        return held.keys() == other[1].keys() and all(
            _equal(part, other[1][key]) for key, part in held.items()
        )
    return held == other[1]
