"""What a block sets of PyTorch and Python holds for the block, and for nobody else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from nnsight_core import TorchModel


class Looking(nn.Module):
    """Notes the settings under which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.seen.append(
            (
                torch.is_autocast_enabled("cpu"),
                torch.get_default_dtype(),
                torch.get_num_threads(),
                torch.ones(1).device.type,
                torch.is_grad_enabled(),
                list(warnings.filters),
            )
        )
        return self.second(x)


@pytest.fixture
def looked() -> Any:
    net = Looking()
    model = TorchModel(net)
    with model.trace(torch.ones(2)):
        model.first.output
        model.second.output
    return model, net


def test_what_a_block_sets_is_not_there_while_the_model_runs(looked: Any) -> None:
    model, net = looked
    before = list(warnings.filters)
    with model.trace(torch.ones(2)):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(True)
            warnings.simplefilter("error")
            model.first.output
            model.second.output
            own = [
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_default_dtype(),
                torch.ones(1).device.type,
                torch.is_grad_enabled(),
                warnings.filters[0][0],
            ].save()
        after = (torch.is_autocast_enabled("cpu"), torch.ones(1).device.type).save()
    assert own == [True, torch.bfloat16, torch.float64, "meta", True, "error"]
    assert after == (False, "cpu")
    assert net.seen[1] == net.seen[0]
    assert list(warnings.filters) == before
    assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")


def test_blocks_do_not_see_each_others_settings(looked: Any) -> None:
    model, _ = looked
    with model.trace() as tracer:
        with tracer.invoke(torch.ones(2)):
            torch.set_default_dtype(torch.float64)
            warnings.filterwarnings("error", message="only mine")
            model.first.output
        with tracer.invoke(torch.ones(2)):
            model.first.output
            dtype = torch.get_default_dtype().save()
            count = sum("only mine" in str(held) for held in warnings.filters).save()
    assert dtype == torch.float32 and count == 0


def test_a_block_that_ends_inside_a_mode_leaves_nothing_of_it(looked: Any) -> None:
    model, net = looked
    with pytest.raises(ZeroDivisionError):
        with model.trace(torch.ones(2)):
            torch.set_default_device("meta")
            torch.set_autocast_enabled("cpu", True)
            model.first.output
            1 / 0
    assert torch.ones(1).device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    assert net.seen[-1] == net.seen[0]
