"""Saves: which names come home, and with what in them."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import numpy
import pytest
import torch

import nnsight_core
from nnsight_core import LocationError, NotSupportedError, UnboundSaveWarning, save

from . import nets, wired
from .nets import X

close = torch.testing.assert_close
model = nets.make()
module: Any = model._backend.module  # type: ignore[union-attr]
EMBED = module.embed(X).detach()


def test_a_saved_value_is_as_it_was_when_it_was_saved() -> None:
    with model.trace(X):
        before = model.embed.output.save()
        model.embed.output[:] = 0
        after = model.embed.output.save()
        model.embed.output += 1
        last = model.embed.output.save()
        model.embed.output += 1
        seen = model.layers[0].input.save()
    close(before, EMBED)
    for value, expected in ((after, 0), (last, 1), (seen, 2)):
        assert value.eq(expected).all()


def test_a_bare_save_equals_a_cloned_one() -> None:
    with model.trace(X):
        bare = model.layers[0].output.save()
        cloned = tuple(part.clone() for part in model.layers[0].output).save()
        model.layers[0].output[0].zero_()
        model.layers[0].output[1].zero_()
    assert all(torch.equal(a, b) for a, b in zip(bare, cloned, strict=True))


def test_a_block_may_work_on_with_what_it_saved() -> None:
    with model.trace(X):
        x = model.embed.output.clone().save()
        y = x * 0
        y = y.add_(1).save()
        x.mul_(0)
    assert y.eq(1).all()
    close(x, EMBED)


def test_saving_works_on_every_object() -> None:
    with model.trace(X):
        number = (3).save()
        text = "text".save()
        nothing = None.save()
        pair = (1, model.embed.output.sum()).save()
        found = {"a": [model.embed.output], "b": {1, 2}}.save()
        shape = model.embed.output.shape.save()
        given = save(model.embed.output[0])
        also = nnsight_core.save([1, 2])
    assert (number, text, nothing, shape, also) == (3, "text", None, (3, 4), [1, 2])
    close(pair[1], EMBED.sum())
    close(found["a"][0], EMBED)
    assert found["b"] == {1, 2}
    close(given, EMBED[0])


def test_a_container_that_was_saved_empty_comes_home_full() -> None:
    with model.trace(X):
        found = [].save()
        by_name = {}.save()
        for index, layer in enumerate(model.layers):
            hidden = layer.output[0]
            found.append(hidden)
            by_name[index] = hidden
    assert len(found) == 2 and list(by_name) == [0, 1]
    assert found[0] is by_name[0]


def test_one_object_under_two_names_is_one_object() -> None:
    with model.trace(X):
        a = model.embed.output.save()
        b = a
        c = [a].save()
    close(a, EMBED)
    assert a is b and c[0] is a


def test_a_name_that_is_bound_anew_holds_its_last_saved_value() -> None:
    with pytest.warns(UnboundSaveWarning):
        with model.trace(X):
            x = model.embed.output.save()
            x = model.layers[0].norm.output.save()
    close(x, module.layers[0].norm(EMBED))


def test_a_name_that_holds_something_else_at_the_end_does_not_come_home() -> None:
    x = "as before"
    with pytest.warns(UnboundSaveWarning):
        with model.trace(X) as tracer:
            x = model.embed.output.save()
            x = 1
    assert x == "as before" and tracer.saves == {}


def test_an_unpacked_save_gives_each_name_its_part() -> None:
    with model.trace(X):
        hidden, residual = model.layers[0].output.save()
        residual *= 1
    close(residual, EMBED)
    assert hidden.shape == (3, 4)


def test_what_an_unpacked_save_holds_does_not_drag_other_names_along() -> None:
    other = None
    flag = True
    with model.trace(X) as tracer:
        other = None
        unrelated = True
        hidden, nothing, one = (model.embed.output, None, True).save()
    assert sorted(tracer.saves) == ["hidden", "nothing", "one"]
    assert nothing is None and one is True and flag is True


def test_small_numbers_and_texts_do_not_drag_other_names_along() -> None:
    with model.trace(X) as tracer:
        zero = 0
        n = (model.embed.output.shape[0] - 3).save()
        word = "a"
        letter = "a".save()
        nothing = None
        none = nothing.save()
    assert sorted(tracer.saves) == ["letter", "n", "none", "nothing"]


def test_a_save_that_no_name_holds_warns_with_its_line() -> None:
    with pytest.warns(UnboundSaveWarning, match="no name holds it") as caught:
        with model.trace(X):
            x = model.embed.output.save()
            model.layers[0].norm.output.save()
    assert [w.filename for w in caught] == [__file__]
    text = linecache.getline(__file__, caught[0].lineno)
    assert text.strip() == "model.layers[0].norm.output.save()"


def test_parts_of_saved_containers_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(X):
            pair = (model.embed.output.save(), model.embed.output.sum().save()).save()
            found = [layer.output[0].save() for layer in model.layers].save()
            found[0] = found[0]
    close(pair[0], EMBED)
    assert len(found) == 2


def test_a_saved_view_holds_no_more_memory_than_it_shows() -> None:
    with model.trace(X):
        row = model.embed.output[0].save()
        pair = (model.embed.output[:, :1], row).save()
        again = row
    for value in (row, *pair):
        assert value.untyped_storage().nbytes() == value.numel() * 4
    close(row, EMBED[0])
    close(pair[0], EMBED[:, :1])
    assert again is row


def test_a_saved_value_may_be_changed_at_home() -> None:
    with model.trace(X):
        x = model.embed.output.save()
    x += 1
    with model.trace(X):
        again = model.embed.output.save()
    close(again, EMBED)


def test_several_invokes_that_save_one_name_give_a_list_in_order() -> None:
    with model.trace() as tracer:
        with tracer.invoke(X):
            x = model.embed.output.save()
            only = (1.0).save()
        with tracer.invoke(X):
            y = model.embed.output.save()
        with tracer.invoke(X * 2):
            x = model.embed.input.save()
    assert [type(v) for v in x] == [torch.Tensor, type(None), torch.Tensor]
    close((x[0], x[2]), (EMBED, X * 2))
    close(y, EMBED)
    assert only == 1.0


def test_a_name_from_outside_that_several_invokes_save_is_a_list() -> None:
    outside = torch.zeros(1)
    with model.trace() as tracer:
        for _ in range(2):
            with tracer.invoke(X):
                outside.save()
                x = model.embed.output.save()
    assert [v.tolist() for v in tracer.saves["outside"]] == [[0.0], [0.0]]
    assert [v.tolist() for v in outside] == [[0.0], [0.0]] and len(x) == 2


def test_a_container_from_outside_comes_home_under_its_name() -> None:
    found: list[float] = []
    with model.trace(X):
        found.append(model.embed.output.sum().item())
        found.save()
    assert len(found) == 1


def test_other_objects_keep_their_own_save() -> None:
    class Plot:
        path: str = ""

        def save(self, path: str = "default") -> str:
            self.path = path
            return path

    plot, other = Plot(), Plot()
    with model.trace(X):
        name = plot.save().save()
        other.save("there")
    assert name == plot.path == "default" and other.path == "there"


def test_save_outside_a_block_says_where_it_belongs() -> None:
    with pytest.raises(LocationError, match="`save` has a value only inside a block"):
        save(1)
    with pytest.raises(AttributeError):
        torch.ones(1).save()  # type: ignore[attr-defined]


def test_each_save_of_one_object_is_as_it_was_then() -> None:
    """However the names are bound to it."""
    f = True

    def helper(x: Any) -> Any:
        return nnsight_core.save(x)

    model = wired.make()
    with model.trace(wired.X):
        h = model[0].output
        a = h.save(); h[:] = 0; b = h.save()  # noqa: E702  # fmt: skip
        h[:] = 1
        c, m = h.save(), 3
        h[:] = 2
        d, n = h.save(), 4
        h[:] = 3
        e = h.save() if f else None
        h[:] = 4
        g = helper(h)
        h[:] = 5
        i = helper(h)
    values = [float(x[0, 0]) for x in (b, c, d, e, g, i)]
    assert values == [0, 1, 2, 3, 4, 5] and float(a[0, 0]) not in values


def test_parts_of_a_saved_container_are_as_they_were_when_they_were_saved() -> None:
    model = wired.make()
    with model.trace(wired.X):
        h = model[0].output
        h[:] = 1
        log = [].save()
        log.append(h.save())
        h[:] = 2
        log.append((h.save(), 7))
        h[:] = 3
    assert [float(log[0][0, 0]), float(log[1][0][0, 0]), log[1][1]] == [1, 2, 7]
    with model.trace(wired.X):
        h = model[0].output
        h[:] = 1
        whole, named = [h].save(), {"h": h}.save()
        array = h.numpy().save()
        counted = numpy.ones(2).save()
        counted += 1
        h[:] = 2
        whole.append(h)
    assert [float(x[0, 0]) for x in whole] == [1, 2]
    assert float(named["h"][0, 0]) == 1 and float(array[0, 0]) == 1
    assert counted.tolist() == [1, 1]


def test_a_name_from_outside_is_not_bound_to_what_it_is_equal_to() -> None:
    kind = torch.float32
    model = wired.make()
    with model.trace() as tracer:
        for _ in range(2):
            with tracer.invoke(wired.X):
                seen = model[0].output.dtype.save()
                as_is = model[0].output.to(kind).save()
    assert kind is torch.float32 and seen == [torch.float32] * 2 and len(as_is) == 2


def test_which_state_a_container_is_to_have_must_be_clear() -> None:
    model = wired.make()
    with pytest.raises(NotSupportedError, match=r"has changed since.*clone"):
        with model.trace(wired.X):
            h = model[0].output
            here, there = [].save(), [].save()
            here.append(h.save())
            h[:] = 2
            there.append(h.save())
    with model.trace(wired.X):
        h = model[0].output
        log = [].save()
        before = h.save()
        h[:] = 5
        log.append(h)
    assert float(log[0][0, 0]) == 5 != float(before[0, 0])


def test_a_container_whose_parts_have_changed_stays_one_under_two_names() -> None:
    model = wired.make()
    with model.trace(wired.X):
        h = model[0].output
        one = [h].save()
        two = one
        h[:] = 2
    assert one is two and float(one[0][0, 0]) != 2
