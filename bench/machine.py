"""Which machine the numbers are from."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> dict[str, str | int]:
    """The processor's name, and how many cores of it may be used."""
    return {
        **_gpu(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
    }


def _gpu() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
