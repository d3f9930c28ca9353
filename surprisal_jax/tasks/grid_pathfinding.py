"""Shortest paths on an open grid: all strategies make the same moves, and differ only in their order.

    x            r2 c7 r4 c5          start row and column, goal row and column
    rows_first      r3 r4 c6 c5       y writes, for each move of one cell, the coordinate that changed
    columns_first   c6 c5 r3 r4
    alternating     r3 c6 r4 c5       row, column, row, ... until one coordinate is at its goal, then the rest

The traces of one x are the same bag of tokens, so neither a token nor the length gives the strategy away. The
goal is at least two rows and one column away, which is when the three traces are pairwise different.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import GeneratedTask, numbers

if TYPE_CHECKING:
    import numpy as np

MIN_ROW_MOVES = 2
MIN_COLUMN_MOVES = 1


class GridPathfinding(GeneratedTask):
    """Walk from a start cell to a goal cell of an open grid; `size` cells a side: 6,480 distinct x at 10."""

    name = "grid_pathfinding"
    strategies = ("rows_first", "columns_first", "alternating")
    sizes = range(4, 41)
    default_size = 10

    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        """Uniform over all prompts."""
        while True:
            row, column, goal_row, goal_column = (int(value) for value in rng.integers(self.size, size=4))
            if abs(goal_row - row) >= MIN_ROW_MOVES and abs(goal_column - column) >= MIN_COLUMN_MOVES:
                return [f"r{row}", f"c{column}", f"r{goal_row}", f"c{goal_column}"]

    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        row, column, goal_row, goal_column = self._parse(x)
        rows = [f"r{r}" for r in _cells_passed(row, goal_row)]
        columns = [f"c{c}" for c in _cells_passed(column, goal_column)]
        alternating = [move for move in chain(*zip_longest(rows, columns)) if move is not None]
        return rows + columns, columns + rows, alternating

    def solve(self, x: Sequence[str]) -> str:
        return " ".join(x[2:])

    def read_answer(self, y: Sequence[str]) -> str | None:
        """The last row and the last column; None if a token is unknown, or there is no row or no column."""
        rows = [token for token in y if token[0] == "r"]
        columns = [token for token in y if token[0] == "c"]
        if not rows or not columns or len(rows) + len(columns) < len(y):
            return None
        return None if numbers([token[1:] for token in y], self.size - 1) is None else f"{rows[-1]} {columns[-1]}"

    def _parse(self, x: Sequence[str]) -> list[int]:
        cells = numbers([token[1:] for token in x], self.size - 1)
        if [token[0] for token in x] != ["r", "c", "r", "c"] or cells is None:
            raise ValueError(
                f"expected start and goal of the form 'r2 c7 r4 c5' on a grid of {self.size} x {self.size}"
            )
        if abs(cells[2] - cells[0]) < MIN_ROW_MOVES or abs(cells[3] - cells[1]) < MIN_COLUMN_MOVES:
            raise ValueError(
                f"expected a goal at least {MIN_ROW_MOVES} rows and {MIN_COLUMN_MOVES} column away,"
                " where the strategies' traces differ"
            )
        return cells


def _cells_passed(start: int, goal: int) -> range:
    step = 1 if goal > start else -1
    return range(start + step, goal + step, step)
