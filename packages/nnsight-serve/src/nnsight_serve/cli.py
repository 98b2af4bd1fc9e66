"""The command `nnsight-serve`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from typing import Any

import uvicorn

from nnsight_core.keeps import LIMIT, SECONDS
from nnsight_core.wire.frames import VERSION
from nnsight_serve.app import create_app
from nnsight_serve.settings import (
    API_KEY,
    HOST,
    MAX_BODY,
    MAX_SAVES,
    MAX_UPLOADS,
    PORT,
    Settings,
    key_of_environment,
    keys_of,
)
from nnsight_vllm_worker.engine import BLOCK_TIMEOUT
from nnsight_vllm_worker.vllm_ports import arguments

GRACE = 10
"""Seconds that running traces get when the server is told to end."""
USAGE_ERROR = 2


def main() -> None:
    """Serve a model until told to end.

    Example:
        $ nnsight-serve openai-community/gpt2 --port 6677 --max-model-len 1024
    """
    sys.exit(serve(sys.argv[1:]))


def serve(command: list[str]) -> int:
    """What `main` does, given the arguments; gives the exit code."""
    ours = _parser()
    asked = next((part for part in command if part in ("-h", "--help") or _about(part)), None)
    if asked is not None:
        print(ours.format_help(), flush=True)
        print("Every engine flag of vLLM is taken too, in vLLM's own spelling.\n", flush=True)
        print(arguments.engine_help(_about(asked)))
        return 0
    try:
        settings = _settings(command, ours)
    except (arguments.UsageError, ValueError) as error:
        print(f"nnsight-serve: {error}\n{ours.format_usage()}", end="", file=sys.stderr)
        return USAGE_ERROR
    taken = _why_taken(settings)
    if taken is not None:
        # Said before the engine is built, which takes long.
        print(f"nnsight-serve: {taken}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn ends gracefully on these, then raises them again for whoever was there before it.
        signal.signal(number, lambda *_: None)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        settings.host,
        settings.port,
        log_level="warning",
        timeout_graceful_shutdown=GRACE,
    )
    try:
        _Server(config, settings).run()
    except SystemExit:
        # What stands last is what people read.
        print(f"nnsight-serve: {app.state.failure or 'could not start'}", file=sys.stderr)
        return 1
    return 0


class _Server(uvicorn.Server):
    """A server that says when it is ready."""

    def __init__(self, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            print(_ready(self._settings, port), flush=True)


def _ready(settings: Settings, port: int) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    who = "whoever has a key" if settings.api_keys else "whoever reaches this address"
    return (
        f"nnsight-serve: http://{host}:{port} serves {settings.model} (protocol {VERSION}; policy "
        f"trusted: blocks are code, and {who} can run any code here)"
    )


def _settings(command: list[str], ours: argparse.ArgumentParser) -> Settings:
    found, engine = arguments.parse(command, ours)
    return Settings(
        model=found.model,
        engine={**engine, **({"taps": found.tap} if found.tap else {})},
        host=found.host,
        port=found.port,
        api_keys=keys_of(found.api_key or []) or key_of_environment(),
        policy=found.policy,
        max_body=found.max_body,
        max_uploads=found.max_uploads,
        max_saves=found.max_saves,
        max_concurrent=found.max_concurrent,
        block_timeout=found.block_timeout,
        keep_bytes=found.keep_bytes,
        keep_seconds=found.keep_seconds,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "nnsight-serve",
        usage="nnsight-serve MODEL [options] [vLLM's engine flags]",
        description="Serve a model on vLLM over HTTP; requests may carry nnsight blocks.",
        add_help=False,
    )
    add: Any = parser.add_argument
    add("model", metavar="MODEL", help="the model's name or folder, as vLLM takes it")
    host, port = os.environ.get(HOST, "127.0.0.1"), os.environ.get(PORT, "6677")
    add("--host", default=host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=port, help="port to listen on; 0 for a free one (%(default)s)")
    add(
        "--api-key",
        metavar="[NAME:]KEY",
        action="append",
        help=f"key that clients must send; may be repeated (or set {API_KEY} to one)",
    )
    add(
        "--tap",
        metavar="PATTERN",
        action="append",
        help="a location that blocks reach in compiled steps; may be repeated (resid)",
    )
    add(
        "--max-body",
        metavar="BYTES",
        type=int,
        default=MAX_BODY,
        help="the largest request that is taken (%(default)s)",
    )
    add(
        "--policy",
        choices=("trusted", "restricted"),
        default="trusted",
        help="what blocks may do: anything, or what a list allows (%(default)s)",
    )
    add(
        "--max-uploads",
        metavar="BYTES",
        type=int,
        default=MAX_UPLOADS,
        help="how many bytes of clients' tensors stay here, for them to name again (%(default)s)",
    )
    add(
        "--max-saves",
        metavar="BYTES",
        type=int,
        default=MAX_SAVES,
        help="the most that one request may bring home (%(default)s)",
    )
    add(
        "--max-concurrent",
        metavar="N",
        type=int,
        help="how many requests of one key may be in the engine at once (any number)",
    )
    add(
        "--block-timeout",
        metavar="SECONDS",
        type=float,
        default=BLOCK_TIMEOUT,
        help="how long a block may hold the engine before it gives control back (%(default)s)",
    )
    add(
        "--keep-bytes",
        metavar="BYTES",
        type=int,
        default=LIMIT,
        help="how much memory kept values may take (%(default)s)",
    )
    add(
        "--keep-seconds",
        metavar="SECONDS",
        type=float,
        default=SECONDS,
        help="how long kept values stay (%(default)s)",
    )
    return parser


def _about(part: str) -> str | None:
    """What `--help=WHAT` asks about."""
    return part.removeprefix("--help=") if part.startswith("--help=") else None


def _why_taken(settings: Settings) -> str | None:
    """Why the address cannot be listened on; None if it can."""
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, proto, _, address in found[:1]:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except (OSError, OverflowError) as error:
        return f"cannot listen on {settings.host}:{settings.port}: {error}. Give another --port."
    return None
