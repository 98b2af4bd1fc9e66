"""Typed values up to a limit: what is beyond it is refused before it is copied."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nnsight_core.errors import EncodeError, SaveLimitError
from nnsight_core.wire.data import SMALL, Encoder, Json
from nnsight_core.wire.frames import Buffer


@dataclass
class Room:
    """How many bytes several encoders may still fill together.

    Attributes:
        limit: how many they were.
        left: how many are left.
    """

    limit: int
    left: int

    @classmethod
    def of(cls, limit: int) -> Room:
        """Room for so many bytes."""
        return cls(limit, limit)


class BoundedEncoder(Encoder):
    """Encodes what there is room for; a number counts as eight bytes.

    Example:
        >>> BoundedEncoder(Room.of(1 << 20)).encode(torch.zeros(1 << 20), "hidden")
        SaveLimitError: hidden does not fit: ...
    """

    def __init__(self, room: Room) -> None:
        super().__init__()
        self.room = room

    def too_large(self) -> EncodeError:
        """The error for what there is no room for."""
        taken = self.room.limit - self.room.left
        return SaveLimitError(
            f"{self.where()} does not fit: the saves of one request may have {self.room.limit} "
            f"bytes here (max_saves), of which {taken} are taken. Save a part of it, reduce it in "
            "the block, or keep it on the engine with `.keep()`."
        )

    def _encode(self, value: object) -> Json:
        left = self.room.left
        try:
            self._take(str.__len__(value) if isinstance(value, str) else 8)
            return super()._encode(value)
        except BaseException:
            self.room.left = left
            raise

    def buffer(self, data: Buffer) -> int:
        self._take(memoryview(data).nbytes)
        return super().buffer(data)

    def fits(self, nbytes: int) -> bool:
        return nbytes <= self.room.left

    def tensor(self, tensor: Tensor) -> dict[str, Json]:
        nbytes = tensor.numel() * tensor.element_size()
        # A small one may lie among others, which have been counted.
        if nbytes > SMALL and not self.fits(nbytes):
            raise self.too_large()
        return super().tensor(tensor)

    def _take(self, nbytes: int) -> None:
        if not self.fits(nbytes):
            raise self.too_large()
        self.room.left -= nbytes
