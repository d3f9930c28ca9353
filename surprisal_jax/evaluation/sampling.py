"""Traces drawn from the reference: what the models are trained on under `traces: reference_samples`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from surprisal_jax.config import ExperimentConfig
from surprisal_jax.data import Record, evaluation_rows, read_jsonl, write_jsonl
from surprisal_jax.dataset import Dataset
from surprisal_jax.evaluation.decode import decode_branches
from surprisal_jax.sequences import SPECIAL_TOKENS, detokenize
from surprisal_jax.training.progress import StageLog
from surprisal_jax.training.sharding import compile_over_rows, first_process_first, put_rows
from surprisal_jax.training.stages import Reference, evaluation_batch


def sample_traces(
    config: ExperimentConfig, dataset: Dataset, reference: Reference, mesh: Mesh, directory: Path
) -> list[Record]:
    """One y for each training x, drawn token by token from the reference at temperature 1, once.

    A sample that is longer than every y of the data, or with a tag in it, is left out. No sample has a
    strategy or a group: nobody knows the first, and each was drawn on its own.

    Args:
      directory: keeps the samples; read where they are there already.
    """
    path = directory / "samples.jsonl"
    if path.exists():
        return read_jsonl(path, dataset.tokenization, config.data.max_tokens)
    directory.mkdir(exist_ok=True)
    vocabulary = dataset.vocabulary
    longest = int(dataset.arrays["suffix_loss_mask"].sum(axis=1).max())  # with </y> and <eos>

    def sample(params: Any, prompts: Mapping[str, jax.Array], key: jax.Array) -> jax.Array:
        # Without <z>, which ends the prefix: the reference reads `<bos> <x> x </x> <y>`.
        return decode_branches(
            reference.step.decoder,
            params,
            prompts["prefix_tokens"],
            prompts["prefix_lengths"] - 1,
            latent_ids=(vocabulary.id("<y>"),),
            forced_ids=(),
            eos_id=vocabulary.id("<eos>"),
            max_new_tokens=longest,
            sampling_keys=jax.vmap(jax.random.fold_in, (None, 0))(key, prompts["row"]),
        )[0][:, 0]

    compiled = compile_over_rows(sample, mesh, batched=(False, True, False))
    prompts = {name: dataset.arrays[name] for name in ("prefix_tokens", "prefix_lengths")}
    prompts["row"] = np.arange(len(dataset.records), dtype=np.int32)
    chunks = evaluation_rows(dataset.rows["train"][:, None], evaluation_batch(mesh))
    key = jax.random.key(config.effective_reference_seed)
    reserved = {*SPECIAL_TOKENS, *(vocabulary.tokens[i] for i in vocabulary.latent_ids)}
    records: list[Record] = []
    with StageLog("sample", len(chunks), 0, directory, log_every=1) as log:
        for index, rows in enumerate(chunks):
            drawn = compiled(reference.params, put_rows(prompts, rows, mesh), key)
            for row, sample_ids in zip(rows, np.asarray(drawn), strict=True):
                words = vocabulary.decode(sample_ids)
                y = words[: words.index("</y>")] if "</y>" in words else []
                if row >= 0 and y and reserved.isdisjoint(y):
                    records.append(Record(dataset.records[row].x, detokenize(y, dataset.tokenization)))
            log.log(index + 1, {})

    def keep() -> None:
        if not path.exists():  # the first process wrote what all drew
            write_jsonl(path, records)

    first_process_first("samples written", keep)
    return records
