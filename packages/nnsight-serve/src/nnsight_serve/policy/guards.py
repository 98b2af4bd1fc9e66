"""The names that every restricted block sees besides its own: its guards and its builtins."""

from __future__ import annotations

from typing import Any

from nnsight_serve.policy import values
from nnsight_serve.policy.allowed import CALLABLES
from nnsight_serve.policy.builtin import BUILTINS
from nnsight_serve.policy.calls import called

__all__ = ["BUILTINS", "GUARDS", "allow"]

GUARDS: dict[str, Any] = {
    "_getattr_": values.attribute,
    "_getitem_": values.item_of,
    "_getiter_": values.each,
    "_item_": values.item,
    "_index_": values.index_of_store,
    "_side_": values.side,
    "_spread_": values.spread,
    "_operate_": values.operate,
    "_single_": values.single,
    "_inplacevar_": values.in_place,
    "_augment_item_": values.augment_item,
    "_augment_side_": values.augment_side,
    "_text_": values.text,
    "_call_": called,
}
"""The guards by the names that a guarded text calls them by."""


def allow(function: Any) -> Any:
    """Let blocks call a function of ours that they are given."""
    CALLABLES[id(function)] = (function, "")
    return function
