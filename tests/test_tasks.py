"""The tasks, against what each strategy promises of its traces, checked step by step by other means than theirs."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest

from surprisal_jax.config import DataConfig, ExperimentConfig, InputError
from surprisal_jax.data import Record
from surprisal_jax.dataset import load_dataset
from surprisal_jax.tasks import TASK_NAMES, Instance, Task, get_task
from surprisal_jax.tasks.grid_pathfinding import GridPathfinding
from surprisal_jax.tasks.lookup import LookupTask

# Enumerated here, not taken from the task: start and goal on a 10 x 10 board, 72 pairs of rows and 90 of
# columns.
STARTS_AND_GOALS = [(a, b, c, d) for a, b, c, d in product(range(10), repeat=4) if abs(a - c) >= 2 and abs(b - d) >= 1]


def prompt(start_row: int, start_column: int, goal_row: int, goal_column: int) -> str:
    return f"r{start_row} c{start_column} r{goal_row} c{goal_column}"


def replay(start: tuple[int, int], y: str, size: int = 10) -> tuple[str, tuple[int, int]]:
    """The axis of every move, and the last cell; fails on a move that is no step to a neighbour."""
    row, column = start
    axes = ""
    for token in y.split(" "):
        axis, to = token[0], int(token[1:])
        assert axis in "rc" and 0 <= to < size
        assert abs(to - (row if axis == "r" else column)) == 1, f"{y}: {token} is not one cell away"
        row, column = (to, column) if axis == "r" else (row, to)
        axes += axis
    return axes, (row, column)


def check_grid_pathfinding(size: int, x: str, traces: Mapping[str, str]) -> str:
    cells = [int(token[1:]) for token in x.split(" ")]
    start, goal = (cells[0], cells[1]), (cells[2], cells[3])
    assert x == prompt(*cells) and max(cells) < size
    rows, columns = abs(start[0] - goal[0]), abs(start[1] - goal[1])
    both = min(rows, columns)
    pattern = {
        "rows_first": "r" * rows + "c" * columns,
        "columns_first": "c" * columns + "r" * rows,
        "alternating": "rc" * both + "r" * (rows - both) + "c" * (columns - both),
    }
    assert {strategy: replay(start, y, size) for strategy, y in traces.items()} == {
        strategy: (moves, goal) for strategy, moves in pattern.items()
    }
    assert len({tuple(sorted(y.split())) for y in traces.values()}) == 1, "one bag of tokens"
    return f"r{goal[0]} c{goal[1]}"


def test_every_trace_of_every_prompt_is_a_shortest_path_in_its_own_order():
    task = GridPathfinding()
    assert len(STARTS_AND_GOALS) == 6480
    for cells in STARTS_AND_GOALS:
        x = prompt(*cells)
        traces = task.traces(x)
        assert tuple(traces) == task.strategies == ("rows_first", "columns_first", "alternating")
        expected = check_grid_pathfinding(10, x, traces)
        for strategy, y in traces.items():
            assert task.classify(x, y) == {strategy}
            assert task.final_answer(y) == task.answer(x) == expected
        assert len(set(traces.values())) == 3


def test_worked_example():
    task = get_task("grid_pathfinding")
    assert dict(task.traces("r2 c7 r6 c1")) == {
        "rows_first": "r3 r4 r5 r6 c6 c5 c4 c3 c2 c1",
        "columns_first": "c6 c5 c4 c3 c2 c1 r3 r4 r5 r6",
        "alternating": "r3 c6 r4 c5 r5 c4 r6 c3 c2 c1",
    }
    assert task.answer("r2 c7 r6 c1") == "r6 c1"


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        ("r3 r4 c6 c5", {"rows_first"}),
        ("  r3\tr4   c6 c5\n", {"rows_first"}),
        ("c6 c5 r3 r4", {"columns_first"}),
        ("r3 c6 r4 c5", {"alternating"}),
        ("c6 r3 c5 r4", set()),  # a legal path of no strategy
        ("r3 r4 c6", set()),
        ("r3 r4 c6 c5 c5", set()),
        ("r3r4c6c5", set()),
        ("", set()),
        ("nonsense", set()),
    ],
)
def test_classify(y, expected):
    assert get_task("grid_pathfinding").classify("r2 c7 r4 c5", y) == expected
    assert get_task("grid_pathfinding").classify(" r2  c7 r4 c5 ", y) == expected


@pytest.mark.parametrize(
    "x",
    [
        "",
        "r2 c7 r4",
        "r2 c7 r4 c5 r1",
        "r2 c7 r3 c5",  # one row apart: two strategies give one trace
        "r2 c7 r4 c7",
        "c7 r2 r4 c5",
        "r2 c7 r10 c5",
        "r-2 c7 r4 c5",
        "2 7 4 5",
        "r٢ c7 r4 c5",
    ],
)
def test_malformed_prompt_raises(x):
    task = get_task("grid_pathfinding")
    for method in (task.traces, task.answer, lambda x: task.classify(x, "r3 r4 c6 c5")):
        with pytest.raises(ValueError, match=r"x: got '.*', expected"):
            method(x)


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        ("r3 r4 c6 c5", "r4 c5"),
        ("c5 r9", "r9 c5"),
        (" r3 \n c0 ", "r3 c0"),
        ("r3 r4", None),
        ("c3", None),
        ("", None),
        ("r3 c4 x", None),
        ("r3 c4 r10", None),
        ("r3 c4 r", None),
        ("r3 c4 </y>", None),
    ],
)
def test_final_answer(y, expected):
    assert get_task("grid_pathfinding").final_answer(y) == expected


def test_generate_draws_every_prompt_equally_often():
    task = get_task("grid_pathfinding")
    rng = np.random.Generator(np.random.PCG64(7))
    counts = dict.fromkeys((prompt(*cells) for cells in STARTS_AND_GOALS), 0)
    for _ in range(10 * 6480):
        counts[task.generate(rng).x] += 1
    chi_square = sum((count - 10) ** 2 / 10 for count in counts.values())
    # mean 6479, standard deviation sqrt(2 * 6479) = 114
    assert abs(chi_square - 6479) < 4 * 114


def test_generate_is_a_function_of_its_generator():
    task = get_task("grid_pathfinding")
    first, again, other = (
        [task.generate(rng) for _ in range(20)]
        for rng in (np.random.Generator(np.random.PCG64(seed)) for seed in (1, 1, 2))
    )
    assert first == again != other
    assert all(instance.traces == task.traces(instance.x) for instance in first)


def test_a_caller_cannot_spoil_the_traces_of_the_next():
    task = get_task("grid_pathfinding")
    task.traces("r2 c7 r4 c5")["rows_first"] = "spoilt"  # type: ignore[index]
    assert task.traces("r2 c7 r4 c5")["rows_first"] == "r3 r4 c6 c5"


# ----------------------------------------------------------------- what the strategies of the other tasks promise
#
# One function a task: it reads a prompt and its traces, fails where a trace is not what its strategy promises, and
# returns the final answer. Each promise leaves one trace, so a trace that keeps it is the right one.


def split_into(y: str, length: int) -> list[list[str]]:
    tokens = y.split(" ")
    assert len(tokens) % length == 0
    return [tokens[i : i + length] for i in range(0, len(tokens), length)]


def bubble_pass(values: list[int]) -> list[int]:
    if len(values) < 2:
        return values
    first, second, *rest = values
    return [min(first, second), *bubble_pass([max(first, second), *rest])]


def check_sorting_algorithms(size: int, x: str, traces: Mapping[str, str]) -> str:
    numbers = [int(token) for token in x.split(" ")]
    assert len(set(numbers)) == len(numbers) == size and set(numbers) <= set(range(4 * size))
    ordered = sorted(numbers)
    states = {
        strategy: [numbers] + [[int(token) for token in state] for state in split_into(y, size)]
        for strategy, y in traces.items()
    }
    for strategy, passes in states.items():
        assert len(passes) == size and passes[-1] == ordered, strategy
    for i, (before, after) in enumerate(pairwise(states["selection"])):
        moved = [place for place in range(size) if before[place] != after[place]]
        assert after[: i + 1] == ordered[: i + 1] and sorted(after) == ordered
        assert moved == [] or (len(moved) == 2 and moved[0] == i), "at most one swap, and into its place"
    prefix = numbers[:1]
    for i, after in enumerate(states["insertion"][1:], start=1):
        insort(prefix, numbers[i])
        assert after == prefix + numbers[i + 1 :]
    for before, after in pairwise(states["bubble"]):
        assert after == bubble_pass(before)
    return " ".join(str(value) for value in ordered)


def check_multidigit_addition(size: int, x: str, traces: Mapping[str, str]) -> str:
    first, second = (int(number.replace(" ", "")) for number in x.split(" + "))
    assert len(str(first)) == len(str(second)) == size
    totals = {
        strategy: [int("".join(reversed(digits))) for digits in split_into(y, size + 1)]
        for strategy, y in traces.items()
    }
    for k in range(1, size + 1):
        low, high = 10**k, 10 ** (size - k)
        # after k steps: the k lowest columns of both, the k highest of both, the k highest of the second
        assert totals["columns_from_ones"][k - 1] == first % low + second % low
        assert totals["columns_from_hundreds"][k - 1] == (first // high + second // high) * high
        assert totals["onto_first_number"][k - 1] == first + second // high * high
    assert all(len(steps) == size and steps[-1] == first + second for steps in totals.values())
    return " ".join(reversed(f"{first + second:0{size + 1}d}"))


def side_value(side: str, unknown: int) -> int:
    """What one side of an equation comes to."""
    assert re.fullmatch(r"x|[0-9]+x?( \+ [0-9]+x?)*", side), side
    terms = re.findall(r"([0-9]*)(x?)", side)
    return sum(int(digits or "1") * (unknown if x else 1) for digits, x in terms if digits or x)


def check_linear_equations(size: int, x: str, traces: Mapping[str, str]) -> str:
    equation = re.sub(r"([0-9]) x", r"\1x", x)
    match = re.fullmatch(r"([1-9])x \+ ([0-9]+) \+ ([1-9])x \+ ([0-9]+) = ([1-9])x \+ ([0-9]+)", equation)
    assert match is not None, x
    a, b, c, d, e, f = (int(number) for number in match.groups())
    assert 2 <= a + c - e <= 9 and 1 <= b <= size and 1 <= d <= size
    left, right = equation.split(" = ")
    (unknown,) = (value for value in range(-20, 20) if side_value(left, value) == side_value(right, value))
    assert 1 <= unknown <= 9 and (a + c - e) * unknown <= 36
    # what is kept as it was in x; the true unknown leaves one value for each number in its place
    ending = r"; [2-9]x = [1-9][0-9]? ; x = [1-9]"
    shapes = {
        "unknowns_first": rf"[2-9]x \+ {b} \+ {d} = {f} {ending}",
        "constants_first": rf"{a}x \+ {c}x = {e}x \+ [1-9][0-9]? {ending}",
        "sides_first": rf"[0-9]+x \+ [0-9]+ = {e}x \+ {f} {ending}",
    }
    for strategy, y in traces.items():
        written = re.sub(r"([0-9]) x", r"\1x", y)
        assert re.fullmatch(shapes[strategy], written), written
        for step in written.split(" ; "):
            left, right = step.split(" = ")
            assert side_value(left, unknown) == side_value(right, unknown), written
            assert side_value(left, unknown + 1) != side_value(right, unknown + 1), "true for any x"
    assert len({y.split(" ; ", 1)[1] for y in traces.values()}) == 1, "they differ in the first step only"
    assert traces["sides_first"].startswith(f"{a + c} x + {b + d} = ")
    return str(unknown)


def check_base_conversion(size: int, x: str, traces: Mapping[str, str]) -> str:
    digits = x.split(" ")
    value = int("".join(digits), 16)
    assert len(digits) == size and f"{value:x}" == "".join(digits) and value >= 4 * 16 ** (size - 1)
    in_base_4 = " ".join(np.base_repr(value, 4))
    assert len(in_base_4.split()) == 2 * size
    for strategy, y in traces.items():
        steps, answer = y.split(" = ")
        assert answer == in_base_4
        written = split_into(steps, 5 if strategy == "through_binary" else 3)
        read = [digit for digit, *_ in written]
        assert read == (digits[::-1] if strategy == "from_right" else digits)
        for digit, *converted in written:
            assert int("".join(converted), 2 if strategy == "through_binary" else 4) == int(digit, 16)
    return in_base_4


# The numbers whose divisors meet in each step: (0, 2, 3) is that of numbers 0 and 1 with that of number 2.
IN_PAIRS = {
    4: [(0, 1, 2), (2, 3, 4), (0, 2, 4)],
    5: [(0, 1, 2), (2, 3, 4), (0, 2, 4), (0, 4, 5)],
    6: [(0, 1, 2), (2, 3, 4), (4, 5, 6), (0, 2, 4), (0, 4, 6)],
    7: [(0, 1, 2), (2, 3, 4), (4, 5, 6), (0, 2, 4), (4, 6, 7), (0, 4, 7)],
    8: [(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (0, 2, 4), (4, 6, 8), (0, 4, 8)],
}


def check_greatest_common_divisor(size: int, x: str, traces: Mapping[str, str]) -> str:
    values = [int(token) for token in x.split(" ")]
    assert len(values) == size and all(2 <= value <= 36 for value in values)
    from_left = [(0, i, i + 1) for i in range(1, size)]
    meetings = {
        "from_left": (values, from_left),
        "from_right": (values[::-1], from_left),
        "in_pairs": (values, IN_PAIRS[size]),
    }
    for strategy, y in traces.items():
        order, meets = meetings[strategy]
        assert y.endswith(" 0")
        chains = [[int(token) for token in chain.split()] for chain in f" {y}".removesuffix(" 0").split(" 0 ")]
        assert [tuple(chain[:2]) for chain in chains] == [
            (math.gcd(*order[i:j]), math.gcd(*order[j:k])) for i, j, k in meets
        ]
        for chain in chains:
            remainders = [divmod(a, b)[1] for a, b in pairwise(chain)]
            assert remainders == [*chain[2:], 0]
        assert chains[-1][-1] == math.gcd(*values)
    return str(math.gcd(*values))


CHECKS: dict[str, Callable[[int, str, Mapping[str, str]], str]] = {
    "grid_pathfinding": check_grid_pathfinding,
    "sorting_algorithms": check_sorting_algorithms,
    "multidigit_addition": check_multidigit_addition,
    "linear_equations": check_linear_equations,
    "base_conversion": check_base_conversion,
    "greatest_common_divisor": check_greatest_common_divisor,
}
# smallest, default, largest
SIZES = {
    "grid_pathfinding": (4, 10, 40),
    "sorting_algorithms": (4, 5, 8),
    "multidigit_addition": (2, 3, 8),
    "linear_equations": (2, 6, 20),
    "base_conversion": (3, 5, 12),
    "greatest_common_divisor": (4, 4, 8),
}
EVERY_SIZE = sorted({(name, size) for name in SIZES for size in (*SIZES[name], SIZES[name][0] + 1)})
NEW_TASKS = tuple(name for name in SIZES if name != "grid_pathfinding")


def drawn(task: Task, count: int, seed: int = 11) -> list[Instance]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return [task.generate(rng) for _ in range(count)]


def corruptions(y: str, random_: random.Random) -> Iterator[str]:
    tokens = y.split(" ")
    i = random_.randrange(len(tokens))
    yield " ".join(tokens[:i] + tokens[i + 1 :])
    yield " ".join([*tokens[:i], "?", *tokens[i + 1 :]])
    yield " ".join([*tokens[:i], tokens[i - 1], *tokens[i:]]) + " 1"
    yield " ".join(reversed(tokens)) + " ="
    yield y + " " + tokens[-1]
    yield y.replace(" ", "")
    yield ""


@pytest.mark.parametrize(("name", "size"), EVERY_SIZE)
def test_drawn_traces_keep_what_their_strategies_promise(name, size):
    task = get_task(name, size)
    random_ = random.Random(size)
    assert len(task.strategies) >= 3
    for instance in drawn(task, 150):
        x, traces = instance.x, instance.traces
        assert tuple(traces) == task.strategies and traces == task.traces(x)
        assert len(set(traces.values())) == len(traces)
        answer = CHECKS[name](size, x, traces)
        assert task.answer(x) == task.answer(f"\t{x} \n") == answer
        for strategy, y in traces.items():
            assert task.final_answer(y) == task.final_answer("\n  " + y.replace(" ", "\t ")) == answer
            assert task.classify(x, y) == {strategy}
            assert task.classify(x.replace(" ", "  ") + " ", "\n  " + y.replace(" ", "\t ")) == {strategy}
            for corrupted in corruptions(y, random_):
                if corrupted not in traces.values():  # which it seldom is
                    assert task.classify(x, corrupted) == set(), corrupted


def test_every_size_in_pairs():
    for size in IN_PAIRS:
        for instance in drawn(get_task("greatest_common_divisor", size), 50):
            check_greatest_common_divisor(size, instance.x, instance.traces)


# Written by hand.
WORKED = [
    (
        "sorting_algorithms",
        4,
        "8 3 11 0",
        {
            "selection": "0 3 11 8   0 3 11 8   0 3 8 11",
            "insertion": "3 8 11 0   3 8 11 0   0 3 8 11",
            "bubble": "3 8 0 11   3 0 8 11   0 3 8 11",
        },
        "0 3 8 11",
    ),
    (
        "multidigit_addition",
        3,
        "3 4 5 + 2 7 8",
        {
            "columns_from_ones": "3 1 0 0   3 2 1 0   3 2 6 0",  # 13, 123, 623
            "columns_from_hundreds": "0 0 5 0   0 1 6 0   3 2 6 0",  # 500, 610, 623
            "onto_first_number": "5 4 5 0   5 1 6 0   3 2 6 0",  # 545, 615, 623
        },
        "3 2 6 0",
    ),
    (
        "multidigit_addition",
        2,
        "9 9 + 9 9",
        {
            "columns_from_ones": "8 1 0   8 9 1",
            "columns_from_hundreds": "0 8 1   8 9 1",
            "onto_first_number": "9 8 1   8 9 1",
        },
        "8 9 1",
    ),
    (
        "linear_equations",
        6,
        "3 x + 5 + 4 x + 2 = 2 x + 27",
        {
            "unknowns_first": "5 x + 5 + 2 = 27 ; 5 x = 20 ; x = 4",
            "constants_first": "3 x + 4 x = 2 x + 20 ; 5 x = 20 ; x = 4",
            "sides_first": "7 x + 7 = 2 x + 27 ; 5 x = 20 ; x = 4",
        },
        "4",
    ),
    (
        "base_conversion",
        3,
        "a 3 f",
        {
            "from_left": "a 2 2 3 0 3 f 3 3 = 2 2 0 3 3 3",
            "from_right": "f 3 3 3 0 3 a 2 2 = 2 2 0 3 3 3",
            "through_binary": "a 1 0 1 0 3 0 0 1 1 f 1 1 1 1 = 2 2 0 3 3 3",
        },
        "2 2 0 3 3 3",
    ),
    (
        "greatest_common_divisor",
        4,
        "24 18 30 12",
        {
            "from_left": "24 18 6 0   6 30 6 0   6 12 6 0",
            "from_right": "12 30 12 6 0   6 18 6 0   6 24 6 0",
            "in_pairs": "24 18 6 0   30 12 6 0   6 6 0",
        },
        "6",
    ),
    (
        "greatest_common_divisor",
        5,
        "9 6 4 10 15",  # the odd one out waits for the divisor of the others
        {
            "from_left": "9 6 3 0   3 4 3 1 0   1 10 1 0   1 15 1 0",
            "from_right": "15 10 5 0   5 4 1 0   1 6 1 0   1 9 1 0",
            "in_pairs": "9 6 3 0   4 10 4 2 0   3 2 1 0   1 15 1 0",
        },
        "1",
    ),
]


@pytest.mark.parametrize(("name", "size", "x", "traces", "answer"), WORKED)
def test_worked_examples(name, size, x, traces, answer):
    task = get_task(name, size)
    assert dict(task.traces(x)) == {strategy: " ".join(y.split()) for strategy, y in traces.items()}
    assert task.answer(x) == answer == CHECKS[name](size, x, task.traces(x))


NO_PROMPTS = {
    "sorting_algorithms": [
        "",
        "3 1 2 4",
        "3 1 2 4 5 6",
        "12 5 17 0 5",  # not distinct
        "3 1 2 4 20",
        "3 1 2 4 -1",
        "3 1 2 4 05",
        "3 1 2 4 x",
        "3 1 2 4 \u0665",
        "3,1,2,4,5",
        "3 1 2 4 5.0",
        "0 1 2 3 4",  # the strategies agree
        "5 4 1 2 3 =",
    ],
    "multidigit_addition": [
        "",
        "+",
        "3 4 5 + 2 7",
        "3 4 + 2 7 8",
        "3 4 5 2 7 8",
        "3 4 5 - 2 7 8",
        "3 4 5 + 2 7 8 9",
        "3 4 + 5 2 7 8",
        "0 4 5 + 2 7 8",
        "3 4 5 + 0 7 8",
        "345 + 278",
        "3 4 5 + 2 7 \u0668",
        "3 4 5 + 2 7 -8",
        "3 4 5 + 2 7 x",
        "3 4 5 + + 7 8",
        "3 0 0 + 2 7 8",  # the strategies agree
    ],
    "linear_equations": [
        "",
        "3 x + 5 + 4 x + 2 = 2 x",
        "3 x + 5 + 4 x + 2 = 2 x + 27 + 1",
        "3 x + 5 + 4 x + 2 = 2 x - 27",
        "3 y + 5 + 4 y + 2 = 2 y + 27",
        "3x + 5 + 4x + 2 = 2x + 27",
        "3 x + 5 + 4 x + 2 = 0 x + 37",
        "3 x + 0 + 4 x + 2 = 2 x + 22",
        "3 x + 7 + 4 x + 2 = 2 x + 29",  # 7 is above 6
        "10 x + 5 + 1 x + 2 = 6 x + 27",
        "1 x + 5 + 2 x + 2 = 2 x + 11",  # one unknown more, not two
        "9 x + 5 + 4 x + 2 = 2 x + 29",  # eleven more
        "1 x + 5 + 1 x + 2 = 2 x + 7",
        "3 x + 5 + 4 x + 2 = 2 x + 28",  # 21 / 5
        "3 x + 5 + 4 x + 2 = 2 x + 7",  # x = 0
        "3 x + 5 + 4 x + 2 = 2 x + 2",  # x = -1
        "1 x + 5 + 3 x + 2 = 2 x + 27",  # x = 10
        "3 x + 5 + 4 x + 2 = 2 x + 47",  # 5 x = 40, above 36
        "\u0663 x + 5 + 4 x + 2 = 2 x + 27",
    ],
    "base_conversion": [
        "",
        "a 3 f 0",
        "a 3 f 0 7 1",
        "3 3 f 0 7",  # would begin with 0 in base 4
        "0 3 f 0 7",
        "a 3 g 0 7",
        "A 3 F 0 7",
        "a3f07",
        "0xa 3 f 0 7",
        "a 3 f 0 -7",
        "a 3 f 0 10",
        "a 3 f 0 \u0667",
        "a 3 = 0 7",
        "a 3 f 3 a",  # reads the same from both ends
    ],
    "greatest_common_divisor": [
        "",
        "24 18 30",
        "24 18 30 12 6",
        "24 18 30 1",
        "24 18 30 0",
        "24 18 30 37",
        "24 18 30 -6",
        "24 18 30 06",
        "24 18 30 6.0",
        "24 18 30 x",
        "24 18 30 \u0666",
        "24, 18, 30, 12",
        "24 18 18 24",  # reads the same from both ends
        "24 18 6 6",  # from_left and in_pairs agree
    ],
}


@pytest.mark.parametrize(("name", "x"), [(name, x) for name in NEW_TASKS for x in NO_PROMPTS[name]])
def test_malformed_prompts_raise(name, x):
    task = get_task(name)
    for method in (task.traces, task.answer, lambda x: task.classify(x, "1")):
        with pytest.raises(ValueError) as raised:
            method(x)
        assert str(raised.value).startswith(f"x: got {x!r}, expected "), raised.value


NO_TRACES = {
    "sorting_algorithms": [
        "",
        "1",
        "1 2 3 4",
        "1 2 3 4 5 6",
        "1 2 3 4 20",
        "1 2 3 4 x",
        "1 2 3 4 05",
        "1 2 3 4 \u0665",
        "12345",
        "1 2 3 4 -5",
        "? 2 3 4 5 1 2 3 4 5",
        "1 2 3 4 5 ; 1 2 3 4",
        "1 2 3 4 </y>",
    ],
    "multidigit_addition": [
        "",
        "3",
        "3 2 6",
        "3 2 6 0 0",
        "3 1 0 0 3 2 6",
        "3260",
        "3 2 6 x",
        "3 2 6 10",
        "3 2 6 \u0660",
        "3 2 6 -0",
        "+ 1 0 0 3 2 6 0",
        "3 2 6 0 = 6 2 3",
        "3 2 6 </y>",
    ],
    "linear_equations": [
        "",
        "4",
        "x",
        "x = 4",
        "; x = 4",
        "; x =",
        "x =",
        ";",
        "7 x = 28 x = 4",
        "7 x = 28 ; x = 4 ;",
        "7 x = 28 ; x = 1 4",
        "7 x = 28 ; x = x",
        "7 x = 28 ; x = \u0664",
        "7 x = 28 ; 4 = x",
        "7 x = ; x = 4",
        "7 x 28 ; x = 4",
        "7 x = 8 = 2 ; x = 4",
        "7 x = 28 ; ; x = 4",
        "so 7 x = 28 ; x = 4",
        "7 x + = 28 ; x = 4",
        "x x = 28 ; x = 4",
        "7 x = 2 8 ; x = 4",
        "7 x = 28 ; x = 0",
    ],
    "base_conversion": [
        "",
        "=",
        "= 2 2 0 3 3 3",
        "a 2 2",
        "a 2 2 =",
        "a 2 2 2 2",
        "a 2 2 = 2 2 = 2 2",
        "a 2 2 = 2 4",
        "a 2 2 = 2 a",
        "a 2 2 = 22",
        "a 2 2 = 2 \u0662",
        "a 2 2 = 2 -2",
        "g 2 2 = 2 2",
        "so a 2 2 = 2 2",
        "a 2 2 = 2 2 </y>",
    ],
    "greatest_common_divisor": [
        "",
        "0",
        "6",
        "6 0",
        "24 18 6",
        "24 18 6 0 6",
        "24 18 0 0",
        "24 18 6 0 6 0",
        "24 18 37 0",
        "24 18 x 0",
        "so 24 18 6 0",
        "24 18 06 0",
        "24 18 \u0666 0",
        "24 18 6 00",
        "24 18 6 0 </y>",
    ],
}


@pytest.mark.parametrize(("name", "y"), [(name, y) for name in NEW_TASKS for y in NO_TRACES[name]])
def test_malformed_traces_have_no_final_answer(name, y):
    assert get_task(name).final_answer(y) is None


@pytest.mark.parametrize(
    ("name", "y", "expected"),
    [
        # wrong, and yet an answer
        ("sorting_algorithms", "3 1 2 4 5", "3 1 2 4 5"),
        ("multidigit_addition", "9 9 9 9 0 0 0 0", "0 0 0 0"),
        ("linear_equations", "12 = 82 + 7 x ; x = 5", "5"),
        ("base_conversion", "0 1 1 = 3", "3"),
        ("greatest_common_divisor", "2 3 5 0", "5"),
    ],
)
def test_wrong_traces_may_have_a_final_answer(name, y, expected):
    assert get_task(name).final_answer(y) == expected


@pytest.mark.parametrize("name", TASK_NAMES)
def test_no_piece_of_a_trace_makes_the_classifier_or_the_final_answer_raise(name):
    """Decoded texts are cut off anywhere, and a model starts anywhere."""
    task = get_task(name)
    for instance in drawn(task, 3):
        for y in instance.traces.values():
            tokens = y.split(" ")
            for i, j in combinations(range(len(tokens) + 1), 2):
                answer = task.final_answer(" ".join(tokens[i:j]))
                assert answer is None or set(answer.split()) <= set(tokens)
                if j - i < len(tokens):
                    assert task.classify(instance.x, " ".join(tokens[i:j])) == set()


@pytest.mark.parametrize("name", TASK_NAMES)
def test_no_token_names_a_strategy(name):
    task = get_task(name)
    tokens: dict[str, set[str]] = {strategy: set() for strategy in task.strategies}
    for instance in drawn(task, 300):
        for strategy, y in instance.traces.items():
            tokens[strategy] |= set(y.split(" "))
    if name == "linear_equations":
        # Sums and differences: where constants are collected first, no number is above 36. A number is no name.
        tokens = {strategy: {token for token in written if not token.isdigit()} for strategy, written in tokens.items()}
    assert all(tokens[strategy] == tokens[task.strategies[0]] for strategy in task.strategies)


@pytest.mark.parametrize("name", TASK_NAMES)
def test_draws_are_a_function_of_the_seed(name):
    first, again, other = (drawn(get_task(name), 30, seed) for seed in (1, 1, 2))
    assert first == again != other


# Divisors above 1 have to be drawn on purpose and come from few lists; of 107,316 equations, 10,000 draws repeat
# some 10,000**2 / 2 / 107,316 = 466.
LEAST_DISTINCT = {
    "sorting_algorithms": 9_900,
    "multidigit_addition": 9_900,
    "linear_equations": 9_450,
    "base_conversion": 9_900,
    "greatest_common_divisor": 8_000,
}


@pytest.mark.parametrize("name", NEW_TASKS)
def test_draws_spread_over_the_prompts(name):
    xs = [instance.x for instance in drawn(get_task(name), 10_000)]
    assert len(set(xs)) > LEAST_DISTINCT[name]


# --------------------------------------------------------------------------------------- how many prompts there are

DISTINCT = {
    "grid_pathfinding": 6_480,
    "sorting_algorithms": 1_612_416,
    "multidigit_addition": 801_900,
    "linear_equations": 107_316,
    "base_conversion": 783_360,
    "greatest_common_divisor": 1_498_930,
}


def is_prompt(task: Task, x: str) -> bool:
    try:
        return bool(task.traces(x))
    except ValueError:
        return False


def test_number_of_lists_to_sort():
    # which strategies agree depends on the order alone: one choice of five numbers stands for all
    task = get_task("sorting_algorithms")
    orders = sum(is_prompt(task, " ".join(order)) for order in permutations("01234"))
    again = sum(is_prompt(task, " ".join(order)) for order in permutations(["2", "7", "11", "13", "19"]))
    assert orders == again == 104
    assert orders * math.comb(20, 5) == DISTINCT["sorting_algorithms"]


def test_number_of_additions():
    # the strategies agree where the first number is its highest digit and zeros, and nowhere else
    task = get_task("multidigit_addition", 2)
    numbers = range(10, 100)
    for a, b in product(numbers, numbers):
        assert is_prompt(task, " + ".join((" ".join(str(a)), " ".join(str(b))))) == (a % 10 != 0)
    task = get_task("multidigit_addition")
    for a in range(100, 1000):
        assert is_prompt(task, f"{' '.join(str(a))} + {' '.join(str(a))}") == (a % 100 != 0)
    assert DISTINCT["multidigit_addition"] == 900 * 900 - 9 * 900


def test_number_of_equations():
    def equations(size: int) -> Iterator[str]:
        for a, c, e, unknown in product(range(1, 10), repeat=4):
            if 2 <= a + c - e <= 9 and (a + c - e) * unknown <= 36:
                for b, d in product(range(1, size + 1), repeat=2):
                    yield f"{a} x + {b} + {c} x + {d} = {e} x + {b + d + (a + c - e) * unknown}"

    task = get_task("linear_equations", 2)
    all_equations = set(equations(2))
    assert all(is_prompt(task, x) for x in all_equations)
    rng = np.random.Generator(np.random.PCG64(4))
    xs = {task.generate(rng).x for _ in range(2_000)}
    assert xs <= all_equations
    # all of them can be drawn, those with few or many unknowns left as well
    unknowns = [[int(tokens[place]) for place in (0, 5, 10)] for tokens in (x.split() for x in xs)]
    assert {a + c - e for a, c, e in unknowns} == set(range(2, 10))
    assert all(set(values) == set(range(1, 10)) for values in zip(*unknowns, strict=True))
    assert sum(1 for _ in equations(6)) == DISTINCT["linear_equations"]


def test_number_of_conversions():
    task = get_task("base_conversion", 3)
    for a, b, c in product("0123456789abcdef", repeat=3):
        assert is_prompt(task, f"{a} {b} {c}") == (a > "3" and a != c)
    # palindromes are told by their first three digits
    assert DISTINCT["base_conversion"] == 12 * 16**4 - 12 * 16**2


def test_number_of_lists_with_a_divisor():
    values = range(2, 37)
    palindromes = {(a, b, b, a) for a, b in product(values, values)}
    # from_left and in_pairs agree where the divisor of the first two is also the third and the fourth
    divisor_follows = {(a, b, g, g) for a, b in product(values, values) if (g := math.gcd(a, b)) > 1}
    agree = palindromes | divisor_follows
    task = get_task("greatest_common_divisor")
    assert not any(is_prompt(task, " ".join(map(str, x))) for x in agree)
    random_ = random.Random(0)
    others = {tuple(random_.choices(values, k=4)) for _ in range(3_000)} | {
        tuple(random_.choices((2, 3, 4, 6, 12), k=4)) for _ in range(3_000)
    }
    assert all(is_prompt(task, " ".join(map(str, x))) for x in others - agree)
    assert 35**4 - len(agree) == DISTINCT["greatest_common_divisor"]


# ---------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", TASK_NAMES)
def test_size_out_of_range_is_one_clear_error(name):
    least, default, most = SIZES[name]
    for size in (least - 1, most + 1):
        message = f"got {size}, expected an integer from {least} to {most} for task {name}"
        with pytest.raises(ValueError) as raised:
            get_task(name, size)
        assert str(raised.value) == message
        with pytest.raises(InputError) as raised_for_user:
            load_dataset(ExperimentConfig(task=name, data=DataConfig(task_size=size)))
        assert str(raised_for_user.value) == f"data.task_size: {message}"
    first, same = (drawn(get_task(name, size), 5) for size in (None, default))
    assert first == same


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in SIZES for size in (SIZES[name][0], SIZES[name][-1])]
)
def test_the_configured_size_reaches_the_records(name, size):
    data = DataConfig(task_size=size, train_groups=4, validation_records=3, test_instances=2)
    dataset = load_dataset(ExperimentConfig(task=name, data=data))
    assert len(dataset.records) == 4 * 2 + 3 + 2 * 3
    for record in dataset.records:
        CHECKS[name](size, record.x, dataset.task.traces(record.x))
        assert dataset.task.classify(record.x, record.y) == {record.strategy}


# ------------------------------------------------------------------------------------------------- docs/tasks.md

PAGE = Path(__file__).parents[1] / "docs" / "tasks.md"


def test_page_shows_traces_as_the_tasks_write_them():
    sections = re.split(r"^## (\w+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert tuple(sections[1::2]) == TASK_NAMES
    for name, text in zip(sections[1::2], sections[2::2], strict=True):
        blocks = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
        assert len(blocks) == 2, "the grammar and the instance"
        lines = dict(line.split(maxsplit=1) for line in blocks[1].splitlines())
        x, *strategies = lines
        task = get_task(name)
        assert x == "x" and tuple(strategies) == task.strategies
        assert {strategy: " ".join(lines[strategy].split()) for strategy in strategies} == task.traces(lines[x])


def test_page_and_docstrings_give_the_sizes_and_the_numbers_of_prompts():
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == list(TASK_NAMES)
    for name, *sizes, distinct in rows:
        task = get_task(name)
        assert tuple(int(size) for size in sizes) == SIZES[name]
        assert int(distinct.replace(",", "")) == DISTINCT[name]
        assert distinct in (type(task).__doc__ or "")


@pytest.mark.parametrize("name", TASK_NAMES)
def test_names_lead_to_tasks(name):
    task: Task = get_task(name)
    assert task.name == name
    assert len(task.strategies) >= 3


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="task: got 'grid', expected one of grid_pathfinding"):
        get_task("grid")


def test_task_names_come_without_numpy():
    code = "import sys; from surprisal_jax.tasks import TASK_NAMES; print('numpy' in sys.modules, TASK_NAMES[0])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["False", "grid_pathfinding"]


# ----------------------------------------------------------------------------------------------------- lookup

RECORDED = [
    Record("3 1", "swap = 1 3", "bubble"),
    Record("3 1", "min = 1 3", "selection"),
    Record("3 1", "swap swap swap = 1 3", "bubble"),
    Record("2 1", "swap = 1 2", "bubble"),
    Record("2 1", "swap = 1 2", "insertion"),
    Record("1 2", "= 1 2"),
]


def test_lookup_knows_what_was_recorded():
    task = LookupTask(RECORDED)
    assert task.strategies == ("bubble", "insertion", "selection")
    assert dict(task.traces("3 1")) == {"bubble": "swap = 1 3", "selection": "min = 1 3"}
    assert task.classify("3 1", " swap  = 1 3\n") == {"bubble"}
    assert task.classify("3 1", "swap swap swap = 1 3") == {"bubble"}
    assert task.classify("2 1", "swap = 1 2") == {"bubble", "insertion"}
    assert task.classify("2 1", "swap = 1 3") == set()
    assert task.classify("1 2", "= 1 2") == set(), "no strategy was given"


def test_lookup_has_no_final_answers_and_says_so():
    task = LookupTask(RECORDED)
    assert task.final_answer("swap = 1 3") is None
    assert not task.has_final_answer and get_task("grid_pathfinding").has_final_answer
    with pytest.raises(ValueError, match="no final answers"):
        task.answer("3 1")


def test_lookup_of_an_unknown_prompt_raises():
    for method in (LookupTask(RECORDED).traces, lambda x: LookupTask(RECORDED).classify(x, "swap = 1 3")):
        with pytest.raises(ValueError, match="x: got '9 9', expected one of the 3 recorded x"):
            method("9 9")


def test_lookup_by_characters_compares_white_space():
    task = LookupTask([Record("a b", "b a", "swap")], "characters")
    assert task.classify("a b", "b a") == {"swap"}
    assert task.classify("a b", "b  a") == set()


def test_lookup_depends_on_no_order_and_generates_recorded_prompts():
    task, backwards = LookupTask(RECORDED), LookupTask(RECORDED[::-1])
    drawn = [[t.generate(rng).x for _ in range(30)] for t in (task, backwards) for rng in [np.random.default_rng(3)]]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {"3 1", "2 1", "1 2"}
