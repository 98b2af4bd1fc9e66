"""Pure: what of PyTorch and Python may run on known values before the block does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_MOST = 100_000
"""Length of a list up to which it is gone through here, where no time limit holds."""


def may_run(function: Callable[..., Any], given: list[Any], named: dict[str, Any]) -> bool:
    """Whether a call changes nothing, runs no code of the user's, and makes nothing huge."""
    if id(function) in _SHAPING:
        return not named and all(plain(value, 0) for value in given)
    if not _makes_little(function, given, named):
        return False
    # What writes into an argument does so by name, or after more arguments than these.
    if "out" in named or len(given) > 3:
        return False
    return all(plain(value, 1) for value in (*given, *named.values()))


def plain(value: Any, depth: int) -> bool:
    """Whether code that is given a value runs no code of the user's, and not for long."""
    if type(value) in (list, tuple, dict, range, torch.Size) and len(value) <= _MOST:
        return not depth or all(plain(v, depth - 1) for v in value)
    return type(value) in (bool, int, float, str, Tensor, Parameter, *_CONSTANTS)


def moderate(*values: Any) -> bool:
    """Whether arithmetic on these makes nothing huge, here where no time limit holds."""
    whole = [value for value in values if type(value) is int]
    if any(number.bit_length() > _BITS for number in whole):
        return False
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    axes = itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    return math.prod(max(sizes) for sizes in axes) <= _LARGE


def _makes_little(function: Callable[..., Any], given: list[Any], named: dict[str, Any]) -> bool:
    values = [*given, *named.values()]
    if function in (torch.zeros, torch.ones, torch.full):
        # What fills it may be among the numbers, which errs to leaving it to the block.
        return math.prod(n for n in _flat(values) if type(n) is int and n > 0) <= _LARGE
    held = [tensor.numel() for tensor in _flat(values) if isinstance(tensor, Tensor)]
    if function is torch.outer:
        return math.prod(held) <= _LARGE
    return sum(held) <= _LARGE if function in (torch.cat, torch.stack) else moderate(*values)


def _flat(values: list[Any]) -> list[Any]:
    return [part for v in values for part in (v if isinstance(v, list | tuple) else [v])]


_BITS = 1 << 12
_LARGE = 1 << 28
_CONSTANTS = (type(None), torch.dtype, torch.device)


_PURE = """
    abs add bfloat16 clone contiguous cpu detach div dot double expand flatten float half item
    matmul mean mul mv neg norm numel reshape size sqrt squeeze sub sum t to tolist type_as
    unsqueeze view
"""
METHODS = frozenset(_PURE.split())
"""Methods of tensors that change nothing."""
_SHAPING = frozenset(map(id, (enumerate, len, list, reversed, tuple, zip)))
"""Functions that do nothing with what the lists that they are given hold."""
FUNCTIONS = frozenset(
    id(function)
    for function in (
        *(abs, bool, enumerate, float, int, len, list, max, min, range, reversed, round, sum),
        *(tuple, zip, math.sqrt, math.exp, math.log),
        *(torch.zeros, torch.ones, torch.full, torch.tensor, torch.norm, torch.linalg.norm),
        *(torch.dot, torch.outer, torch.matmul, torch.mv, torch.nn.functional.normalize),
        *(torch.linalg.vector_norm, torch.sqrt, torch.abs, torch.stack, torch.cat),
        *(torch.zeros_like, torch.ones_like, torch.full_like),
    )
)
"""Functions that change nothing, by their ids (a value may not be hashable)."""
