"""A run's data as the models read it: records of all splits, one vocabulary, padded arrays, and an identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from surprisal_jax.config import ExperimentConfig, InputError
from surprisal_jax.data import SPLITS, Record, generate_records, read_splits
from surprisal_jax.sequences import Vocabulary, build_sequences, tokenize
from surprisal_jax.tasks import Task, get_task
from surprisal_jax.tasks.lookup import LookupTask

#: Part of every identity below: raise it when records, templates or arrays change their meaning.
FORMAT_VERSION = 1

#: Raise it when what a run with latents does or carries changes, and its reference does not. 2: y keeps its positions.
#: 3: groups are held.
LATENT_FORMAT_VERSION = 3


@dataclass(frozen=True)
class Dataset:
    """All splits, one after another; row n of every array is record n."""

    records: tuple[Record, ...]
    rows: Mapping[str, np.ndarray]  # split -> its rows
    vocabulary: Vocabulary
    arrays: Mapping[str, np.ndarray]  # the fields of SequenceArrays
    task: Task
    tokenization: str
    identity: str  # sha256 over everything training can see: never the strategies
    anchor_latents: np.ndarray  # int32 [N], the latent assigned to a labelled example; -1: none

    @property
    def latent_identity(self) -> str:
        """`identity`, what else the disentangle stage reads of the data, and how it lays a sequence out: the labels of
        the anchors, and a version."""
        content = [self.identity, LATENT_FORMAT_VERSION, self.anchor_latents[self.anchor_latents >= 0].tolist()]
        content.append(np.flatnonzero(self.anchor_latents >= 0).tolist())
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def split_records(self, split: str) -> list[Record]:
        return [self.records[row] for row in self.rows[split]]


def load_dataset(config: ExperimentConfig) -> Dataset:
    """Generate the task's records, or read the user's file, and turn them into arrays.

    Raises:
      InputError: what is wrong with the file or the sizes asked for, in one line.
    """
    if config.data.path is None:
        task = _make_task(config)
        splits = generate_records(task, config.data, config.effective_data_seed)
        return make_dataset(splits, task, config)
    path = config.data.path
    splits = read_splits(path, config.data)
    records = [record for split in SPLITS for record in splits[split]]
    if config.latent_scope == "group" and all(record.group is None for record in splits["train"]):
        raise InputError(
            f"{path}: group: got no record with one, expected groups for latent_scope group (or latent_scope example)"
        )
    if config.task is None:
        return make_dataset(splits, LookupTask(records, config.data.tokenization), config)
    named = _make_task(config)
    for record in records:
        try:
            named.traces(record.x)
        except ValueError as error:
            raise InputError(f"{path}: {error} by task {config.task}; for other traces give task none") from None
    return make_dataset(splits, named, config)


def _make_task(config: ExperimentConfig) -> Task:
    try:
        return get_task(str(config.task), config.data.task_size)
    except ValueError as error:
        raise InputError(f"data.task_size: {error}") from None


def with_training_records(dataset: Dataset, records: list[Record], config: ExperimentConfig) -> Dataset:
    """The same validation and test split and vocabulary, and other records to train on."""
    splits = {split: dataset.split_records(split) for split in SPLITS} | {"train": records}
    return make_dataset(splits, dataset.task, config, dataset.vocabulary)


def make_dataset(
    splits: Mapping[str, list[Record]], task: Task, config: ExperimentConfig, vocabulary: Vocabulary | None = None
) -> Dataset:
    """Arrays of one width for all splits, so that each program is compiled once."""
    records = tuple(record for split in SPLITS for record in splits[split])
    bounds = np.cumsum([0, *(len(splits[split]) for split in SPLITS)])
    rows = {split: np.arange(bounds[i], bounds[i + 1], dtype=np.int32) for i, split in enumerate(SPLITS)}
    tokenization = config.data.tokenization
    texts = [(tokenize(record.x, tokenization), tokenize(record.y, tokenization)) for record in records]
    if vocabulary is None:
        vocabulary = Vocabulary.from_texts((text for pair in texts for text in pair), config.num_latents)
    sequences = build_sequences([(vocabulary.encode(x), vocabulary.encode(y)) for x, y in texts], vocabulary)
    visible = [{**asdict(record), "strategy": None} for record in records]
    anchor_latents = _assign_anchors(records, rows["train"], task, config)
    content: list[object] = [FORMAT_VERSION, tokenization, vocabulary.tokens, bounds.tolist(), visible]
    identity = hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
    arrays = {field.name: getattr(sequences, field.name) for field in fields(sequences)}
    return Dataset(records, rows, vocabulary, arrays, task, tokenization, identity, anchor_latents)


def _assign_anchors(
    records: Sequence[Record], train_rows: np.ndarray, task: Task, config: ExperimentConfig
) -> np.ndarray:
    """The first `anchors` training records of each strategy, with the strategy's place in the task as their latent."""
    latents = np.full(len(records), -1, np.int32)
    if not config.anchors:
        return latents
    if len(task.strategies) > config.num_latents:
        raise InputError(
            f"num_latents: got {config.num_latents} with anchors {config.anchors}, expected at least"
            f" {len(task.strategies)}, one for each strategy"
        )
    for latent, strategy in enumerate(task.strategies):
        labelled = [row for row in train_rows if records[row].strategy == strategy][: config.anchors]
        if len(labelled) < config.anchors:
            raise InputError(
                f"anchors: got {config.anchors}, expected at most {len(labelled)}, the training records of {strategy}"
            )
        latents[labelled] = latent
    return latents
