"""Taps: locations whose values are reachable while vLLM runs compiled code and CUDA graphs.

At a tap stands an operation (`tap_op`) that vLLM compiles and captures with the rest. Each tap owns
a slab of device memory with a fixed number of slots; before a pass, the rows that somebody wants
are given slots, and one copy after it takes them all. What does not fit (long prompts) is copied
where the operation's own Python runs, in a pass without graphs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nnsight_core.errors import EngineError
from nnsight_core.locations import Location
from nnsight_core.node import Places
from nnsight_core.taps import RESID
from nnsight_core.tree import TOKENS, TensorInfo
from nnsight_core.visit import outside_inference
from nnsight_vllm_worker.layouts import Layout, Split, Sum, join
from nnsight_vllm_worker.record import Record, Slot
from nnsight_vllm_worker.tap_op import SINKS, WANTED
from nnsight_vllm_worker.vllm_ports.parallel import Ranks

MOST_BYTES = 256 * 2**20
"""What the slabs of an engine may take together, unless fewer than `FEWEST` slots fit in it."""
FEWEST, MOST = 64, 1024
"""Slots of an engine's slabs."""
ENTRIES = 1024
"""Entries of the tables that writes go through."""
_WIDEST = 65536

Kind = tuple[str, int]
"""Dtype and width of a tensor."""
Shards = dict[Kind, tuple[list[int], list[Tensor]]]
"""By kind of memory, the lines that were gathered and what each rank has in them."""
Numbers = dict[Location, tuple[tuple[Kind, int], ...]]
"""For each tensor of a tap, the kind of memory and the line of it in copies of some taps."""


class Tap(NamedTuple):
    """One tap.

    Attributes:
        keys: how each tensor is reached in the location's value.
        infos: the tensors as a block sees them.
        slabs: for each tensor, `[slots, width]`.
        places: for each, the kind of memory in which its slab lies, and the line of it.
        first: its row in the engine's table of entries.
        form: how the value is built, with a `Slot` for each tensor.
        layouts: for each tensor, how the ranks hold it.
    """

    location: Location
    keys: tuple[tuple[Any, ...], ...]
    infos: tuple[TensorInfo, ...]
    slabs: list[Tensor]
    places: tuple[tuple[Kind, int], ...]
    first: int
    form: Any
    layouts: tuple[Layout, ...]

    @property
    def shared(self) -> bool:
        """Whether not each rank holds all of it."""
        return any(layout is not None for layout in self.layouts)

    def value(self, tensors: list[Tensor]) -> Any:
        """The value, built as the module builds it, of these tensors."""
        for index, info in enumerate(self.infos):
            if len(info.shape) != 2 or tensors[index].dim() != 2:
                tensors[index] = tensors[index].view(tensors[index].shape[0], *_inner(info))
        if type(self.form) is tuple and self.form == tuple(range(len(tensors))):
            return tuple(tensors)  # a layer's pair, above all
        return _filled(self.form, tensors)


class Taps:
    """The taps of one model, and the device memory that they share.

    Attributes:
        taps: by location, in the order of the forward pass.
        named: their locations, by name.
        slots: how many rows a pass can copy within graphs.
        bytes: of device memory, slabs and tables together.
        rank, count: which rank of the engine this is, and how many it has.
        ranks: how they reach one another, if there are several.
    """

    def __init__(
        self, record: Record, names: list[str], patterns: Iterable[str], rows: int, device: Any
    ) -> None:
        wanted, order = set(names), [at for at in record.order if str(at) in set(names)]
        missing = wanted - {str(at) for at in order}
        chosen = []
        for at in order:
            why = _unfit(record, at)
            if why is None:
                chosen.append(at)
            elif RESID not in patterns:
                raise EngineError(f"{at} cannot be a tap: {why}.")
        if missing and RESID not in patterns:
            raise EngineError(f"{min(missing)} cannot be a tap: the forward pass did not run it.")
        per_slot = sum(_width(i) * _dtype(i).itemsize for at in chosen for i in record.seen[at])
        fit = MOST_BYTES // max(per_slot, 1)
        self.slots = min(max(fit, FEWEST), MOST, rows)
        self.device = device
        self.rank, self.count = record.rank, record.ranks
        self.ranks: Ranks | None = None
        self.taps: dict[Location, Tap] = {}
        self.named: dict[str, Location] = {}
        count = sum(len(record.seen[at]) for at in chosen)
        widest = max((_width(i) for at in chosen for i in record.seen[at]), default=1)
        self._map = torch.full((rows,), -1, dtype=torch.int32, device=device)
        counts = Counter(_kind(info) for at in chosen for info in record.seen[at])
        self._memory = {
            (dtype, width): torch.zeros(
                (of_kind, self.slots, width), dtype=getattr(torch, dtype), device=device
            )
            for (dtype, width), of_kind in counts.items()
        }
        self._lines: dict[tuple[Location, ...], dict[Kind, tuple[list[int], Tensor]]] = {}
        self._numbers: dict[tuple[Location, ...], Numbers] = {}
        lines = {kind: itertools.count() for kind in counts}
        self.entries = torch.zeros((count, rows), dtype=torch.int32, device=device)
        self.operands = torch.zeros((ENTRIES, widest), dtype=torch.float32, device=device)
        self.masks = torch.zeros((ENTRIES, widest), dtype=torch.bool, device=device)
        self.kinds = torch.zeros((ENTRIES, 3), dtype=torch.int32, device=device)
        self.factors = torch.zeros((ENTRIES,), dtype=torch.float32, device=device)
        self._place: list[tuple[int, int]] = []
        self._addresses: list[int] = []
        self._heard: list[int] = []
        number = 0
        for at in chosen:
            infos = record.seen[at]
            places = tuple((_kind(info), next(lines[_kind(info)])) for info in infos)
            # To PyTorch each is a tensor of its own: of views its compiler would make copies.
            slabs = [torch.from_dlpack(self._memory[kind][line]) for kind, line in places]
            keys = tuple(_keys(record.forms[at], index) for index in range(len(infos)))
            layouts = record.layouts.get(str(at)) or (None,) * len(infos)
            whole = record.whole(at) or ()
            form = record.forms[at]
            self.taps[at] = Tap(at, keys, whole, slabs, places, number, form, layouts)
            number += len(infos)
            self._addresses += [slabs[0].data_ptr()] * len(infos)
        # Another engine's, whose memory this was.
        WANTED.pop(self._map.data_ptr(), None)
        self.bytes = sum(
            t.numel() * t.element_size()
            for t in (
                *self._memory.values(),
                *(self._map, self.entries, self.operands, self.masks, self.kinds, self.factors),
            )
        )

    # -- in the model ----------------------------------------------------------------------------

    def install(self, modules: dict[str, nn.Module]) -> None:
        """Put the taps into a model, before vLLM compiles it."""
        for path, sides in self._by_module().items():
            module = modules[path]
            module._nnsight_taps = tuple(  # type: ignore[assignment]
                self._arguments(sides[side]) if side in sides else None
                for side in ("input", "output")
            )
            keys = tuple(sides[s].keys if s in sides else None for s in ("input", "output"))
            module.__class__ = _tapped(type(module), *keys)

    def remove(self, modules: dict[str, nn.Module]) -> None:
        """Give the modules their own classes back; what is compiled keeps its taps."""
        for path in self._by_module():
            module = modules[path]
            module.__class__ = type(module).__bases__[0]

    def bind(self, places: Places) -> None:
        """Take the locations of these places, which runs will ask for."""
        bound = [
            tap._replace(location=places.location(at.path, at.side))
            for at, tap in self.taps.items()
        ]
        self.taps = {tap.location: tap for tap in bound}
        self._lines.clear()
        self._numbers.clear()
        self.named = {str(at): at for at in self.taps}

    def around(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module's forward with its taps, for passes that run as plain Python."""
        sides = self._by_module().get(path)
        if sides is None:
            return forward
        entry, output = sides.get("input"), sides.get("output")

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if entry is not None:
                _look(_picked((args, kwargs), entry.keys), self._arguments(entry))
            value = forward(*args, **kwargs)
            if output is not None:
                _tap(_picked(value, output.keys), self._arguments(output))
            return value

        tapped.__wrapped__ = forward  # type: ignore[attr-defined]
        return tapped

    def _by_module(self) -> dict[str, dict[str, Tap]]:
        found: dict[str, dict[str, Tap]] = {}
        for tap in self.taps.values():
            found.setdefault(tap.location.path, {})[tap.location.side] = tap
        return found

    def _arguments(self, tap: Tap) -> tuple[Any, ...]:
        entries = self.entries[tap.first : tap.first + len(tap.slabs)]
        tables = (self.operands, self.masks, self.kinds, self.factors)
        return (tap.slabs, self._map, entries, *tables)

    # -- in a pass -------------------------------------------------------------------------------

    @property
    def placed(self) -> list[tuple[int, int]]:
        """The spans whose rows have slots."""
        return self._place

    def place(self, spans: list[tuple[int, int]]) -> None:
        """Give the rows of these spans of the batch slots, one span after the other."""
        if spans == self._place:
            return
        rows = max((stop for _, stop in [*spans, *self._place]), default=0)
        slots = torch.full((rows,), -1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        first = 0
        for start, stop in spans:
            slots[start:stop] = torch.arange(first, first + stop - start, dtype=torch.int32)
            first += stop - start
        self._map[:rows].copy_(slots, non_blocking=True)
        self._place = spans

    def copies(self, wanted: tuple[Location, ...], first: int, lengths: Sequence[int]) -> Kept:
        """The values of taps, as copies: of each request so many rows, from slot `first` on."""
        lines, rows = self._lines_of(wanted), sum(lengths)
        copies = {}
        with outside_inference():
            for kind, (chosen, index) in lines.items():
                memory = self._memory[kind][:, first : first + rows]
                if chosen == list(range(chosen[0], chosen[0] + len(chosen))):
                    copies[kind] = memory[chosen[0] : chosen[0] + len(chosen)].clone()
                else:
                    copies[kind] = memory.index_select(0, index)
        shared = tuple(at for at in wanted if self.taps[at].shared)
        numbers = self._numbers.get(wanted)
        if numbers is None:
            numbers = self._numbers[wanted] = self._numbered(wanted, shared)
        return Kept(self, numbers, copies, self.gather(shared, first, rows), lengths)

    def gather(self, shared: tuple[Location, ...], first: int, rows: int) -> Shards:
        """What every rank has in these slots of taps, on the first rank; called on all of them."""
        found: Shards = {}
        for kind, (chosen, index) in self._lines_of(shared).items():
            assert self.ranks is not None
            mine = self._memory[kind][:, first : first + rows].index_select(0, index)
            found[kind] = chosen, self.ranks.gather(mine)
        return found

    def whole(self, at: Location, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors of a tap as a block sees them; called on all ranks."""
        layouts = self.taps[at].layouts
        return [
            self._joined(layout, tensor) for layout, tensor in zip(layouts, tensors, strict=True)
        ]

    def _joined(self, layout: Layout, tensor: Tensor) -> Tensor:
        if self.ranks is None or not isinstance(layout, Split | Sum):
            return tensor
        joined = self.ranks.join(layout, tensor)
        return tensor if joined is None else joined

    def _numbered(self, wanted: tuple[Location, ...], shared: tuple[Location, ...]) -> Numbers:
        """Where in the copies each tensor lies, or in what is gathered, if it is not whole here."""
        copied, gathered = self._lines_of(wanted), self._lines_of(shared)
        numbers: Numbers = {}
        for at in wanted:
            tap, own = self.taps[at], []
            for (kind, line), layout in zip(tap.places, tap.layouts, strict=True):
                lines = gathered if isinstance(layout, Split | Sum) else copied
                own.append((kind, lines[kind][0].index(line)))
            numbers[at] = tuple(own)
        return numbers

    def _lines_of(self, wanted: tuple[Location, ...]) -> dict[Kind, tuple[list[int], Tensor]]:
        known = self._lines.get(wanted)
        if known is not None:
            return known
        found: dict[Kind, list[int]] = {}
        for at in wanted:
            for kind, line in self.taps[at].places:
                found.setdefault(kind, []).append(line)
        lines = self._lines[wanted] = {
            kind: (chosen, torch.tensor(chosen, device=self.device))
            for kind, chosen in found.items()
        }
        return lines

    def value(self, at: Location, tensors: list[Tensor]) -> Any:
        """The value of a tap, built as the module builds it, of these tensors."""
        return self.taps[at].value(tensors)

    def listen(
        self, wanted: Iterable[Location], sink: Callable[[Location, list[Tensor]], None]
    ) -> None:
        """Have `sink` called with the tensors of these taps in the pass that begins now."""
        for at in wanted:
            self._heard.append(self.taps[at].slabs[0].data_ptr())

            def call(tensors: list[Tensor], at: Location = at) -> None:
                sink(at, tensors)

            SINKS.setdefault(self._heard[-1], []).append(call)

    def busy(self, copied: Iterable[Location], written: Iterable[int]) -> Collection[int]:
        """The taps that have something to do in a pass, as `want` takes them.

        Args:
            copied: those of which rows have slots.
            written: the tensors of which rows have entries, by their row in `entries`.
        """
        addresses = {self._addresses[tensor] for tensor in written}
        addresses.update(self.taps[at].slabs[0].data_ptr() for at in copied)
        return addresses

    def want(self, busy: Collection[int] = ()) -> None:
        """Say which taps have something to do in the pass that begins; the others do nothing."""
        WANTED[self._map.data_ptr()] = busy

    def rest(self) -> None:
        """Have no sink called any more."""
        for address in self._heard:
            SINKS.pop(address, None)
        self._heard.clear()


def _kind(info: TensorInfo) -> Kind:
    return info.dtype, _width(info)


def _inner(info: TensorInfo) -> list[int]:
    return [dim for dim in info.shape[1:] if isinstance(dim, int)]


def _width(info: TensorInfo) -> int:
    return math.prod(_inner(info))


class Kept(Mapping[Location, Any]):
    """Copies of what some taps hold; a value is put together when it is asked for.

    Args:
        numbers: where in the copies each tensor lies.
        copies: of each kind of memory, `[lines, rows, width]`.
        shards: what each rank has of lines that none has whole.
        lengths: how many of the rows are each request's.
    """

    def __init__(
        self,
        taps: Taps,
        numbers: Numbers,
        copies: dict[Kind, Tensor],
        shards: Shards,
        lengths: Sequence[int],
    ) -> None:
        self.copies = copies
        self._numbers = numbers
        self._shards = shards
        self._taps = taps
        self._lengths = lengths
        self._parts: dict[tuple[Kind, int], dict[int, Tensor]] = {}

    def tensors(self) -> list[Tensor]:
        """The memory of the copies."""
        shards = [shard for _, shards in self._shards.values() for shard in shards]
        return [*self.copies.values(), *shards]

    def __getitem__(self, at: Location) -> Any:
        return self._rows(at, 0, None)

    def of(self, at: Location, place: int) -> Any:
        """What a tap holds of one request, in tensors that nobody else has been given."""
        tap = self._taps.taps[at]
        lines = [] if tap.shared else [self._line(*where) for where in self._numbers[at]]
        if lines and place in lines[0]:
            return tap.value([parts.pop(place) for parts in lines])
        first = sum(self._lengths[:place])
        return self._rows(at, first, first + self._lengths[place])

    def _line(self, kind: Kind, number: int) -> dict[int, Tensor]:
        """The parts of one line that no request has been given."""
        parts = self._parts.get((kind, number))
        if parts is None:
            # Not views: those would share their count of versions.
            cut = torch.unsafe_split_with_sizes(self.copies[kind][number], self._lengths)
            parts = self._parts[kind, number] = dict(enumerate(cut))
        return parts

    def _rows(self, at: Location, first: int, stop: int | None) -> Any:
        tap, tensors = self._taps.taps[at], []
        for (kind, number), layout in zip(self._numbers[at], tap.layouts, strict=True):
            if isinstance(layout, Split | Sum):
                shards = self._shards[kind][1]
                tensors.append(join(layout, [shard[number, first:stop] for shard in shards]))
            else:
                tensors.append(self.copies[kind][number, first:stop].data)
        return tap.value(tensors)

    def __iter__(self) -> Iterator[Location]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, at: object) -> bool:
        return at in self._numbers


def _dtype(info: TensorInfo) -> torch.dtype:
    return getattr(torch, info.dtype)


def _unfit(record: Record, at: Location) -> str | None:
    """Why a location cannot be a tap; None if it can."""
    if at in record.repeated:
        return "one forward pass reaches it more than once"
    infos = record.whole(at)
    if not infos:
        return "it holds no tensors"
    for info in infos:
        if (
            not info.shape
            or info.shape[0] != TOKENS
            or not all(isinstance(dim, int) for dim in info.shape[1:])
        ):
            return f"it holds a tensor of shape {info}, which is not one row per token"
        if _width(info) > _WIDEST:
            return f"its rows are wider than {_WIDEST}"
    if not _data(record.forms[at]):
        return "its value holds more than tensors, numbers and texts"
    return None


def _data(form: Any) -> bool:
    if isinstance(form, tuple | list):
        return type(form) in (tuple, list) and all(map(_data, form))
    if isinstance(form, dict):
        return all(map(_data, form.values()))
    return form is None or isinstance(form, int | float | str)


def _keys(form: Any, index: int) -> tuple[Any, ...]:
    """How the tensor of this number is reached in a value of this form."""
    if isinstance(form, Slot):
        return () if form == index else (None,)
    parts = form.items() if isinstance(form, dict) else enumerate(form or ())
    for key, part in parts:
        if isinstance(part, Slot | tuple | list | dict):
            inner = _keys(part, index)
            if None not in inner:
                return (key, *inner)
    return (None,)


def _filled(form: Any, tensors: list[Tensor]) -> Any:
    if isinstance(form, Slot):
        return tensors[form]
    if isinstance(form, tuple | list):
        return type(form)(_filled(part, tensors) for part in form)
    if isinstance(form, dict):
        return {key: _filled(part, tensors) for key, part in form.items()}
    return form


def _picked(value: Any, keys: tuple[tuple[Any, ...], ...]) -> list[Tensor]:
    found = []
    for path in keys:
        part = value
        for key in path:
            part = part[key]
        found.append(part)
    return found


def _tap(values: list[Tensor], arguments: tuple[Any, ...]) -> None:
    torch.ops.nnsight.tap(values, *arguments)


def _look(values: list[Tensor], arguments: tuple[Any, ...]) -> None:
    torch.ops.nnsight.look(values, *arguments)


def _tapped(cls: type[nn.Module], entry: Any, output: Any) -> type[nn.Module]:
    """A class whose forward is that of `cls` with taps at what comes in or goes out."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if entry is not None:
            _look(_picked((args, kwargs), entry), self._nnsight_taps[0])
        value = cls.forward(self, *args, **kwargs)
        if output is not None:
            _tap(_picked(value, output), self._nnsight_taps[1])
        return value

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
