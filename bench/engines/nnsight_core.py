"""Our plain PyTorch backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.workloads import torch
from nnsight_core import TorchModel, save


def cases() -> dict[str, Callable[[], Any]]:
    return torch.cases(TorchModel, save)
