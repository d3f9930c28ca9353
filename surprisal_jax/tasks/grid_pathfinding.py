"""Shortest paths on an open grid: all strategies make the same moves, and differ only in their order.

    x            r2 c7 r4 c5          start row and column, goal row and column
    rows_first      r3 r4 c6 c5       y writes, for each move of one cell, the coordinate that changed
    columns_first   c6 c5 r3 r4
    alternating     r3 c6 r4 c5       row, column, row, ... until one coordinate is at its goal, then the rest

The traces of one x are the same bag of tokens, so neither a token nor the length gives the strategy away. The
goal is at least two rows and one column away, which is when the three traces are pairwise different.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from surprisal_jax.tasks.task import Instance

if TYPE_CHECKING:
    import numpy as np

GRID_SIZE = 10
MIN_ROW_MOVES = 2
MIN_COLUMN_MOVES = 1

_X_PATTERN = re.compile(r"r([0-9]) c([0-9]) r([0-9]) c([0-9])")
_MOVE_PATTERN = re.compile(r"[rc][0-9]")


class GridPathfinding:
    """Walk from a start cell to a goal cell of a 10 x 10 open grid; 6,480 distinct x."""

    name = "grid_pathfinding"
    strategies = ("rows_first", "columns_first", "alternating")
    has_final_answer = True

    def generate(self, rng: np.random.Generator) -> Instance:
        """Draw x uniformly."""
        prompts = _all_prompts()
        x = prompts[int(rng.integers(len(prompts)))]
        return Instance(x, self.traces(x))

    def traces(self, x: str) -> Mapping[str, str]:
        return dict(zip(self.strategies, _traces(" ".join(x.split())), strict=True))

    def classify(self, x: str, y: str) -> set[str]:
        trace = " ".join(y.split())
        return {strategy for strategy, expected in self.traces(x).items() if expected == trace}

    def answer(self, x: str) -> str:
        _, _, row, column = _parse(" ".join(x.split()))
        return f"r{row} c{column}"

    def final_answer(self, y: str) -> str | None:
        """The last row and the last column; None if a token is unknown, or there is no row or no column."""
        tokens = y.split()
        rows = [token for token in tokens if token.startswith("r")]
        columns = [token for token in tokens if token.startswith("c")]
        if not rows or not columns or not all(_MOVE_PATTERN.fullmatch(token) for token in tokens):
            return None
        return f"{rows[-1]} {columns[-1]}"


@functools.cache
def _all_prompts() -> tuple[str, ...]:
    cells = range(GRID_SIZE)
    return tuple(
        f"r{row} c{column} r{goal_row} c{goal_column}"
        for row in cells
        for column in cells
        for goal_row in cells
        for goal_column in cells
        if abs(goal_row - row) >= MIN_ROW_MOVES and abs(goal_column - column) >= MIN_COLUMN_MOVES
    )


def _parse(x: str) -> tuple[int, int, int, int]:
    match = _X_PATTERN.fullmatch(x)
    if match is None:
        raise ValueError(f"x: got {x!r}, expected start and goal of the form 'r2 c7 r4 c5'")
    row, column, goal_row, goal_column = (int(digit) for digit in match.groups())
    if abs(goal_row - row) < MIN_ROW_MOVES or abs(goal_column - column) < MIN_COLUMN_MOVES:
        raise ValueError(
            f"x: got {x!r}, expected a goal at least {MIN_ROW_MOVES} rows and {MIN_COLUMN_MOVES} column away,"
            " where the strategies' traces differ"
        )
    return row, column, goal_row, goal_column


@functools.cache  # at most 6,480 entries: malformed x raises and is not kept
def _traces(x: str) -> tuple[str, str, str]:
    """The traces in the order of `GridPathfinding.strategies`."""
    row, column, goal_row, goal_column = _parse(x)
    rows = [f"r{r}" for r in _cells_passed(row, goal_row)]
    columns = [f"c{c}" for c in _cells_passed(column, goal_column)]
    alternating = [move for move in chain(*zip_longest(rows, columns)) if move is not None]
    return " ".join(rows + columns), " ".join(columns + rows), " ".join(alternating)


def _cells_passed(start: int, goal: int) -> range:
    step = 1 if goal > start else -1
    return range(start + step, goal + step, step)
