"""Processes for the study's units. It imports no jax: each process starts its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from surprisal_jax.allocator import keep_freed_memory
from surprisal_jax.study.plan import Member, configuration


def run_units(units: Sequence[Sequence[Member]], runs: Path, output: Path, workers: int, hours: float) -> None:
    """Every unit in a process of its own, `workers` at a time; none is begun after `hours`.

    Args:
      units: members that share a reference.
      runs: directory of the references.
      output: directory of the tables.
    """
    # One thread a process: models this small gain little from more, and the processes are many.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(runs.resolve() / "compiled"))
    started = time.monotonic()
    deadline = started + 3600 * hours
    context = multiprocessing.get_context("spawn")
    cores = _cores(workers)
    total, finished = len(units), 0
    waiting = iter(units)
    with ProcessPoolExecutor(workers, context, _end_with_parent, max_tasks_per_child=1) as pool:
        running: dict[Future[None], tuple[Sequence[Member], int | None]] = {}

        def begin() -> None:
            while len(running) < workers and time.monotonic() < deadline:
                unit = next(waiting, None)
                if unit is None:
                    return
                core = cores.pop()
                running[pool.submit(run_unit, unit, runs, output, core)] = unit, core

        begin()
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit, core = running.pop(future)
                cores.append(core)
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


def _cores(workers: int) -> list[int | None]:
    """A core for each worker; none where the system does not tell, or has fewer cores than workers."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return list(cores[:workers]) if workers <= len(cores) else [None] * workers


def run_unit(unit: Sequence[Member], runs: Path, output: Path, core: int | None) -> None:
    """All members that share one reference, in a process of their own; each program's rows are written as it ends.

    On `core` alone: two that move between two cores take a quarter longer each.
    """
    if core is not None:
        os.sched_setaffinity(0, {core})
    log = output / "log" / f"{unit[0].task}-seed{unit[0].seed}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    keep_freed_memory()
    from surprisal_jax.study.members import run_members

    run_members({member: configuration(member, str(runs)) for member in unit}, output)


def _end_with_parent() -> None:
    """Let this process end when the one that began it is gone, however it went: left behind, it would go on writing the
    checkpoints that the next call of the same command writes too."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of a pool"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
