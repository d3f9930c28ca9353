"""Sorting a short list: y is the whole list after each pass, and the strategies differ in what a pass does.

    x           8 3 11 0                             distinct numbers
    selection     0 3 11 8   0 3 11 8   0 3 8 11     a pass swaps the smallest of the rest to its place
    insertion     3 8 11 0   3 8 11 0   0 3 8 11     a pass inserts the next number among those before it
    bubble        3 8 0 11   3 0 8 11   0 3 8 11     a pass swaps neighbours in the wrong order, from left to right

Each makes one pass fewer than there are numbers, so all traces of one size are as long. A list on which two of
them agree, such as one that is sorted, is not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import GeneratedTask, numbers

if TYPE_CHECKING:
    import numpy as np


class SortingAlgorithms(GeneratedTask):
    """Sort `size` distinct numbers below four times `size`; 1,612,416 lists at 5."""

    name = "sorting_algorithms"
    strategies = ("selection", "insertion", "bubble")
    sizes = range(4, 9)
    default_size = 5

    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        chosen: list[int] = []
        while len(chosen) < self.size:
            value = int(rng.integers(4 * self.size))
            if value not in chosen:
                chosen.append(value)
        return [str(value) for value in chosen]

    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        values = numbers(x, 4 * self.size - 1)
        if values is None or len(values) != self.size or len(set(values)) != self.size:
            raise ValueError(f"expected {self.size} distinct numbers below {4 * self.size}")
        return tuple(
            [str(value) for state in passes(values) for value in state] for passes in (_selection, _insertion, _bubble)
        )

    def solve(self, x: Sequence[str]) -> str:
        return " ".join(sorted(x, key=int))

    def read_answer(self, y: Sequence[str]) -> str | None:
        """The last list; None where y is not a number of whole lists."""
        if not y or len(y) % self.size or numbers(y, 4 * self.size - 1) is None:
            return None
        return " ".join(y[-self.size :])


def _selection(values: Sequence[int]) -> list[list[int]]:
    state, states = list(values), []
    for place in range(len(state) - 1):
        smallest = state.index(min(state[place:]))
        state[place], state[smallest] = state[smallest], state[place]
        states.append(list(state))
    return states


def _insertion(values: Sequence[int]) -> list[list[int]]:
    return [sorted(values[: place + 1]) + list(values[place + 1 :]) for place in range(1, len(values))]


def _bubble(values: Sequence[int]) -> list[list[int]]:
    state, states = list(values), []
    for last in range(len(state) - 1, 0, -1):
        for i in range(last):
            if state[i] > state[i + 1]:
                state[i], state[i + 1] = state[i + 1], state[i]
        states.append(list(state))
    return states
