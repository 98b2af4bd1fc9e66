"""What blocks leave behind for later ones: the store of kept values beside whoever runs blocks.

A value is copied when it is kept. Several ranks keep the same values: ids come from the request and
a count, and time is what the holder of the engine says it is, so that all let go the same ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nnsight_core.errors import EncodeError, KeepLimitError, KeptError, LateWriteError
from nnsight_core.kept import Kept, gone
from nnsight_core.values import describe, flat, map_tensors, plain

LIMIT = 4 << 30
"""How many bytes may stay, unless another limit is set."""
SECONDS = 3600.0
"""How long a value stays."""
_REMEMBERED = 1 << 12
"""Of how many values that are gone the reason is known."""
_DEEP = 50
_WORDS = 200
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(slots=True)
class _Value:
    value: Any
    of: str
    bytes: int
    since: float
    versions: list[int]
    written: torch.cuda.Event | None


class Keeps:
    """Kept values by id.

    Args:
        device: where their tensors lie.
        limit: how many bytes may stay.
        seconds: how long a value may stay.
    """

    def __init__(
        self, device: torch.device | str, limit: int = LIMIT, seconds: float = SECONDS
    ) -> None:
        self.device = torch.device(device)
        self.limit = limit
        self.seconds = seconds
        self.bytes = 0
        self._now = 0.0
        self._values: dict[str, _Value] = {}
        self._why: OrderedDict[str, str] = OrderedDict()

    def tick(self, now: float) -> None:
        """It is so late; what is too old leaves."""
        self._now = max(self._now, now)
        old = [id for id, v in self._values.items() if self._now - v.since > self.seconds]
        self.drop(old, f"it was kept for more than keep_seconds={self.seconds:g}")

    def put(self, id: str, of: str, value: Any) -> Kept:
        """Keep a copy of a value.

        Args:
            of: the request that keeps it.

        Raises:
            EncodeError: something in it is no data.
            KeepLimitError: there is no room for it.
        """
        if not isinstance(value, Tensor | list | tuple | dict):
            raise EncodeError(
                f"A {type(value).__name__} cannot be kept; only tensors can, and lists, tuples and "
                "dicts of tensors, numbers and texts. Save it instead."
            )
        value = _data(value)
        size = _size(value)
        if self.bytes + size > self.limit:
            raise KeepLimitError(
                f"{size} bytes cannot be kept: {self.bytes} of the {self.limit} that may stay on "
                f"the engine (keep_bytes) are in use, by {len(self._values)} values. Free handles "
                "(`del`, `model.kept.clear()`), save the value instead, or raise keep_bytes=."
            )
        with torch.inference_mode(False), torch.no_grad():
            made: dict[int, Tensor] = {}
            value = map_tensors(value, lambda t: made.setdefault(_id(t), _copied(t, self.device)))
        return self._hold(id, of, value, self._now)

    def get(self, id: str, copy: bool, name: str = "") -> Any:
        """A value for a block; with `copy`, one that the block may change.

        Args:
            name: what messages call it.

        Raises:
            KeptError: it is not there.
        """
        held = self._values.get(id)
        if held is None:
            unknown = "it was freed, or is on another engine, or on this one before it was started"
            raise KeptError(gone(name or id, self._why.get(id, unknown)))
        for tensor in flat(held.value):
            if held.written is not None:
                # It may have been made on another stream than the one that uses it.
                held.written.wait()
                tensor.record_stream(torch.cuda.current_stream())
        with torch.inference_mode(False), torch.no_grad():
            made: dict[int, Tensor] = {}
            change = torch.clone if copy else (lambda tensor: tensor)
            return map_tensors(held.value, lambda t: made.setdefault(_id(t), change(t)))

    def parts(self, id: str) -> list[Any]:
        """Let each part of a list or tuple be a value of its own; the handles of the parts.

        Parts that are no tensors or containers are given as they are.
        """
        held = self._values.pop(id)
        self.bytes -= held.bytes
        handles: list[Any] = []
        for index, part in enumerate(held.value):
            if isinstance(part, Tensor | list | tuple | dict):
                part = self._hold(f"{id}.{index}", held.of, part, held.since)
            handles.append(part)
        return handles

    def check(self, ids: Iterable[str]) -> LateWriteError | None:
        """An error if a block changed a value that it was not to change; such a value leaves."""
        for id in ids:
            held = self._values.get(id)
            if held is not None and _versions(held.value) != held.versions:
                self.drop([id], "a block changed it through a call that its text does not show")
                return LateWriteError(
                    "The block, or another that uses the same kept value, changed it in place "
                    "through a call that its text does not show. Clone it in the block first."
                )
        return None

    def drop(self, ids: Iterable[str], why: str) -> None:
        """Let values go."""
        for id in ids:
            held = self._values.pop(id, None)
            if held is not None:
                self.bytes -= held.bytes
                self._why[id] = why
        while len(self._why) > _REMEMBERED:
            self._why.popitem(last=False)

    def drop_of(self, request: str) -> None:
        """Let go what a request kept that nobody waits for any more."""
        ids = [id for id, held in self._values.items() if held.of == request]
        self.drop(ids, "the request that kept it failed or was aborted")

    def held(self) -> list[tuple[str, int, float]]:
        """The id, bytes and age of each value."""
        return [(id, v.bytes, self._now - v.since) for id, v in self._values.items()]

    def tensors(self) -> list[Tensor]:
        """The tensors of all of them."""
        return [tensor for held in self._values.values() for tensor in flat(held.value)]

    def _hold(self, id: str, of: str, value: Any, since: float) -> Kept:
        size = _size(value)
        written = None
        if self.device.type == "cuda":
            written = torch.cuda.Event()
            written.record()
        self._values[id] = _Value(value, of, size, since, _versions(value), written)
        self.bytes += size
        shape, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else (None, None)
        what = describe(value)
        what = what if len(what) <= _WORDS else what[:_WORDS] + "..."
        return Kept(id, what, size, shape, dtype)


class Keeper:
    """What one run keeps, and which kept values it uses.

    Args:
        of: the request of the run.
        place: tells the runs of a request apart.

    Attributes:
        made: the ids of what the run kept.
        given: the kept values that it got.
    """

    def __init__(self, keeps: Keeps, of: str, place: str | int = 0) -> None:
        self.made: list[str] = []
        self.given: list[Any] = []
        self._used: list[str] = []
        self._keeps = keeps
        self._of = of
        self._place = place

    def keep(self, value: Any) -> Kept:
        """Keep a copy of a value. See `Keeps.put`."""
        name = f"{self._of}.{self._place}.{len(self.made)}"
        handle = self._keeps.put(name, self._of, value)
        self.made.append(name)
        return handle

    def parts(self, handle: Kept) -> list[Any]:
        """The handles of a kept pair's parts. See `Keeps.parts`."""
        handles = self._keeps.parts(handle.id)
        self.made += [part.id for part in handles if type(part) is Kept]
        return handles

    def get(self, id: str, copy: bool, name: str = "") -> Any:
        """A kept value for the run. See `Keeps.get`."""
        self._used.append(id)
        self.given.append(self._keeps.get(id, copy, name))
        return self.given[-1]

    def check(self) -> LateWriteError | None:
        """An error if the run changed what it was not to change."""
        return self._keeps.check(self._used)

    def settle(self, home: Iterable[str]) -> None:
        """The run has ended: what it kept leaves, but for what these handles stand for."""
        home = {*home}
        left = [id for id in self.made if id not in home]
        self._keeps.drop(left, "no handle of it came home")
        self.made, self.given = [], []


def _data(value: Any, deep: int = 0) -> Any:
    """A value of plain tensors in Python's own containers.

    Raises:
        EncodeError: something in it is something else.
    """
    if isinstance(value, Tensor):
        tensor = plain(value)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise EncodeError(f"A {tensor.layout} tensor on {tensor.device} cannot be kept.")
        return tensor
    kind = type(value)
    if kind in _PLAIN:
        return value
    if deep > _DEEP:
        raise EncodeError(f"What is nested more than {_DEEP} deep cannot be kept.")
    if kind is dict:
        odd = next((key for key in value if type(key) not in _PLAIN), None)
        if odd is None:
            return {key: _data(part, deep + 1) for key, part in value.items()}
        value, kind = odd, type(odd)
    elif kind is list:
        return [_data(part, deep + 1) for part in value]
    elif isinstance(value, tuple):
        parts = tuple([_data(part, deep + 1) for part in tuple.__iter__(value)])
        # What PyTorch's own functions give back is used by the names of its fields.
        return kind(parts) if kind.__module__ == "torch.return_types" else parts
    raise EncodeError(
        f"A {kind.__module__}.{kind.__qualname__} cannot be kept; only tensors can, and lists, "
        "tuples and dicts of tensors, numbers and texts."
    )


def _id(tensor: Tensor) -> int:
    return id(tensor)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Its elements in memory of their own."""
    own = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    return own.resolve_conj().resolve_neg()


def _size(value: Any) -> int:
    """The bytes of a value's tensors, each counted once, and a few for whatever else it holds."""
    tensors = {id(t): t.numel() * t.element_size() for t in flat(value)}
    return sum(tensors.values()) + _others(value)


def _others(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_others, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return sum(map(_others, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 0 if isinstance(value, Tensor) else 8


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in flat(value)]
