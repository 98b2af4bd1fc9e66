"""`python -m bench [WORKLOAD ...]`: measure, keep the results as JSON and print the tables.

`python -m bench load` has a way and arguments of its own; see `bench.workloads.load`.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from bench.report import WORKLOADS, write_page
from bench.results import Result


def main() -> None:
    """Run the workloads that are named, or all that need no GPU."""
    if sys.argv[1:2] == ["load"]:
        importlib.import_module("bench.workloads.load").main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--page", action="store_true", help="write docs/performance.md anew, too")
    chosen = parser.parse_args()
    if unknown := set(chosen.workloads) - set(WORKLOADS):
        parser.error(f"unknown: {', '.join(sorted(unknown))} (choose from {', '.join(WORKLOADS)})")
    here = [name for name in WORKLOADS if "gpu" not in name]
    for name in chosen.workloads or here:
        workload = importlib.import_module(f"bench.workloads.{name}")
        result = Result.of(name, workload.measure())
        result.write()
        print(
            f"\n{name}: {result.origin()}\n\n{workload.table(result.measured).text()}", flush=True
        )
    if chosen.page:
        write_page()


if __name__ == "__main__":
    main()
