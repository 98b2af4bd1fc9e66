"""The model's tokenizer on a laptop: transformers' own, or the one that the server hands out.

What a server hands out is data, and nothing of it is run. It is kept on disk by its content, so
that it comes over the network once, and is there while the server is not.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnsight_client.http_backend import HttpBackend
from nnsight_core.errors import NNsightError, ProtocolError
from nnsight_core.tree_cache import cache_folder
from nnsight_core.wire.tokenizer import digest_of


def find_tokenizer(name: str, backend_for: Callable[[dict[str, Any]], Any]) -> Any:
    """The tokenizer of a model.

    Args:
        name: the model's name or folder.
        backend_for: gives the backend of the model's server, or raises.

    Raises:
        Exception: what transformers says, where no server helps.
    """
    try:
        return _loaded(name)
    except Exception as error:  # of transformers, of the hub, of whatever the files hold
        try:
            backend = backend_for({})
        except ValueError:
            raise error from None
        try:
            return _loaded(str(served_tokenizer(getattr(backend, "now", backend), name)))
        except (NNsightError, OSError) as other:
            error.add_note(f"The server's could not be had either: {other}")
            raise error from None


def served_tokenizer(server: HttpBackend, name: str) -> Path:
    """The folder that holds the files of a server's tokenizer.

    Raises:
        ProtocolError: the server cannot be reached, and its tokenizer was never met.
        NotSupportedError: it has none to hand out.
    """
    home = cache_folder("tokenizers")
    known = home / hashlib.blake2b(f"{server.url}\0{name}".encode(), digest_size=16).hexdigest()
    digest = known.read_text() if known.is_file() else ""
    have = bool(digest) and (home / digest).is_dir()
    try:
        files = server.tokenizer(digest if have else None)
    except ProtocolError:
        if not have:
            raise
        files = None
    if files is None:
        return home / digest
    digest = digest_of(files)
    _keep(home / digest, files)
    _write(known, digest.encode())
    return home / digest


def _loaded(name: str) -> Any:
    from transformers import AutoTokenizer

    # Said aloud, since otherwise transformers asks at the terminal.
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def _keep(folder: Path, files: dict[str, bytes]) -> None:
    """Have the files in a folder, which is there as a whole or not at all."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as new:
        made = Path(new) / "files"
        made.mkdir()
        for name, content in files.items():
            (made / name).write_bytes(content)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # unless another process was faster
                raise


def _write(file: Path, content: bytes) -> None:
    new = file.with_suffix(f".{os.getpid()}")
    new.write_bytes(content)
    new.replace(file)
