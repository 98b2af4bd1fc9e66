"""A server for what is measured, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.workloads.vllm_cpu import ENVIRONMENT

READY = re.compile(r"nnsight-serve: (http://\S+) serves")
PATIENCE = 300


@contextmanager
def serving(path: str, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server, which must end in order."""
    command = [str(Path(sys.executable).with_name("nnsight-serve")), path, "--port", "0", *flags]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        environment = {**os.environ, **ENVIRONMENT}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield process, _ready(process, Path(log.name))
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise RuntimeError(f"The server ended with {process.returncode}.")
        finally:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if found := READY.search(log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"The server did not become ready:\n{log.read_text()}")
