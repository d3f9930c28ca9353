"""Hexadecimal to base 4: y converts digit by digit and then writes the number, and the strategies differ in how.

    x              a 3 f
    from_left        a 2 2 3 0 3 f 3 3 = 2 2 0 3 3 3               each digit and its two digits in base 4
    from_right       f 3 3 3 0 3 a 2 2 = 2 2 0 3 3 3
    through_binary   a 1 0 1 0 3 0 0 1 1 f 1 1 1 1 = 2 2 0 3 3 3   each digit and its four bits

A number that reads the same from both ends is not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import GeneratedTask, numbers

if TYPE_CHECKING:
    import numpy as np

DIGITS = "0123456789abcdef"
#: Smaller leading digits would give a number in base 4 that begins with 0.
LEADING = DIGITS[4:]


class BaseConversion(GeneratedTask):
    """Convert a hexadecimal number of `size` digits; 783,360 numbers at 5."""

    name = "base_conversion"
    strategies = ("from_left", "from_right", "through_binary")
    sizes = range(3, 13)
    default_size = 5

    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        rest = rng.integers(len(DIGITS), size=self.size - 1)
        return [LEADING[int(rng.integers(len(LEADING)))], *(DIGITS[int(value)] for value in rest)]

    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        if len(x) != self.size or not set(x) <= set(DIGITS) or x[0] not in LEADING:
            raise ValueError(f"expected {self.size} hexadecimal digits of the form 'a 3 f', the first at least 4")
        ending = ["=", *self.solve(x).split()]
        steps = [[digit, *_in_base(digit, 4, 2)] for digit in x]
        in_binary = [[digit, *_in_base(digit, 2, 4)] for digit in x]
        return tuple([*chain(*order), *ending] for order in (steps, reversed(steps), in_binary))

    def solve(self, x: Sequence[str]) -> str:
        return " ".join(digit for source in x for digit in _in_base(source, 4, 2))

    def read_answer(self, y: Sequence[str]) -> str | None:
        """The number in base 4 after the one equals sign; None where there is none, or no digits before the sign."""
        if y.count("=") != 1:
            return None
        steps, answer = y[: y.index("=")], y[y.index("=") + 1 :]
        if not steps or not set(steps) <= set(DIGITS) or not answer or numbers(answer, 3) is None:
            return None
        return " ".join(answer)


def _in_base(digit: str, base: int, length: int) -> list[str]:
    value = DIGITS.index(digit)
    return [str(value // base**place % base) for place in reversed(range(length))]
