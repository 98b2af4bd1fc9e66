"""Refusals at a location: a replacement that does not fit, a question that comes too late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnsight_core.errors import LocationError, OutOfOrderError, WriteError
from nnsight_core.locations import Location
from nnsight_core.saves import SCALARS
from nnsight_core.values import describe, dtype_name, leaves

if TYPE_CHECKING:
    from nnsight_core.run import Run


def check_tokens(written: Iterable[Tensor], vocabulary: int) -> None:
    """Refuse sampled tokens that the model does not have, on which it could not go on.

    Raises:
        WriteError: with the token.
    """
    for tensor in written:
        for token in torch.aminmax(tensor) if tensor.numel() else ():
            if not 0 <= int(token) < vocabulary:
                raise WriteError(
                    f"samples were written with the token {int(token)}; the model's are those from "
                    f"0 to {vocabulary - 1}."
                )


def check_replacement(location: Location, old: Any, new: Any) -> None:
    """Refuse a replacement that does not fit.

    Raises:
        WriteError: other structure, rows, width or dtype, with both in the message.
    """
    if old is new:
        return
    before, after = list(leaves(old)), list(leaves(new))
    if [_built(part) for part in before] != [_built(part) for part in after]:
        raise WriteError(
            f"{location} is {describe(old)}; it cannot be replaced by {describe(new)}, which is "
            "built otherwise."
        )
    check_kept(location, before, new)
    for (path, was), (_, now) in zip(before, after, strict=True):
        if not isinstance(was, Tensor):
            continue
        if was.shape != now.shape:
            raise WriteError(
                f"{location}{path} is {describe(was)} for this request; it cannot be replaced by "
                f"{describe(now)}, which has other rows or another width."
            )
        if was.dtype != now.dtype:
            raise WriteError(
                f"{location}{path} is {describe(was)}; it cannot be replaced by {describe(now)}. "
                f"Convert it first: `.to(torch.{dtype_name(was.dtype)})`."
            )


def check_kept(location: Location, before: list[tuple[str, Any]], new: Any) -> None:
    """Refuse a value in which anything but tensors is another than before.

    Args:
        before: the parts that it had, by how they are reached.

    Raises:
        WriteError: with what was there.
    """
    after = dict(leaves(new))
    for path, was in before:
        now = after.pop(path, None)
        if isinstance(was, Tensor) or was is now or (type(now) in SCALARS and was == now):
            continue
        raise WriteError(
            f"{location}{path} is {was!r:.80}, which is no tensor; other requests may share it, so "
            "it cannot be replaced."
        )
    for path, now in after.items():
        if not isinstance(now, Tensor):
            raise WriteError(
                f"{location} has no {path}, and got {now!r:.80} there: a write must keep how the "
                "value is built."
            )


def unseen_write(location: Location) -> WriteError:
    """The error for a write of a block whose text does not show that it writes."""
    return WriteError(
        f"{location} was written by a block whose text looked as if it changed nothing. "
        "Write where it can be seen: by assignment, by a slice, by an in-place method."
    )


def _built(part: tuple[str, Any]) -> tuple[str, bool]:
    path, leaf = part
    return path, isinstance(leaf, Tensor)


def check_order(run: Run, location: Location, gone: bool) -> None:
    """Refuse a location that this step cannot reach any more.

    Raises:
        OutOfOrderError: the forward pass has gone past it.
        LocationError: it lies inside a module that the block skipped.
    """
    if any(location.path.startswith(prefix) for prefix in run.skipped):
        raise LocationError(f"{location} does not run: the block skipped a module around it.")
    if gone and run.over:
        raise OutOfOrderError(
            f"{location} was asked for too late: the request has finished; its last step was "
            f"step {run.step}."
        )
    if gone:
        raise OutOfOrderError(
            f"{location} was asked for too late: the forward pass has already gone past it in "
            f"step {run.step}. A block reads in forward order (a module's parts before its own "
            "output); keep a value that is needed later in a variable."
        )
