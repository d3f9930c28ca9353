"""The greatest common divisor of several numbers, two at a time by remainders: the strategies differ in which two.

    x             24 18 30 12
    from_left       24 18 6 0   6 30 6 0     6 12 6 0
    from_right      12 30 12 6 0   6 18 6 0   6 24 6 0
    in_pairs        24 18 6 0   30 12 6 0     6 6 0

Two numbers are followed by the remainder of the last two written, until it is 0; the divisor stands before the 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import GeneratedTask, numbers

if TYPE_CHECKING:
    import numpy as np

LARGEST = 36
LARGEST_COMMON_FACTOR = 6


class GreatestCommonDivisor(GeneratedTask):
    """`size` numbers from 2 to 36 that share a factor from 1 to 6; 1,498,930 lists at 4."""

    name = "greatest_common_divisor"
    strategies = ("from_left", "from_right", "in_pairs")
    sizes = range(4, 9)
    default_size = 4

    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        factor = int(rng.integers(1, LARGEST_COMMON_FACTOR + 1))
        least = 2 if factor == 1 else 1
        return [str(factor * int(value)) for value in rng.integers(least, LARGEST // factor + 1, size=self.size)]

    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        values = numbers(x, LARGEST)
        if values is None or len(values) != self.size or min(values) < 2:
            raise ValueError(f"expected {self.size} numbers from 2 to {LARGEST}")
        return tuple([str(value) for value in trace] for trace in (_fold(values), _fold(values[::-1]), _pair(values)))

    def solve(self, x: Sequence[str]) -> str:
        return str(gcd(*(int(token) for token in x)))

    def read_answer(self, y: Sequence[str]) -> str | None:
        """The number before the last, which is 0; None where that 0 does not end two numbers and their remainders."""
        if len(y) < 3 or y[-1] != "0" or "0" in y[-3:-1] or numbers(y, LARGEST) is None:
            return None
        return y[-2]


def _remainders(first: int, second: int) -> list[int]:
    written = [first, second]
    while written[-1]:
        written.append(written[-2] % written[-1])
    return written


def _fold(values: Sequence[int]) -> list[int]:
    divisor, written = values[0], []
    for value in values[1:]:
        chain = _remainders(divisor, value)
        written += chain
        divisor = chain[-2]
    return written


def _pair(values: Sequence[int]) -> list[int]:
    """Neighbours first, then what they gave, until one is left; an odd one out waits."""
    written: list[int] = []
    while len(values) > 1:
        chains = [_remainders(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        written += [value for chain in chains for value in chain]
        values = [chain[-2] for chain in chains] + list(values[len(values) - len(values) % 2 :])
    return written
