"""Time side by side: contenders in one process, in turns, so that what slows the machine slows them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Times:
    """Seconds of every contender in every round."""

    seconds: Mapping[str, list[float]]

    def ratio(self, name: str, to: str) -> tuple[float, float]:
        """Minimum over minimum, and the median of the ratios within a round."""
        own, other = self.seconds[name], self.seconds[to]
        paired = [a / b for a, b in zip(own, other, strict=True)]
        return min(own) / min(other), statistics.median(paired)


def measure(contenders: Mapping[str, Callable[[], Any]], rounds: int = 20, calls: int = 1) -> Times:
    """Run every contender once a round, each round beginning with the next one.

    Args:
      contenders: each runs its program once and gives its results, which are waited for.
      rounds: after one round that is not counted, in which everything is compiled.
      calls: of a contender in its turn, one after another: more for programs of a millisecond.
    """
    names = list(contenders)
    for name in names:
        jax.block_until_ready(contenders[name]())
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            begun = time.perf_counter()
            for _ in range(calls):
                result = contenders[name]()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - begun) / calls)
    return Times(seconds)


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, and what it should be. `value` and `paired` are ratios unless `unit`."""

    what: str
    value: float
    paired: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    @property
    def judged(self) -> float:
        """The paired median where there is one: a minimum may be one lucky round."""
        return self.value if self.paired is None else self.paired

    def verdict(self) -> str:
        if self.at_most is not None:
            return "met" if self.judged <= self.at_most else "missed"
        if self.at_least is not None:
            return "met" if self.judged >= self.at_least else "missed"
        return ""

    def target(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| what | min / min | paired median | target | |", "|---|---|---|---|---|"]
    for row in rows:
        paired = "" if row.paired is None else f"{row.paired:.3f}"
        lines.append(f"| {row.what} | {row.value:.4g}{row.unit} | {paired} | {row.target()} | {row.verdict()} |")
    return "\n".join(lines)
