"""Data whose later fields are written only where they say something.

So a side that does not know such a field yet still reads the rest.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer


class Sparse(BaseModel):
    """A model whose `later` fields are left out where they hold their defaults."""

    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = plain(self)
        for name, default in _defaults(type(self)):
            if name in data and getattr(self, name) == default:
                del data[name]
        return data


@cache
def _defaults(cls: type[Sparse]) -> list[tuple[str, Any]]:
    # pydantic looks at a factory's signature each time, which takes longer than all the rest.
    fields = cls.model_fields
    return [(name, fields[name].get_default(call_default_factory=True)) for name in cls.later]
