"""How far the latents are the hidden strategies: from decodes and weights to the numbers of the evaluation.

Everything here is a pure function of NumPy arrays. Names and axes used throughout:

    N instances (distinct x), K latents, S strategies, R records (rows; several may belong to one x)
    credit [N, K, S]: what the decode of latent k on instance n earns for strategy s, see `strategy_credit`
    mapping: (latent, strategy index) pairs, one-to-one, ordered by latent, min(K, S) of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment, minimize
from scipy.special import logsumexp

if TYPE_CHECKING:
    from surprisal_jax.config import ReconstructionLossConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
LatentMap = tuple[tuple[int, int], ...]

# Credits are sums of 1/1, 1/2, ... 1/S over at most some thousand instances: totals that differ by less than
# this (relative to their size) differ by rounding alone and are a tie.
_TIE = 1e-9


def strategy_credit(fits: Sequence[Sequence[AbstractSet[str]]], strategies: Sequence[str]) -> Floats:
    """Credit each decode earns for each strategy.

    A decode that fits m strategies earns 1/m for each of them; one that fits none earns 0 everywhere and
    still counts as an instance, so it lowers every mean that is taken over N.

    Args:
      fits: N x K sets; `fits[n][k]` are the strategies that the decode of latent k on instance n fits.
      strategies: the S names, in the order of the last axis of the result.

    Returns:
      float64 [N, K, S].

    Raises:
      ValueError: a set names an unknown strategy, or the instances have different numbers of latents.
    """
    column = {name: s for s, name in enumerate(strategies)}
    num_latents = len(fits[0]) if len(fits) else 0
    credit = np.zeros((len(fits), num_latents, len(strategies)))
    for n, per_latent in enumerate(fits):
        if len(per_latent) != num_latents:
            raise ValueError(f"instance {n} has {len(per_latent)} decodes, instance 0 has {num_latents}")
        for k, fitting in enumerate(per_latent):
            for name in fitting:
                if name not in column:
                    raise ValueError(f"instance {n}, latent {k}: unknown strategy {name!r}; known: {list(strategies)}")
                credit[n, k, column[name]] = 1.0 / len(fitting)
    return credit


def latents_by_strategies(credit: Floats) -> Floats:
    """Mean credit [K, S] over the instances; what a row lacks to 1 is the share of decodes that fit none."""
    _require_credit(credit)
    return np.asarray(credit.mean(axis=0, dtype=np.float64))


def one_to_one_value(credit: Floats) -> float:
    """The value of `one_to_one_alignment` without its map: cheap enough for every bootstrap resample."""
    _require_credit(credit)
    instances, num_latents, num_strategies = credit.shape
    total = _best_total(credit.sum(axis=0, dtype=np.float64))
    return total / float(instances * min(num_latents, num_strategies))


def one_to_one_alignment(credit: Floats) -> tuple[float, LatentMap]:
    """Best one-to-one map between latents and strategies, pooled over the instances.

        value = max over one-to-one maps of  sum_n sum_{(k, s) in map} credit[n, k, s]  /  (N * min(K, S))

    One map for all instances: a latent that means another strategy on each x does not align. 1 is reached
    only if every mapped latent shows its strategy, and that one alone, on every instance; decodes that fit
    nothing stay in the denominator. If K > S some latents stay unmapped, if K < S some strategies do.

    Args:
      credit: [N, K, S], N, K and S at least 1.

    Returns:
      The value, between 0 and 1, and the map. Of equally good maps the one is taken in which latent 0 has the
      smallest strategy index, then latent 1, and so on; staying unmapped comes last.
    """
    _require_credit(credit)
    return one_to_one_value(credit), best_map(credit.sum(axis=0, dtype=np.float64))


def local_coverage(credit: Floats) -> Floats:
    """Share of the strategies that any latent shows, per instance [N]; shown means credit > 0.

    An instance on which every strategy is shown has exactly 1.
    """
    _require_credit(credit)
    return np.asarray((credit > 0).any(axis=1).mean(axis=1, dtype=np.float64))


def final_answer_correct(predicted: Sequence[Sequence[str | None]], answers: Sequence[str]) -> Bools:
    """Whether each decode ends at the true answer: N x K predictions (None: unreadable) -> bool [N, K]."""
    if len(predicted) != len(answers):
        raise ValueError(f"{len(predicted)} instances have decodes, {len(answers)} have a true answer")
    return np.array([[p is not None and p == a for p in row] for row, a in zip(predicted, answers, strict=True)], bool)


def posterior_alignment(latents: ArrayLike, strategy_index: ArrayLike, mapping: Iterable[tuple[int, int]]) -> float:
    """Share of records whose latent is mapped to the record's true strategy.

    Args:
      latents: int [R], for instance the argmax of q.
      strategy_index: int [R], the true strategy of each record.
      mapping: (latent, strategy index) pairs. A latent in no pair is wrong for every record.
    """
    latents, strategy_index = _require_rows(latents, strategy_index)
    correct = np.zeros(latents.shape, bool)
    for latent, strategy in mapping:
        correct |= (latents == latent) & (strategy_index == strategy)
    return float(correct.mean())


def best_map_alignment(
    latents: ArrayLike, strategy_index: ArrayLike, num_latents: int, num_strategies: int
) -> tuple[float, LatentMap]:
    """`posterior_alignment` under the one-to-one map that is best for these records, and that map.

    Args:
      latents: int [R] in [0, num_latents).
      strategy_index: int [R] in [0, num_strategies).

    Returns:
      The share of records and the map (ties as in `one_to_one_alignment`).

    Raises:
      ValueError: an index outside its range, or lists that are empty or not equally long.
    """
    latents, strategy_index = _require_rows(latents, strategy_index)
    bounds = {"latents": (latents, num_latents), "strategy_index": (strategy_index, num_strategies)}
    for name, (values, size) in bounds.items():
        if values.min() < 0 or values.max() >= size:
            raise ValueError(f"{name} must lie in [0, {size}), found {values.min()} to {values.max()}")
    table = np.zeros((num_latents, num_strategies))
    np.add.at(table, (latents, strategy_index), 1.0)
    return _best_total(table) / latents.size, best_map(table)


def bag_of_tokens_accuracy(
    train: Sequence[tuple[Sequence[str], int]], test: Sequence[tuple[Sequence[str], int]], num_strategies: int
) -> float:
    """How well the strategy is told from the tokens of y alone, whatever their order: what needs no reading.

    A softmax regression on token counts with a small ridge, fitted to `train` by L-BFGS. Near chance, the strategies
    write the same tokens; near 1, counting tokens would do.

    Args:
      train, test: (the tokens of y, strategy index), one a record; tokens that `train` has not are not counted.

    Returns:
      The share of `test` that is told right.

    Raises:
      ValueError: one of them is empty.
    """
    if not train or not test:
        raise ValueError(f"a classifier needs records, got {len(train)} to fit and {len(test)} to tell")
    columns = {token: i for i, token in enumerate(sorted({token for y, _ in train for token in y}))}

    def counts(records: Sequence[tuple[Sequence[str], int]]) -> Floats:
        table = np.zeros((len(records), len(columns) + 1))
        table[:, -1] = 1.0
        for row, (y, _) in enumerate(records):
            for token in y:
                if token in columns:
                    table[row, columns[token]] += 1.0
        return table

    features, truth = counts(train), np.eye(num_strategies)[[strategy for _, strategy in train]]
    shape = (features.shape[1], num_strategies)

    def objective(flat: Floats) -> tuple[float, Floats]:
        weights = flat.reshape(shape)
        logits = features @ weights
        log_p = logits - logsumexp(logits, axis=1, keepdims=True)
        gradient = features.T @ (np.exp(log_p) - truth) / len(truth) + 2e-4 * weights
        return float(-(truth * log_p).sum() / len(truth) + 1e-4 * (weights**2).sum()), gradient.ravel()

    fitted = minimize(objective, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 200})
    told = np.argmax(counts(test) @ fitted.x.reshape(shape), axis=1)
    return float((told == np.asarray([strategy for _, strategy in test])).mean())


def permute_latents(credit: Floats, rng: np.random.Generator) -> Floats:
    """`credit` with its K rows shuffled anew for each instance.

    What the latents show on each x is kept; what one latent means from x to x is lost.
    """
    _require_credit(credit)
    instances, num_latents, _ = credit.shape
    order = rng.permuted(np.tile(np.arange(num_latents), (instances, 1)), axis=1)
    return np.take_along_axis(credit, order[:, :, None], axis=1)


def permuted_latent_control(credit: Floats, rng: np.random.Generator) -> float:
    """`one_to_one_value` after `permute_latents`: what latents that mean nothing across instances reach.

    It must be at chance; a value well above would show a fault in the measure. For K = S and every strategy
    shown on every instance, chance is 1 / K plus what a maximum over maps gains from noise, of order
    1 / sqrt(N K).
    """
    return one_to_one_value(permute_latents(credit, rng))


def bootstrap_interval(
    statistic: Callable[[Ints], float],
    n: int,
    rng: np.random.Generator,
    resamples: int = 1000,
    *,
    rows_of: ArrayLike | None = None,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile bootstrap interval over instances.

    A statistic that is itself a maximum over maps is maximised anew on every resample, so its interval leans
    upwards for small n, as the statistic does.

    Args:
      statistic: takes indices (int64, with repetitions) and returns the number for that resample, for
        instance `lambda i: one_to_one_value(credit[i])` or `lambda i: float(correct[i].mean())`.
      n: number of instances, at least 1; each resample draws n of them with replacement.
      rng: where the draws come from; equal generators give equal intervals.
      resamples: number of resamples.
      rows_of: the instance of each record, int [R] in [0, n). When given, `statistic` receives record indices
        instead: all records of every drawn instance, as often as it was drawn. Records of one x are not
        independent of each other, and an interval over records would be too narrow.
      confidence: the interval spans its central share of the resampled values.

    Returns:
      (low, high).

    Raises:
      ValueError: n < 1, resamples < 1, `rows_of` outside [0, n), or a resample without a finite value.
    """
    if n < 1 or resamples < 1:
        raise ValueError(f"a bootstrap needs at least one instance and one resample, got n={n}, resamples={resamples}")
    expand = None if rows_of is None else _rows_of_instances(np.asarray(rows_of, np.int64), n)
    values = np.empty(resamples)
    for r in range(resamples):
        drawn = rng.integers(0, n, size=n)
        values[r] = statistic(drawn if expand is None else expand(drawn))
    if not np.isfinite(values).all():
        raise ValueError(
            f"the statistic was not finite on {int((~np.isfinite(values)).sum())} of {resamples} resamples"
        )
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)


def collapse_threshold(
    token_weights: ArrayLike,
    inverse_token_weights: ArrayLike,
    mask: ArrayLike,
    example_base_loss: ArrayLike,
    token_weighted_base_loss: ArrayLike,
    inverse_token_weighted_base_loss: ArrayLike,
    c_base: float,
    reconstruction: ReconstructionLossConfig,
    divisor_floor: float,
) -> float:
    """Mean over examples of the largest weight that one token has in the reconstruction total.

    The total is a weighted sum of per-token NLLs, `sum_t w_t l_t`, with n supervised tokens in the example
    and

        w_t = raw_weight / n
            + baseline_normalized_weight / (n c_base)
            + example_normalized_weight / (n example_base_loss)
            + token_weighted_weight pi_t
            + normalized_token_weighted_weight pi_t / token_weighted_base_loss
            + normalized_inverse_token_weighted_weight rho_t / inverse_token_weighted_base_loss

    every divisor being `max(value, divisor_floor)`. A latent carries at most ln K nats, so knowing it gains
    at most `max_t w_t ln K`, and costs `beta ln K`: where this number is at most beta, ignoring the latent is
    the optimum.

    Args:
      token_weights, inverse_token_weights: pi and rho, [N, T].
      mask: bool [N, T], the supervised positions.
      example_base_loss, token_weighted_base_loss, inverse_token_weighted_base_loss: [N], nats.
      c_base: mean base loss over the validation examples, nats.
      reconstruction: the six weights.
      divisor_floor: nats.

    Returns:
      A weight (no unit). Examples without a supervised token are in no mean.

    Raises:
      ValueError: shapes disagree, the floor is not positive, or no example has a supervised token.
    """
    pi, rho = np.asarray(token_weights, np.float64), np.asarray(inverse_token_weights, np.float64)
    supervised = np.asarray(mask, bool)
    base, weighted_base, inverse_base = (
        np.asarray(v, np.float64)
        for v in (example_base_loss, token_weighted_base_loss, inverse_token_weighted_base_loss)
    )
    if pi.ndim != 2 or not pi.shape == rho.shape == supervised.shape:
        raise ValueError(
            f"weights and mask must share one shape [N, T], got {pi.shape}, {rho.shape}, {supervised.shape}"
        )
    if not base.shape == weighted_base.shape == inverse_base.shape == pi.shape[:1]:
        raise ValueError(
            f"base losses must have shape {pi.shape[:1]}, got {base.shape}, {weighted_base.shape}, {inverse_base.shape}"
        )
    if not divisor_floor > 0:
        raise ValueError(f"divisor_floor must be positive, got {divisor_floor}")
    kept = supervised.any(axis=1)
    if not kept.any():
        raise ValueError("no example has a supervised token")
    pi, rho, supervised = pi[kept], rho[kept], supervised[kept]

    def floored(values: Any) -> Floats:
        return np.maximum(np.asarray(values, np.float64), divisor_floor)

    count = supervised.sum(axis=1)
    uniform = (
        reconstruction.raw_weight
        + reconstruction.baseline_normalized_weight / floored(c_base)
        + reconstruction.example_normalized_weight / floored(base[kept])
    ) / count
    on_pi = reconstruction.normalized_token_weighted_weight / floored(weighted_base[kept])
    on_pi += reconstruction.token_weighted_weight
    on_rho = reconstruction.normalized_inverse_token_weighted_weight / floored(inverse_base[kept])
    weights = uniform[:, None] + on_pi[:, None] * pi + on_rho[:, None] * rho
    return float(np.where(supervised, weights, 0.0).max(axis=1).mean())


def strategy_revealing_positions(y: Sequence[str], others: Iterable[Sequence[str]]) -> Bools:
    """Where a reader of x and of y so far learns something about the strategy from the next token.

    Args:
      y: the tokens of one trace.
      others: the token lists of the other strategies' traces for the same x.

    Returns:
      bool [len(y) + 2], one entry a supervised token: the tokens of y, the closing tag, `<eos>`. Position t
      is True where some other trace has the same tokens before t and another one at t. The closing tag is a
      token like any other, so a trace that another one continues parts from it at its closing tag. A trace
      equal to y parts nowhere.
    """
    end = object()  # equal to no token a trace may contain
    own = [*y, end]
    revealing = np.zeros(len(y) + 2, bool)
    for other in others:
        for t, (mine, theirs) in enumerate(zip(own, [*other, end], strict=False)):
            if mine != theirs:
                revealing[t] = True
                break
    return revealing


def positions_on_mask(positions: Sequence[Bools], mask: Bools) -> Bools:
    """Lays flags per supervised token onto scored positions.

    Args:
      positions: N arrays, as from `strategy_revealing_positions`.
      mask: bool [N, T], the supervised positions.

    Returns:
      bool [N, T], False off the mask.

    Raises:
      ValueError: a row of `mask` does not select as many positions as that example has flags.
    """
    if len(positions) != len(mask):
        raise ValueError(f"{len(positions)} examples have flags, the mask has {len(mask)} rows")
    counts = mask.sum(axis=1)
    for n, flags in enumerate(positions):
        if len(flags) != counts[n]:
            raise ValueError(f"example {n} has {len(flags)} supervised tokens, its mask selects {counts[n]}")
    laid = np.zeros(mask.shape, bool)
    laid[mask] = np.concatenate(positions) if len(positions) else []
    return laid


def strategy_token_share(token_weights: ArrayLike, positions: ArrayLike) -> Floats:
    """Share of pi [..., T] on the flagged positions (bool [..., T]), one number an example [...].

    pi sums to 1 over an example, so this is a plain sum; an example without a supervised token has share 0.
    """
    weights, flags = np.asarray(token_weights, np.float64), np.asarray(positions, bool)
    if weights.shape != flags.shape:
        raise ValueError(f"weights have shape {weights.shape}, positions {flags.shape}")
    return np.asarray(np.where(flags, weights, 0.0).sum(axis=-1))


def _require_credit(credit: Floats) -> None:
    if credit.ndim != 3 or 0 in credit.shape:
        raise ValueError(f"credit must have shape [N, K, S] with no empty axis, got {credit.shape}")


def _require_rows(latents: ArrayLike, strategy_index: ArrayLike) -> tuple[Ints, Ints]:
    rows = np.asarray(latents, np.int64), np.asarray(strategy_index, np.int64)
    if rows[0].ndim != 1 or rows[0].shape != rows[1].shape or rows[0].size == 0:
        raise ValueError(f"latents and strategies must be equally long lists, got {rows[0].shape} and {rows[1].shape}")
    return rows


def _best_total(table: Floats) -> float:
    """Largest sum of a one-to-one selection from a [K, S] table (0 where an axis is empty)."""
    if 0 in table.shape:
        return 0.0
    return float(table[linear_sum_assignment(table, maximize=True)].sum())


def best_map(table: Floats) -> LatentMap:
    """The best selection that comes first in the order of strategies per latent, unmapped last.

    The solver's own choice among equals depends on its pivoting and on rounding in the last digit; the order
    does not.
    """
    num_latents, num_strategies = table.shape
    unmapped = max(num_latents - num_strategies, 0)
    padded = np.hstack([table, np.zeros((num_latents, unmapped))])
    tolerance = _TIE * max(1.0, float(np.abs(table).sum()))
    columns = list(range(padded.shape[1]))
    pairs = []
    for k in range(num_latents):
        best = _best_total(padded[k:, columns])
        for choice in columns:
            rest = [c for c in columns if c != choice]
            if padded[k, choice] + _best_total(padded[k + 1 :, rest]) >= best - tolerance:
                break
        columns = rest
        if choice < num_strategies:
            pairs.append((k, choice))
    return tuple(pairs)


def _rows_of_instances(rows_of: Ints, n: int) -> Callable[[Ints], Ints]:
    if rows_of.ndim != 1 or rows_of.size == 0 or rows_of.min() < 0 or rows_of.max() >= n:
        raise ValueError(f"rows_of must be a list of instances in [0, {n})")
    rows = np.argsort(rows_of, kind="stable")
    counts = np.bincount(rows_of, minlength=n)
    starts = np.cumsum(counts) - counts

    def expand(drawn: Ints) -> Ints:
        lengths = counts[drawn]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.asarray(rows[np.repeat(starts[drawn], lengths) + within])

    return expand
