"""What was told of a run's saves, so that each is told once while a request goes on.

A saved list that grows is told by what it grew by, a saved dict by its new keys, and everything
else when its name holds another object. What changes in any other way (an element that is replaced,
a tensor that is written in place) is told again when the run ends, so that what has come home by
then is what a run that was never streamed brings home.
"""

from __future__ import annotations

from collections.abc import Container
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

    def grow(self, added: Any) -> None:
        """What it has got since was told as well."""
        _, parts = self.held
        if type(added) is list:
            parts.extend(map(_state, added))
        else:
            parts.update({key: _state(part) for key, part in added.items()})


class Told:
    """What was told of one run's saves."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._refused: set[str] = set()

    def news(self, found: dict[str, Any]) -> News:
        """What is new by now, as far as a look at each name shows it; `went` says what of it went.

        A name that could not be told is left for the end.
        """
        saves: dict[str, Any] = {}
        more: dict[str, Any] = {}
        for name, value in found.items():
            sent = self._sent.get(name)
            if name in self._refused:
                continue
            if sent is None or not _same(sent.value, value):
                saves[name] = value
            else:
                added = _growth(sent, value)
                if added:
                    more[name] = added
        return News(saves, more, self._gone(found))

    def went(self, news: News, names: Container[str]) -> None:
        """Of some news, these names were told; what the others hold could not be."""
        for name, value in news.saves.items():
            if name in names:
                self._sent[name] = _Sent(value)
        for name, added in news.more.items():
            if name in names:
                self._sent[name].grow(added)
        self._refused.update(name for name in (*news.saves, *news.more) if name not in names)

    def rest(self, found: dict[str, Any]) -> News:
        """What is still to be told when the run has ended, found by looking at everything."""
        refused, self._refused = self._refused, set()
        news = self.news(found)
        self.went(news, found)
        for name, value in found.items():
            if name in news.saves:
                continue
            # What could not be told is tried again whole, so that its error says where it lies.
            if name in refused or not _equal(self._sent[name].held, _state(value)):
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
        return value[len(parts) :]
    if type(value) is dict and len(value) > len(parts):
        added = {key: part for key, part in value.items() if key not in parts}
        if len(added) + len(parts) == len(value):
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
        return list(held) == list(other[1]) and all(
            _equal(part, other[1][key]) for key, part in held.items()
        )
    return held == other[1]
