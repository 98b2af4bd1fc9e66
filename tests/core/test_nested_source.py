"""The operations inside functions that a forward calls, at any depth."""

from __future__ import annotations

import importlib.util
import linecache
from pathlib import Path

import pytest
import torch
from torch import nn

from nnsight_core import LocationError, TorchModel
from nnsight_core.source import _probe, operations_of


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


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Private(Base):
    def __init__(self) -> None:
        super().__init__()
        self.__by = 3.0

    def __times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.__by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = super().forward(x)
        return self.__times(moved)


def test_a_forward_with_private_names_of_its_class() -> None:
    net = Private()
    model = TorchModel(net)
    with model.trace(torch.ones(2)):
        moved = model.source.moved_0.output.save()
        scaled = model.source.self___times_0.output.save()
    assert moved.tolist() == [2, 2] and scaled.tolist() == [6, 6]
    assert net(torch.ones(2)).tolist() == [6, 6]


def test_a_forward_whose_file_was_edited_keeps_what_it_was_made_from(tmp_path: Path) -> None:
    path = tmp_path / "user_net.py"
    text = (
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        assert x.ndim == 1\n        moved = x + 2\n        return moved.abs()\n"
    )
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text(text.replace("+ 2", "+ 3"))
    linecache.checkcache(str(path))
    net = module.Net()
    model = TorchModel(net)
    with pytest.raises(LocationError), model.trace(torch.ones(2)):
        moved = model.source.moved_0.output.save()
    assert net(torch.ones(2)).tolist() == [3, 3]
    path.write_text(text)
    linecache.checkcache(str(path))
    _probe.cache_clear()
    assert operations_of(net.forward) is not None


class Texts(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        moved = x + 1
        return (
            moved,
            """
            indented
        """,
        )


def test_texts_of_a_forward_keep_their_indentation() -> None:
    net = Texts()
    model = TorchModel(net)
    with model.trace(torch.ones(2)):
        moved = model.source.moved_0.output.save()
        text = model.output[1].save()
    assert moved.tolist() == [2, 2]
    assert text == net(torch.ones(2))[1] == "\n            indented\n        "
