"""The operations inside functions that a forward calls, at any depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nnsight_core import LocationError, TorchModel


def outer(x: torch.Tensor, by: float) -> torch.Tensor:
    doubled = inner(x) * by
    return torch.relu(doubled)


def inner(x: torch.Tensor) -> torch.Tensor:
    shifted = x + 1
    return shifted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * 10
        return scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = outer(x, 2.0)
        second = self.part(first)
        return self.child(second)


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return TorchModel(Net())


def test_operations_of_a_function_and_of_one_that_it_calls(model: TorchModel) -> None:
    with model.trace(torch.ones(2)):
        shifted = model.source.outer_0.source.inner_0.source.shifted_0.output.save()
        relu = model.source.outer_0.source.torch_relu_0.input.save()
        scaled = model.source.self_part_0.source.scaled_0.output.save()
        out = model.output.save()
    assert shifted.tolist() == [2, 2] and relu.tolist() == [4, 4]
    assert scaled.tolist() == [40, 40] == out.tolist()


def test_writes_inside_a_function(model: TorchModel) -> None:
    with model.trace(torch.ones(2)):
        model.source.outer_0.source.inner_0.output[0] = 100
        out = model.output.save()
    assert out.tolist() == [2000, 40]
    with model.trace(torch.ones(2)):
        out = model.output.save()
    assert out.tolist() == [40, 40]


def test_what_has_no_operations_is_said_to_be_unreached(model: TorchModel) -> None:
    with pytest.raises(LocationError, match="was not reached"):
        with model.trace(torch.ones(2)):
            model.source.self_child_0.source.nothing_0.output
    with pytest.raises(LocationError, match="has no operation 'outter_0'"):
        with model.trace(torch.ones(2)):
            model.source.outter_0.source.inner_0.output
