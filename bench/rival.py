"""The environment of `nnsight==0.8.1`, which cannot share ours.

It is made when it is missing or its pins have changed, with the same Python and the same torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.turns import ROOT

PINS = ROOT / "requirements/rival.txt"
ENVIRONMENT = ROOT / ".venv-rival"


def rival_python() -> Path:
    """The interpreter of the rival's environment."""
    python = ENVIRONMENT / "bin/python"
    made_from = ENVIRONMENT / ".ready"
    pins = PINS.read_text()
    if not made_from.exists() or made_from.read_text() != pins:
        print(f"making {ENVIRONMENT.name}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        _install_torch(python, pins)
        _pip(python, "-r", str(PINS))
        made_from.write_text(pins)
    return python


def _install_torch(python: Path, pins: str) -> None:
    """Torch comes first and alone, as in the Makefile: its index knows nothing else."""
    [torch] = [line for line in pins.splitlines() if line.startswith("torch==")]
    try:
        _pip(python, torch)
    except subprocess.CalledProcessError:
        index = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
        _pip(python, "--index-url", index, torch)


def _pip(python: Path, *what: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--no-deps"]
    subprocess.run([*command, *what], check=True)
