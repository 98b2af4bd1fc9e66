"""Handles of values that stay on an engine, and the list of them that a model shows.

What a handle stands for is with whoever runs blocks (`nnsight_core.keeps`). In a later block the
handle's name holds the value itself; anywhere else it can only be asked what it is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from nnsight_core.errors import KeptError, LocationError

if TYPE_CHECKING:
    import torch


class Kept:
    """A value that a block left on the engine with `x.keep()`.

    Use it in the block of a later trace, where its name holds the value. It is let go when nothing
    refers to the handle any more, after a time limit, or by `model.kept.clear()`.

    Attributes:
        id: what the engine knows the value by.
        what: what it is, in words: `float32 [5, 96]`.
        shape: the shape of a tensor; None for a container of them.
        dtype: the dtype of a tensor; None for a container.
        bytes: how much memory it takes.
        name: the name that it came home under.

    Example:
        >>> with model.trace("The Eiffel Tower is in"):
        ...     hidden = model.transformer.h[3].output.keep()
        >>> with model.trace("The Colosseum is in"):
        ...     model.transformer.h[3].output[-1] = hidden[-1]
        ...     logits = model.logits.save()
    """

    __slots__ = (
        "__weakref__",
        "_home",
        "_lost",
        "_since",
        "bytes",
        "dtype",
        "id",
        "name",
        "shape",
        "what",
    )

    def __init__(
        self,
        id: str,
        what: str,
        bytes: int,
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.id = id
        self.what = what
        self.bytes = bytes
        self.shape = shape
        self.dtype = dtype
        self.name = ""
        self._since = time.monotonic()
        self._home: KeptValues | None = None
        self._lost = ""

    @property
    def age(self) -> float:
        """Seconds since the handle came home."""
        return time.monotonic() - self._since

    def __repr__(self) -> str:
        lost = f", gone: {self._lost}" if self._lost else ""
        return f"<Kept {self.what}, {self.bytes} bytes, {self.age:.0f} s old{lost}>"

    # A copy would be a second handle, with whose end the first would stand for nothing.
    def __copy__(self) -> Kept:
        return self

    def __deepcopy__(self, _: Any) -> Kept:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stands for a value on one engine, so it cannot be pickled.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LocationError(f"`.{name}` of {self._told()}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        parts = [p for a in given for p in (a if isinstance(a, list | tuple) else (a,))]
        handle = next((p for p in parts if isinstance(p, cls)), None)
        name = getattr(function, "__name__", "torch")
        raise KeptError(f"`{name}` of {'a kept value' if handle is None else handle._told()}")

    def _told(self) -> str:
        return (
            f"{self!r}: the value is on the engine. Use the handle inside a block, or bring the "
            "value home there: `here = handle.save()`."
        )


def _refusing(operator: str) -> Any:
    def refuse(self: Kept, *_: Any) -> NoReturn:
        raise KeptError(f"`{operator}` of {self._told()}")

    return refuse


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
    and rand or ror xor rxor neg pos abs invert lt le gt ge bool len iter getitem setitem delitem
    contains int float complex index array
"""
for _name in _OPERATORS.split():
    setattr(Kept, f"__{_name}__", _refusing(_name))


@dataclass(frozen=True, slots=True)
class KeptInfo:
    """One value that is on the engine.

    Attributes:
        id: what the engine knows it by.
        bytes: how much memory it takes.
        age: seconds since the request that kept it came.
        name: the name that its handle came home under.
    """

    id: str
    bytes: int
    age: float
    name: str


class Holder(Protocol):
    """Where kept values are, as a list of them asks it."""

    def let_go(self, ids: list[str], why: str) -> None:
        """Let values go; those that are not there any more are passed over."""
        ...

    def list_kept(self) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each value that is there, after those too old were let go."""
        ...


class KeptValues:
    """The values that blocks kept on a model's engine: their number, each of them, `clear()`.

    Example:
        >>> for kept in model.kept:
        ...     print(kept.name, kept.bytes, kept.age)
        >>> model.kept.clear()
    """

    def __init__(self, holder: Holder) -> None:
        # Not held: an engine that nobody refers to ends, whatever became of its handles.
        self._holder = weakref.ref(holder)
        self._handles: weakref.WeakValueDictionary[str, Kept] = weakref.WeakValueDictionary()
        # Handles end in any thread, in the middle of anything, so that only their ids are noted.
        self._ended: deque[str] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[KeptInfo]:
        self.flush()
        holder = self._holder()
        found = [] if holder is None or self._closed else holder.list_kept()
        for id, size, age in found:
            handle = self._handles.get(id)
            yield KeptInfo(id, size, age, handle.name if handle is not None else "")

    @property
    def bytes(self) -> int:
        """How much memory they take together."""
        return sum(kept.bytes for kept in self)

    def __repr__(self) -> str:
        lines = [f"{k.name or k.id}: {k.bytes} bytes, {k.age:.0f} s" for k in self]
        return "\n".join(lines) or "nothing is kept"

    def clear(self) -> None:
        """Let every value go; their handles stand for nothing from then on."""
        ids = [kept.id for kept in self]
        for handle in list(self._handles.values()):
            handle._lost = "model.kept.clear() was called"
        self._let_go(ids, "it was freed by model.kept.clear()")

    # -- for backends ----------------------------------------------------------------------------

    def handles(self) -> list[Kept]:
        """The handles that are there and stand for something."""
        return [handle for handle in list(self._handles.values()) if not handle._lost]

    def adopt(self, saves: dict[str, Any], value: Any = None) -> None:
        """Handles have come home: from now on, what they stand for ends with them.

        Args:
            value: what a function given as `fn=` gave back.
        """
        for name, part in {"value": value, **saves}.items():
            for handle in handles_in(part):
                if handle._home is None:
                    handle._home, handle.name = self, name
                    self._handles[handle.id] = handle
                    weakref.finalize(handle, self._ended.append, handle.id).atexit = False

    def disown(self, ids: list[str]) -> None:
        """Handles have been on their way to nobody."""
        self._ended.extend(ids)

    def check(self, handles: list[Kept]) -> None:
        """Refuse handles that surely stand for nothing here.

        Raises:
            KeptError: with the reason.
        """
        for handle in handles:
            why = handle._lost
            if handle._home is not self:
                why = "it is on another engine"
                if handle._home is not None and handle._home._closed:
                    why = "the engine that it was on was closed or restarted"
            if why:
                raise KeptError(gone(handle.name or handle.id, why))

    def ended(self) -> list[str]:
        """The ids that handles stood for which have ended; each is given once."""
        with self._lock:
            return [self._ended.popleft() for _ in range(len(self._ended))]

    def flush(self) -> None:
        """Let go what the handles that have ended stood for."""
        ids = self.ended()
        try:
            self._let_go(ids, "its handle was freed")
        except BaseException:
            self._ended.extend(ids)
            raise

    def close(self) -> None:
        """The engine has ended, and what was on it."""
        self._closed = True

    def _let_go(self, ids: list[str], why: str) -> None:
        holder = self._holder()
        if ids and holder is not None and not self._closed:
            holder.let_go(ids, why)


def gone(name: str, why: str) -> str:
    """What is said of a handle that stands for nothing."""
    return f"The kept value {name!r} cannot be had: {why}. Keep it again in a trace."


def handles_in(value: Any) -> list[Kept]:
    """The handles in lists, tuples and dicts."""
    found: list[Kept] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        held = waiting.pop()
        kind = type(held)
        if kind is Kept:
            found.append(held)
        elif kind in (list, tuple, dict) and id(held) not in seen:
            seen.add(id(held))
            waiting += held.values() if kind is dict else held
    return found


def with_handles(value: Any, change: Any) -> Any:
    """A value in whose lists, tuples and dicts each handle is what `change` makes of it.

    Containers without a handle stay the objects that they are.
    """
    kind = type(value)
    if kind is Kept:
        return change(value)
    if kind not in (list, tuple, dict) or not handles_in(value):
        return value
    if kind is dict:
        return {key: with_handles(part, change) for key, part in value.items()}
    return kind(with_handles(part, change) for part in value)


def stand_in(handle: Kept) -> Any:
    """What a handle may be read as where the value is not: a tensor of its shape, in no memory.

    Of a container it is a handle that holds nothing on the engine.
    """
    if handle.shape is None or handle.dtype is None:
        return Kept(handle.id, handle.what, handle.bytes)
    import torch

    return torch.zeros((), dtype=handle.dtype).expand(handle.shape)
