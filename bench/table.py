"""Tables, as text for a terminal and as Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the first column is text, the others are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """The table with its columns lined up."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def lined_up(line: Sequence[str]) -> str:
            cells = [line[0].ljust(widths[0])]
            cells += [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
            return "  ".join(cells)

        return "\n".join(lined_up(line) for line in lines)

    def markdown(self) -> str:
        """The table as Markdown."""
        rule = ["---", *["--:"] * (len(self.header) - 1)]
        lines = [self.header, rule, *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def typical_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """How much longer one thing took than another in the same round; the median of the rounds."""
    return median(a - b for a, b in zip(some, others, strict=True))


def typical_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """How many times as long one thing took as another in the same round; the median."""
    return median(a / b for a, b in zip(some, others, strict=True))
