"""Results as files: `bench/results/<workload>.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from bench.machine import machine
from bench.turns import ROOT, Measured

FOLDER = ROOT / "bench/results"


@dataclass(frozen=True)
class Result:
    """What a workload gave, on which machine and when."""

    workload: str
    date: str
    machine: dict[str, str | int]
    measured: Measured

    @classmethod
    def of(cls, workload: str, measured: Measured) -> Self:
        """A result of now, on this machine."""
        return cls(workload, datetime.now(UTC).date().isoformat(), machine(), measured)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The result that a file holds."""
        held = json.loads(path.read_text())
        return cls(**{**held, "measured": Measured(**held["measured"])})

    def write(self) -> None:
        """Keep the result; one of the same workload is replaced."""
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / f"{self.workload}.json"
        held = asdict(self)
        for engines in held["measured"]["seconds"].values():
            for engine, rounds in engines.items():
                engines[engine] = [float(f"{seconds:.5g}") for seconds in rounds]
        path.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n")

    def origin(self) -> str:
        """Where the numbers come from, in a sentence."""
        cpu, cores = self.machine["cpu"], self.machine["cores"]
        versions = {
            f"{package} {version}"
            for packages in self.measured.versions.values()
            for package, version in packages.items()
        }
        where = f"{gpu}, {cpu}" if (gpu := self.machine.get("gpu")) else cpu
        return f"{where}, {cores} cores; {', '.join(sorted(versions))}; {self.date}."
