"""The training loop that every stage shares: restore, step, log, evaluate, save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from surprisal_jax.config import LoggingConfig
from surprisal_jax.training.checkpoint import Checkpoints
from surprisal_jax.training.progress import StageLog
from surprisal_jax.training.sharding import put_batch, put_on_mesh

#: `(carry, step) -> (carry, metrics)`, run after the given number of steps. What it puts into the carry may be a host
#: array.
Evaluate = Callable[[Mapping[str, Any], int], tuple[Mapping[str, Any], Mapping[str, float]]]

#: Updates before those of a trace, among them the ones that compile; and those in it.
_NOT_TRACED, _TRACED = 10, 10


def train(
    stage: str,
    carry: dict[str, Any],
    *,
    train_step: Callable[..., tuple[Any, Any]],
    batch_at: Callable[[Mapping[str, Any], int], Mapping[str, np.ndarray]],
    begin: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    evaluate: Evaluate,
    evaluate_every: int,
    total_steps: int,
    batch_size: int,
    directory: Path,
    mesh: Mesh,
    logging: LoggingConfig,
    profile: bool,
) -> dict[str, Any]:
    """Run a stage to its last step, from its newest checkpoint where there is one.

    Args:
      stage: the name under which metrics are logged.
      carry: everything a checkpoint holds: `state`, the TrainState, and what `evaluate` keeps beside it.
      train_step: compiled, `(state, batch) -> (state, metrics)`; consumes the state.
      batch_at: the host batch of a step (from 0), a pure function of the carry and the step, which are all that a
        resumed run needs to know. Of the carry it may read what `evaluate` keeps there, not the state: reading that
        would wait for the step before.
      begin: called on the carry before the first step, not where a checkpoint is there.
      evaluate: called after every `evaluate_every` steps and after the last, on the whole carry.
      directory: of the stage: `checkpoints/`, `metrics.jsonl`, `tensorboard/` and `profile/` go there.

    Returns:
      The carry after the last step, which is on disk as well.
    """
    # Closed on the way out of an error too: a save that has begun is finished.
    with contextlib.closing(Checkpoints(directory / "checkpoints", keep=logging.keep_checkpoints)) as checkpoints:
        restored = checkpoints.restore_newest(carry)
        start = 0
        if restored is not None:
            start, carry, _ = restored
        carry = put_on_mesh(carry, mesh)
        if restored is None:
            carry = put_on_mesh(dict(begin(carry)), mesh)
        if start == total_steps:
            return carry
        with (
            StageLog(stage, total_steps, start, directory, logging.log_every) as log,
            contextlib.ExitStack() as traced,
        ):
            for step in range(start, total_steps):
                if profile and step == start + _NOT_TRACED:
                    traced.enter_context(jax.profiler.trace(directory / "profile" / stage))
                batch = put_batch(batch_at(carry, step), mesh)
                # Whatever a step reads is on the device by now.
                with jax.transfer_guard("disallow"):
                    carry["state"], metrics = train_step(carry["state"], batch)
                done = step + 1
                if done == start + _NOT_TRACED + _TRACED:
                    jax.block_until_ready(carry["state"])
                    traced.close()
                last = done == total_steps
                measured: dict[str, Any] = {}
                if done % evaluate_every == 0 or last:
                    looked_at, values = evaluate(carry, done)
                    carry = put_on_mesh(dict(looked_at), mesh)
                    measured.update(values)
                if done % logging.log_every == 0 or last or measured:
                    measured = {**name_leaves(metrics), **measured}
                log.log(done, measured)
                if done % logging.checkpoint_every == 0 or last:
                    # First the lines of the steps that the checkpoint makes final: a resumed run does not write them.
                    log.flush()
                    position = {"step": done, "data_position": done * batch_size}
                    checkpoints.save(done, carry, position)
        return carry


def name_leaves(metrics: Any) -> dict[str, jax.Array]:
    """The leaves of a metrics pytree by name: the last field name of the path, with what qualifies it where it is not a
    loss term.

    `terms.reconstruction.raw_reconstruction_loss` is logged as `raw_reconstruction_loss`, `floor_rates.inverse_nll` as
    `floor_rate/inverse_nll`, `posterior_usage` of K entries as `posterior_usage/0` and so on.
    """
    named: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        keys = [str(getattr(key, "name", getattr(key, "key", key))) for key in path]
        keys = [key for key in keys if key not in ("terms", "reconstruction")]
        name = "/".join(keys)
        if leaf.ndim == 0:
            named[name] = leaf
        else:
            named.update({f"{name}/{i}": leaf[i] for i in range(leaf.shape[0])})
    return named
