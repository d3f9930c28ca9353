"""Two processes that a cluster started train what one process trains: real processes, which find each other as under
Slurm."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
FLAGS = (
    *("--data-parallel", "2", "--fsdp", "2", "--micro-batches", "2"),
    *("--reference.steps", "10", "--disentangle.steps", "10", "--disentangle.reseed-until", "5"),
)


def train(output: Path, processes: int) -> None:
    """The small run over 4 devices."""
    job = random.randrange(2**31)  # of which the port is made
    started = []
    for index in range(processes):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            # Unoptimised programs are compiled in half the time.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes} --xla_backend_optimization_level=0",
        }
        flags = list(FLAGS)
        if processes > 1:
            environment |= {
                "SLURM_JOB_ID": str(job),
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": str(processes),
                "SLURM_PROCID": str(index),
                "SLURM_LOCALID": str(index),
                "SLURM_STEP_NUM_NODES": "1",
            }
            flags += ["--distributed", "true"]
        command = [sys.executable, "train.py", "--config", "tests/data/small.yaml", "--output-dir", str(output), *flags]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    try:
        for process in started:
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in started:
            process.kill()


def lines(output: Path, pattern: str) -> list[dict[str, Any]]:
    (path,) = output.glob(pattern)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_processes_train_to_the_values_of_one(tmp_path: Path) -> None:
    train(tmp_path / "one", 1)
    train(tmp_path / "two", 2)
    for stage in ("*-reference-*/metrics.jsonl", "small-seed0-*/metrics.jsonl"):
        one, two = lines(tmp_path / "one", stage), lines(tmp_path / "two", stage)
        assert len(one) == len(two) and [line["step"] for line in one] == [line["step"] for line in two]
        for mine, other in zip(one, two, strict=True):
            assert mine.keys() == other.keys()
            for name, value in mine.items():
                if isinstance(value, float):
                    np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    summaries = [
        json.loads(next((tmp_path / name).glob("small-*/summary.json")).read_text()) for name in ("one", "two")
    ]
    for name in ("alignment_one_to_one", "posterior_alignment", "c_base", "collapse_threshold"):
        np.testing.assert_allclose(summaries[1][name], summaries[0][name], rtol=1e-4, err_msg=name)
