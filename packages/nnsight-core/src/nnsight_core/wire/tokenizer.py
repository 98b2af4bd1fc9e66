"""A tokenizer on the wire: the files that transformers saves it as, which are data alone."""

from __future__ import annotations

import hashlib
import re

from nnsight_core.errors import ProtocolError
from nnsight_core.wire.frames import Frame

KIND = "tokenizer"
LIMIT = 1 << 28
"""The most bytes that the files of a tokenizer may have."""
# Texts, and the protocol buffers of SentencePiece. Nothing that could be run has such a name.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.(json|txt|jinja|model)")


def is_file(name: str) -> bool:
    """Whether a file of this name may be part of a tokenizer."""
    return _NAME.fullmatch(name) is not None


def frame_of(files: dict[str, bytes]) -> Frame:
    """The frame that carries a tokenizer's files, by name."""
    return Frame({"kind": KIND, "files": list(files)}, list(files.values()))


def files_of(frame: Frame) -> dict[str, bytes]:
    """The files that a frame carries.

    Raises:
        ProtocolError: it carries none, or one that cannot be part of a tokenizer.
    """
    names = frame.header.get("files") if frame.header.get("kind") == KIND else None
    if not isinstance(names, list) or len(names) != len(frame.buffers):
        raise ProtocolError("A frame came that carries no tokenizer.")
    for name in names:
        if not isinstance(name, str) or not is_file(name):
            raise ProtocolError(f"A tokenizer came with a file {str(name)[:40]!r}.")
    return {name: bytes(buffer) for name, buffer in zip(names, frame.buffers, strict=True)}


def digest_of(files: dict[str, bytes]) -> str:
    """What tells a tokenizer's files from any others."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
