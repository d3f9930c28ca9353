"""The evaluate stage: decode under every forced latent, read the posterior, and fill every name of `summary.json`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from surprisal_jax import losses
from surprisal_jax.config import ExperimentConfig
from surprisal_jax.data import evaluation_rows
from surprisal_jax.dataset import Dataset
from surprisal_jax.evaluation import alignment
from surprisal_jax.evaluation.decode import decode_branches
from surprisal_jax.evaluation.report import (
    METRICS,
    TokenRow,
    write_latents_by_strategies,
    write_token_heat_map,
    write_training_curves,
)
from surprisal_jax.models.latent import suffix_start
from surprisal_jax.sequences import detokenize, tokenize
from surprisal_jax.training.progress import StageLog
from surprisal_jax.training.sharding import compile_over_rows, put_rows
from surprisal_jax.training.stages import evaluation_batch
from surprisal_jax.training.step import Evaluation, Hyperparameters, LatentStep


@dataclass(frozen=True)
class Decodes:
    """Decoded texts of N distinct x under K forced latents."""

    xs: list[str]
    outputs: list[list[str]]  # [N][K]
    log_router: np.ndarray  # [N, K]


class Evaluator:
    """Reads a model over many records, with programs that are compiled once for all calls."""

    def __init__(
        self,
        step: LatentStep,
        hyperparameters: Hyperparameters,
        dataset: Dataset,
        scores: Mapping[str, np.ndarray],
        mesh: Mesh,
    ) -> None:
        self.dataset = dataset
        self.batch_size = evaluation_batch(mesh)
        self._mesh = mesh
        self._hyperparameters = hyperparameters
        self._arrays = {**dataset.arrays, **scores}
        self._evaluate = compile_over_rows(step.evaluate, mesh, batched=(False, True, False))
        self._gradients = compile_over_rows(step.latent_gradients, mesh, batched=(False, True, False, False))
        vocabulary = dataset.vocabulary

        def decode(params: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
            return decode_branches(
                step.decoder,
                params,
                tokens,
                lengths,
                latent_ids=step.latent_ids,
                forced_ids=vocabulary.encode(["</z>", "<y>"]),
                eos_id=vocabulary.id("<eos>"),
                max_new_tokens=dataset.arrays["suffix_tokens"].shape[1],
                suffix_start=suffix_start(lengths),
            )

        self._decode = compile_over_rows(decode, mesh, batched=(False, True, True))

    def under(self, hyperparameters: Hyperparameters) -> Evaluator:
        """The same programs with other hyperparameters, without another compilation."""
        other = copy.copy(self)
        other._hyperparameters = hyperparameters
        return other

    def read(
        self, params: Mapping[str, Any], rows: np.ndarray, report: Callable[[int], None] = lambda batches: None
    ) -> Evaluation:
        """`LatentStep.evaluate` of the given rows, as host arrays in their order."""
        evaluation = self._over_batches(
            lambda batch: self._evaluate(params, batch, self._hyperparameters), rows, report
        )
        assert isinstance(evaluation, Evaluation)
        return evaluation

    def latent_gradients(self, params: Mapping[str, Any], rows: np.ndarray, latent: int) -> np.ndarray:
        """`LatentStep.latent_gradients` of the given rows, [N, D]."""
        gradients: np.ndarray = self._over_batches(
            lambda batch: self._gradients(params["model"], batch, self._hyperparameters, latent), rows
        )
        return gradients

    def _over_batches(
        self,
        compiled: Callable[[dict[str, jax.Array]], Any],
        rows: np.ndarray,
        report: Callable[[int], None] = lambda batches: None,
    ) -> Any:
        """What `compiled` gives for the rows, batch by batch, as host arrays in their order."""
        parts = []
        for chunk in evaluation_rows(rows[:, None], self.batch_size):
            parts.append(jax.device_get(compiled(put_rows(self._arrays, chunk, self._mesh))))
            report(1)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(rows)], *parts)

    def decode(
        self, params: Mapping[str, Any], limit: int, report: Callable[[int], None] = lambda batches: None
    ) -> Decodes:
        """Greedy decodes of the first `limit` distinct x of the test split under every latent."""
        dataset = self.dataset
        first_rows: dict[str, int] = {}
        for row in dataset.rows["test"]:
            first_rows.setdefault(dataset.records[row].x, int(row))
        rows = np.asarray(list(first_rows.values())[:limit], np.int32)
        prompts = {name: dataset.arrays[name] for name in ("prefix_tokens", "prefix_lengths")}
        outputs: list[list[str]] = []
        log_router = []
        for chunk in evaluation_rows(rows[:, None], self.batch_size):
            batch = put_rows(prompts, chunk, self._mesh)
            decoded = self._decode(params["model"], batch["prefix_tokens"], batch["prefix_lengths"])
            tokens, router = jax.device_get(decoded)
            counted = chunk >= 0
            log_router.append(router[counted])
            outputs.extend([[_text(branch, dataset) for branch in branches] for branches in tokens[counted]])
            report(1)
        return Decodes([dataset.records[row].x for row in rows], outputs, np.concatenate(log_router))


def _text(tokens: np.ndarray, dataset: Dataset) -> str:
    """The text before `</y>`; without one everything stays, tags and all, and fits nothing."""
    words = dataset.vocabulary.decode(tokens)
    return detokenize(words[: words.index("</y>")] if "</y>" in words else words, dataset.tokenization)


@dataclass(frozen=True)
class Report:
    """The numbers, and what the pictures show."""

    metrics: dict[str, float | None]
    intervals: dict[str, tuple[float, float] | None]
    mapping: alignment.LatentMap | None
    table: np.ndarray | None  # [K, S], mean credit
    test_weighting: losses.TokenWeighting

    def latent_strategies(self, strategies: tuple[str, ...]) -> dict[str, str]:
        """What each mapped latent means."""
        return {str(latent): strategies[s] for latent, s in self.mapping or ()}


def evaluate_run(
    config: ExperimentConfig,
    evaluator: Evaluator,
    params: Mapping[str, Any],
    weighting: Mapping[str, float | None],
    c_base: float,
    directory: Path,
) -> Report:
    """Decode, read the posterior, measure; with a progress bar of its own.

    Args:
      weighting, c_base: as `measure` takes them.
      directory: of the run, for the stage's log.
    """
    dataset = evaluator.dataset
    test, validation = dataset.rows["test"], dataset.rows["validation"]
    instances = min(config.data.test_instances, len({dataset.records[row].x for row in test}))
    batch = evaluator.batch_size
    total = sum(-(-count // batch) for count in (instances, len(test), len(validation)))
    with StageLog("evaluate", total, 0, directory, log_every=1) as log:
        done = 0

        def report(batches: int) -> None:
            nonlocal done
            done += batches
            log.log(done, {})

        decodes = evaluator.decode(params, instances, report)
        on_test = evaluator.read(params, test, report)
        on_validation = evaluator.read(params, validation, report)
    return measure(config, dataset, decodes, on_test, on_validation, weighting, c_base)


def measure(
    config: ExperimentConfig,
    dataset: Dataset,
    decodes: Decodes,
    test: Evaluation,
    validation: Evaluation,
    weighting: Mapping[str, float | None],
    c_base: float,
) -> Report:
    """Every metric from what was decoded and read; a pure function of host arrays.

    Args:
      test, validation: of all records of these splits, in order.
      weighting: `collapse_threshold` and `strategy_token_share`, known since scoring.
      c_base: nats.
    """
    task, strategies = dataset.task, dataset.task.strategies
    rng = np.random.default_rng(np.random.SeedSequence([config.seed, 2]))
    metrics: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float] | None] = {}
    count = len(decodes.xs)

    def put(name: str, statistic: Callable[[np.ndarray], float], **bootstrap: Any) -> None:
        whole = bootstrap.pop("whole")
        metrics[name] = statistic(whole)
        intervals[name] = alignment.bootstrap_interval(statistic, count, rng, **bootstrap)

    everything = np.arange(count)
    mapping = table = None
    if strategies:
        fits = [[task.classify(x, text) for text in row] for x, row in zip(decodes.xs, decodes.outputs, strict=True)]
        credit = alignment.strategy_credit(fits, strategies)
        _, mapping = alignment.one_to_one_alignment(credit)
        table = alignment.latents_by_strategies(credit)
        covered = alignment.local_coverage(credit)
        permuted = alignment.permute_latents(credit, rng)
        put("alignment_one_to_one", lambda i: alignment.one_to_one_value(credit[i]), whole=everything)
        put("local_strategy_coverage_mean", lambda i: float(covered[i].mean()), whole=everything)
        put("local_strategy_full_coverage_rate", lambda i: float((covered[i] == 1.0).mean()), whole=everything)
        put("permuted_latent_control", lambda i: alignment.one_to_one_value(permuted[i]), whole=everything)
    if task.has_final_answer:
        predicted = [[task.final_answer(text) for text in row] for row in decodes.outputs]
        correct = alignment.final_answer_correct(predicted, [task.answer(x) for x in decodes.xs])
        gumbel = rng.gumbel(size=decodes.log_router.shape)
        sampled = correct[everything, np.argmax(decodes.log_router + gumbel, axis=1)]
        put("mean_overall_final_answer_accuracy", lambda i: float(correct[i].mean()), whole=everything)
        put("sampled_final_answer_accuracy", lambda i: float(sampled[i].mean()), whole=everything)

    rows_of, chosen = _records_of_decoded(dataset, decodes)
    if strategies and mapping is not None and len(chosen):
        truth = np.asarray([strategies.index(str(dataset.split_records("test")[i].strategy)) for i in chosen])
        network = np.argmax(test.log_posterior[chosen], axis=1)
        closed_form = np.argmax(test.closed_form_log_posterior[chosen], axis=1)
        num_latents = config.num_latents

        def best(latents: np.ndarray) -> Callable[[np.ndarray], float]:
            return lambda i: alignment.best_map_alignment(latents[i], truth[i], num_latents, len(strategies))[0]

        def under_map(latents: np.ndarray) -> Callable[[np.ndarray], float]:
            return lambda i: alignment.posterior_alignment(latents[i], truth[i], mapping)

        records = np.arange(len(chosen))
        put("posterior_alignment", under_map(network), whole=records, rows_of=rows_of)
        put("posterior_alignment_best_map", best(network), whole=records, rows_of=rows_of)
        if config.posterior == "closed_form":
            put("closed_form_posterior_alignment", under_map(closed_form), whole=records, rows_of=rows_of)
            put("closed_form_posterior_alignment_best_map", best(closed_form), whole=records, rows_of=rows_of)
    known = {split: _strategy_records(dataset, split) for split in ("train", "test")}
    if len(strategies) > 1 and all(known.values()):
        metrics["bag_of_tokens_accuracy"] = alignment.bag_of_tokens_accuracy(
            known["train"], known["test"], len(strategies)
        )
    metrics["rho_recon"] = rho_recon(validation, c_base)
    metrics.update(weighting)
    return Report(
        {name: metrics.get(name) for name in METRICS},
        {name: intervals.get(name) for name in METRICS},
        mapping,
        table,
        test.weighting,
    )


def rho_recon(validation: Evaluation, c_base: float) -> float:
    """Validation mean of `E_q[raw] / c_base`, q the network."""
    expected = np.exp(validation.log_posterior.astype(np.float64)) * validation.raw_reconstruction_loss
    return float(expected.sum(axis=1).mean() / c_base)


def floor_warnings(config: ExperimentConfig, weighting: losses.TokenWeighting, mask: np.ndarray) -> list[str]:
    """A line for each floor that acts on more than half of what it is for, where a term that uses it has a weight."""
    weights = config.reconstruction
    inverse = weights.normalized_inverse_token_weighted_weight
    tokens = weighting.aligned_base_token_nll[mask]
    rates = {
        "inverse_nll_floor": (inverse, np.mean(tokens < config.inverse_nll_floor)),
        "divisor_floor on example_base_loss": (
            weights.example_normalized_weight,
            np.mean(weighting.example_base_loss < config.divisor_floor),
        ),
        "divisor_floor on token_weighted_base_loss": (
            weights.normalized_token_weighted_weight,
            np.mean(weighting.token_weighted_base_loss < config.divisor_floor),
        ),
        "divisor_floor on inverse_token_weighted_base_loss": (
            inverse,
            np.mean(weighting.inverse_token_weighted_base_loss < config.divisor_floor),
        ),
    }
    return [
        f"{name} acts on {rate:.0%} of the training data"
        for name, (weight, rate) in rates.items()
        if weight and rate > 0.5
    ]


def write_figures(directory: Path, dataset: Dataset, report: Report, curves: Sequence[Path]) -> None:
    """The pictures of a run: latents by strategies, training curves, token heat map."""
    directory.mkdir(parents=True, exist_ok=True)
    strategies = dataset.task.strategies
    if report.table is not None and report.mapping is not None:
        write_latents_by_strategies(
            directory / "latents_by_strategies.png",
            report.table,
            strategies,
            report.mapping,
            float(report.metrics["alignment_one_to_one"] or 0.0),
        )
    write_training_curves(directory / "training_curves.png", curves)
    write_token_heat_map(directory / "token_heat_map.png", heat_rows(dataset, report))


def heat_rows(dataset: Dataset, report: Report) -> list[TokenRow]:
    """The first traces of the test split with their token weights and surprisals, for the token heat map."""
    weighting = report.test_weighting
    mask = dataset.arrays["suffix_loss_mask"][dataset.rows["test"]][:, 1:]
    rows = []
    for i, record in enumerate(dataset.split_records("test")[:6]):
        tokens = [*tokenize(record.y, dataset.tokenization), "</y>", "<eos>"]
        title = record.x if record.strategy is None else f"{record.x}   {record.strategy}"
        weights, surprisal = weighting.token_weights[i][mask[i]], weighting.aligned_base_token_nll[i][mask[i]]
        rows.append(TokenRow(title, tokens, weights, surprisal))
    return rows


def weighting_metrics(
    config: ExperimentConfig, dataset: Dataset, weighting: Any, rows: np.ndarray, c_base: float
) -> dict[str, float | None]:
    """`collapse_threshold` and `strategy_token_share` of the given rows, from the token weights alone, before any
    training.

    Args:
      weighting: `TokenWeighting` of these rows on suffix positions, host arrays.
    """
    mask = dataset.arrays["suffix_loss_mask"][rows][:, 1:]
    threshold = alignment.collapse_threshold(
        weighting.token_weights,
        weighting.inverse_token_weights,
        mask,
        weighting.example_base_loss,
        weighting.token_weighted_base_loss,
        weighting.inverse_token_weighted_base_loss,
        c_base,
        config.reconstruction,
        config.divisor_floor,
    )
    flags = []
    for row in rows:
        record = dataset.records[row]
        others = [trace for trace in dataset.task.traces(record.x).values() if trace != record.y]
        y = tokenize(record.y, dataset.tokenization)
        flags.append(
            alignment.strategy_revealing_positions(y, [tokenize(trace, dataset.tokenization) for trace in others])
        )
    positions = alignment.positions_on_mask(flags, mask)
    parted = positions.any(axis=1)
    share = alignment.strategy_token_share(weighting.token_weights, positions)
    return {
        "collapse_threshold": threshold,
        # Undefined where no x is recorded under two strategies, as may be with a user's file.
        "strategy_token_share": float(share[parted].mean()) if parted.any() else None,
    }


#: Records from which the bag-of-tokens classifier learns: more change its accuracy by less than a percent.
_CLASSIFIED_RECORDS = 4096


def _strategy_records(dataset: Dataset, split: str) -> list[tuple[list[str], int]]:
    """The tokens of y and the strategy's index of records that have one, at most `_CLASSIFIED_RECORDS`."""
    strategies = dataset.task.strategies
    return [
        (tokenize(record.y, dataset.tokenization), strategies.index(record.strategy))
        for record in dataset.split_records(split)[:_CLASSIFIED_RECORDS]
        if record.strategy in strategies
    ]


def _records_of_decoded(dataset: Dataset, decodes: Decodes) -> tuple[np.ndarray, np.ndarray]:
    """Test records with a known strategy whose x was decoded: the index of that x, and their place in the test
    split."""
    index = {x: n for n, x in enumerate(decodes.xs)}
    pairs = [
        (index[record.x], i)
        for i, record in enumerate(dataset.split_records("test"))
        if record.x in index and record.strategy in dataset.task.strategies
    ]
    both = np.asarray(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]
