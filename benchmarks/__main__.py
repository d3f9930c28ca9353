"""`make bench`: every comparison, one after another, and their table in `benchmarks/RESULTS.md`."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks import head, matmuls, step
from benchmarks.peers import compare
from benchmarks.timing import Row, table
from surprisal_jax import __version__
from surprisal_jax.files import write_text

PROGRAMS: dict[str, Callable[[int], list[Row]]] = {
    "head": head.rows,
    "step": step.parts,
    "prefix": step.prefix,
    "matmuls": matmuls.rows,
    "peers": compare.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=list(PROGRAMS), action="append", help="only this; nothing is written [all]")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each comparison [20]")
    arguments = parser.parse_args()
    found: list[Row] = []
    for name in arguments.only or PROGRAMS:
        rows = PROGRAMS[name](arguments.rounds)
        print(table(rows), flush=True)
        found += rows
    if arguments.only is None:
        about = (
            f"`make bench`, {arguments.rounds} rounds, in turns in one process. surprisal_jax {__version__}, jax "
            f"{jax.__version__}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}. "
            "Ratios of times unless a row says memory; a row is judged by its paired median where it has one."
        )
        write_text(Path(__file__).parent / "RESULTS.md", f"# Measured side by side\n\n{about}\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
