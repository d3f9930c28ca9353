"""The tasks, against paths replayed cell by cell and strategies described by the pattern of their moves."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from surprisal_jax.data import Record
from surprisal_jax.tasks import TASK_NAMES, Task, get_task
from surprisal_jax.tasks.grid_pathfinding import GridPathfinding
from surprisal_jax.tasks.lookup import LookupTask

# Enumerated here, not taken from the task: start and goal on a 10 x 10 board, 72 pairs of rows and 90 of
# columns.
STARTS_AND_GOALS = [(a, b, c, d) for a, b, c, d in product(range(10), repeat=4) if abs(a - c) >= 2 and abs(b - d) >= 1]


def prompt(start_row: int, start_column: int, goal_row: int, goal_column: int) -> str:
    return f"r{start_row} c{start_column} r{goal_row} c{goal_column}"


def replay(start: tuple[int, int], y: str) -> tuple[str, tuple[int, int]]:
    """The axis of every move, and the last cell; fails on a move that is no step to a neighbour."""
    row, column = start
    axes = ""
    for token in y.split(" "):
        axis, to = token[0], int(token[1:])
        assert axis in "rc" and 0 <= to <= 9
        assert abs(to - (row if axis == "r" else column)) == 1, f"{y}: {token} is not one cell away"
        row, column = (to, column) if axis == "r" else (row, to)
        axes += axis
    return axes, (row, column)


def test_every_trace_of_every_prompt_is_a_shortest_path_in_its_own_order():
    task = GridPathfinding()
    assert len(STARTS_AND_GOALS) == 6480
    for cells in STARTS_AND_GOALS:
        start, goal = cells[:2], cells[2:]
        x = prompt(*cells)
        rows, columns = abs(cells[0] - cells[2]), abs(cells[1] - cells[3])
        both = min(rows, columns)
        pattern = {
            "rows_first": "r" * rows + "c" * columns,
            "columns_first": "c" * columns + "r" * rows,
            "alternating": "rc" * both + "r" * (rows - both) + "c" * (columns - both),
        }
        traces = task.traces(x)
        assert tuple(traces) == task.strategies == ("rows_first", "columns_first", "alternating")
        for strategy, y in traces.items():
            assert replay(start, y) == (pattern[strategy], goal), (x, strategy, y)
            assert task.classify(x, y) == {strategy}
            assert task.final_answer(y) == task.answer(x) == f"r{goal[0]} c{goal[1]}"
        assert len(set(traces.values())) == 3
        assert len({tuple(sorted(y.split())) for y in traces.values()}) == 1, "one bag of tokens"


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
