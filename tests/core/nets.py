"""Small modules whose outputs are built in the ways that models build them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from nnsight_core import TorchModel

X = torch.arange(12.0).reshape(3, 4)


class Pair(NamedTuple):
    """A named pair of tensors."""

    hidden: Tensor
    residual: Tensor


class Layer(nn.Module):
    """Gives back a pair, as vLLM's decoder layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        normed = self.norm(residual)
        return self.mlp(normed), residual


class Shapes(nn.Module):
    """Gives back its argument in many containers."""

    def forward(self, x: Tensor) -> Any:
        return {
            "list": [x + 1, x + 2],
            "pair": Pair(x + 3, x + 4),
            "output": ModelOutput(logits=x + 5, none=None),
            "flag": True,
        }


class Net(nn.Module):
    """Two layers that hand on pairs, a container of everything, and a head used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.shapes = Shapes()
        self.twice = nn.Linear(4, 4)
        self.again = self.twice
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden, residual = self.embed(x) * scale, None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual=residual)
        total = hidden + residual
        made = self.shapes(total)
        total = total + made["list"][0] + made["pair"].hidden + made["output"].logits
        total = self.twice(total)
        total = self.again(total)
        return self.head(total)


def make() -> TorchModel:
    """A model over a new `Net`."""
    return TorchModel(Net().eval())


def check_idle(model: TorchModel) -> None:
    """Nothing of a trace is left behind, and the model computes what it does untraced."""
    interleaver = model._backend.interleaver  # type: ignore[union-attr]
    assert interleaver.waiting == {} and interleaver.skips == {} and not interleaver.watching
    fresh = Net().eval()
    fresh.load_state_dict(model._backend.module.state_dict())  # type: ignore[union-attr]
    torch.testing.assert_close(model._backend.module(X), fresh(X))  # type: ignore[union-attr]
