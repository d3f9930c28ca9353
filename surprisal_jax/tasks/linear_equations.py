"""Solving a linear equation: y rewrites it step by step, and the strategies differ in what they put together first.

x                 3 x + 5 + 4 x + 2 = 2 x + 27
unknowns_first      5 x + 5 + 2 = 27      ; 5 x = 20 ; x = 4       3 x + 4 x - 2 x, all on the left
constants_first     3 x + 4 x = 2 x + 20  ; 5 x = 20 ; x = 4       27 - 5 - 2, all on the right
sides_first         7 x + 7 = 2 x + 27    ; 5 x = 20 ; x = 4       each side for itself
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import GeneratedTask, numbers

if TYPE_CHECKING:
    import numpy as np


_SIDE = r"[0-9]+(?: x)?(?: \+ [0-9]+(?: x)?)*"
_TRACE = re.compile(rf"(?:{_SIDE} = {_SIDE} ; )+x = ([1-9])")


class LinearEquations(GeneratedTask):
    """`a x + b + c x + d = e x + f` with a, c, e from 1 to 9, 2 to 9 unknowns more on the left than on the right, b and
    d from 1 to `size`, and an unknown from 1 to 9; 107,316 equations at 6."""

    name = "linear_equations"
    strategies = ("unknowns_first", "constants_first", "sides_first")
    sizes = range(2, 21)
    default_size = 6
    largest_constant = 36

    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        while True:
            first, second, right, unknown = (int(value) for value in rng.integers(1, 10, size=4))
            constants = [int(value) for value in rng.integers(1, self.size + 1, size=2)]
            remaining = first + second - right
            if 2 <= remaining <= 9 and remaining * unknown <= self.largest_constant:
                moved = sum(constants) + remaining * unknown
                left = [first, "x", "+", constants[0], "+", second, "x", "+", constants[1]]
                return [str(token) for token in (*left, "=", right, "x", "+", moved)]

    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        first, constant, second, other, right, moved = self._parse(x)
        remaining, total = first + second - right, constant + other
        ending = f"; {remaining} x = {moved - total} ; x = {(moved - total) // remaining}"
        return tuple(
            f"{equation} {ending}".split()
            for equation in (
                f"{remaining} x + {constant} + {other} = {moved}",
                f"{first} x + {second} x = {right} x + {moved - total}",
                f"{first + second} x + {total} = {right} x + {moved}",
            )
        )

    def solve(self, x: Sequence[str]) -> str:
        first, constant, second, other, right, moved = self._parse(x)
        return str((moved - constant - other) // (first + second - right))

    def read_answer(self, y: Sequence[str]) -> str | None:
        """What the last of two or more equations says x is."""
        match = _TRACE.fullmatch(" ".join(y))
        return match[1] if match else None

    def _parse(self, x: Sequence[str]) -> list[int]:
        form = "expected an equation of the form '3 x + 5 + 4 x + 2 = 2 x + 27'"
        signs = [token for place, token in enumerate(x) if place not in (0, 3, 5, 8, 10, 13)]
        values = numbers([x[place] for place in (0, 3, 5, 8, 10, 13)], 1000) if len(x) == 14 else None
        if values is None or signs != ["x", "+", "+", "x", "+", "=", "x", "+"]:
            raise ValueError(form)
        first, constant, second, other, right, moved = values
        remaining, product = first + second - right, moved - constant - other
        if not {first, second, right} <= set(range(1, 10)) or not {constant, other} <= set(range(1, self.size + 1)):
            raise ValueError(f"{form} with 1 to 9 unknowns a term and constants from 1 to {self.size} on the left")
        if not 2 <= remaining <= 9 or product not in range(
            remaining, min(9 * remaining, self.largest_constant) + 1, remaining
        ):
            raise ValueError(
                f"{form} with 2 to 9 unknowns left and x from 1 to 9, together at most {self.largest_constant}"
            )
        return values
