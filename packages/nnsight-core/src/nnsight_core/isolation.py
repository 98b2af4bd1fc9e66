"""What PyTorch and Python keep per thread or process and a block may change: its own, not others'.

A block parks in the middle of `with torch.autocast(...)`, say, and the engine goes on in the same
thread. So what a block has set is taken off when it gives control back, and put on when it goes on.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

_DEVICES = ("cpu", "cuda")
_stacks: Any = torch._C
_Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class Settings(NamedTuple):
    """The settings at one moment.

    `functions` and `dispatches` are how many modes PyTorch's two stacks hold (`with device:` is
    one); `autocast` is None where it is off.
    """

    grad: bool
    dtype: torch.dtype
    threads: int
    functions: int
    dispatches: int
    autocast: _Autocast | None


def settings() -> Settings:
    """The settings as they are."""
    return Settings(
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        _stacks._len_torch_function_stack(),
        _stacks._len_torch_dispatch_stack(),
        _autocast() if _stacks._is_any_autocast_enabled() else None,
    )


class Isolation:
    """The settings of one block, kept while the engine has control."""

    __slots__ = ("_engine", "_filters", "_held", "_modes", "_own", "_own_filters")

    def __init__(self) -> None:
        self._own: Settings | None = None
        self._own_filters: tuple[Any, list[Any]] | None = None
        self._modes: tuple[list[Any], list[Any]] = ([], [])

    def enter(self) -> None:
        """The block is about to go on."""
        engine = self._engine = settings()
        self._filters, self._held = warnings.filters, list(warnings.filters)
        own = self._own or engine._replace(grad=False)
        if own != engine:
            _apply(own, engine)
            for mode in self._modes[0]:
                _stacks._push_on_torch_function_stack(mode)
            for mode in self._modes[1]:
                _stacks._push_on_torch_dispatch_stack(mode)
        if self._own_filters is not None:
            _set_filters(*self._own_filters)

    def leave(self) -> None:
        """The block has given control back."""
        engine, own = self._engine, settings()
        self._own = own
        if own != engine:
            self._modes = (
                _popped(_stacks._pop_torch_function_stack, own.functions - engine.functions),
                _popped(_stacks._pop_torch_dispatch_stack, own.dispatches - engine.dispatches),
            )
            _apply(engine, own)
        if warnings.filters is not self._filters or warnings.filters != self._held:
            self._own_filters = (warnings.filters, list(warnings.filters))
            _set_filters(self._filters, self._held)


def _autocast() -> _Autocast:
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)


def _apply(wanted: Settings, now: Settings) -> None:
    torch.set_grad_enabled(wanted.grad)
    if wanted.dtype is not now.dtype:
        torch.set_default_dtype(wanted.dtype)
    if wanted.threads != now.threads:
        torch.set_num_threads(wanted.threads)
    if wanted.autocast != now.autocast:
        off = tuple((device, False, torch.get_autocast_dtype(device)) for device in _DEVICES)
        for device, enabled, dtype in wanted.autocast or off:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _popped(pop: Any, count: int) -> list[Any]:
    return [pop() for _ in range(count)][::-1]


def _set_filters(filters: Any, held: list[Any]) -> None:
    filters[:] = held
    warnings.filters = filters
    warnings._filters_mutated()  # type: ignore[attr-defined]
