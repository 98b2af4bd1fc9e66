"""What PyTorch and Python keep per thread or process and a block may change: its own, not others'.

A block parks in the middle of `with torch.autocast(...)`, say, and the engine goes on in the same
thread. So what a block has set is taken off when it gives control back, and put on when it goes on.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch as dispatches

_DEVICE: Any = torch._GLOBAL_DEVICE_CONTEXT
_DEVICES = ("cpu", "cuda")
_stacks: Any = torch._C
_Autocast = tuple[tuple[str, bool, torch.dtype], ...]
_States = list[tuple[torch.Generator, torch.Tensor]]


class Settings(NamedTuple):
    """The settings at one moment.

    `functions` and `dispatches` are how many modes PyTorch's two stacks hold (`with device:` is
    one); `autocast` is None where it is off. `seed` is what the random numbers were last seeded
    with.
    """

    grad: bool
    dtype: torch.dtype
    threads: int
    functions: int
    dispatches: int
    autocast: _Autocast | None
    seed: int
    deterministic: bool
    precision: str
    recursion: int
    trace: Any
    profile: Any
    stdout: Any
    showwarning: Any


def settings() -> Settings:
    """The settings as they are."""
    return Settings(
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        _stacks._len_torch_function_stack(),
        _stacks._len_torch_dispatch_stack(),
        _autocast() if _stacks._is_any_autocast_enabled() else None,
        torch.default_generator.initial_seed(),
        _stacks._get_deterministic_algorithms(),
        _stacks._get_float32_matmul_precision(),
        sys.getrecursionlimit(),
        sys.gettrace(),
        sys.getprofile(),
        sys.stdout,
        warnings.showwarning,
    )


@contextmanager
def random_kept() -> Iterator[None]:
    """Within it, random numbers may be drawn; after it, they are where they were."""
    before = _states()
    try:
        yield
    finally:
        _swapped(before)


class Isolation:
    """The settings of one block, kept while the engine has control."""

    __slots__ = (
        "_device",
        "_engine",
        "_filters",
        "_held",
        "_modes",
        "_own",
        "_own_filters",
        "_random",
    )

    def __init__(self) -> None:
        self._own: Settings | None = None
        self._own_filters: tuple[Any, list[Any]] | None = None
        self._modes: tuple[list[Any], list[Any]] = ([], [])
        self._device: Any = None
        self._random: _States | None = None

    def draw_apart(self, seed: int) -> None:
        """Give the block random numbers of its own from the start, and leave the engine its."""
        self._random = [
            (generator, torch.Generator(generator.device).manual_seed(seed).get_state())
            for generator, _ in _states()
        ]

    def enter(self) -> None:
        """The block is about to go on."""
        if self._random is not None:
            self._random = _swapped(self._random)
        engine = self._engine = settings()
        self._filters, self._held = warnings.filters, list(warnings.filters)
        own = self._own or engine._replace(grad=False)
        if own != engine:
            _apply(own, engine)
            for mode in self._modes[0]:
                _stacks._push_on_torch_function_stack(mode)
            for mode in self._modes[1]:
                dispatches._push_mode(mode)
            _DEVICE.device_context = self._device
        if self._own_filters is not None:
            _set_filters(*self._own_filters)

    def leave(self) -> None:
        """The block has given control back."""
        engine, own = self._engine, settings()
        self._own = own
        if own != engine:
            self._modes = (
                _popped(_stacks._pop_torch_function_stack, own.functions - engine.functions),
                _popped(dispatches._pop_mode, own.dispatches - engine.dispatches),
            )
            _apply(engine, own)
            self._device, _DEVICE.device_context = getattr(_DEVICE, "device_context", None), None
        if self._random is not None:
            self._random = _swapped(self._random)
        elif own.seed != engine.seed:
            self._random = _states()
            # Where the engine's own random numbers were is not known any more: others follow.
            torch.manual_seed(hash((engine.seed, own.seed)))
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
    if wanted.deterministic != now.deterministic:
        torch.use_deterministic_algorithms(wanted.deterministic)
    if wanted.precision != now.precision:
        torch.set_float32_matmul_precision(wanted.precision)
    if wanted.recursion != now.recursion:
        sys.setrecursionlimit(wanted.recursion)
    if wanted.trace is not now.trace:
        sys.settrace(wanted.trace)
    if wanted.profile is not now.profile:
        sys.setprofile(wanted.profile)
    sys.stdout, warnings.showwarning = wanted.stdout, wanted.showwarning
    if wanted.autocast != now.autocast:
        off = tuple((device, False, torch.get_autocast_dtype(device)) for device in _DEVICES)
        for device, enabled, dtype in wanted.autocast or off:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _popped(pop: Any, count: int) -> list[Any]:
    return [pop() for _ in range(count)][::-1]


def _states() -> _States:
    """The states of the random numbers of the devices that this process works with."""
    used = [
        generator
        for generator in torch.cuda.default_generators
        if _stacks._cuda_hasPrimaryContext(generator.device.index)
    ]
    return [(generator, generator.get_state()) for generator in (torch.default_generator, *used)]


def _swapped(states: _States) -> _States:
    """Put states of the random numbers on; gives those that were there."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    for generator, state in states:
        generator.set_state(state)
    return before


def _set_filters(filters: Any, held: list[Any]) -> None:
    filters[:] = held
    warnings.filters = filters
    warnings._filters_mutated()  # type: ignore[attr-defined]
