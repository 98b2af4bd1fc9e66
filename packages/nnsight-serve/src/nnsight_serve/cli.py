"""The command `nnsight-serve`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from typing import Any

from nnsight_core.keeps import LIMIT, SECONDS
from nnsight_serve.app import create_app
from nnsight_serve.logs import configure
from nnsight_serve.server import Server
from nnsight_serve.settings import (
    API_KEY,
    EDIT_BYTES,
    GRACE,
    HOST,
    MAX_BODIES,
    MAX_BODY,
    MAX_EDITS,
    MAX_REQUESTS,
    MAX_SAVES,
    MAX_UPLOADS,
    PORT,
    Settings,
    key_of_environment,
    keys_of,
    keys_of_file,
)
from nnsight_vllm_worker.engine import BLOCK_TIMEOUT
from nnsight_vllm_worker.vllm_ports import arguments

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
        print("vLLM's flags of its engine and its OpenAI routes are taken too:\n", flush=True)
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
    configure(settings.log_format)
    server = Server(app, settings, lambda line: print(line, flush=True))
    try:
        server.run()
    except SystemExit:
        if server.stopped:
            return 0
        # What stands last is what people read.
        print(f"nnsight-serve: {app.state.failure or 'could not start'}", file=sys.stderr)
        return 1
    return 0


def _settings(command: list[str], ours: argparse.ArgumentParser) -> Settings:
    found, engine, routes = arguments.parse(command, ours)
    return Settings(
        model=found.model,
        engine={**engine, **({"taps": found.tap} if found.tap else {})},
        openai=routes,
        host=found.host,
        port=found.port,
        api_keys=_keys(found),
        policy=found.policy,
        max_body=found.max_body,
        max_bodies=found.max_bodies,
        max_uploads=found.max_uploads,
        max_saves=found.max_saves,
        max_concurrent=found.max_concurrent,
        max_requests=found.max_requests,
        max_edits=found.max_edits,
        edit_bytes=found.edit_bytes,
        block_timeout=found.block_timeout,
        keep_bytes=found.keep_bytes,
        keep_seconds=found.keep_seconds,
        grace=found.grace,
        log_format=found.log_format,
    )


def _keys(found: argparse.Namespace) -> dict[str, str]:
    given = list(found.api_key or [])
    if found.api_keys_file is not None:
        given += keys_of_file(found.api_keys_file)
    return keys_of(given) or key_of_environment()


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
        "--api-keys-file",
        metavar="FILE",
        help="file with a NAME:KEY in each line, besides empty ones and # comments",
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
        "--max-bodies",
        metavar="BYTES",
        type=int,
        default=MAX_BODIES,
        help="how much memory the requests that are under way may take together (%(default)s)",
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
        "--max-requests",
        metavar="N",
        type=int,
        default=MAX_REQUESTS,
        help="how many requests of all keys may be in the engine, waiting ones included "
        "(%(default)s)",
    )
    add(
        "--max-edits",
        metavar="N",
        type=int,
        default=MAX_EDITS,
        help="how many edits one key may have installed (%(default)s)",
    )
    add(
        "--edit-bytes",
        metavar="BYTES",
        type=int,
        default=EDIT_BYTES,
        help="how much memory the edits of one key may take (%(default)s)",
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
    add(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=GRACE,
        help="how long running requests may go on when the server is told to end (%(default)s)",
    )
    add(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="how the line looks that is written for each request (%(default)s)",
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
