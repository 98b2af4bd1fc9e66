"""The main job, from end to end: serve a real model on vLLM's CPU backend, trace it from a client.

The server runs in this environment. The client runs in one that holds nnsight-client and
nnsight-core and no vLLM (`.venv-client`, see the Makefile). Ends by itself and leaves no process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from prepare_models import prepare

ROOT = Path(__file__).parent.parent
CLIENT = ROOT / ".venv-client" / "bin" / "python"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
PATIENCE = 180.0


def main() -> int:
    """Prepare, serve, trace, stop; the client's exit status."""
    started = time.monotonic()
    print("1. A real language model, SmolLM2-135M, made ready without a hub")
    model = prepare("smollm2")
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    serve = str(Path(sys.executable).with_name("nnsight-serve"))
    command = [serve, str(model), "--port", str(port)]
    command += ["--max-model-len", "512", "--served-model-name", "SmolLM2-135M"]
    # Two traces are over long before compiling the model, which takes most of a minute on two
    # cores, would pay.
    command += ["--enforce-eager"]
    print(f"2. nnsight-serve on vLLM's CPU backend, at {url} (half a minute)")
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait(server, url)
            print("3. A client without vLLM runs its blocks in that engine's forward pass\n")
            sys.stdout.flush()
            client = [str(CLIENT), str(Path(__file__).with_name("demo_client.py")), url, str(model)]
            status = subprocess.run(client, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode
        except RuntimeError as error:
            log.seek(0)
            print(log.read()[-4000:], error, sep="\n", file=sys.stderr)
            status = 1
        finally:
            left = _stop(server)
    print(f"\nDone in {time.monotonic() - started:.0f} s; processes left: {left}")
    return status or left


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"The server ended with status {server.returncode}.")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.25)
    raise RuntimeError(f"The server was not ready within {PATIENCE:.0f} s.")


def _stop(server: subprocess.Popen[bytes]) -> int:
    """End the server; how many of its processes are still there afterwards."""
    try:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    server.terminate()
    server.wait(60)
    _, left = psutil.wait_procs(family, timeout=15)
    for process in left:
        process.kill()
    return len(left)


if __name__ == "__main__":
    sys.exit(main())
