"""This project's step against the same step in PyTorch, in turns: one works while the other waits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.step import training, workload
from benchmarks.timing import Row, Times
from benchmarks.workload import C_BASE, Workload
from surprisal_jax.sequences import SPECIAL_TOKENS

#: `make bench` makes it.
PYTHON = Path(".venv-torch/bin/python")
#: (form, way) of the processes of torch_step.py.
PEERS = (("same", "eager"), ("same", "compile"), ("plain", "eager"))


def write_inputs(file: Path, work: Workload) -> None:
    """Parameters, batch and settings, by name."""
    state, batch, hyperparameters = work.arguments()
    config, stage = work.config, work.config.disentangle
    params = {**state.params, "reference": work.reference()}
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    arrays |= {f"batch/{name}": value for name, value in batch.items()}
    arrays["coefficients"] = np.asarray(hyperparameters.coefficients.reconstruction)
    shape = {
        **{name: getattr(config.model, name) for name in ("num_layers", "num_heads", "norm_epsilon", "rope_theta")},
        **{name: getattr(stage, name) for name in ("learning_rate", "warmup_steps", "steps")},
        **{name: getattr(stage, name) for name in ("max_gradient_norm", "weight_decay")},
        "num_latents": config.num_latents,
        "first_latent_id": len(SPECIAL_TOKENS),
        "chunk_size": config.chunk_size,
        "beta": config.beta,
        "c_base": C_BASE,
        "threads": len(os.sched_getaffinity(0)),
    }
    named: Any = {name: np.asarray(value) for name, value in arrays.items()}
    np.savez(file, shape=json.dumps(shape), **named)


@contextmanager
def peer(path: Path, form: str, way: str) -> Iterator[Callable[[str], dict[str, Any]]]:
    """A process of torch_step.py, as a function from an order to its answer."""
    program = Path(__file__).with_name("torch_step.py")
    with subprocess.Popen(
        [PYTHON, program, path, form, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(order: str) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            print(order, file=process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        yield ask
        process.stdin.close()


def jax_matmul_rate(size: int = 1024, repeats: int = 20) -> float:
    left, right = (jax.random.normal(jax.random.key(i), (size, size)) for i in range(2))
    product = jax.jit(jnp.matmul)
    best = math.inf
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        jax.block_until_ready(product(left, right))
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def rows(rounds: int = 20, updates: int = 2, **shape: Any) -> list[Row]:
    """Empty where PyTorch's environment is not there."""
    if not PYTHON.exists():
        print(f"peers: skipped, {PYTHON} is not there")
        return []
    work = workload(**shape)
    own = training(work.step(), work)
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "inputs.npz"
        write_inputs(path, work)
        asked = {" ".join(kind): stack.enter_context(peer(path, *kind)) for kind in PEERS}
        # Also what compiles everything.
        losses = [float(own()) for _ in range(3)]
        for name, ask in asked.items():
            got = ask("3")["losses"]
            if name.startswith("same") and not np.allclose(got, losses, rtol=1e-4):
                raise AssertionError(f"PyTorch, {name}: losses {got}, expected {losses}")
        seconds: dict[str, list[float]] = {name: [] for name in ("jax", *asked)}
        names = list(seconds)
        for index in range(rounds):
            for name in names[index % len(names) :] + names[: index % len(names)]:
                if name == "jax":
                    begun = time.perf_counter()
                    for _ in range(updates):
                        total = own()
                    jax.block_until_ready(total)
                    seconds[name].append(time.perf_counter() - begun)
                else:
                    seconds[name].append(asked[name](str(updates))["seconds"])
        answer = asked["same eager"]("matmul")
        rates = {"jax": jax_matmul_rate(), "torch": answer["rate"]}
    times = Times(seconds)
    # Above 1 where this machine's bare product is faster in torch.
    handicap = rates["torch"] / rates["jax"]
    shown = f"PyTorch {answer['torch']}"
    result = []
    for name, what, most in (
        ("same eager", "the same algorithm, eager", 0.75),
        ("same compile", "the same algorithm, torch.compile", 1.0),
        ("plain eager", "whole sequences, all logits, online reference, eager", 0.35),
    ):
        ratio, paired = times.ratio("jax", name)
        result.append(Row(f"step to {shown}, {what}", ratio, paired, at_most=most))
        result.append(
            Row(f"step to {shown}, {what}; divided by the ratio of bare products", ratio / handicap, paired / handicap)
        )
    return result
