"""Frames: one message as bytes, a JSON header and raw buffers.

    4 bytes  magic "NNSF"
    1 byte   major version of the protocol
    1 byte   flags: 1 = the body is one zstd frame
    2 bytes  zero
    4 bytes  length of the header, little endian
    8 bytes  length of the body as it follows, little endian
    header   UTF-8 JSON object; `buffers` holds the length of each buffer
    body     the buffers, each padded with zeros to a multiple of 8 bytes

Frames follow one another without anything between them, so a stream of them can be cut at any byte
and read on later.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import orjson
import torch

from nnsight_core.errors import EncodeError, ProtocolError, SaveLimitError

VERSION = 1
"""Major version of the protocol that this code speaks; another one is refused."""
MEDIA_TYPE = "application/vnd.nnsight.frames"

_MAGIC = b"NNSF"
_PREFIX = struct.Struct("<4sBBHIQ")
_ZSTD = 1
_WORTH_COMPRESSING = 1 << 16
_MAX_HEADER = 1 << 28
_LENGTH = 24
"""Bytes that the length of a buffer may take in the header, beside what is sealed."""
_TOO_LONG = (
    f"{{}} bytes beside tensors and arrays are more than a message may have ({_MAX_HEADER}). Use a "
    "tensor or an array instead of a list of numbers."
)
_NONE = memoryview(b"")

Buffer = bytes | bytearray | memoryview


@dataclass(slots=True)
class Frame:
    """A message: its header, and the buffers that the header speaks of by index.

    Attributes:
        lengths: how many bytes each buffer has, where they are to be passed on and not to be read:
            then they are in pieces, of which one holds nothing of two buffers.
        coming: gives those pieces, where they are still on their way and not yet in `buffers`.
    """

    header: dict[str, Any]
    buffers: list[Buffer] = field(default_factory=list)
    lengths: list[int] | None = None
    coming: AsyncIterable[Buffer] | None = None
    _sealed: bytes | None = field(default=None, init=False, compare=False, repr=False)

    def seal(self) -> bytes:
        """The header as JSON, made once: whoever sends the frame cannot refuse it any more.

        Raises:
            EncodeError: JSON cannot say what is in the header.
            SaveLimitError: no reader would take so much.
        """
        if self._sealed is None:
            try:
                made = _json(self.header)
            except (TypeError, ValueError) as error:
                raise EncodeError(f"A value cannot be written as JSON: {error}.") from None
            size = len(made) + _LENGTH * (len(self.buffers) + 1)
            if size > _MAX_HEADER:
                raise SaveLimitError(_TOO_LONG.format(size))
            self._sealed = made
        return self._sealed

    @property
    def sizes(self) -> list[int]:
        """How many bytes each buffer has."""
        if self.lengths is not None:
            return self.lengths
        return [memoryview(buffer).nbytes for buffer in self.buffers]

    def parts(self, compress: bool = False) -> list[Buffer]:
        """The frame as pieces that follow one another; buffers are not copied."""
        lengths = self.sizes
        padding = Padding(lengths)
        body = [part for buffer in self.buffers for part in padding.after(buffer)]
        size = _padded(lengths)
        if compress and size >= _WORTH_COMPRESSING:
            packed = _compressor().compress(b"".join(body))
            if len(packed) < 0.9 * size:
                return [self._head(lengths, len(packed), _ZSTD), packed]
        return [self._head(lengths, size), *body]

    def head(self) -> bytes:
        """What comes before its buffers, where these are not packed."""
        return self._head(self.sizes, _padded(self.sizes))

    def to_bytes(self, compress: bool = False) -> bytes:
        """The frame as one piece."""
        return b"".join(self.parts(compress))

    def _head(self, lengths: list[int], size: int, flags: int = 0) -> bytes:
        header = _json({**self.header, "buffers": lengths})
        if len(header) > _MAX_HEADER:
            raise EncodeError(_TOO_LONG.format(len(header)))
        return _PREFIX.pack(_MAGIC, VERSION, flags, 0, len(header), size) + header


class Padding:
    """What stands between the buffers of a frame.

    Args:
        lengths: how many bytes each buffer has.

    Example:
        >>> padding = Padding([5, 8])
        >>> [padding.after(piece) for piece in (b"abc", b"de", b"abcdefgh")]
        [[b'abc'], [b'de', b'\\x00\\x00\\x00'], [b'abcdefgh']]
    """

    def __init__(self, lengths: list[int]) -> None:
        ends = zip(accumulate(lengths), lengths, strict=True)
        self._missing = {end: bytes(-length % 8) for end, length in ends if length % 8}
        self._at = 0

    def after(self, piece: Buffer) -> list[Buffer]:
        """The next piece of the buffers, and what follows it if a buffer ends with it."""
        self._at += memoryview(piece).nbytes
        missing = self._missing.pop(self._at, None)
        return [piece] if missing is None else [piece, missing]


class FrameTooLarge(ProtocolError):
    """A frame is beyond the reader's limit."""


class FrameReader:
    """Cuts a stream of bytes into frames.

    Args:
        limit: the most bytes that one frame may have, unpacked; None for no limit.
        unpacks: is told how many bytes a body will have before it is unpacked; what it raises
            keeps it packed.

    Example:
        >>> reader = FrameReader()
        >>> for chunk in response.iter_bytes():
        ...     for frame in reader.feed(chunk):
        ...         handle(frame)
        >>> reader.end()
    """

    def __init__(
        self, limit: int | None = None, unpacks: Callable[[int], None] = lambda _: None
    ) -> None:
        self._limit = limit
        self._unpacks = unpacks
        self._pending = bytearray()
        self._flags = 0
        self._header: bytes | None = None
        # A body goes where it stays, so that a large one is copied once.
        self._body = _NONE
        self._filled = 0

    def feed(self, chunk: Buffer) -> Iterator[Frame]:
        """The frames that are complete with this chunk.

        Raises:
            ProtocolError: the bytes are no frame, or one of another version.
            FrameTooLarge: a frame is beyond the limit.
        """
        rest = memoryview(chunk).cast("B")
        while True:
            if self._header is None:
                rest = self._begin(rest)
            if self._header is None:
                return
            taken = min(len(self.room), len(rest))
            self.room[:taken] = rest[:taken]
            rest = rest[taken:]
            frame = self.filled(taken)
            if frame is None:
                return
            yield frame

    @property
    def room(self) -> memoryview:
        """Where the rest goes of the body that is coming; empty where none is."""
        return self._body[self._filled :]

    def filled(self, count: int) -> Frame | None:
        """So many bytes were put into `room`; gives the frame if it is complete with them.

        Raises:
            ProtocolError: the bytes are no frame.
            FrameTooLarge: it is beyond the limit.
        """
        self._filled += count
        if self._header is None or self._filled < len(self._body):
            return None
        header, body = self._header, self._body
        self._header, self._body, self._filled = None, _NONE, 0
        packed = bool(self._flags & _ZSTD)
        return _frame(header, body, self._unpacks if packed else None, self._limit)

    @property
    def packed(self) -> bool:
        """Whether what is coming has a body that will be unpacked."""
        return self._header is not None and bool(self._flags & _ZSTD)

    def end(self) -> None:
        """Say that the stream is over.

        Raises:
            ProtocolError: it broke off inside a frame.
        """
        if self._pending or self._header is not None:
            size = len(self._pending) or _PREFIX.size + len(self._header or b"") + self._filled
            raise ProtocolError(f"The stream broke off inside a frame, after {size} bytes of it.")

    def _begin(self, rest: memoryview) -> memoryview:
        """Take what comes before a body; gives what is left."""
        pending = self._pending
        if len(pending) < _PREFIX.size:
            rest = self._take(rest, _PREFIX.size)
        if len(pending) < _PREFIX.size:
            if not _MAGIC.startswith(bytes(pending[:4])):
                raise ProtocolError(_no_frame(pending))
            return rest
        magic, version, flags, zero, header_size, body_size = _PREFIX.unpack_from(pending)
        if magic != _MAGIC:
            raise ProtocolError(_no_frame(pending))
        if version != VERSION:
            raise ProtocolError(
                f"The peer speaks version {version} of the protocol; this side knows {VERSION}. "
                "Install the same release of nnsight on both sides."
            )
        if zero or flags & ~_ZSTD or header_size > _MAX_HEADER:
            raise ProtocolError(_no_frame(pending))
        start = _PREFIX.size + header_size
        if self._limit is not None and start + body_size > self._limit:
            raise FrameTooLarge(
                f"A frame of {start + body_size} bytes is beyond the limit of {self._limit}."
            )
        rest = self._take(rest, start)
        if len(pending) == start:
            self._header, self._flags = bytes(pending[_PREFIX.size :]), flags
            self._body, self._filled = memory(body_size), 0
            pending.clear()
        return rest

    def _take(self, rest: memoryview, size: int) -> memoryview:
        count = min(size - len(self._pending), len(rest))
        self._pending += rest[:count]
        return rest[count:]


def memory(size: int) -> memoryview:
    """Memory for bytes that are coming, which takes room as it fills.

    It is PyTorch's, as that of other tensors: ordinary pages, or huge ones where PyTorch is told so
    (`THP_MEM_ALLOC_ENABLE=1`).

    Raises:
        FrameTooLarge: there is none.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu").numpy().data
    except (MemoryError, OverflowError, RuntimeError, TypeError):
        raise FrameTooLarge(f"A body of {size} bytes does not fit here.") from None


def read_frame(data: Buffer, limit: int | None = None) -> Frame:
    """The one frame that some bytes are.

    Raises:
        ProtocolError: they are not exactly one frame of this version.
    """
    reader = FrameReader(limit)
    frames = list(reader.feed(data))
    reader.end()
    if len(frames) != 1:
        raise ProtocolError(f"{len(frames)} frames came where one was expected.")
    return frames[0]


def join(frames: Iterable[Frame]) -> bytes:
    """Several frames as one piece."""
    return b"".join(frame.to_bytes() for frame in frames)


def _frame(
    header: bytes, body: Buffer, unpacks: Callable[[int], None] | None, limit: int | None
) -> Frame:
    try:
        fields = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"The header of a frame is not JSON: {error}.") from None
    lengths = fields.pop("buffers", None) if isinstance(fields, dict) else None
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ProtocolError("The header of a frame does not list its buffers.")
    expected = _padded(lengths)
    if unpacks is not None:
        if limit is not None and expected > limit:
            raise FrameTooLarge(f"A frame of {expected} bytes is beyond the limit of {limit}.")
        unpacks(expected)
        body = _unpack(body, expected)
    if expected != len(body):
        raise ProtocolError(
            f"The buffers of a frame have {len(body)} bytes where its header says {expected}."
        )
    buffers: list[Buffer] = []
    start = 0
    view = memoryview(body)
    for length in lengths:
        buffers.append(view[start : start + length])
        start += length + -length % 8
    return Frame(fields, buffers)


def _padded(lengths: list[int]) -> int:
    return sum(length + -length % 8 for length in lengths)


def _json(header: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(header)
    except TypeError as error:
        if "surrogates" not in str(error):
            raise
        # A text has a lone surrogate (a strange file name), which UTF-8 has not.
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def _compressor() -> Any:
    import zstandard

    return zstandard.ZstdCompressor(level=1)


def _unpack(body: Buffer, expected: int) -> bytes:
    import zstandard

    try:
        size = zstandard.frame_content_size(body)
        if size != expected:
            raise ProtocolError(
                f"A packed body says {size} bytes where its header says {expected}."
            )
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=expected)
    except (zstandard.ZstdError, MemoryError, OverflowError) as error:
        raise ProtocolError(f"A packed body cannot be unpacked: {error}.") from None


def _no_frame(pending: bytearray) -> str:
    return (
        f"These bytes are no frame of the nnsight protocol (they begin with "
        f"{bytes(pending[:16])!r}): is the peer an nnsight server?"
    )
