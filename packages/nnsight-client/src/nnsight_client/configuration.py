"""The user's own server (`remote=True`): its address and key, from the environment or a file."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
import tomllib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnsight_client.addresses import check_address
from nnsight_client.keys import check_key
from nnsight_core.errors import NNsightWarning

SERVER = "NNSIGHT_SERVER"
API_KEY = "NNSIGHT_API_KEY"
_NAMES = ("server", "api_key")
_warned: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Configuration:
    """A server and the key that it wants."""

    server: str
    api_key: str | None = field(default=None, repr=False)


def configure(server: str, api_key: str | None = None) -> Path:
    """Write down the server that `remote=True` means, for this user alone to read.

    Args:
        server: its address.
        api_key: the key that it wants, if it wants one.

    Returns:
        The file that it stands in; what stood there before is gone.

    Raises:
        ValueError: `server` is no address, or the key cannot travel in a header.

    Example:
        >>> nnsight_client.configure("https://models.example.org", api_key="...")
        >>> model = VLLM("openai-community/gpt2", remote=True)
    """
    given = {"server": check_address(server), "api_key": check_key(api_key)}
    for name, value in given.items():
        if value is not None and not (value.isascii() and value.isprintable()):
            raise ValueError(f"{name} holds characters that no header can carry.")
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items() if value]
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Made for its owner alone from the first byte on, and never half of it is seen.
    handle, new = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as out:
        out.writelines(lines)
    os.replace(new, path)
    return path


def configured() -> Configuration:
    """What the environment and the file say; the environment wins.

    Raises:
        ValueError: neither names a server, or the file is not well formed.
    """
    told = _read(file())
    server, api_key = told.get("server"), told.get("api_key")
    named = os.environ.get(SERVER, "").strip()
    if named:
        # The key that stands in the file is shown to the server that stands there, and no other.
        same = server is not None and named.rstrip("/") == server.rstrip("/")
        server, api_key = named, api_key if same else None
    if not server:
        raise ValueError(
            f"remote=True needs a server: set {SERVER} (and {API_KEY}), or call "
            f'`nnsight_client.configure(server="https://...", api_key="...")` once, which writes '
            f"{file()}."
        )
    return Configuration(server, os.environ.get(API_KEY, "").strip() or api_key)


def choose(serve: str | None, api_key: str | None, remote: bool) -> tuple[str | None, str | None]:
    """The address and key that `serve=`, `api_key=` and `remote=` mean together.

    Raises:
        ValueError: both `serve=` and `remote=True`, or `remote=True` without a configuration.
    """
    if not remote:
        return serve, api_key
    if serve is not None:
        raise ValueError("serve= names a server, remote=True means the configured one: give one.")
    found = configured()
    return found.server, api_key or found.api_key


def file() -> Path:
    """Where the file is, whether it exists or not."""
    home = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(home) if home else Path.home() / ".config"
    return folder / "nnsight" / "config.toml"


def _read(path: Path) -> dict[str, str]:
    try:
        told: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for name, value in told.items():
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, 1, 0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes {' and '.join(_NAMES)}."
            raise ValueError(f"{path} says {name!r}, which is unknown. {hint}")
        if not isinstance(value, str):
            raise ValueError(f'{path}: {name} is a text, such as {name} = "...".')
    if "api_key" in told and path not in _warned and _is_open(path):
        _warned.add(path)
        warnings.warn(
            f"{path} holds a key, and others can read it: `chmod 600 {path}`.",
            NNsightWarning,
            stacklevel=2,
        )
    return told


def _is_open(path: Path) -> bool:
    """Whether others than its owner can read a file."""
    return os.name == "posix" and bool(path.stat().st_mode & 0o077)
