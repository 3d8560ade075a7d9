"""What the benchmarks share: tables for people, exponents, and the folder of the project."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Characters that make a token of English text, roughly; good enough for ratios.
CHARACTERS_PER_TOKEN = 4


@dataclass
class Table:
    """One table of the results: a heading, a sentence about how it was measured, and rows."""

    title: str
    note: str
    columns: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        grid = "\n".join("| " + " | ".join(map(shown, line)) + " |" for line in lines)
        return f"## {self.title}\n\n{self.note}\n\n{grid if self.rows else '_Nothing was measured._'}\n"


def shown(value: object) -> str:
    """A number with as many digits as it deserves, or the text."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.0f}"


def verdict(value: float, most: float) -> str:
    """Whether a target was met."""
    return f"≤ {most:g}: {'met' if value <= most else '**missed**'}"


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope in a log-log plot: 0 means that the cost stays, 1 that it grows as the work does."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    return statistics.linear_regression(x, y).slope


def p95(values: Sequence[float]) -> float:
    """The value that one in twenty exceeds."""
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)]
