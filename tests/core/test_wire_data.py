"""Typed values that are data: round trips, and what a decoder refuses."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, namedtuple
from enum import IntEnum, StrEnum
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import ModelOutput

from nnsight_core import EncodeError, ProtocolError
from nnsight_core.values import flat
from nnsight_core.wire import data
from nnsight_core.wire.data import MAX_DEPTH, Decoder, Encoder
from nnsight_core.wire.frames import Frame, FrameReader, read_frame

from . import nets

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(st.characters(codec=None)),
    st.binary(max_size=20),
    st.complex_numbers(),
    st.sampled_from([torch.float16, torch.int8, torch.device("cuda:1"), torch.Size([2, 3]), ...]),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
)
hashable = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(max_size=9))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable | st.tuples(hashable, hashable), inner, max_size=4),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    encoder = Encoder()
    form = encoder.encode(value, "x")
    frame = read_frame(Frame({"x": form}, encoder.buffers).to_bytes())
    return Decoder(frame.buffers).decode(frame.header["x"])


def same(a: Any, b: Any) -> bool:
    """Equality with types, the sign of zero and nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b) or (a != a and b != b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return bool(a == b)


@given(values)
@settings(deadline=None, max_examples=150)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
DTYPES += [torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4), st.randoms())
@settings(deadline=None, max_examples=80)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: list[int], random: Any) -> None:
    count = math.prod(shape) * dtype.itemsize
    top = 1 if dtype is torch.bool else 255
    data = torch.tensor([random.randint(0, top) for _ in range(count)], dtype=torch.uint8)
    tensor = data.view(dtype).reshape(shape)
    back = there_and_back(tensor)
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(
        back.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12)[::3],
        torch.arange(4).expand(3, 4),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.ones(3, requires_grad=True),
    ],
)
def test_tensors_that_lie_strangely_come_back_whole(tensor: torch.Tensor) -> None:
    back = there_and_back(tensor)
    assert torch.equal(back, tensor) and back.is_contiguous() and not back.requires_grad


def test_a_view_ships_no_more_than_it_shows() -> None:
    encoder = Encoder()
    encoder.encode(torch.zeros(1000, 1000)[0, :5])
    assert sum(memoryview(b).nbytes for b in encoder.buffers) == 20


def test_a_tensor_that_came_owns_its_memory() -> None:
    encoder = Encoder()
    form = encoder.encode(torch.ones(3))
    data = bytearray(encoder.buffers[0])
    back = Decoder([data]).decode(form)
    data[:] = bytes(12)
    back += 1
    assert back.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6).reshape(2, 3).T,
        numpy.array(5.0),
        numpy.zeros((0, 3), numpy.int8),
        numpy.array([1, 2], ">i4"),
        numpy.array(["a", "bcd"]),
        numpy.array([b"a", b"bcd"]),
        numpy.array(["2020-01-01"], "M8[D]"),
        numpy.array([True, False]),
        numpy.array([1 + 2j]),
    ],
)
def test_arrays_come_back(array: numpy.ndarray) -> None:
    back = there_and_back(array)
    assert back.shape == array.shape and back.dtype.kind == array.dtype.kind
    assert (back == array).all() and back.flags.writeable


def test_numbers_of_numpy_come_back() -> None:
    for value in (numpy.float32(1.5), numpy.int64(3), numpy.bool_(True), numpy.str_("a")):
        back = there_and_back(value)
        assert type(back) is type(value) and back == value


class Color(IntEnum):
    """Subclasses of plain values come back plain."""

    RED = 3


class Name(StrEnum):
    """A text that is an enum's member."""

    A = "a"


Local = namedtuple("Local", ["first", "second"])


def test_subclasses_come_back_as_plain_as_they_can() -> None:
    assert there_and_back([Color.RED, Name.A]) == [3, "a"]
    ordered = there_and_back(OrderedDict(b=1, a=2))
    assert type(ordered) is dict and list(ordered) == ["b", "a"]
    out = there_and_back(ModelOutput(logits=torch.ones(2)))
    assert type(out) is dict and out["logits"].tolist() == [1, 1]


def test_named_tuples_come_back_as_their_class_or_one_like_it() -> None:
    pair = there_and_back(nets.Pair(1, 2))  # type: ignore[arg-type]
    assert type(pair) is nets.Pair and pair == (1, 2)
    made = there_and_back(namedtuple("Elsewhere", ["a", "b"])(1, [2]))
    assert (made.a, made.b) == (1, [2]) and type(made).__name__ == "Elsewhere"
    top = there_and_back(torch.tensor([3.0, 1.0]).sort())
    assert top.values.tolist() == [1, 3] and top.indices.tolist() == [1, 0]


def test_one_object_that_occurs_twice_comes_back_as_one() -> None:
    tensor, inner = torch.ones(2), [1]
    encoder = Encoder()
    back = there_and_back({"a": tensor, "b": [tensor, inner, inner]})
    encoder.encode([tensor, tensor])
    assert back["a"] is back["b"][0] and back["b"][1] is back["b"][2]
    assert len(encoder.buffers) == 1


def test_containers_that_hold_themselves_come_back() -> None:
    loop: list[Any] = [1]
    loop.append({"loop": loop})
    back = there_and_back(loop)
    assert back[1]["loop"] is back


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "x"),
        ({"a": [1, object()]}, r"x\['a'\]\[1\]"),
        ({"a": (lambda: 1,)}, r"x\['a'\]\[0\]"),
        ({object(): 1}, r"x key <.*>"),
        (numpy.array([object()]), "x"),
        (numpy.array(["a"], numpy.dtypes.StringDType()), "x"),
        (numpy.array([(1, 2)], "i4,i4"), "x"),
        (torch.eye(2).to_sparse(), "x"),
        (torch.empty(2, device="meta"), "x"),
        (sys, "x"),
        (ValueError("x"), "x"),
    ],
)
def test_what_is_no_data_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(EncodeError, match=f"^{path} is a"):
        Encoder().encode(value, "x")


def test_what_is_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(EncodeError, match="nested"):
        Encoder().encode(deep, "x")
    form: Any = {"$": "list", "v": []}
    for _ in range(3 * MAX_DEPTH):
        form = {"$": "list", "v": [form]}
    with pytest.raises(ProtocolError):
        Decoder([]).decode(form)


def test_what_was_refused_leaves_nothing_behind() -> None:
    encoder = Encoder()
    tensor = torch.ones(2)
    with pytest.raises(EncodeError):
        encoder.encode([tensor, object()], "bad")
    assert encoder.buffers == []
    form = encoder.encode({"good": tensor}, "good")
    assert Decoder(encoder.buffers).decode(form)["good"].tolist() == [1, 1]


CODE_TAGS = ["function", "class", "path", "pickle", "pymodule", "nn", "record", "partial", "method"]
CODE_TAGS += ["member", "node", "source", "operation", "tracer", "tokenizer", "zzz", 3, None]


@pytest.mark.parametrize("tag", CODE_TAGS)
def test_a_decoder_of_results_refuses_code_and_imports_nothing(tag: Any) -> None:
    before = set(sys.modules)
    form = {"$": tag, "module": "antigravity", "name": "x", "b": 0, "source": "1", "#": 0}
    form |= {"filename": "x", "line": 1, "lazy": False, "names": {}, "v": [], "path": ""}
    with pytest.raises(ProtocolError, match=rf"of type '{tag}' is not accepted here"):
        Decoder([b"cos\nsystem\n"]).decode({"$": "list", "v": [form]})
    assert set(sys.modules) == before


def test_a_named_tuple_of_a_lazy_module_imports_nothing() -> None:
    before = set(sys.modules)
    form = {"$": "named", "module": "transformers", "name": "BertModel.X", "k": ["a"], "v": [1]}
    assert Decoder([]).decode(form).a == 1
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "form",
    [
        [],
        {},
        {"v": 1},
        {"$": "list"},
        {"$": "list", "v": 3},
        {"$": "list", "v": [[]]},
        {"$": "int", "v": "x"},
        {"$": "int", "v": "9" * 5000},
        {"$": "float", "v": []},
        {"$": "text", "v": "zz"},
        {"$": "dict", "k": [1], "v": []},
        {"$": "dict", "k": [{"$": "list", "v": []}], "v": [1]},
        {"$": "set", "v": [{"$": "dict", "k": [], "v": []}]},
        {"$": "ref", "n": 7},
        {"$": "ref", "n": []},
        {"$": "bytes", "b": -1},
        {"$": "bytes", "b": 1},
        {"$": "bytes", "b": True},
        {"$": "tensor", "dtype": "float32", "shape": [2], "b": 0},
        {"$": "tensor", "dtype": "float32", "shape": [-1], "b": 0},
        {"$": "tensor", "dtype": "float32", "shape": [2**62, 4], "b": 0},
        {"$": "tensor", "dtype": "float33", "shape": [1], "b": 0},
        {"$": "tensor", "dtype": "load", "shape": [1], "b": 0},
        {"$": "tensor", "dtype": [], "shape": [1], "b": 0},
        {"$": "tensor", "dtype": "float32", "shape": 1, "b": 0},
        {"$": "array", "dtype": "O", "shape": [1], "b": 0},
        {"$": "array", "dtype": "T", "shape": [1], "b": 0},
        {"$": "array", "dtype": "i2,O", "shape": [1], "b": 0},
        {"$": "array", "dtype": {"names": ["a"], "formats": ["O"]}, "shape": [1], "b": 0},
        {"$": "array", "dtype": "<f4", "shape": [3], "b": 0},
        {"$": "dtype", "v": "nn"},
        {"$": "device", "v": "nowhere"},
        {"$": "range", "v": [1, 2, 0]},
        {"$": "slice", "v": [1, 2, 3, 4]},
        {"$": "size", "v": ["a"]},
        {"$": "complex", "v": ["1"]},
        {"$": "named", "module": "x", "name": "Y", "k": ["a b"], "v": [1]},
        {"$": "named", "module": [], "name": "Y", "k": ["a"], "v": [1]},
    ],
)
def test_what_is_not_well_formed_is_a_protocol_error(form: Any) -> None:
    with pytest.raises(ProtocolError):
        Decoder([b"\0\0\0\0"]).decode(form)


json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "v", "k", "b", "n", "#", "dtype", "shape"]), inner)
        | st.builds(
            lambda tag, rest: {**rest, "$": tag},
            st.sampled_from(sorted(Decoder([]).readers())),
            st.dictionaries(st.sampled_from(["v", "k", "b", "n", "#", "dtype", "shape"]), inner),
        )
    ),
    max_leaves=8,
)


@given(json)
@settings(deadline=None, max_examples=200)
def test_any_json_is_a_value_or_a_protocol_error(form: Any) -> None:
    try:
        Decoder([b"12345678"]).decode(form)
    except ProtocolError:
        pass


def test_a_key_that_is_met_again_in_a_value_comes_back() -> None:
    value = {None: {b"": 1}, b"": 2}
    assert there_and_back(value) == value


def packed(value: Any) -> tuple[Any, Encoder, Any]:
    """What comes of a value whose tensors are packed, the encoder, and the form."""
    encoder = Encoder()
    encoder.pack(value)
    form = encoder.encode(value)
    return Decoder(encoder.buffers).decode(form), encoder, form


def test_many_tensors_share_a_buffer() -> None:
    shared = torch.arange(4.0)
    value = {
        "alike": [torch.full((2, 3), float(i)) for i in range(50)],
        "pair": (torch.ones(3), torch.zeros(3)),
        "mixed": [torch.ones(2), torch.ones(3), 5, torch.tensor(7), torch.empty(0), torch.empty(0)],
        "half": [torch.ones(5, dtype=torch.bfloat16), torch.full((5,), 2.0, dtype=torch.bfloat16)],
        "twice": [shared, shared],
        "large": torch.randn(200, 200),
    }
    made, encoder, form = packed(value)
    assert len(encoder.buffers) <= 5
    assert form["v"][0]["$"] == "tensors" and form["v"][0]["n"] == 50
    assert made["twice"][0] is made["twice"][1]
    assert type(made["pair"]) is tuple and made["mixed"][2] == 5
    for here, there in zip(flat(made), flat(value), strict=True):
        assert here.dtype == there.dtype and torch.equal(here, there)
        assert here.untyped_storage().nbytes() == there.numel() * there.element_size()


def test_what_was_brought_from_a_device_is_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_is_elsewhere", lambda tensor: True)
    runs = [
        {"seen": [torch.full((2, 3), float(10 * run + i)) for i in range(5)], "one": torch.rand(7)}
        for run in range(4)
    ]
    brought = data.bring(value for run in runs for value in run.values())
    assert len(brought) == 24
    assert len({held.untyped_storage().data_ptr() for _, held in brought.values()}) == 1
    wanted = [[tensor.clone() for tensor in flat(run)] for run in runs]
    for run, before in zip(runs, wanted, strict=True):
        # It is what was copied that goes, whatever the device holds by then.
        for tensor in flat(run):
            tensor.zero_()
        encoder = Encoder()
        encoder.brought = brought
        encoder.pack(run["seen"])
        made = Decoder(encoder.buffers).decode(encoder.encode(run))
        assert all(torch.equal(a, b) for a, b in zip(flat(made), before, strict=True))
    # An id may come to be another tensor's.
    other = torch.rand(7)
    encoder = Encoder()
    encoder.brought = {id(other): next(iter(brought.values()))}
    assert torch.equal(Decoder(encoder.buffers).decode(encoder.encode(other)), other)
    monkeypatch.setattr(data, "_TOGETHER", 100)
    assert len(data.bring([torch.rand(20) for _ in range(9)])) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"n": 51},
        {"n": -1},
        {"at": -8},
        {"at": 3},
        {"at": 10**9},
        {"b": 7},
        {"as": "set"},
        {"shape": [0], "n": 10**12},
        {"shape": [10**9]},
        {"dtype": "nothing"},
    ],
    ids=str,
)
def test_packed_tensors_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    _, encoder, form = packed([torch.full((2, 3), float(i)) for i in range(50)])
    with pytest.raises(ProtocolError):
        Decoder(encoder.buffers).decode({**form, **change})


def test_a_large_tensor_stays_where_it_came() -> None:
    encoder = Encoder()
    large, small = torch.randn(600, 500), torch.randn(3)
    forms = [encoder.encode(large), encoder.encode(small), encoder.encode(large.bool())]
    [frame] = FrameReader().feed(Frame({}, encoder.buffers).to_bytes())
    decoder = Decoder(frame.buffers, own=True)
    made = [decoder.decode(form) for form in forms]
    assert torch.equal(made[0], large) and torch.equal(made[2], large.bool())
    places = [numpy.frombuffer(b, "uint8").ctypes.data for b in frame.buffers]
    assert [t.data_ptr() == p for t, p in zip(made, places, strict=True)] == [True, False, False]
    assert made[0].untyped_storage().nbytes() == large.numel() * 4
    made[0].add_(1)
    # Who reads them for others copies.
    assert torch.equal(Decoder(frame.buffers).decode(forms[0]), large + 1)
    assert Decoder(frame.buffers).decode(forms[0]).data_ptr() not in places


class Warm(float):
    value = 3.0


class Loud(str):
    def __str__(self) -> str:
        return "loud"


def test_a_subclass_is_the_number_or_text_that_it_is() -> None:
    assert there_and_back([Warm(7.5), Loud("soft")]) == [7.5, "soft"]


def test_a_range_of_large_numbers_comes_back() -> None:
    assert there_and_back(range(2**70, 2**70 + 9, 3)) == range(2**70, 2**70 + 9, 3)


def test_a_text_of_numpys_keeps_the_zeros_at_its_end() -> None:
    assert there_and_back(numpy.str_("a\0")) == "a\0" and there_and_back(numpy.str_("")) == ""


@pytest.mark.parametrize("sign", [1, -1])
def test_whole_numbers_have_a_limit(sign: int) -> None:
    largest = sign * (10**4300 - 1)
    assert there_and_back([largest]) == [largest]
    for value in ([largest + sign], {largest + sign: 1}):
        with pytest.raises(EncodeError, match=r"x.* is a whole number of more than 4300 digits"):
            Encoder().encode(value, "x")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (numpy.ma.array([1.0, 2.0], mask=[0, 1]), "MaskedArray, of which only the numbers"),
        (numpy.matrix([[1, 2]]), "matrix, of which only the numbers"),
        (numpy.bytes_(b"a\0"), "numpy.bytes_, which cannot"),
    ],
    ids=["masked", "matrix", "bytes"],
)
def test_what_would_come_back_as_less_is_refused(value: Any, words: str) -> None:
    with pytest.raises(EncodeError, match=words):
        Encoder().encode(value, "x")


def test_a_renamed_named_tuple_comes_back_where_its_class_is_not() -> None:
    renamed: Any = namedtuple("renamed", ["a", "a"], rename=True)
    back = there_and_back(renamed(1, 2))
    assert type(back) is not renamed and back._asdict() == {"a": 1, "_1": 2}


class Odd(tuple):
    _fields = ("a b",)


def test_a_named_tuple_that_nobody_else_can_make_is_refused() -> None:
    with pytest.raises(EncodeError, match="x is a .*Odd, which cannot"):
        Encoder().encode(Odd([1]), "x")


def test_a_tuple_that_holds_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append((1, ring))
    inner = ring[0]
    encoder = Encoder()
    with pytest.raises(EncodeError, match="x is a tuple that holds itself"):
        encoder.encode(inner, "x")
    back = Decoder(encoder.buffers).decode(encoder.encode([ring, ring[0], inner], "y"))
    assert back[0][0] is back[1] is back[2] and back[1][1] is back[0]
