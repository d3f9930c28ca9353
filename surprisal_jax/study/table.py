"""The study on disk: two CSV files that grow by whole runs, so that a study goes on where it was stopped."""

from __future__ import annotations

import csv
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surprisal_jax.evaluation.report import METRICS
from surprisal_jax.study.plan import Member

SECONDS = ("reference", "sample", "score", "disentangle", "evaluate")
#: `identity` is that of the run's configuration; `members` share the seconds of all stages but evaluate.
RESULT_COLUMNS = (
    "task",
    "seed",
    "setting",
    "identity",
    *METRICS,
    "latents_by_strategies",
    "members",
    *(f"seconds_{stage}" for stage in SECONDS),
    "surprisal_jax",
    "jax",
)
CURVE_COLUMNS = ("task", "seed", "setting", "identity", "step", "posterior_alignment", "rho_recon")


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows, with the header in a new file. Processes that write at once take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Opened before its turn: another may have written the header since.
        file.seek(0, os.SEEK_END)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)
        file.flush()


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows; none where there is no file yet."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def current_rows(path: Path, identities: Mapping[Member, str]) -> dict[Member, list[dict[str, str]]]:
    """The rows of the plan's members whose configuration is still the one that was run."""
    rows: dict[Member, list[dict[str, str]]] = {}
    for row in read_rows(path):
        member = Member(row["task"], int(row["seed"]), row["setting"])
        if identities.get(member) == row["identity"]:
            rows.setdefault(member, []).append(row)
    return rows
