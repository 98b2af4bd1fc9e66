"""Modules that a block itself calls, where they are split over several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nnsight_core.errors import LocationError
from nnsight_core.node import Node, Places, bare
from nnsight_core.values import flat, map_tensors
from nnsight_vllm_worker.joint import Values, or_end
from nnsight_vllm_worker.layouts import Layout, Split, Sum, Unknown
from nnsight_vllm_worker.vllm_ports.parallel import Layers


class Hole(NamedTuple):
    """Stands for a tensor of a call, which travels apart."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Module(NamedTuple):
    """Stands for a module that is an argument of a call."""

    path: str


class Called:
    """Runs modules on all ranks at once: whole tensors go in and come out."""

    def __init__(self, values: Values, layers: Layers, places: Places) -> None:
        self._values = values
        self._layers = layers
        self._places = places

    def alone(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of which each rank holds all."""
        module = self._places.modules[path]
        return module(*map(bare, args), **{k: bare(v) for k, v in kwargs.items()})

    def form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call without its tensors."""
        return _form([list(args), dict(kwargs)])

    def check(self, path: str, tensors: list[Tensor]) -> None:
        """Refuse what all ranks cannot do at once, before any of them waits for another.

        Raises:
            LocationError: nothing says how the ranks hold what the module takes, or gives.
            RuntimeError: as PyTorch would on one rank, with the tensor's device, layout or shape.
        """
        given = self._known(path, "input")
        self._known(path, "output")
        if any(layout is not None for layout in given):
            _count(path, "input", given, tensors)
        for tensor, layout in zip(tensors, self._layouts(path, "input"), strict=False):
            device, shape = self._values.device, list(tensor.shape)
            if tensor.device.type != device.type or tensor.layout is not torch.strided:
                raise RuntimeError(
                    f"{path} was called with a {tensor.layout} tensor on {tensor.device}, and the "
                    f"model's are dense ones on {device}. Make it of a value of the block "
                    "(`hidden.new_zeros(...)`), or move it there (`.to(hidden.device)`)."
                )
            if not isinstance(layout, Split):
                continue
            width = layout.whole(self._values.ranks.size)
            if not shape or shape[-1] != width:
                raise RuntimeError(
                    f"{path} was called with a tensor of shape {shape}, and takes {width} columns."
                )

    def run(self, path: str, form: Any, tensors: list[Tensor] | None) -> Any:
        """Run a module.

        Args:
            tensors: those of the call, on the first rank.

        Raises:
            Exception: what the module raises, on the first rank.
        """
        args, kwargs = self._arguments(path, form, tensors)
        error: BaseException | None = None
        made: Any = None
        try:
            made = self._places.modules[path](*args, **kwargs)
        except Exception as raised:
            error = raised
        failed = self._values.ranks.agree(None if error is None else repr(error))
        if error is not None:
            raise error
        if any(failed):
            raise RuntimeError(f"{path} failed on another rank: {next(filter(None, failed))}")
        return self._result(path, made)

    @or_end
    def _arguments(self, path: str, form: Any, tensors: list[Tensor] | None) -> Any:
        """The arguments of a call, as this rank has them."""
        layouts = self._layouts(path, "input")
        given = itertools.repeat(None) if tensors is None else iter(tensors)
        return self._filled(form, lambda hole: self._given(next(layouts), hole, next(given)))

    def _given(self, layout: Layout, hole: Hole, given: Tensor | None) -> Tensor:
        ranks = self._values.ranks
        like = torch.empty(hole.shape, dtype=hole.dtype, device=self._values.device)
        if isinstance(layout, Sum):
            return like.zero_() if given is None else given
        if not isinstance(layout, Split):
            return ranks.broadcast(given, like)
        last = len(hole.shape) - 1
        shape = (*hole.shape[:-1], hole.shape[-1] * layout.width // layout.whole(ranks.size))
        return ranks.deal(layout, given, like.new_empty(shape), last)

    def _result(self, path: str, made: Any) -> Any:
        _count(path, "output", self._known(path, "output"), flat(made))
        layouts = self._layouts(path, "output")

        def whole(tensor: Tensor) -> Tensor:
            layout = next(layouts)
            if not isinstance(layout, Split | Sum):
                return tensor
            last = tensor.dim() - 1
            flat_heads = isinstance(layout, Sum) or tensor.shape[last] == layout.width
            joined = self._values.ranks.join(layout, tensor, last if flat_heads else 1)
            return tensor if joined is None else joined

        return map_tensors(made, whole)

    def _filled(self, form: Any, fill: Any) -> Any:
        if isinstance(form, Hole):
            return fill(form)
        if isinstance(form, Module):
            return self._places.modules[form.path]
        if isinstance(form, list | tuple):
            return _like(form, [self._filled(each, fill) for each in form])
        if isinstance(form, dict):
            return {key: self._filled(each, fill) for key, each in form.items()}
        return form

    def _layouts(self, path: str, side: str) -> Iterator[Layout]:
        """How the ranks hold each tensor; those that follow are whole where all of these are."""
        return itertools.chain(self._layers.held(path, side) or (), itertools.repeat(None))

    def _known(self, path: str, side: str) -> tuple[Layout, ...]:
        layouts = self._layers.held(path, side)
        if layouts is None:
            why = "it did not run when the engine recorded its locations"
        else:
            why = next((each.why for each in layouts if isinstance(each, Unknown)), "")
        if layouts is None or why:
            raise LocationError(
                f"{path} cannot be called: its {side} lies on several ranks, and {why}. Call the "
                "module around it, or those in it."
            )
        return layouts


def _count(path: str, side: str, known: tuple[Layout, ...], found: list[Tensor]) -> None:
    if len(found) > len(known):
        raise LocationError(
            f"{path} cannot be called so: its {side} has {len(found)} tensors, and how ranks share "
            f"them is known of {len(known)}. Call it as the model does."
        )


def _like(value: Any, parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Hole(tuple(value.shape), value.dtype)
    if isinstance(value, Node):
        return Module(value._path)
    if isinstance(value, list | tuple):
        return _like(value, [_form(each) for each in value])
    if isinstance(value, dict):
        return {key: _form(each) for key, each in value.items()}
    return value
