"""`python -m surprisal_jax.study`: run what the plan still lacks, then write the report."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from surprisal_jax.config import InputError, run_identity
from surprisal_jax.study.plan import PLAN, SETTINGS, Member, configuration, members
from surprisal_jax.study.table import current_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 after a user's mistake."""
    arguments = _parser().parse_args(argv)
    try:
        return _study(arguments)
    except InputError as error:
        print(f"study: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m surprisal_jax.study",
        description="Runs settings x tasks x seeds of surprisal_jax/study/plan.py that have no row yet, and writes the "
        "report. Stopped or killed, the same command goes on.",
    )
    parser.add_argument("--output", default="docs/study", metavar="DIRECTORY", help="CSV and report [docs/study]")
    parser.add_argument("--runs", default="runs", metavar="DIRECTORY", help="references and their scores [runs]")
    parser.add_argument("--block", choices=[block.name for block in PLAN], action="append", help="only this block")
    parser.add_argument("--setting", choices=list(SETTINGS), action="append", help="only this setting")
    parser.add_argument("--seed", type=int, action="append", help="only this seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of one core [all cores]")
    parser.add_argument("--hours", type=float, default=24.0, help="begin nothing after this time [24]")
    return parser


def _study(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output)
    blocks = tuple(block for block in PLAN if arguments.block is None or block.name in arguments.block)
    wanted = [
        member
        for member in members(blocks)
        if (arguments.setting is None or member.setting in arguments.setting)
        and (arguments.seed is None or member.seed in arguments.seed)
    ]
    configs = {member: configuration(member, arguments.runs) for member in wanted}
    done = current_rows(output / "results.csv", {member: run_identity(config) for member, config in configs.items()})
    units: dict[object, list[Member]] = {}
    for member, config in configs.items():
        if member not in done:
            # What the reference depends on beside the seed: its members run in one process, one after another.
            key = (member.task, member.seed, config.num_latents, config.data, config.model, config.reference)
            units.setdefault(key, []).append(member)
    print(f"{len(wanted)} runs, {len(done)} done; {len(units)} references to go on {arguments.workers} workers")
    _run(list(units.values()), arguments, output)
    return 0


def _run(units: list[list[Member]], arguments: argparse.Namespace, output: Path) -> None:
    # One thread a process: models this small gain little from more, and the processes are many.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(arguments.runs).resolve() / "compiled"))
    started = time.monotonic()
    deadline = started + 3600 * arguments.hours
    context = multiprocessing.get_context("spawn")
    total, finished = len(units), 0
    waiting = iter(units)
    with ProcessPoolExecutor(arguments.workers, context, max_tasks_per_child=1) as pool:
        running: dict[Future[None], list[Member]] = {}

        def begin() -> None:
            while len(running) < arguments.workers and time.monotonic() < deadline:
                unit = next(waiting, None)
                if unit is None:
                    return
                running[pool.submit(run_unit, unit, arguments.runs, output)] = unit

        begin()
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit = running.pop(future)
                future.result()
                finished += 1
                elapsed = time.monotonic() - started
                left = elapsed / finished * (total - finished) / 60
                print(
                    f"{finished}/{total} {unit[0].task} seed {unit[0].seed}: {', '.join(m.setting for m in unit)}; "
                    f"{elapsed / 60:.0f} min, some {left:.0f} min left",
                    flush=True,
                )
            begin()


def run_unit(unit: Sequence[Member], runs: str, output: Path) -> None:
    """All members that share one reference, in a process of their own; each program's rows are written as it ends."""
    log = output / "log" / f"{unit[0].task}-seed{unit[0].seed}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
    from surprisal_jax.study.members import run_members

    run_members({member: configuration(member, runs) for member in unit}, output)


if __name__ == "__main__":
    sys.exit(main())
