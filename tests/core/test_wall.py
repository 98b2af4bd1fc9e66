"""Nothing that walks the C stack looks beyond a block."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable

import pytest
import torch

from nnsight_core.wall import behind_wall

from . import nets
from .nets import X

walls = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="no wall is built on this machine",
)


def frames() -> int:
    """How many C frames a walk finds from here (glibc walks as PyTorch does)."""
    return ctypes.CDLL(None).backtrace((ctypes.c_void_p * 400)(), 400)


def deep(levels: int, call: Callable[[], int]) -> int:
    """Call a function below so many C frames."""
    if not levels:
        return call()
    return functools.reduce(lambda _, __: deep(levels - 1, call), [1], 0)


def walled() -> int:
    found: list[int] = []
    behind_wall(lambda: found.append(frames()))
    return found[0]


@walls
def test_a_walk_ends_at_the_wall() -> None:
    assert deep(20, frames) > deep(1, frames)
    assert deep(20, walled) == deep(1, walled) < deep(1, frames)


def test_what_is_raised_behind_a_wall_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        behind_wall(lambda: [1 / 0].clear())
    with pytest.raises(SystemExit):
        behind_wall(lambda: sys.exit(1))


def test_errors_of_pytorch_in_blocks_started_at_many_depths() -> None:
    model = nets.make()

    def fail() -> int:
        with pytest.raises(RuntimeError, match="shape"):
            with model.trace(X):
                bad = model.layers[1].mlp.output.reshape(-1, 7)
        return 1

    assert all(deep(levels, fail) for levels in (30, 0, 12, 1, 25, 3) for _ in range(5))
    with pytest.raises(RuntimeError, match="shape"):
        with model.trace(X):
            bad = torch.ones(3).reshape(2, 2)
