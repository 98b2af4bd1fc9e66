"""Typed values looked at without decoding them."""

from __future__ import annotations

from collections.abc import Iterator

from nnsight_core.wire.data import Json


def tagged(*values: Json) -> Iterator[dict[str, Json]]:
    """Every tagged object in some typed values, in no particular order.

    Of those, `b` is the index of a buffer, and `h` the content of a tensor that travels apart.
    """
    # Not recursive: what comes from a peer may be nested as deep as it likes.
    left: list[Json] = list(values)
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if "$" in value:
                yield value
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
