"""`python -m surprisal_jax.study`: run what the plan still lacks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from surprisal_jax.config import InputError, reference_settings, run_identity
from surprisal_jax.study.plan import PLAN, SETTINGS, Member, configuration, members
from surprisal_jax.study.runner import run_units
from surprisal_jax.study.table import current_rows, read_rows


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
        description="Runs settings x tasks x seeds of surprisal_jax/study/plan.py that have no row yet, and adds "
        "their rows. Stopped or killed, the same command goes on.",
    )
    parser.add_argument("--output", default="docs/study", metavar="DIRECTORY", help="CSV files and report [docs/study]")
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
    # Of all blocks, since the report is about all of them.
    configs = {member: configuration(member, arguments.runs) for member in members()}
    identities = {member: run_identity(config) for member, config in configs.items()}
    wanted = [
        member
        for member in members(blocks)
        if (arguments.setting is None or member.setting in arguments.setting)
        and (arguments.seed is None or member.seed in arguments.seed)
    ]
    done = current_rows(output / "results.csv", {member: identities[member] for member in wanted})
    units: dict[object, list[Member]] = {}
    for member in wanted:
        if member not in done:
            config = configs[member]
            # What the reference depends on beside the seed: its members run in one process, one after another.
            key = (
                config.task,
                config.effective_data_seed,
                config.num_latents,
                config.data,
                json.dumps(reference_settings(config)),
            )
            units.setdefault(key, []).append(member)
    print(f"{len(wanted)} runs, {len(done)} done; {len(units)} references to go on {arguments.workers} workers")
    run_units(list(units.values()), Path(arguments.runs), output, arguments.workers, arguments.hours)
    _write_page(output, identities)
    return 0


def _write_page(output: Path, identities: Mapping[Member, str]) -> None:
    """The report over all blocks, whatever this call ran."""
    from surprisal_jax.study.page import write_study_page

    rows = {member: found[-1] for member, found in current_rows(output / "results.csv", identities).items()}
    output.mkdir(parents=True, exist_ok=True)
    write_study_page(output / "index.html", rows, read_rows(output / "curves.csv"))
    print(f"report in {output / 'index.html'}")


if __name__ == "__main__":
    sys.exit(main())
