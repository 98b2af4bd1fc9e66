"""nnsight 0.8.1. Runs in an environment of its own (see `bench.rival`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
from torch import cat

from bench.workloads import torch


class Batching(nnsight.NNsight):
    """Its wrapper for any module, with the one method that several prompts need.

    The wrapper itself refuses more than one prompt; its classes for language models join the
    prompts to one batch, as this does.
    """

    def _batch(self, invokes: list[Any], fn: Any) -> Any:
        if len(invokes) < 2:
            return super()._batch(invokes, fn)
        return (cat([args[0] for args, _ in invokes]),), {}


def cases() -> dict[str, Callable[[], Any]]:
    return torch.cases(Batching, nnsight.save)
