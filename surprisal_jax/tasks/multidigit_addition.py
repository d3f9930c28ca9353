"""Adding two numbers: y is a list of running totals, and the strategies differ in what is added when.

    x                       3 4 5 + 2 7 8
    columns_from_ones         3 1 0 0   3 2 1 0   3 2 6 0      13, 13 + 110, 123 + 500
    columns_from_hundreds     0 0 5 0   0 1 6 0   3 2 6 0      500, 500 + 110, 610 + 13
    onto_first_number         5 4 5 0   5 1 6 0   3 2 6 0      345 + 200, + 70, + 8

Totals have one digit more than the numbers, and are written from the ones digit up, the way a carry runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import GeneratedTask, numbers

if TYPE_CHECKING:
    import numpy as np


class MultidigitAddition(GeneratedTask):
    """Add two numbers of `size` digits each; 801,900 pairs at 3."""

    name = "multidigit_addition"
    strategies = ("columns_from_ones", "columns_from_hundreds", "onto_first_number")
    sizes = range(2, 9)
    default_size = 3

    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        first, second = (str(int(rng.integers(10 ** (self.size - 1), 10**self.size))) for _ in range(2))
        return [*first, "+", *second]

    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        first, second = self._parse(x)
        places = [10**place for place in range(self.size)]
        columns = [(first // place % 10 + second // place % 10) * place for place in places]
        parts = [second // place % 10 * place for place in reversed(places)]
        totals = (
            accumulate(columns),
            accumulate(reversed(columns)),
            (first + part for part in accumulate(parts)),
        )
        return tuple([digit for total in strategy for digit in self._digits(total)] for strategy in totals)

    def solve(self, x: Sequence[str]) -> str:
        return " ".join(self._digits(sum(self._parse(x))))

    def read_answer(self, y: Sequence[str]) -> str | None:
        """The last total; None where y is not a number of whole totals."""
        if not y or len(y) % (self.size + 1) or numbers(y, 9) is None:
            return None
        return " ".join(y[-self.size - 1 :])

    def _parse(self, x: Sequence[str]) -> tuple[int, int]:
        first, sign, second = x[: self.size], x[self.size : self.size + 1], x[self.size + 1 :]
        for number in (first, second):
            if len(number) != self.size or numbers(number, 9) is None or number[0] == "0" or list(sign) != ["+"]:
                raise ValueError(f"expected two numbers of {self.size} digits of the form '3 4 5 + 2 7 8'")
        return int("".join(first)), int("".join(second))

    def _digits(self, total: int) -> list[str]:
        """From the ones up."""
        return list(reversed(str(total).zfill(self.size + 1)))
