"""Write traces.jsonl: what three real sorting programs do to lists of five integers, one record a run.

    {"x": "3 1 4 2 5", "y": "3/1 4/2 3/2 = 1 2 3 4 5", "strategy": "insertion_sort", "group": "7"}

x is the list before the run. y logs every exchange as `left/right`, the two values that change places, and
ends with the list after the run. Nothing in y names a program: all of them write the same tokens in the same
grammar, and only the order and the choice of exchanges tell them apart. Lists that two programs treat alike
are left out, every list is sorted by all three, and a group holds two runs of one program on different lists
of one split, as if they came from one session.

The committed file is the output of `python examples/make_traces.py --seed 0`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np

from surprisal_jax.data import Record, split_of, write_jsonl

LARGEST = 7  # lists are five different integers from 1 to this
LENGTH = 5
GROUP_SIZE = 2
LISTS = {"train": 800, "validation": 100, "test": 100}


class LoggedList(list[int]):
    """A list that logs every exchange of two of its items."""

    def __init__(self, items: tuple[int, ...]) -> None:
        super().__init__(items)
        self.log: list[str] = []

    def swap(self, i: int, j: int) -> None:
        self.log.append(f"{self[i]}/{self[j]}")
        self[i], self[j] = self[j], self[i]


def insertion_sort(items: LoggedList) -> None:
    for end in range(1, len(items)):
        i = end
        while i > 0 and items[i - 1] > items[i]:
            items.swap(i - 1, i)
            i -= 1


def selection_sort(items: LoggedList) -> None:
    for start in range(len(items) - 1):
        smallest = min(range(start, len(items)), key=items.__getitem__)
        if smallest != start:
            items.swap(start, smallest)


def bubble_sort(items: LoggedList) -> None:
    for end in range(len(items) - 1, 0, -1):
        for i in range(end):
            if items[i] > items[i + 1]:
                items.swap(i, i + 1)


PROGRAMS: tuple[Callable[[LoggedList], None], ...] = (insertion_sort, selection_sort, bubble_sort)


def run(program: Callable[[LoggedList], None], items: tuple[int, ...]) -> str:
    """The trace one program leaves."""
    logged = LoggedList(items)
    program(logged)
    return " ".join([*logged.log, "=", *map(str, logged)])


def make_records(seed: int) -> list[Record]:
    bits = np.random.PCG64(seed)

    def shuffled(count: int) -> list[int]:
        # raw draws: their stream is the same under every version of numpy
        return [int(i) for i in np.argsort(bits.random_raw(count), kind="stable")]

    candidates = list(permutations(range(1, LARGEST + 1), LENGTH))
    chosen: dict[str, list[tuple[str, list[str]]]] = {split: [] for split in LISTS}
    for i in shuffled(len(candidates)):
        x = " ".join(map(str, candidates[i]))
        traces = [run(program, candidates[i]) for program in PROGRAMS]
        members = chosen[split_of(x)]
        if len(set(traces)) == len(PROGRAMS) and len(members) < LISTS[split_of(x)]:
            members.append((x, traces))

    groups: list[list[tuple[str, str, str]]] = []
    for members in chosen.values():
        for p, program in enumerate(PROGRAMS):
            runs = [(members[i][0], members[i][1][p], program.__name__) for i in shuffled(len(members))]
            groups.extend(runs[i : i + GROUP_SIZE] for i in range(0, len(runs), GROUP_SIZE))
    order = shuffled(len(groups))
    return [Record(x, y, strategy, str(n)) for n, g in enumerate(order) for x, y, strategy in groups[g]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the traces of three sorting programs as JSONL.")
    parser.add_argument("--seed", type=int, default=0, help="which lists, and their order (default: %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("traces.jsonl"),
        help="file to write (default: traces.jsonl beside this script)",
    )
    arguments = parser.parse_args()
    records = make_records(arguments.seed)
    write_jsonl(arguments.output, records)
    print(f"{arguments.output}: {len(records)} records")


if __name__ == "__main__":
    main()
