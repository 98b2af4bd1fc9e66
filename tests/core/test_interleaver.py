"""Reads, writes and their order, on the plain PyTorch backend."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from nnsight_core import (
    BlockError,
    LateWriteError,
    LocationError,
    OutOfOrderError,
    TorchModel,
    WriteError,
    save,
)

from . import nets
from .nets import X

close = torch.testing.assert_close


def run(model: TorchModel) -> Any:
    """What a forward gives back, recorded by hooks of PyTorch's own."""
    found: dict[str, Any] = {}
    module: nn.Module = model._backend.module  # type: ignore[union-attr]
    handles = [
        part.register_forward_hook(lambda m, a, o, name=name: found.update({name: o}))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    module(X)
    for handle in handles:
        handle.remove()
    return found


# -- reads -----------------------------------------------------------------------------------------


def test_every_location_is_what_a_hook_sees(model: TorchModel) -> None:
    want = run(model)
    with model.trace(X):
        x = model.input.save()
        embed_in = model.embed.input.save()
        embed = model.embed.output.save()
        args, kwargs = model.layers[0].inputs.save()
        norm = model.layers[0].norm.output.save()
        pair = model.layers[0].output.save()
        second = model.layers[1].output[1].save()
        made = model.shapes.output.save()
        head = model.head.output.save()
        out = model.output.save()
    close((x, embed_in), (X, X))
    close(embed, want["embed"])
    close(args[0], embed)
    assert kwargs == {"residual": None}
    close(norm, want["layers.0.norm"])
    close(pair, want["layers.0"])
    close(second, want["layers.1"][1])
    close(made["list"], want["shapes"]["list"])
    close(made["pair"], want["shapes"]["pair"])
    close(made["output"].logits, want["shapes"]["output"].logits)
    assert type(made["pair"]) is nets.Pair and made["flag"] is True
    close((head, out), (want["head"], want["head"]))


def test_one_location_may_be_read_many_times_while_it_is_there(model: TorchModel) -> None:
    with model.trace(X):
        a = model.embed.output.save()
        b = model.embed.output.save()
        same = (model.embed.output is a).save()
    assert same is True and a is b


def test_a_location_that_is_gone_is_refused_at_once(model: TorchModel) -> None:
    with pytest.raises(OutOfOrderError, match=r"embed\.output was asked for too late"):
        with model.trace(X) as tracer:
            before = model.layers[0].output.save()
            try:
                model.layers[0].norm.output
            except OutOfOrderError:
                after = model.layers[1].output.save()
            model.embed.output
    assert set(tracer.saves) == {"before", "after"}
    assert after[0].shape == (3, 4)


def test_an_input_is_gone_once_its_module_runs(model: TorchModel) -> None:
    with pytest.raises(OutOfOrderError, match=r"layers\.0\.input"):
        with model.trace(X):
            model.layers[0].norm.output
            model.layers[0].input


def test_a_module_that_does_not_run_is_said_to_be_not_reached(model: TorchModel) -> None:
    with pytest.raises(LocationError, match=r"unused\.output was not reached in step 0"):
        with model.trace(X) as tracer:
            x = model.embed.output.save()
            model.unused.output
    assert tracer.saves["x"].shape == (3, 4)


def test_an_engine_value_that_this_backend_has_not_is_not_reached(model: TorchModel) -> None:
    with pytest.raises(LocationError, match="logits was not reached"):
        with model.trace(X):
            model.logits


def test_a_block_may_catch_that_a_location_was_not_reached(model: TorchModel) -> None:
    with model.trace(X):
        try:
            x = model.unused.output.save()
        except LocationError as error:
            text = str(error).save()
    assert "not reached" in text


def test_a_module_that_runs_twice_is_visited_twice(model: TorchModel) -> None:
    want = run(model)
    module = model._backend.module  # type: ignore[union-attr]
    once = module.twice(want["shapes"]["list"][0] - 1 + _parts(want))
    twice = module.twice(once)
    assert model.tree.modules["again"].same_as == "twice"
    with model.trace(X):
        first = model.twice.output.save()
    close(first, once)
    close(twice, want["again"])


def _parts(want: Any) -> Any:
    made = want["shapes"]
    return made["list"][0] + made["pair"].hidden + made["output"].logits


def test_values_are_private_copies(model: TorchModel) -> None:
    with model.trace(X):
        hidden = model.layers[0].output[0]
        residual = model.layers[0].output[1]
        saved = hidden.save()
        pointers = (hidden.data_ptr(), residual.data_ptr()).save()
        given = model.layers[1].input.data_ptr().save()
    assert given not in pointers and not saved.is_inference() and not saved.requires_grad


def test_gradients_are_off_in_a_block_and_the_engines_mode_is_kept(model: TorchModel) -> None:
    module = model._backend.module  # type: ignore[union-attr]
    with model.trace(X):
        off = torch.is_grad_enabled().save()
        torch.set_grad_enabled(True)
        model.embed.output
        on = torch.is_grad_enabled().save()
        leaf = torch.ones(2, requires_grad=True)
        (leaf * 3).sum().backward()
        grad = leaf.grad.save()
        later = model.head.output.requires_grad.save()
    assert (off, on, later) == (False, True, False) and not torch.is_grad_enabled()
    assert grad.tolist() == [3, 3]
    assert all(p.grad is None for p in module.parameters())


def test_inference_mode_of_the_caller_does_not_reach_a_block(model: TorchModel) -> None:
    with torch.inference_mode():
        with model.trace(X):
            model.embed.output[:] = 0
            h = model.embed.output.save()
            ordinary = (not h.is_inference()).save()
            seen = model.layers[0].input.save()
    assert ordinary is True and seen.eq(0).all()


# -- writes ----------------------------------------------------------------------------------------


def test_in_place_slices_and_assignment_write_the_same(model: TorchModel) -> None:
    found = []
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.embed.output[:] = model.embed.output * 2
            out = model.output.save()
        with tracer.invoke(X):
            model.embed.output.mul_(2)
            out = model.output.save()
        with tracer.invoke(X):
            model.embed.output *= 2
            out = model.output.save()
        with tracer.invoke(X):
            model.embed.output = model.embed.output * 2
            out = model.output.save()
        with tracer.invoke(X):
            h = model.embed.output
            for row in h:
                row *= 2
            out = model.output.save()
        with tracer.invoke(X):
            h = model.embed.output
            h.view(-1)[:6] *= 2
            h.T[:, 1:].select(1, 1).mul_(2)
            h.T[:, 1:].select(1, 0)[2:].mul_(2)
            out = model.output.save()
        with tracer.invoke(X):
            torch.mul(model.embed.output, 2, out=model.embed.output)
            out = model.output.save()
        with tracer.invoke((X, 2.0)):
            out = model.output.save()
    for value in out:
        close(value, out[-1])
    assert not torch.allclose(out[0], run(model)["head"])


def test_a_part_of_a_pair_is_written_alone(model: TorchModel) -> None:
    want = run(model)
    with model.trace(X):
        model.layers[0].output[1][1:] = 7
        args, kwargs = model.layers[1].inputs.save()
    close(args[0], want["layers.0"][0])
    close(kwargs["residual"][0], want["layers.0"][1][0])
    assert kwargs["residual"][1:].eq(7).all()


def test_a_pair_is_replaced_whole_or_in_part(model: TorchModel) -> None:
    with model.trace(X):
        hidden, residual = model.layers[0].output
        model.layers[0].output = (hidden * 0, residual)
        first = model.layers[0].output[0].save()
        given = model.layers[1].input.save()
    assert first.eq(0).all() and given.eq(0).all()


def test_a_list_or_dict_that_was_served_may_be_changed(model: TorchModel) -> None:
    want = run(model)
    with model.trace(X):
        made = model.shapes.output
        made["list"][0] = made["list"][0] * 0
        made["output"].logits[:] = 0
        made["pair"] = nets.Pair(made["pair"].hidden * 0, made["pair"].residual)
        total = model.twice.input.save()
    close(total, want["layers.1"][0] + want["layers.1"][1])


def test_a_list_that_was_served_and_lost_a_part_is_refused(model: TorchModel) -> None:
    with pytest.raises(WriteError, match="holds 5 tensors and was left with 4"):
        with model.trace(X):
            model.shapes.output["list"].pop()
            model.head.output
    with pytest.raises(WriteError, match=r"changed from \[3, 4\] to \[2, 4\]"):
        with model.trace(X):
            model.shapes.output["list"][0] = X[:2]
    with pytest.raises(WriteError, match="changed from float32 to float64"):
        with model.trace(X):
            model.shapes.output["list"][0] = X.double()


def test_what_a_block_wrote_it_reads_again(model: TorchModel) -> None:
    with model.trace(X):
        model.embed.output = torch.ones(3, 4)
        one = model.embed.output.save()
        model.embed.output[0] = 2
        two = model.embed.output.save()
        seen = model.layers[0].input.save()
    assert one.eq(1).all() and two[0].eq(2).all() and two[1:].eq(1).all()
    close(seen, two)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (torch.zeros(2, 4), r"float32 \[3, 4\] for this request; .* float32 \[2, 4\]"),
        (torch.zeros(3, 5), r"float32 \[3, 4\] for this request; .* float32 \[3, 5\]"),
        (torch.zeros(4), r"float32 \[3, 4\] for this request; .* float32 \[4\]"),
        (torch.zeros(3, 4).double(), r"float32 \[3, 4\]; .* float64 \[3, 4\].*to\(torch.float32\)"),
        (3.0, r"float32 \[3, 4\]; it cannot be replaced by float, which is built otherwise"),
        (None, r"float32 \[3, 4\]; it cannot be replaced by None"),
        ((X, X), r".* replaced by \(float32 \[3, 4\], float32 \[3, 4\]\), which is built"),
    ],
)  # fmt: skip
def test_a_replacement_that_does_not_fit_is_refused_with_both_shapes(
    model: TorchModel, replacement: Any, message: str
) -> None:
    with pytest.raises(WriteError, match=r"embed\.output is " + message):
        with model.trace(X):
            model.embed.output = replacement


def test_a_part_of_a_replacement_that_does_not_fit_is_named(model: TorchModel) -> None:
    with pytest.raises(WriteError, match=r"layers\.0\.output\[1\] is float32 \[3, 4\] .*\[3, 3\]"):
        with model.trace(X):
            model.layers[0].output = (X, X[:, :3])


def test_a_replacement_of_what_is_no_tensor_is_refused_instead_of_being_lost(
    model: TorchModel,
) -> None:
    with pytest.raises(WriteError, match=r"shapes\.output\['flag'\] is True, which is no tensor"):
        with model.trace(X):
            model.shapes.output = {**model.shapes.output, "flag": False}
    with pytest.raises(WriteError, match=r"is None, which is no tensor"):
        with model.trace(X):
            args, kwargs = model.layers[0].inputs
            model.layers[0].inputs = args, {**kwargs, "residual": 3}


def test_an_assignment_that_was_refused_and_caught_changes_nothing(model: TorchModel) -> None:
    want = run(model)
    with model.trace(X):
        try:
            model.embed.output = torch.zeros(1)
        except WriteError:
            pass
        out = model.output.save()
    close(out, want["head"])


def test_a_value_resized_in_place_is_refused(model: TorchModel) -> None:
    with pytest.raises(WriteError, match=r"embed\.output was changed from \[3, 4\] to \[3, 2\]"):
        with model.trace(X):
            model.embed.output.resize_(3, 2)
            model.head.output


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.add_(1),
        lambda h: h[0].add_(1),
        lambda h: h.view(-1)[3:].mul_(2),
        lambda h: h.__setitem__(0, 0),
        lambda h: torch.add(h, 1, out=h),
    ],
)
def test_a_write_after_the_visit_is_an_error_not_a_loss(model: TorchModel, write: Any) -> None:
    with pytest.raises(LateWriteError, match=r"embed\.output was written in place after its visit"):
        with model.trace(X):
            h = model.embed.output
            model.layers[0].output
            write(h)
    with pytest.raises(LateWriteError, match=r"embed\.output"):
        with model.trace(X):
            h = model.embed.output
            model.layers[0].output
            write(h)
            model.layers[1].output


def test_a_late_write_through_a_view_alone_is_an_error(model: TorchModel) -> None:
    with pytest.raises(LateWriteError, match=r"layers\.0\.output"):
        with model.trace(X):
            row = model.layers[0].output[1][0]
            model.layers[1].output
            row += 1


def test_a_late_write_to_a_clone_is_fine(model: TorchModel) -> None:
    want = run(model)
    with model.trace(X):
        h = model.embed.output.clone()
        model.layers[0].output
        h += 1
        h.save()
        out = model.output.save()
    close(h, want["embed"] + 1)
    close(out, want["head"])


def test_a_tensor_from_outside_may_be_changed_at_any_time(model: TorchModel) -> None:
    outside = torch.ones(4)
    with model.trace(X):
        model.embed.output += outside
        model.layers[0].output
        outside += 1
        total = outside.save()
    assert total.tolist() == [2, 2, 2, 2]


def test_an_input_write_reaches_that_module_alone(model: TorchModel) -> None:
    want = run(model)
    with model.trace(X):
        model.layers[0].norm.input[:] = 0
        normed = model.layers[0].norm.output.save()
        residual = model.layers[0].output[1].save()
    assert normed.std() < 1e-6
    close(residual, want["layers.0"][1])


def test_inputs_are_written_by_assignment_too(model: TorchModel) -> None:
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.layers[1].input = torch.zeros(3, 4)
            seen = model.layers[1].inputs.save()
        with tracer.invoke(X):
            args, kwargs = model.layers[1].inputs
            model.layers[1].inputs = (args[0] * 0,), kwargs
            seen = model.layers[1].inputs.save()
        with tracer.invoke(X):
            args, kwargs = model.layers[1].inputs
            kwargs["residual"] = kwargs["residual"] * 0
            model.layers[1].norm.input
            seen = (args, kwargs).save()
            residual = model.layers[1].output[1].save()
    assert seen[0][0][0].eq(0).all() and seen[1][0][0].eq(0).all()
    close(residual, seen[2][0][0])


def test_the_input_of_a_module_that_is_given_keywords_only() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.empty = Empty()

        def forward(self, x: Any) -> Any:
            return self.inner(input=x) + self.empty()

    class Empty(nn.Module):
        def forward(self) -> Any:
            return torch.zeros(1)

    model = TorchModel(Net())
    with model.trace(X):
        x = model.inner.input.save()
        model.inner.input = x * 0
        out = model.inner.output.save()
        nothing = model.empty.input.save()
    close(x, X)
    close(out, model._backend.module.inner.bias.detach().expand(3, 4))  # type: ignore[union-attr]
    assert nothing is None
    with pytest.raises(WriteError, match=r"empty\.input has no arguments"):
        with model.trace(X):
            model.empty.input = X


def test_the_models_own_parameters_are_not_written() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x: Any) -> Any:
            return self.weight[: x.shape[0]]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()

        def forward(self, x: Any) -> Any:
            return x + self.positions(x)

    net = Net()
    model = TorchModel(net)
    with model.trace(X):
        model.positions.output[:] = 0
        out = model.output.save()
    close(out, X)
    assert net.positions.weight.eq(1).all()


def test_the_users_own_tensors_are_not_written(model: TorchModel) -> None:
    net = TorchModel(nn.Sequential(nn.Identity(), nn.Linear(4, 4)))
    x = X.clone()
    with net.trace(x):
        net[0].output[:] = 0
        seen = net[1].input.save()
    assert seen.eq(0).all()
    close(x, X)


# -- skip ------------------------------------------------------------------------------------------


def test_a_skipped_module_gives_back_what_was_given(model: TorchModel) -> None:
    with model.trace(X):
        residual = model.layers[1].inputs[1]["residual"]
        model.layers[1].skip((model.layers[1].input, residual))
        out = model.layers[1].output.save()
        given = model.shapes.input.save()
    close(given, out[0] + out[1])


def test_nothing_inside_a_skipped_module_can_be_asked_for(model: TorchModel) -> None:
    with pytest.raises(LocationError, match=r"layers\.1\.mlp\.output does not run: .*skipped"):
        with model.trace(X):
            model.layers[1].skip((X, X))
            model.layers[1].mlp.output


def test_a_skip_that_does_not_fit_is_refused(model: TorchModel) -> None:
    with pytest.raises(WriteError, match=r"layers\.1\.output.*built otherwise"):
        with model.trace(X):
            model.layers[1].skip(X)
    with pytest.raises(WriteError, match=r"embed\.output .*\[3, 4\].*\[1, 4\]"):
        with model.trace(X):
            model.embed.skip(X[:1])
            model.head.output


def test_a_module_that_has_run_cannot_be_skipped(model: TorchModel) -> None:
    with pytest.raises(OutOfOrderError, match=r"embed\.input"):
        with model.trace(X):
            model.layers[0].input
            model.embed.skip(X)


def test_a_skip_is_forgotten_with_its_trace(model: TorchModel) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Sequential(nn.Linear(4, 4))
            self.fail = True

        def forward(self, x: Any) -> Any:
            return self.outer(x)

    net = Broken()
    broken = TorchModel(net)
    hook = net.outer[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        with broken.trace(X):
            broken.outer.skip(X * 0)
            broken.output
    hook.remove()
    assert broken._backend.interleaver.skips == {}  # type: ignore[union-attr]
    assert not net(X).eq(0).all()


# -- operations ------------------------------------------------------------------------------------


def test_operations_are_listed_read_and_written(model: TorchModel) -> None:
    names = model.tree.modules["layers.0"].operations
    assert names == ("residual_0", "self_norm_0", "normed_0", "self_mlp_0")
    assert dir(model.layers[0].source) == sorted(names)
    assert "self_mlp_0" in str(model.layers[0].source)
    want = run(model)
    with model.trace(X):
        given = model.layers[1].source.self_norm_0.input.save()
        normed = model.layers[1].source.self_norm_0.output.save()
        bound = model.layers[1].source.normed_0.output.save()
        model.layers[1].source.self_mlp_0.output[:] = 3
        out = model.layers[1].output.save()
    close(given, want["layers.1"][1])
    close((normed, bound), (want["layers.1.norm"],) * 2)
    assert out[0].eq(3).all()
    with model.trace(X):
        model.layers[1].source.residual_0.output = torch.zeros(3, 4)
        out = model.layers[1].output.save()
    assert out[1].eq(0).all()
    with model.trace(X):
        model.layers[0].source.self_norm_0.skip(torch.zeros(3, 4))
        normed = model.layers[0].source.normed_0.output.save()
    assert normed.eq(0).all()


def test_an_operation_that_does_not_exist_is_refused_before_anything_runs(
    model: TorchModel,
) -> None:
    with pytest.raises(LocationError, match=r"no operation 'self_mpl_0'. It has: residual_0"):
        with model.trace(X):
            model.layers[0].source.self_mpl_0.output
    with pytest.raises(LocationError, match="no operation 'x'"):
        model.layers[0].source.x


# -- modules and helpers in a block ----------------------------------------------------------------


def test_a_module_called_in_a_block_is_no_visit(model: TorchModel) -> None:
    want = run(model)
    with model.trace(X):
        early = model.head(model.embed.output).save()
        late = model.head.output.save()
        weight = model.head.weight.save()
    module = model._backend.module  # type: ignore[union-attr]
    close(early, module.head(want["embed"]))
    close(late, want["head"])
    close(weight, module.head.weight)


def helper(layer: Any) -> Any:
    hidden = layer.output[0]
    hidden[:] = 1
    return save(hidden.sum())


def test_a_helper_function_may_read_write_and_save(model: TorchModel) -> None:
    with model.trace(X):
        total = helper(model.layers[0])
        seen = model.layers[1].input.save()
    assert total.item() == 12 and seen.eq(1).all()


def test_hooks_of_the_user_still_work(model: TorchModel) -> None:
    module = model._backend.module  # type: ignore[union-attr]
    seen = []
    handle = module.embed.register_forward_hook(lambda m, a, o: seen.append(o.clone()) or o + 1)
    want = module.embed.forward(X)
    with model.trace(X):
        embed = model.embed.output.save()
        given = model.layers[0].input.save()
    handle.remove()
    assert len(seen) == 1
    close(given, want + 1)


# -- errors ----------------------------------------------------------------------------------------


def broken_helper(value: Any) -> Any:
    raise KeyError("no such thing")


def raising(model: TorchModel, where: str) -> None:
    with model.trace(X) as tracer:
        if where == "before":
            1 / 0
        x = model.embed.output.save()
        if where == "after":
            1 / 0
        if where == "helper":
            broken_helper(x)


@pytest.mark.parametrize(
    ("where", "kind", "last"),
    [
        ("before", ZeroDivisionError, "raising"),
        ("after", ZeroDivisionError, "raising"),
        ("helper", KeyError, "broken_helper"),
    ],
)
def test_an_error_in_a_block_is_raised_with_the_users_lines(
    model: TorchModel, where: str, kind: type[Exception], last: str
) -> None:
    with pytest.raises(kind) as raised:
        raising(model, where)
    frames = traceback.extract_tb(raised.tb)
    ours = [f for f in frames if "nnsight_core" in f.filename]
    mine = [f for f in frames if f.filename == __file__]
    assert mine[-1].name == last and frames[-1] is mine[-1]
    assert mine[-1].line in ("1 / 0", 'raise KeyError("no such thing")')
    assert [f.name for f in mine if f not in ours][:2].count("raising") == 1
    assert raised.value.__notes__ == ["Raised in the block of invoke 0."]
    assert raised.value.__context__ is None
    text = "".join(traceback.format_exception(raised.value))
    assert "Skipped" not in text and "During handling" not in text


def test_what_was_saved_before_an_error_comes_home(model: TorchModel) -> None:
    x = None
    with pytest.raises(ZeroDivisionError):
        with model.trace(X):
            x = model.embed.output.save()
            1 / 0
    close(x, run(model)["embed"])


def test_one_bad_invoke_does_not_lose_the_others(model: TorchModel) -> None:
    x = None
    with pytest.raises(ZeroDivisionError) as raised:
        with model.trace() as tracer:
            with tracer.invoke(X):
                x = model.embed.output.save()
            with tracer.invoke(X):
                1 / 0
                x = model.embed.output.save()
            with tracer.invoke(X * 2):
                x = model.embed.output.save()
    assert raised.value.__notes__ == ["Raised in the block of invoke 1."]
    assert x is not None and x[1] is None and len(x) == 3
    close(x[0], run(model)["embed"])


def test_several_bad_invokes_raise_a_group(model: TorchModel) -> None:
    x = None
    with pytest.raises(ExceptionGroup, match="2 errors in 3 invokes") as raised:
        with model.trace() as tracer:
            for divisor in (0, 1, 0):
                with tracer.invoke(X):
                    x = (1 / divisor).save()
    assert [type(e) for e in raised.value.exceptions] == [ZeroDivisionError] * 2
    assert x == [None, 1.0, None]


def test_a_forward_that_fails_is_the_error_of_that_invoke(model: TorchModel) -> None:
    x = None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                x = model.embed.input.save()
            with tracer.invoke(X[:, :3]):
                x = model.embed.input.save()
            with tracer.invoke(X):
                x = model.embed.input.save()
    assert x is not None and [None if v is None else v.shape[1] for v in x] == [4, 3, 4]


def test_a_block_that_would_end_the_process_is_a_block_error(model: TorchModel) -> None:
    with pytest.raises(BlockError, match="SystemExit: 3"):
        with model.trace(X):
            sys.exit(3)
    with pytest.raises(BlockError, match="KeyboardInterrupt"):
        with model.trace(X):
            model.embed.output
            raise KeyboardInterrupt
    with pytest.raises(BlockError, match="GeneratorExit"):
        with model.trace(X):
            raise GeneratorExit


def test_a_block_that_reads_on_after_an_error_was_thrown_in_goes_on(model: TorchModel) -> None:
    with model.trace(X):
        try:
            model.embed.output.resize_(1, 1)
            model.layers[0].output
        except WriteError as error:
            text = str(error).save()
        out = model.output.save()
    assert "embed.output" in text
    close(out, run(model)["head"])


def test_an_endless_catcher_ends_with_its_step(model: TorchModel) -> None:
    with pytest.raises(LocationError, match=r"unused\.output"):
        with model.trace(X):
            for _ in range(3):
                with contextlib.suppress(LocationError):
                    model.unused.output
            model.unused.output


def test_asynchronous_frames_of_a_generator_in_a_block_end_with_it(model: TorchModel) -> None:
    with model.trace(X):

        def layers() -> Any:
            for layer in model.layers:
                yield layer.output[0]

        first = next(layers()).save()
    close(first, run(model)["layers.0"][0])


def test_a_write_that_pytorch_does_not_count_lands(model: TorchModel) -> None:
    for way in range(2):
        with model.trace(X):
            hidden = model.embed.output
            if way:
                hidden.data[:] = 0
            else:
                hidden.numpy()[:] = 0
            seen = model.layers[0].input.save()
        assert seen.abs().sum() == 0


def test_a_weight_can_be_read_and_not_written(model: TorchModel) -> None:
    weight = model.embed.weight.clone()
    with pytest.raises(WriteError, match=r"embed\.weight .* every request shares"):
        with model.trace(X):
            model.embed.weight[:] = 0
    with model.trace(X):
        read = (model.embed.weight * 1).save()
    assert torch.equal(weight, model.embed.weight) and torch.equal(read, weight)


def test_a_late_write_names_the_line_after_which_it_came(model: TorchModel) -> None:
    with pytest.raises(LateWriteError, match=r"after line \d+ of .*test_interleaver\.py"):
        with model.trace(X):
            early = model.embed.output
            later = model.layers[0].norm.output
            early[:] = 0


def test_a_second_path_of_a_shared_module_is_refused(model: TorchModel) -> None:
    with pytest.raises(LocationError, match="again is the same module object as twice"):
        with model.trace(X):
            found = model.again.output


def test_a_value_that_cannot_be_copied_ends_the_run_and_not_the_forward(model: TorchModel) -> None:
    class Odd(dict[str, torch.Tensor]):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(x=tensor)

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> Odd:
            return Odd(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)["x"] + 1

    odd = TorchModel(Outer())
    with pytest.raises(TypeError):
        with odd.trace(X):
            before = odd.inner.input.save()
            found = odd.inner.output
    assert torch.equal(before, X)
    with odd.trace(X):
        found = odd.output.save()
    assert torch.equal(found, X + 1)
