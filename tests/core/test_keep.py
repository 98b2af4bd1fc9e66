"""Values that stay where blocks run: their handles, the store, and how they travel."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

import nnsight_core
from nnsight_core import (
    EncodeError,
    KeepLimitError,
    Kept,
    KeptError,
    KeptValues,
    LocationError,
    NotSupportedError,
    UnboundSaveWarning,
)
from nnsight_core.code import compile_block
from nnsight_core.effects import effects_of
from nnsight_core.keeps import Keeper, Keeps
from nnsight_core.kept import stand_in, with_handles
from nnsight_core.wire.code import CodeDecoder, CodeEncoder
from nnsight_core.wire.data import Decoder, Encoder
from nnsight_core.wire.frames import Frame, read_frame

from . import nets
from .nets import X

model = nets.make()
backend: Any = model._backend
EMBED = backend.module.embed(X).detach()


@pytest.fixture(autouse=True)
def empty() -> Any:
    """Nothing is kept after a test."""
    yield
    gc.collect()
    assert len(model.kept) == 0 == backend.keeps.bytes


def keep_embed() -> Kept:
    with model.trace(X):
        kept: Any = model.embed.output.keep()
    return kept


def test_the_block_has_the_value_and_the_user_a_handle() -> None:
    with model.trace(X):
        hidden = model.embed.output.keep()
        inside = (type(hidden) is torch.Tensor).save()
        model.embed.output[:] = 0
    assert inside and type(hidden) is Kept
    assert (hidden.shape, hidden.dtype, hidden.bytes) == (torch.Size([3, 4]), torch.float32, 48)
    assert hidden.name == "hidden" and 0 <= hidden.age < 60
    assert repr(hidden).startswith("<Kept float32 [3, 4], 48 bytes, 0 s old")
    with model.trace(X):
        home = hidden.save()
        more = (hidden * 2).save()
    assert torch.equal(home, EMBED) and torch.equal(more, EMBED * 2) and type(hidden) is Kept


def test_a_handle_that_a_later_block_saves_alone_comes_home() -> None:
    hidden: Any = keep_embed()
    with model.trace(X):
        hidden.save()
    assert torch.equal(hidden, EMBED)


def test_keep_is_there_for_functions() -> None:
    def keeps(value: torch.Tensor) -> torch.Tensor:
        return nnsight_core.keep(value + 1)

    with model.trace(X):
        hidden = keeps(model.embed.output)
    with model.trace(X):
        home = (hidden * 1).save()
    assert torch.equal(home, EMBED + 1)
    with pytest.raises(LocationError, match="`keep` has a value only inside a block"):
        nnsight_core.keep(X)


def test_a_function_given_as_a_block_gives_handles_back() -> None:
    def one(_: Any) -> Any:
        return nnsight_core.keep(model.embed.output)

    def several(_: Any) -> Any:
        return {"of": [nnsight_core.keep(layer.output[0]) for layer in model.layers]}

    kept = model.trace(X, fn=one).value
    many = model.trace(X, fn=several).value
    assert type(kept) is Kept and [type(h) for h in many["of"]] == [Kept] * 2
    assert len(model.kept) == 3
    with model.trace(X):
        home = (kept * 1).save()
    assert torch.equal(home, EMBED)


@pytest.mark.parametrize(
    "use",
    [
        lambda h: h + 1,
        lambda h: 1 - h,
        lambda h: h[0],
        len,
        bool,
        iter,
        float,
        lambda h: h @ X,
        lambda h: X + h,
        torch.sum,
        lambda h: torch.stack([h, h]),
    ],
)
def test_outside_a_block_a_handle_says_where_its_value_is(use: Any) -> None:
    told = "the value is on the engine. Use the handle inside a block, or bring the value home"
    with pytest.raises(KeptError, match=told):
        use(keep_embed())


def test_a_handle_has_no_attributes_of_a_tensor_and_no_copies() -> None:
    hidden = keep_embed()
    with pytest.raises(LocationError, match="`.norm` of <Kept.*on the engine"):
        hidden.norm()
    assert not hasattr(hidden, "grad") and not hasattr(hidden, "__len_hint__")
    assert copy.copy(hidden) is hidden and copy.deepcopy([hidden])[0] is hidden
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(hidden)
    assert hidden == hidden and {hidden: 1}[hidden] == 1


def test_a_pair_its_parts_and_what_pytorch_gives_back() -> None:
    with model.trace(X):
        top = model.embed.output.topk(2).keep()
        hidden, residual = model.layers[0].output.keep()
        pair = model.layers[1].output.keep()
        expected = pair[0].clone().save()
    assert pair.shape is None and pair.what == "(float32 [3, 4], float32 [3, 4])"
    assert len(model.kept) == 4
    with model.trace(X):
        found = (pair[0], hidden.shape, residual.sum(), top.indices, top[0]).save()
    assert torch.equal(found[0], expected) and found[1] == (3, 4)
    assert torch.equal(found[3], EMBED.topk(2).indices)


def test_a_saved_container_holds_handles_of_what_was_kept_in_it() -> None:
    with model.trace(X):
        found = [layer.output[0].keep() for layer in model.layers].save()
        deep = {"of": ({"x": model.layers[1].output[1].keep()}, 3)}.save()
        last = model.layers[1].output[0].clone().save()
    assert [type(h) for h in found] == [Kept, Kept] and deep["of"][1] == 3
    handle = deep["of"][0]["x"]
    assert type(handle) is Kept and len(model.kept) == 3
    with model.trace(X):
        home = (found[1] * 1).save()
    assert torch.equal(home, last)


def test_several_invokes_fill_a_shared_container_with_handles() -> None:
    with model.trace() as tracer:
        slots = nnsight_core.save([None, None])
        for index in range(2):
            with tracer.invoke(X + index):
                slots[index] = model.embed.output.keep()
                each = model.embed.output.keep()
    assert [type(slot) for slot in (*slots, *each)] == [Kept] * 4
    with model.trace(X):
        home = (slots[1] - each[1]).save()
    assert home.eq(0).all()


def test_what_cannot_be_kept_says_so() -> None:
    for value in (3, {1}, object(), [object()], {"a": {1}}, model.embed, torch.ones(2).to_sparse()):
        with pytest.raises(EncodeError, match="cannot be kept"):
            with model.trace(X):
                hidden = value.keep()
    with pytest.raises(NotSupportedError, match="'hidden' was both saved and kept"):
        with model.trace(X):
            hidden = model.embed.output.save()
            hidden.keep()
    with pytest.warns(UnboundSaveWarning, match="kept, but no name holds it"):
        with model.trace(X):
            (model.embed.output + 1).keep()


def test_of_one_value_a_name_may_be_the_save_and_another_the_handle() -> None:
    with model.trace(X):
        value = model.embed.output
        there = value.keep()
        here = value.save()
    assert type(there) is Kept and torch.equal(here, EMBED) and torch.equal(value, EMBED)


def test_a_class_that_has_its_own_keep_goes_on_having_it() -> None:
    class Shop:
        def keep(self) -> int:
            return 7

    shop = Shop()
    with model.trace(X):
        seven = shop.keep().save()
    assert seven == 7


def test_a_block_that_raises_leaves_nothing() -> None:
    with pytest.raises(ValueError):
        with model.trace(X):
            hidden = model.embed.output.keep()
            raise ValueError
    assert backend.keeps.bytes == 0


def test_a_handle_ends_with_the_users_name_even_in_a_function() -> None:
    gc.disable()
    try:
        hidden: Any = keep_embed()
        with model.trace(X):
            more = (hidden + 1).save()
        handles = [hidden]
        del hidden
        with model.trace(X):
            again = (handles[0] + 1).save()
        assert len(model.kept) == 1 and torch.equal(more, again)
        handles.clear()
        assert len(model.kept) == 0
        with model.trace(X):
            hidden = model.embed.output.keep()
        del hidden
        assert len(model.kept) == 0
    finally:
        gc.enable()


def test_a_kept_value_is_not_changed_by_a_block_that_writes_into_it() -> None:
    hidden: Any = keep_embed()
    with model.trace(X):
        hidden += 1
        mine = (hidden * 1).save()
    with model.trace(X):
        theirs = (hidden * 1).save()
    assert torch.equal(mine, EMBED + 1) and torch.equal(theirs, EMBED)


def test_a_handle_of_another_model_and_one_that_was_cleared_are_refused() -> None:
    hidden: Any = keep_embed()
    other = nets.make()
    with pytest.raises(KeptError, match="'kept' cannot be had: it is on another engine"):
        with other.trace(X):
            more = (hidden + 1).save()
    model.kept.clear()
    with pytest.raises(KeptError, match=r"model.kept.clear\(\) was called"):
        with model.trace(X):
            more = (hidden + 1).save()


# -- the store ------------------------------------------------------------------------------------


def test_ids_come_from_the_request_and_a_count() -> None:
    made = []
    for _ in range(2):
        keeper = Keeper(Keeps("cpu"), "request", 1)
        made.append([keeper.keep(X).id, keeper.keep((X, 1)).id])
    assert made == [["request.1.0", "request.1.1"]] * 2


def test_a_copy_shares_no_memory_and_takes_no_more_than_its_elements() -> None:
    keeps = Keeps("cpu")
    whole = torch.zeros(1000)
    handle = keeps.put("a", "r", {"x": whole[:2], "same": whole[:2], "n": 1})
    whole += 1
    value = keeps.get("a", copy=False)
    assert value["x"].eq(0).all() and value["x"].untyped_storage().nbytes() == 8
    assert handle.bytes == keeps.bytes and value["n"] == 1
    keeps.drop(["a", "never"], "")
    assert keeps.bytes == 0


def test_the_limit_counts_what_is_there() -> None:
    keeps = Keeps("cpu", limit=100)
    keeps.put("a", "r", X)
    keeps.put("b", "r", X)
    with pytest.raises(KeepLimitError, match="48 bytes cannot be kept: 96 of the 100"):
        keeps.put("c", "r", X)
    assert issubclass(KeepLimitError, MemoryError)
    keeps.drop(["a"], "")
    keeps.put("c", "r", X)
    keeps.drop_of("other")
    assert [id for id, _, _ in keeps.held()] == ["b", "c"]
    keeps.drop_of("r")
    assert keeps.bytes == 0


def test_time_is_what_the_holder_says() -> None:
    keeps = Keeps("cpu", seconds=10)
    keeps.tick(100)
    keeps.put("a", "r", X)
    keeps.tick(109)
    assert keeps.held() == [("a", 48, 9)]
    keeps.tick(50)
    assert keeps.held() == [("a", 48, 9)]
    keeps.tick(111)
    with pytest.raises(KeptError, match="'h' .* kept for more than keep_seconds=10"):
        keeps.get("a", copy=True, name="h")
    with pytest.raises(KeptError, match="it was freed, or is on another engine"):
        keeps.get("b", copy=True)


def test_a_value_that_was_changed_all_the_same_leaves() -> None:
    keeps = Keeps("cpu")
    keeps.put("a", "r", [X])
    keeps.get("a", copy=True)[0].zero_()
    assert keeps.check(["a"]) is None
    keeps.get("a", copy=False)[0].zero_()
    assert "changed it in place" in str(keeps.check(["a"]))
    assert keeps.bytes == 0


def test_what_no_handle_came_home_of_leaves() -> None:
    keeps = Keeps("cpu")
    keeper = Keeper(keeps, "r")
    first, second = keeper.keep(X), keeper.keep((X, X))
    parts = keeper.parts(second)
    keeper.settle([first.id, parts[1].id])
    assert [id for id, _, _ in keeps.held()] == [first.id, parts[1].id] and keeps.bytes == 96


# -- on the wire ----------------------------------------------------------------------------------


def test_a_handle_comes_home_as_what_is_known_of_it() -> None:
    keeps = Keeps("cpu")
    encoder = Encoder()
    one = keeps.put("r.0.0", "r", X.bfloat16())
    form = encoder.encode([one, one, keeps.put("r.0.1", "r", (X, 3))])
    frame = read_frame(Frame({"x": form}, encoder.buffers).to_bytes())
    assert not frame.buffers
    first, same, pair = Decoder(frame.buffers).decode(frame.header["x"])
    assert first is same and (first.id, first.what) == ("r.0.0", "bfloat16 [3, 4]")
    assert (first.shape, first.dtype, first.bytes) == ((3, 4), torch.bfloat16, 24)
    assert pair.shape is None and pair.what == "(float32 [3, 4], int)"


@pytest.mark.parametrize(
    "form",
    [
        {"id": "a"},
        {"id": "a", "what": "", "bytes": -1},
        {"id": "a", "what": "", "bytes": 1, "dtype": "x", "shape": []},
    ],
)
def test_a_handle_that_is_not_well_formed_is_refused(form: Any) -> None:
    with pytest.raises(nnsight_core.ProtocolError):
        Decoder([]).decode({"$": "kept", **form})


def test_a_block_names_a_value_and_its_side_has_it() -> None:
    hidden = keep_embed()
    encoder = CodeEncoder()
    form = encoder.encode({"h": [hidden], "f": lambda x: x + hidden}, "names")
    assert encoder.handles == [hidden]  # written once, and referred to
    asked = []

    def value(id: str, name: str) -> torch.Tensor:
        asked.append((id, name))
        return X

    made = CodeDecoder(encoder.buffers, model, kept=value).decode(form)
    assert asked == [(hidden.id, "kept")]
    assert made["h"][0] is X and torch.equal(made["f"](1), X + 1)
    with pytest.raises(nnsight_core.ProtocolError, match="where none are"):
        CodeDecoder(encoder.buffers, model).decode(form)


# -- what is read from the text -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "x = model.embed.output.{}()",
        "x = nnsight_core.{}(y)",
        "x = {}(model.embed.output)",
        "(x := model.embed.output).{}()",
    ],
)
def test_keeping_is_read_as_saving_is(text: str) -> None:
    found = []
    for word in ("save", "keep"):
        code = compile_block(f"    {text.format(word)}\n", "user.py", 1, "f")
        effects = effects_of(code, {"model": model, "y": X})
        found.append((effects, code.names.binds, code.names.saved))
        assert not effects.opaque and not effects.writes and not code.snapshots
    assert found[0] == found[1]


def test_a_list_of_kept_values_is_known_by_the_model_alone() -> None:
    assert type(model.kept) is KeptValues and repr(model.kept) == "nothing is kept"
    hidden = keep_embed()
    [info] = model.kept
    assert (info.id, info.bytes, info.name) == (hidden.id, 48, "kept")
    assert "kept: 48 bytes, 0 s" in repr(model.kept)


def test_where_values_are_not_a_blank_of_the_same_shape_stands_for_them() -> None:
    keeps = Keeps("cpu")
    one, pair = keeps.put("a", "r", X.bfloat16()), keeps.put("b", "r", (X, X))
    blank, [other], three = with_handles((one, [pair], 3), stand_in)
    assert (blank.shape, blank.dtype, three) == (X.shape, torch.bfloat16, 3)
    assert blank.untyped_storage().nbytes() == 2
    # Not the handle itself, which would live as long as whatever is read from the text.
    assert other is not pair and other.what == pair.what
    with pytest.raises(KeptError):
        other[0]
