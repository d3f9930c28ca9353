"""Solving a linear equation: y rewrites it step by step, and the strategies differ in what they move first.

    x                    9 x + 4 0 7 = 2 x + 4 3 5
    unknowns_to_left       7 x + 7 0 4 = 5 3 4 ; 7 x = 8 2 ; x = 4
    constants_to_right     9 x = 2 x + 8 2     ; 7 x = 8 2 ; x = 4
    unknowns_to_right      7 0 4 = 5 3 4 - 7 x ; 7 x = 8 2 ; x = 4

In y numbers are written from the ones digit up, the way a borrow runs: 7 0 4 is 407.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import GeneratedTask, numbers

if TYPE_CHECKING:
    import numpy as np

EXPECTED = "expected an equation of the form '9 x + 4 0 7 = 2 x + 4 3 5'"

_TERM = "[0-9](?: [0-9])*(?: x)?"
_SIDE = f"{_TERM}(?: [+-] {_TERM})?"
_TRACE = re.compile(f"(?:{_SIDE} = {_SIDE} ; )+x = ([0-9])")


class LinearEquations(GeneratedTask):
    """`a x + b = c x + d` with digits a >= c + 2, c >= 1, an unknown from 1 to 9 and constants of `size` digits;
    221,760 equations at 3."""

    name = "linear_equations"
    strategies = ("unknowns_to_left", "constants_to_right", "unknowns_to_right")
    sizes = range(2, 7)
    default_size = 3

    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        while True:
            left, right, unknown = (int(value) for value in rng.integers(1, 10, size=3))
            constant = int(rng.integers(10 ** (self.size - 1), 10**self.size))
            moved = constant + (left - right) * unknown
            if left >= right + 2 and moved < 10**self.size:
                return [str(left), "x", "+", *str(constant), "=", str(right), "x", "+", *str(moved)]

    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        left, constant, right, moved = self._parse(x)
        unknowns = str(left - right)
        constants, low, high = (str(number)[::-1] for number in (moved - constant, constant, moved))
        ending = [";", unknowns, "x", "=", *constants, ";", "x", "=", self.solve(x)]
        return (
            [unknowns, "x", "+", *low, "=", *high, *ending],
            [str(left), "x", "=", str(right), "x", "+", *constants, *ending],
            [*low, "=", *high, "-", unknowns, "x", *ending],
        )

    def solve(self, x: Sequence[str]) -> str:
        left, constant, right, moved = self._parse(x)
        return str((moved - constant) // (left - right))

    def read_answer(self, y: Sequence[str]) -> str | None:
        """What the last equation says x is; None where y is not a number of equations that end in one digit for x."""
        trace = _TRACE.fullmatch(" ".join(y))
        return None if trace is None else trace[1]

    def _parse(self, x: Sequence[str]) -> tuple[int, int, int, int]:
        size = self.size
        if len(x) != 2 * size + 7 or [*x[1:3], x[size + 3], *x[size + 5 : size + 7]] != ["x", "+", "=", "x", "+"]:
            raise ValueError(EXPECTED)
        parts = [x[:1], x[3 : size + 3], x[size + 4 : size + 5], x[size + 7 :]]
        if any(numbers(part, 9) is None or part[0] == "0" for part in parts):
            raise ValueError(EXPECTED)
        left, constant, right, moved = (int("".join(part)) for part in parts)
        unknown = (moved - constant) / (left - right) if left >= right + 2 else 0
        if unknown not in range(1, 10):
            raise ValueError(f"{EXPECTED}, with 2 more unknowns on the left than on the right, and x from 1 to 9")
        return left, constant, right, moved
