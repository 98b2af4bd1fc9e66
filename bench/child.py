"""One engine in a process of its own, which runs what it is asked for and tells how long it took.

    python -m bench.child bench.engines.nnsight_core torch nnsight-core

The first argument is the engine's module, the others are the packages whose versions are told. A
question is a line of JSON on standard input, an answer one on standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from importlib.metadata import version
from time import perf_counter


def main(engine: str, packages: list[str]) -> None:
    # What the engine prints goes to standard error, so that only answers come out here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    cases = importlib.import_module(engine).cases()
    versions = {package: version(package) for package in packages}
    answer({"python": platform.python_version(), **versions})
    for line in sys.stdin:
        name, calls = json.loads(line)
        case = cases[name]
        start = perf_counter()
        for _ in range(calls):
            case()
        answer((perf_counter() - start) / calls)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
