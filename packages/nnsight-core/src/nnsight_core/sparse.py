"""Data whose later fields are written only where they say something.

So a side that does not know such a field yet still reads the rest.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer


class Sparse(BaseModel):
    """A model whose `later` fields are left out where they hold their defaults."""

    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = plain(self)
        for name in self.later:
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if name in data and getattr(self, name) == default:
                del data[name]
        return data
