"""What a block hands over, and what it may do with it afterwards: on the plain PyTorch backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnsight_core import LateWriteError, TorchModel, WriteError

from .nets import X

close = torch.testing.assert_close


def test_what_a_location_was_set_to_is_taken_as_it_is(model: TorchModel) -> None:
    with model.trace(X):
        made = torch.ones(3, 4)
        model.layers[0].mlp.output = made
        first = model.layers[0].output[0].save()
        made += 1
        model.layers[1].mlp.output = made
        second = model.layers[1].output[0].save()
    close(first, torch.ones(3, 4))
    close(second, torch.full((3, 4), 2.0))


def test_a_tensor_from_outside_is_not_changed_through_a_location(model: TorchModel) -> None:
    steer = torch.ones(3, 4)
    with model.trace() as tracer:
        for _ in range(3):
            with tracer.invoke(X):
                model.embed.output = steer
                model.embed.output[:, 0] += 5
                seen = model.layers[0].input.save()
    assert [value[0, 0] for value in seen] == [6, 6, 6]
    close(steer, torch.ones(3, 4))


def test_what_was_given_and_is_changed_at_once_is_refused(model: TorchModel) -> None:
    with pytest.raises(WriteError, match=r"What embed\.output was set to was changed in place"):
        with model.trace(X):
            made = torch.ones(3, 4)
            model.embed.output = made
            made[:, 0] = 0
            model.head.output.save()
    with pytest.raises(WriteError, match=r"What layers\.0\.mlp\.output was set to"):
        with model.trace(X):
            made = torch.ones(3, 4)
            model.layers[0].mlp.skip(made)
            made *= 2


def test_a_late_write_is_found_though_the_name_is_bound_anew(model: TorchModel) -> None:
    with pytest.raises(LateWriteError, match=r"layers\.0\.mlp\.output"):
        with model.trace(X):
            hidden = model.layers[0].mlp.output
            after = model.layers[1].mlp.output
            hidden += 1000
            hidden = after
            last = model.head.output.save()


def test_a_late_write_that_pytorch_does_not_count_is_found(model: TorchModel) -> None:
    with pytest.raises(LateWriteError, match=r"embed\.output"):
        with model.trace(X):
            hidden = model.embed.output
            last = model.head.output.save()
            hidden.data[:] = 0


def test_a_part_that_is_no_tensor_cannot_be_changed_in_place(model: TorchModel) -> None:
    with pytest.raises(WriteError, match=r"shapes\.output\['flag'\] is True"):
        with model.trace(X):
            model.shapes.output["flag"] = False
    with pytest.raises(WriteError, match=r"has no \['new'\], and got 3"):
        with model.trace(X):
            model.shapes.output["new"] = 3


class Filling(nn.Module):
    """Hands its parts a list that they fill."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        x = self.part(x, made)
        return x + sum(made)


class Part(nn.Module):
    """Fills the list that it is handed."""

    def forward(self, x: Tensor, made: list[Tensor]) -> Tensor:
        made.append(x * 2)
        return x + 1


def test_a_list_that_a_module_fills_is_filled_under_a_write_to_its_input() -> None:
    model = TorchModel(Filling())
    with model.trace(X):
        model.part.input[:] += 1
        out = model.output.save()
    close(out, Filling()(X + 1))


def test_a_write_within_a_list_that_a_module_is_handed_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner([x])

    class Inner(nn.Module):
        def forward(self, held: list[Tensor]) -> Tensor:
            return held[0] + 1

    model = TorchModel(Outer())
    with pytest.raises(WriteError, match=r"inner\.input was written within a list"):
        with model.trace(X):
            model.inner.inputs[0][0][0][:] = 0


def test_a_tensor_that_is_handed_on_twice_is_one_for_a_block_too() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = Both()

        def forward(self, x: Tensor) -> Tensor:
            here, there = self.both(x)
            return here + there

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x + 1
            return x, x

    model = TorchModel(Twice())
    with model.trace(X):
        model.both.output[0][:] = 7
        other = model.both.output[1].save()
        out = model.output.save()
    close(other, torch.full((3, 4), 7.0))
    close(out, torch.full((3, 4), 14.0))


def test_a_cache_sees_nothing_of_what_runs_after_a_forward_that_failed() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x: Tensor, fail: bool = False) -> Tensor:
            x = self.part(x)
            if fail:
                raise ValueError("the model's own")
            return x

    model = TorchModel(Fails())
    interleaver = model._backend.interleaver  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="own"):
        with model.trace(X, fail=True) as tracer:
            cache = tracer.cache()
    assert not interleaver.observers and not interleaver.watching


def test_an_invoke_that_cannot_begin_does_not_lose_the_others(model: TorchModel) -> None:
    with pytest.raises(AttributeError, match="nothing_0"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                good = model.embed.output.save()
            with tracer.invoke(X):
                bad = model.embed.source.nothing_0.output.save()
    close(good, model._backend.module.embed(X))  # type: ignore[union-attr]


def test_what_comes_home_is_not_the_models_own_memory(model: TorchModel) -> None:
    with model.trace(X):
        weight = model.head.weight.save()
        kept = model.embed.output.keep()
    assert type(weight) is Tensor
    module: Any = model._backend.module  # type: ignore[union-attr]
    assert weight.data_ptr() != module.head.weight.data_ptr()
    with model.trace(X):
        here = kept.save()
    here.zero_()
    with model.trace(X):
        again = kept.save()
    assert again.abs().sum() > 0


def test_a_cache_converts_no_whole_numbers() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(60000, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids)

    model = TorchModel(Tokens())
    with model.trace(torch.tensor([50257])) as tracer:
        cache = tracer.cache(dtype=torch.bfloat16, include_inputs=True)
    assert cache["embed"].output.dtype == torch.bfloat16
    close(cache["embed"].inputs[0][0], torch.tensor([50257]))
