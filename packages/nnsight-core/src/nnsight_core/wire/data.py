"""Typed values that are plain data: numbers, texts, containers, tensors, arrays.

A value is JSON with tags: numbers, texts, true, false and null stand for themselves, everything
else is an object with `$` for its type. Tensors and arrays keep their bytes (little endian) in the
frame's buffers. An object that occurs twice is written once, so it comes back as one object.
Decoding builds data and runs nothing.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from nnsight_core.cache import Cache
from nnsight_core.errors import EncodeError, ProtocolError
from nnsight_core.kept import Kept
from nnsight_core.outputs import RESULT_LATER, LateResult
from nnsight_core.values import dtype_name, plain
from nnsight_core.wire.frames import Buffer

Json = Any
MAX_DEPTH = 100
SMALL = 1 << 16
"""Bytes up to which a tensor may share a buffer with others."""
_DIGITS = 4300
"""Digits that a whole number may have, as Python reads them."""

_EARLY = ("list", "dict", "function", "class", "nn", "record")
"""Types of values that a decoder has at hand while their parts are still being read."""
_ARRAYS = (numpy.ndarray, numpy.memmap)
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class Encoder:
    """Turns values into typed JSON and buffers.

    Attributes:
        buffers: the buffers of everything encoded so far.
        brought: what has been copied from its device before. See `bring`.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.brought: Brought = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._often: set[int] = set()
        self._seen: dict[int, tuple[int, Any]] = {}
        self._within: set[int] = set()
        self._at: list[str] = []

    def encode(self, value: Any, name: str = "") -> Json:
        """The typed JSON of a value.

        Args:
            name: what messages call it.

        Raises:
            EncodeError: it, or something in it, is no data.
        """
        self._at.append(name)
        before = len(self._seen), len(self.buffers)
        try:
            if len(self._at) > MAX_DEPTH:
                raise EncodeError(f"{self.where()} is nested more than {MAX_DEPTH} deep.")
            return self._encode(value)
        except (EncodeError, RecursionError) as error:
            # Nothing later may refer to a part of what did not go.
            while len(self._seen) > before[0]:
                self._within.discard(self._seen.popitem()[1][0])
            del self.buffers[before[1] :]
            if isinstance(error, RecursionError):
                raise EncodeError(f"{self.where()} is nested too deep.") from None
            raise
        finally:
            self._at.pop()

    def where(self) -> str:
        """What is being encoded, for messages: `config['layers'][3]`."""
        return "".join(self._at) or "the value"

    def _encode(self, value: Any) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**53) <= value <= 2**53 else self._large(value)
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "v": repr(value)}
        if kind is str:
            return _text(value)
        if isinstance(value, LateResult):
            return {"$": "result"}
        seen = self._seen.get(id(value))
        if seen is not None:
            self._within.add(seen[0])
            return {"$": "ref", "n": seen[0]}
        # The entry holds the value, so that its id is not given to another meanwhile.
        number = len(self._seen)
        self._seen[id(value)] = (number, value)
        form = self.form(value)
        form["#"] = number
        # None is named before it is over, unless from within itself.
        if number in self._within and form["$"] not in _EARLY:
            raise EncodeError(
                f"{self.where()} is a {kind.__qualname__} that holds itself, which can only be "
                "shipped of lists and dicts."
            )
        return form

    def form(self, value: Any) -> dict[str, Json]:
        """The tagged form of a value that is no scalar."""
        kind: Any = type(value)
        if (kind is list or kind is tuple) and len(value) > 1 and id(value[0]) in self._places:
            together = self._tensors(value)
            if together is not None:
                return together
        if kind is list or kind is tuple or kind in (set, frozenset):
            return {"$": kind.__name__, "v": self._parts(value)}
        if kind is dict:
            return self._dict(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, numpy.ndarray):
            return self._array(value)
        if kind in (bytes, bytearray):
            return {"$": kind.__name__, "b": self.buffer(bytes(value))}
        if kind is complex:
            return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
        if kind is torch.dtype:
            return {"$": "dtype", "v": dtype_name(value)}
        if kind is torch.device:
            return {"$": "device", "v": str(value)}
        if kind is slice:
            return {"$": "slice", "v": self._parts([value.start, value.stop, value.step])}
        if kind is range:
            return {"$": "range", "v": self._parts([value.start, value.stop, value.step])}
        if value is Ellipsis:
            return {"$": "ellipsis"}
        if kind is Kept:
            return self.kept(value)
        if kind is Cache:
            return {"$": "cache", "v": self.encode(value.data())}
        if isinstance(value, torch.Size):
            return {"$": "size", "v": list(value)}
        # What `x.topk(3)` and its like give back has its fields under the other name.
        fields = getattr(kind, "_fields", None) or getattr(kind, "__match_args__", None)
        if isinstance(value, tuple) and fields:
            try:
                _named_like(kind.__name__, tuple(fields))
            except (TypeError, ValueError):
                raise self.refusal(value) from None
            named = {"module": kind.__module__, "name": kind.__qualname__}
            return {"$": "named", **named, "k": list(fields), "v": self._parts(value)}
        if isinstance(value, dict):
            return self._dict(value)
        # An array drops the zeros at the end of a text.
        padded = kind in (numpy.str_, numpy.bytes_) and value[-1:] in ("\0", b"\0")
        if isinstance(value, numpy.generic) and not padded:
            return {**self._array(numpy.asarray(value)), "$": "scalar"}
        if isinstance(value, int | float | str):  # an enum's member or another subclass
            return {"$": "plain", "v": self._encode(_base_of(value))}
        raise self.refusal(value)

    def kept(self, handle: Kept) -> dict[str, Json]:
        """A handle's form: what it stands for, and what is known of that without having it."""
        form: dict[str, Json] = {"$": "kept", "id": handle.id}
        form |= {"what": handle.what, "bytes": handle.bytes}
        if handle.shape is not None and handle.dtype is not None:
            form |= {"dtype": dtype_name(handle.dtype), "shape": list(handle.shape)}
        return form

    def refusal(self, value: Any) -> EncodeError:
        """The error for a value that is no data."""
        return EncodeError(
            f"{self.where()} is a {type(value).__module__}.{type(value).__qualname__}, which "
            "cannot come home from a block. Save tensors, arrays, numbers, texts, or lists, tuples "
            "and dicts of them."
        )

    def buffer(self, data: Buffer) -> int:
        """Keep some bytes; gives their index."""
        self.buffers.append(data)
        return len(self.buffers) - 1

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes more may be kept."""
        return True

    def tensor(self, tensor: Tensor) -> dict[str, Json]:
        """A tensor's form: dtype, shape and its elements, never more of its storage than that."""
        tensor = plain(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise EncodeError(
                f"{self.where()} is a {tensor.layout} tensor on {tensor.device}; only dense ones "
                "can be shipped. Use `.to_dense()` or `.dequantize()`."
            )
        form = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        place = self._places.get(id(tensor))
        if place is not None:
            return {"$": "tensor", **form, "b": place[0], "at": place[1]}
        return {"$": "tensor", **form, "b": self.buffer(tensor_bytes(self._held(tensor)))}

    def _held(self, tensor: Tensor) -> Tensor:
        """The tensor, on the host if it has been brought there."""
        brought = self.brought.get(id(tensor))
        # An id may be another's by now.
        if brought is not None and brought[0] is tensor:
            return brought[1]
        if torch.cuda.is_initialized() and tensor.is_cpu and tensor.is_pinned():
            # Whoever has it copied there (`non_blocking=True`) has not waited for it.
            torch.cuda.synchronize()
        return tensor

    def pack(self, *values: Any) -> None:
        """Put the many small tensors of values into few buffers, those of a device in one go.

        That takes far less time than one by one. The values have to be there until everything is
        encoded.
        """
        tensors = _plain_tensors(values)
        self._often = {key for key, count in Counter(map(id, tensors)).items() if count > 1}
        alike: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for tensor in tensors:
            if _is_small(tensor):
                held = self._held(tensor)
                alike.setdefault((held.dtype, held.device), {})[id(tensor)] = held
        for packed in alike.values():
            size = sum(tensor.numel() * tensor.element_size() for tensor in packed.values())
            if len(packed) > 1 and self.fits(size):
                together = torch.cat([tensor.reshape(-1) for tensor in packed.values()])
                index, at = self.buffer(tensor_bytes(together)), 0
                for key, tensor in packed.items():
                    self._places[key] = index, at
                    at += tensor.numel() * tensor.element_size()

    def _tensors(self, value: Any) -> dict[str, Json] | None:
        """The form of a list of tensors that lie one behind the other; None if it is none such."""
        first = value[0]
        index, at = self._places[id(first)]
        size, alike = first.numel() * first.element_size(), (first.dtype, first.shape)
        if not size:
            return None
        for number, tensor in enumerate(value):
            if self._places.get(id(tensor)) != (index, at + number * size):
                return None
            if (tensor.dtype, tensor.shape) != alike or id(tensor) in self._often:
                return None
        form = {"dtype": dtype_name(first.dtype), "shape": list(first.shape), "b": index, "at": at}
        return {"$": "tensors", "as": type(value).__name__, "n": len(value), **form}

    def _array(self, array: numpy.ndarray) -> dict[str, Json]:
        if type(array) not in _ARRAYS:
            kind = type(array)
            raise EncodeError(
                f"{self.where()} is a {kind.__module__}.{kind.__qualname__}, of which only the "
                "numbers would ship. Ship `numpy.asarray` of it, and a mask beside it."
            )
        if array.dtype.hasobject or array.dtype.names:
            raise EncodeError(
                f"{self.where()} is an array of {array.dtype}; only arrays of numbers ship."
            )
        little = numpy.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        data = _view(little.reshape(-1).view(numpy.uint8))
        form = {"dtype": little.dtype.str, "shape": list(array.shape)}
        return {"$": "array", **form, "b": self.buffer(data)}

    def _large(self, value: int) -> dict[str, Json]:
        try:
            digits = str(value)
        except ValueError:  # Python's own limit, which a process may have set anew
            digits = ""
        if not 0 < len(digits) - (value < 0) <= _DIGITS:
            raise EncodeError(
                f"{self.where()} is a whole number of more than {_DIGITS} digits, which cannot be "
                "shipped. Ship its bytes (`to_bytes`), or the numbers that it is made of."
            )
        return {"$": "int", "v": digits}

    def _parts(self, values: Any) -> list[Json]:
        return [self.encode(v, f"[{i}]") for i, v in enumerate(values)]

    def _dict(self, value: dict[Any, Any]) -> dict[str, Json]:
        keys = [self.encode(k, f" key {_shown(k)}") for k in value]
        values = [self.encode(v, f"[{_shown(k)}]") for k, v in value.items()]
        return {"$": "dict", "k": keys, "v": values}


class Decoder:
    """Turns typed JSON and buffers back into values; builds data and runs nothing.

    Args:
        buffers: the buffers of the frame that the JSON came in.
        own: whether nobody else reads them, and this once, so that a large tensor may stay where
            it came.
    """

    def __init__(self, buffers: list[Buffer], own: bool = False) -> None:
        self.buffers = buffers
        self._own = own
        self._made: dict[int, Any] = {}
        self._whole: dict[tuple[int, str], Tensor] = {}
        self._depth = 0

    def decode(self, form: Json) -> Any:
        """The value of a typed JSON.

        Raises:
            ProtocolError: it is not well formed, or no data.
        """
        if form is None or isinstance(form, bool | int | float | str):
            return form
        if not isinstance(form, dict):
            raise ProtocolError("A typed value is neither a scalar nor a tagged object.")
        self._depth += 1
        try:
            if self._depth > 2 * MAX_DEPTH:
                raise ProtocolError(f"A typed value is nested more than {2 * MAX_DEPTH} deep.")
            return self._tagged(form)
        except ProtocolError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
            raise ProtocolError(f"A typed value is not well formed: {error!r}.") from error
        finally:
            self._depth -= 1

    def forget(self) -> None:
        """Hold nothing that was decoded, nor what it came in, and no longer itself.

        Else what was decoded takes room until Python looks for cycles.
        """
        self.buffers = []
        self._made.clear()
        self._whole.clear()
        vars(self).pop("_readers", None)

    def _tagged(self, form: dict[str, Json]) -> Any:
        tag = form["$"]
        if tag == "ref":
            return self._made[form["n"]]
        read = self._readers.get(tag)
        if read is None:
            raise ProtocolError(f"A typed value of type {str(tag)[:40]!r} is not accepted here.")
        value = read(form)
        if "#" in form:
            self._made[form["#"]] = value
        return value

    @cached_property
    def _readers(self) -> dict[str, Callable[[dict[str, Json]], Any]]:
        return self.readers()

    def readers(self) -> dict[str, Callable[[dict[str, Json]], Any]]:
        """How each tag is read."""
        return {
            "int": lambda f: int(_short(f["v"])),
            "float": lambda f: float(f["v"]),
            "text": lambda f: bytes.fromhex(f["v"]).decode("utf-8", "surrogatepass"),
            "result": lambda _: RESULT_LATER,
            "list": self._list,
            "tuple": lambda f: tuple(self._parts(f)),
            "set": lambda f: set(self._parts(f)),
            "frozenset": lambda f: frozenset(self._parts(f)),
            "dict": self._dict,
            "named": self._named,
            "tensor": self.tensor,
            "tensors": self._tensors,
            "array": self._array,
            "scalar": lambda f: self._array(f)[()],
            "size": lambda f: torch.Size(f["v"]),
            "bytes": lambda f: bytes(self._buffer(f)),
            "bytearray": lambda f: bytearray(self._buffer(f)),
            "complex": lambda f: complex(float(f["v"][0]), float(f["v"][1])),
            "dtype": lambda f: _DTYPES[f["v"]],
            "device": lambda f: torch.device(f["v"]),
            "slice": lambda f: slice(*self._parts(f)),
            "range": lambda f: range(*self._parts(f)),
            "ellipsis": lambda _: Ellipsis,
            "kept": self._kept,
            "cache": lambda f: Cache.of(self.decode(f["v"])),
            "plain": lambda f: self.decode(f["v"]),
        }

    def tensor(self, form: dict[str, Json]) -> Tensor:
        """A tensor that owns its memory, on the CPU."""
        if "at" not in form:
            data = self._buffer(form)
            return tensor_of(data, form["dtype"], form["shape"], self._own and self._most(data))
        return self._part(form, form["shape"]).clone()

    def _most(self, data: Buffer) -> bool:
        """Whether a buffer is most of its frame, which stays as long as a part of it does."""
        size = memoryview(data).nbytes
        return size >= _LARGE and 2 * size >= sum(memoryview(b).nbytes for b in self.buffers)

    def _tensors(self, form: dict[str, Json]) -> Any:
        kind = {"list": list, "tuple": tuple}[form["as"]]
        if not math.prod(_shape(form["shape"])):
            raise ProtocolError("Tensors without elements do not lie one behind the other.")
        parts = self._part(form, [_index(form["n"]), *form["shape"]]).unbind(0)
        return kind([part.clone() for part in parts])

    def _part(self, form: dict[str, Json], shape: list[int]) -> Tensor:
        """A view of what lies in a buffer with other tensors."""
        index, at, dtype = form["b"], _index(form["at"]), form["dtype"]
        whole = self._whole.get((index, dtype))
        if whole is None:
            data = self._buffer(form)
            size = memoryview(data).nbytes // _DTYPES[dtype].itemsize
            whole = self._whole[index, dtype] = tensor_of(data, dtype, [size], self._own)
        first, odd = divmod(at, whole.element_size())
        count = math.prod(_shape(shape))
        if odd or first + count > whole.numel():
            raise ProtocolError(f"A tensor of {dtype} {shape} does not lie in its buffer at {at}.")
        return whole[first : first + count].view(shape)

    def _array(self, form: dict[str, Json]) -> numpy.ndarray:
        dtype = numpy.dtype(str(form["dtype"]))
        if dtype.kind not in "biufcmMSU" or dtype.hasobject:
            raise ProtocolError(f"An array of {dtype} is not accepted.")
        return numpy.frombuffer(self._buffer(form), dtype).reshape(form["shape"]).copy()

    def _buffer(self, form: dict[str, Json]) -> Buffer:
        return self.buffers[_index(form["b"])]

    def _parts(self, form: dict[str, Json]) -> list[Any]:
        return [self.decode(part) for part in form["v"]]

    def _list(self, form: dict[str, Json]) -> list[Any]:
        made: list[Any] = []
        self._made[form.get("#", -1)] = made
        made.extend(self._parts(form))
        return made

    def _dict(self, form: dict[str, Json]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._made[form.get("#", -1)] = made
        # In the order of writing, all keys first: a value may refer to a key.
        keys = [self.decode(key) for key in form["k"]]
        for key, value in zip(keys, form["v"], strict=True):
            made[key] = self.decode(value)
        return made

    def _kept(self, form: dict[str, Json]) -> Any:
        """A handle, which stands for something once the one whose values these are adopts it."""
        id, what, size = str(form["id"]), str(form["what"]), _index(form["bytes"])
        if "dtype" not in form:
            return Kept(id, what, size)
        return Kept(id, what, size, torch.Size(_shape(form["shape"])), _DTYPES[form["dtype"]])

    def _named(self, form: dict[str, Json]) -> Any:
        """A named tuple: of its own class if this process has it, else of one made like it."""
        found = loaded(form["module"], form["name"])
        fields = [str(k) for k in form["k"]]
        if not (
            isinstance(found, type)
            and issubclass(found, tuple)
            and list(getattr(found, "_fields", ())) == fields
        ):
            found = _named_like(form["name"].rpartition(".")[2], tuple(fields))
        return tuple.__new__(found, self._parts(form))


@lru_cache(256)
def _named_like(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """A named tuple, for a reader that lacks the class.

    Raises:
        TypeError, ValueError: there can be none such.
    """
    # Renamed, since a class that was made so has fields `_0`, `_1`.
    made = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    if made._fields != fields:
        raise ValueError(f"{fields} cannot be the fields of a named tuple")
    return made


def loaded(module: str, name: str) -> Any:
    """What this process already has under a name; nothing is imported or run to find it."""
    found: Any = sys.modules.get(module)
    for part in str(name).split("."):
        # Not getattr: a module's own `__getattr__` may import more.
        found = getattr(found, "__dict__", {}).get(part)
    return found


Brought = Mapping[int, tuple[Tensor, Tensor]]
"""By id, a tensor of a device and what it holds, on the host."""


def bring(values: Iterable[Any]) -> Brought:
    """The small tensors of a device that are in values, copied to the host in one go.

    The values have to stay as they are for as long as this is used. Of very many, only the first
    are copied: whether the others may come home is judged before they are.
    """
    alike: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    left = _TOGETHER
    for tensor in _plain_tensors(values):
        if _is_elsewhere(tensor) and _is_small(tensor) and left > 0:
            alike.setdefault((tensor.dtype, tensor.device), {})[id(tensor)] = tensor
            left -= tensor.numel() * tensor.element_size()
    brought: dict[int, tuple[Tensor, Tensor]] = {}
    for found in alike.values():
        together = torch.cat([tensor.reshape(-1) for tensor in found.values()]).cpu()
        parts = together.split([tensor.numel() for tensor in found.values()])
        for (key, tensor), part in zip(found.items(), parts, strict=True):
            brought[key] = tensor, part.view(tensor.shape)
    return brought


def _is_elsewhere(tensor: Tensor) -> bool:
    return not tensor.is_cpu


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor may share a buffer with others."""
    small = tensor.numel() * tensor.element_size() <= SMALL
    return small and tensor.layout is torch.strided and not tensor.is_meta


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in order, without copying them if they lie so already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return _view(flat.view(torch.uint8).numpy())


_LARGE = 1 << 20
_TOGETHER = 1 << 26
"""Bytes of small tensors that are copied from a device in one go."""


def tensor_of(data: Buffer, dtype: str, shape: list[int], stay: bool = False) -> Tensor:
    """A tensor from its elements' bytes.

    Args:
        stay: whether it may be where they are, if they can be written.

    Raises:
        ProtocolError: their number does not fit.
    """
    if dtype not in _DTYPES:
        raise ProtocolError(f"A tensor of {str(dtype)[:40]!r} is not accepted.")
    _shape(shape)
    made_of = _DTYPES[dtype]
    count = math.prod(shape)
    if count * made_of.itemsize != memoryview(data).nbytes:
        raise ProtocolError(
            f"A tensor of {dtype} {shape} needs {count * made_of.itemsize} bytes, not "
            f"{memoryview(data).nbytes}."
        )
    if stay and count and not memoryview(data).readonly:
        return torch.frombuffer(data, dtype=torch.uint8).view(made_of).view(shape)
    tensor = torch.empty(shape, dtype=made_of)
    if count:
        _view(tensor.reshape(-1).view(torch.uint8).numpy())[:] = memoryview(data).cast("B")
    return tensor


def _shape(shape: Any) -> list[int]:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ProtocolError(f"A tensor of shape {str(shape)[:80]} is not accepted.")
    return shape


def _view(array: Any) -> memoryview:
    return memoryview(array)


def _plain_tensors(values: Any) -> list[Tensor]:
    """The tensors in containers, in order; no code of a class of the user's is run."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [*values][::-1]
    while waiting:
        held = waiting.pop()
        kind = type(held)
        if kind is Tensor:
            found.append(held)
        elif kind in (list, tuple, dict) and id(held) not in seen:
            seen.add(id(held))
            waiting += [*(held.values() if kind is dict else held)][::-1]
    return found


def _text(value: str) -> Json:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON cannot carry
        return {"$": "text", "v": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _base_of(value: Any) -> Any:
    """The number or text that an object of a subclass is; nothing of the subclass is asked."""
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else str.__str__(value)


def _shown(key: Any) -> str:
    """A key, for messages."""
    try:
        return repr(key)
    except ValueError:  # a number of too many digits
        return f"of type {type(key).__name__}"


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ProtocolError(f"{str(value)[:40]!r} is no index of a buffer.")
    return value


def _short(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _DIGITS + 1:
        raise ProtocolError("A whole number is too long.")
    return value
