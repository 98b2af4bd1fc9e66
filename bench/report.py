"""`python -m bench.report`: the tables of the kept results into `docs/performance.md`.

A workload's table stands between `<!-- bench: NAME -->` and `<!-- end -->`; the rest of the page is
left as it is.
"""

from __future__ import annotations

import importlib
import re

from bench.results import FOLDER, Result
from bench.turns import ROOT

WORKLOADS = (
    *("torch", "vllm_cpu", "sweep_cpu", "served"),
    *("vllm_gpu", "vllm_gpu_small", "vllm_gpu2", "sweep_gpu"),
)
PAGE = ROOT / "docs/performance.md"


def write_page() -> None:
    """Put the table of every result that is there into the page."""
    page = PAGE.read_text()
    for name in WORKLOADS:
        path = FOLDER / f"{name}.json"
        if path.exists():
            page = _replaced(page, name, _section(Result.read(path)))
    PAGE.write_text(page)


def _section(result: Result) -> str:
    workload = importlib.import_module(f"bench.workloads.{result.workload}")
    return f"{workload.table(result.measured).markdown()}\n\n{result.origin()}"


def _replaced(page: str, name: str, section: str) -> str:
    start = f"<!-- bench: {name} -->"
    place = re.compile(rf"{re.escape(start)}\n.*?(?=<!-- end -->)", re.DOTALL)
    if not place.search(page):
        raise ValueError(f"{PAGE.name} has no place for the table of {name!r} ({start}).")
    return place.sub(lambda _: f"{start}\n{section}\n", page, count=1)


if __name__ == "__main__":
    write_page()
