"""Modules of several ranks that a block calls: whole tensors in and out, or a refusal by name."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from nnsight_core import LocationError
from nnsight_core.node import Places
from nnsight_vllm_worker.called import Called, Hole
from nnsight_vllm_worker.joint import Values
from nnsight_vllm_worker.layouts import SUM, Layout, Unknown, part, split
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.vllm_ports.parallel import Layers, Ranks

CPU = torch.device("cpu")
MIXED = Unknown("a layer mixes it")


class Two:
    """The first of two ranks, to which the second hands in the same."""

    rank, size = 0, 2

    def agree(self, mine: Any) -> list[Any]:
        return [mine] * self.size

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        assert tensor is not None
        return tensor

    def deal(self, layout: Any, whole: Tensor, like: Tensor, axis: int) -> Tensor:
        return part(layout, whole, 0, self.size, axis)

    def join(self, layout: Any, tensor: Tensor, axis: int) -> Tensor:
        return tensor * 2 if layout is SUM else torch.cat([tensor] * 2, axis)


def made(kind: type[nn.Module], **attributes: Any) -> Any:
    """A layer of vLLM's as it is on one of two ranks, which computes nothing itself."""
    layer = cast(Any, kind.__new__(kind))
    nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


class Wrapped(nn.Module):
    """As an adapter's layer is: it never calls what it wraps."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Mixer(nn.Module):
    """What nobody foresaw: it gives what a rank holds, and says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"tp_size": 2, "output_partition_sizes": [4, 4], "gather_output": False}
        self.proj = made(MergedColumnParallelLinear, **sizes)

    def forward(self, *values: Tensor) -> Any:
        return values


def model() -> nn.Module:
    sizes = {"tp_size": 2, "output_partition_sizes": [4], "gather_output": False}
    row = {"tp_size": 2, "input_size_per_partition": 4, "input_is_parallel": True}
    return nn.ModuleDict(
        {
            "up": Wrapped(made(ColumnParallelLinear, **sizes)),
            "down": Wrapped(made(RowParallelLinear, reduce_results=True, **row)),
            "mixer": Mixer(),
            "norm": nn.LayerNorm(8),
        }
    )


def called(recorded: dict[str, tuple[Layout, ...]]) -> tuple[Called, Layers]:
    modules = dict(model().named_modules())
    layers = Layers(modules)
    layers.recorded |= recorded
    ranks = cast(Ranks, Two())
    return Called(Values(ranks, RowMap(), CPU), layers, Places(modules=modules)), layers


def test_layers_know_their_layouts_where_nothing_has_called_them() -> None:
    _, layers = called({})
    assert layers.held("up.base_layer", "input") == layers.held("up", "input") == (None,)
    assert layers.held("up.base_layer", "output") == (split(4),)
    assert layers.held("down.base_layer", "input") == (split(4),)
    assert layers.held("down.base_layer", "output") == (None,)
    assert layers.held("mixer.proj", "output") == (split(4, 4),)
    assert layers.held("mixer", "output") is None
    logits = Layers({"logits": made(LogitsProcessor)})
    assert logits.told("logits", "input", [torch.ones(5, 8)], []) == {0: None}


def test_an_input_that_ranks_share_is_dealt_out_where_nothing_was_recorded() -> None:
    calls, _ = called({})
    calls.check("down.base_layer", [torch.ones(5, 8)])
    with pytest.raises(RuntimeError, match="takes 8 columns"):
        calls.check("down.base_layer", [torch.ones(5, 4)])
    (args, _) = calls._arguments(
        "down.base_layer", calls.form((torch.ones(5, 8),), {}), [torch.ones(5, 8)]
    )
    assert args[0].shape == (5, 4)


@pytest.mark.parametrize(
    "recorded",
    [
        {},
        {"mixer.input": (None,)},
        {"mixer.input": (None,), "mixer.output": (MIXED,)},
        {"mixer.input": (None,), "mixer.output": (None, MIXED)},
        {"mixer.input": (MIXED,), "mixer.output": (None,)},
    ],
)
def test_what_is_refused_as_a_location_is_refused_when_called(
    recorded: dict[str, tuple[Layout, ...]],
) -> None:
    calls, layers = called(recorded)
    assert not layers.local("mixer")
    why = "a layer mixes it" if MIXED in sum(recorded.values(), ()) else "did not run"
    with pytest.raises(LocationError, match=f"mixer cannot be called: .*{why}"):
        calls.check("mixer", [torch.ones(5, 8)])


def test_more_tensors_than_are_known_are_refused() -> None:
    calls, _ = called({"mixer.input": (split(4),), "mixer.output": (split(4),)})
    value = torch.ones(5, 8)
    with pytest.raises(LocationError, match="input has 2 tensors"):
        calls.check("mixer", [value, value])
    calls, _ = called({"mixer.input": (None,), "mixer.output": (None,)})
    calls.check("mixer", [value, value])  # a residual that the first layer was not given
    with pytest.raises(LocationError, match="output has 2 tensors"):
        calls.run("mixer", calls.form((value, value), {}), [value, value])


def test_a_summand_goes_in_once() -> None:
    calls, _ = called({"mixer.input": (SUM,), "mixer.output": (SUM,)})
    hole, value = Hole((5, 8), torch.float32), torch.ones(5, 8)
    assert torch.equal(calls._given(SUM, hole, value), value)
    assert not calls._given(SUM, hole, None).any()  # on every other rank


def test_heads_that_are_given_apart_come_one_after_the_other() -> None:
    calls, _ = called({"mixer.input": (None,), "mixer.output": (split(8),)})
    value = torch.arange(40.0).view(5, 2, 4)
    (heads,) = calls.run("mixer", calls.form((value,), {}), [value])
    assert torch.equal(heads, torch.cat([value, value], 1))
    (flat,) = calls.run("mixer", calls.form((value,), {}), [value.view(1, 5, 8)])
    assert flat.shape == (1, 5, 16)


def test_attention_of_another_width_than_its_heads_is_not_known() -> None:
    plain = made(Attention, num_heads=2, head_size_v=4)
    latent = made(MLAAttention, num_heads=2, v_head_dim=4)
    layers = Layers({"plain": plain, "latent": latent})
    for path in ("plain", "latent"):
        assert layers.told(path, "output", [torch.ones(5, 8)], []) == {0: split(8)}
        (layout,) = layers.told(path, "output", [torch.ones(5, 4)], []).values()
        assert isinstance(layout, Unknown) and "as wide as the heads" in layout.why


def test_weights_that_were_never_loaded_are_whole_only_where_one_rank_works_alone() -> None:
    module = Mixer()
    module.sinks = nn.Parameter(torch.ones(4))
    module.register_buffer("table", torch.ones(4), persistent=False)
    modules = {"mixer": module, "norm": nn.LayerNorm(8), "mixer.proj": module.proj}
    for dummy in (False, True):
        layers = Layers(modules)
        layers.compare(lambda mine: [mine, mine], dummy)
        held = {"mixer.table", "norm.weight", "norm.bias"}
        assert layers._whole_tensors == (held if dummy else held | {"mixer.sinks"})
