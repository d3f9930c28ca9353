"""The numbers of the evaluation against brute force, hand-computed examples and plain loops."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from surprisal_jax.config import ReconstructionLossConfig
from surprisal_jax.evaluation import alignment

THREE = ("down", "across", "spiral")


def brute_force(table):
    """Best one-to-one maps of an exact [K][S] table: (total, the first in the agreed order, number)."""
    num_latents, num_strategies = len(table), len(table[0])
    unmapped = num_strategies  # sorts after every strategy
    totals = {}
    for choice in itertools.product(range(num_strategies + 1), repeat=num_latents):
        used = [s for s in choice if s != unmapped]
        if len(used) != len(set(used)) or len(used) != min(num_latents, num_strategies):
            continue
        totals[choice] = sum((table[k][s] for k, s in enumerate(choice) if s != unmapped), Fraction(0))
    best = max(totals.values())
    winners = [choice for choice, total in totals.items() if total == best]
    return best, tuple((k, s) for k, s in enumerate(min(winners)) if s != unmapped), len(winners)


# credit and map


def test_credit_is_shared_by_the_strategies_that_fit():
    fits = [[{"down"}, {"down", "spiral"}, set()], [{"across", "down", "spiral"}, {"across"}, {"spiral"}]]
    third = 1 / 3
    expected = [
        [[1, 0, 0], [0.5, 0, 0.5], [0, 0, 0]],
        [[third, third, third], [0, 1, 0], [0, 0, 1]],
    ]
    np.testing.assert_array_equal(alignment.strategy_credit(fits, THREE), expected)
    assert alignment.strategy_credit(fits, THREE).dtype == np.float64


def test_credit_refuses_what_it_cannot_place():
    with pytest.raises(ValueError, match=r"instance 1, latent 0: unknown strategy 'sideways'"):
        alignment.strategy_credit([[{"down"}], [{"sideways"}]], THREE)
    with pytest.raises(ValueError, match="instance 1 has 1 decodes, instance 0 has 2"):
        alignment.strategy_credit([[{"down"}, set()], [{"down"}]], THREE)


def test_alignment_by_hand():
    # Pooled table over two instances: rows latents, columns strategies.
    #   latent 0: 0 2 0     latent 1: 1/2 0 1/2     latent 2: 0 0 1     (latent 2 fits nothing on instance 0,
    #   latent 1 fits down and spiral on instance 0 and nothing on instance 1)
    fits = [
        [{"across"}, {"down", "spiral"}, set()],
        [{"across"}, set(), {"spiral"}],
    ]
    credit = alignment.strategy_credit(fits, THREE)
    value, mapping = alignment.one_to_one_alignment(credit)
    assert mapping == ((0, 1), (1, 0), (2, 2))
    assert value == pytest.approx((2 + 0.5 + 1) / (2 * 3), rel=1e-15)
    np.testing.assert_allclose(
        alignment.latents_by_strategies(credit), [[0, 1, 0], [0.25, 0, 0.25], [0, 0, 0.5]], rtol=1e-15
    )


def test_outputs_that_fit_nothing_stay_in_the_denominator():
    perfect = [[{"down"}, {"across"}, {"spiral"}]]
    silent = [[set(), set(), set()]]
    credit = alignment.strategy_credit(perfect * 3 + silent, THREE)
    assert alignment.one_to_one_value(credit) == 0.75


def test_one_map_serves_all_instances():
    # Every instance shows every strategy, but latents 0 and 1 trade places on half of them.
    eye = np.eye(3)
    credit = np.stack([eye, eye[[1, 0, 2]], eye, eye[[1, 0, 2]]])
    value, mapping = alignment.one_to_one_alignment(credit)
    assert value == pytest.approx((2 + 2 + 4) / 12, rel=1e-15)
    assert mapping == ((0, 0), (1, 1), (2, 2))
    np.testing.assert_array_equal(alignment.local_coverage(credit), np.ones(4))


@pytest.mark.parametrize(
    ("num_latents", "num_strategies"), [(2, 2), (3, 3), (4, 4), (2, 4), (3, 5), (4, 2), (5, 3), (3, 1)]
)
def test_alignment_equals_brute_force(num_latents, num_strategies):
    # Few distinct values and few instances: equally good maps are frequent.
    rng = np.random.default_rng(num_latents * 10 + num_strategies)
    choices = [Fraction(0), Fraction(0), Fraction(0), Fraction(1, 3), Fraction(1, 2), Fraction(1)]
    ties = 0
    for _ in range(40):
        instances = int(rng.integers(1, 4))
        drawn = rng.integers(0, len(choices), (instances, num_latents, num_strategies))
        exact = [[[choices[i] for i in row] for row in table] for table in drawn]
        pooled = [
            [sum(exact[n][k][s] for n in range(instances)) for s in range(num_strategies)] for k in range(num_latents)
        ]
        total, mapping, winners = brute_force(pooled)
        credit = np.array(exact, dtype=np.float64)
        value, found = alignment.one_to_one_alignment(credit)
        assert found == mapping
        assert value == pytest.approx(
            float(total) / (instances * min(num_latents, num_strategies)), rel=1e-14, abs=1e-15
        )
        assert alignment.one_to_one_value(credit) == value
        ties += winners > 1
    assert ties >= 3


def test_more_latents_than_strategies_and_fewer():
    credit = np.zeros((5, 4, 2))
    credit[:, 1, 0] = credit[:, 3, 1] = 1.0
    assert alignment.one_to_one_alignment(credit) == (1.0, ((1, 0), (3, 1)))
    assert alignment.one_to_one_alignment(credit.transpose(0, 2, 1)) == (1.0, ((0, 1), (1, 3)))


def test_all_equal_table_takes_the_first_map():
    assert alignment.one_to_one_alignment(np.zeros((2, 3, 3)))[1] == ((0, 0), (1, 1), (2, 2))
    assert alignment.one_to_one_alignment(np.full((7, 3, 2), 1 / 3))[1] == ((0, 0), (1, 1))
    assert alignment.one_to_one_alignment(np.full((7, 2, 3), 1 / 3))[1] == ((0, 0), (1, 1))


def test_rounding_does_not_decide_a_tie():
    # Each latent earns three thirds of each strategy, but on the crossing the last one is an ulp larger.
    credit = np.full((3, 2, 2), 1 / 3)
    credit[2, [0, 1], [1, 0]] = np.nextafter(1 / 3, 1) * (1 + 2**-50)
    assert alignment.one_to_one_value(credit) > credit[:, 0, 0].sum() / 3
    assert alignment.one_to_one_alignment(credit)[1] == ((0, 0), (1, 1))


def test_empty_credit_is_refused():
    with pytest.raises(ValueError, match=r"no empty axis, got \(0, 3, 3\)"):
        alignment.one_to_one_alignment(np.zeros((0, 3, 3)))


# coverage, final answers


def test_local_coverage_by_hand():
    fits = [
        [{"down"}, {"across"}, {"spiral"}],  # all
        [{"down"}, {"down"}, set()],  # one of three
        [{"down", "spiral"}, set(), set()],  # two of three: both are shown
        [set(), set(), set()],  # none
    ]
    credit = alignment.strategy_credit(fits, THREE)
    np.testing.assert_allclose(alignment.local_coverage(credit), [1, 1 / 3, 2 / 3, 0], rtol=1e-15)


def test_full_coverage_is_exactly_one():
    # Ten times 0.1, summed in floating point, is not 1; the share of all strategies must be.
    for size in range(1, 30):
        assert alignment.local_coverage(np.eye(size)[None]).tolist() == [1.0]


def test_final_answers():
    correct = alignment.final_answer_correct([["a", "b"], [None, "c"], ["c", "c"]], ["a", "c", "c"])
    np.testing.assert_array_equal(correct, [[True, False], [False, True], [True, True]])
    with pytest.raises(ValueError, match="1 instances have decodes, 2 have a true answer"):
        alignment.final_answer_correct([["a"]], ["a", "b"])


# posterior


def test_posterior_alignment_by_hand():
    latents = [0, 0, 1, 2, 3, 3]
    strategies = [1, 0, 0, 2, 2, 1]
    mapping = ((0, 1), (1, 0), (2, 2))  # latent 3 is mapped to nothing
    assert alignment.posterior_alignment(latents, strategies, mapping) == 3 / 6
    assert alignment.posterior_alignment(latents, strategies, ()) == 0.0


@pytest.mark.parametrize(("num_latents", "num_strategies"), [(3, 3), (4, 3), (2, 3)])
def test_best_map_equals_brute_force_over_maps(num_latents, num_strategies):
    rng = np.random.default_rng(num_latents)
    small, large = sorted((num_latents, num_strategies))
    for _ in range(20):
        latents = rng.integers(0, num_latents, 12)
        strategies = rng.integers(0, num_strategies, 12)
        best = 0.0
        for image in itertools.permutations(range(large), small):
            pairs = [(a, b) if num_latents <= num_strategies else (b, a) for a, b in enumerate(image)]
            hits = sum((k, s) in pairs for k, s in zip(latents, strategies, strict=True))
            best = max(best, hits / 12)
        value, mapping = alignment.best_map_alignment(latents, strategies, num_latents, num_strategies)
        assert value == pytest.approx(best, rel=1e-15)
        assert alignment.posterior_alignment(latents, strategies, mapping) == pytest.approx(best, rel=1e-15)
        assert len(mapping) == small


def test_best_map_refuses_indices_out_of_range():
    with pytest.raises(ValueError, match=r"strategy_index must lie in \[0, 3\), found -1 to 2"):
        alignment.best_map_alignment([0, 1], [-1, 2], 3, 3)
    with pytest.raises(ValueError, match=r"latents must lie in \[0, 2\), found 0 to 2"):
        alignment.best_map_alignment([0, 2], [0, 1], 2, 3)


# control


@pytest.mark.parametrize("size", [2, 3, 4])
def test_control_is_at_chance_on_a_perfect_table(size):
    credit = np.tile(np.eye(size), (4000, 1, 1))
    assert alignment.one_to_one_value(credit) == 1.0
    for seed in range(5):
        control = alignment.permuted_latent_control(credit, np.random.default_rng(seed))
        # The best of the maps lies above 1/K, by a few standard errors of one matched share at most.
        assert 1 / size <= control < 1 / size + 3 / math.sqrt(4000 * size)


def test_control_shuffles_each_instance_on_its_own_and_keeps_its_rows():
    rng = np.random.default_rng(3)
    credit = rng.random((300, 3, 4))
    shuffled = alignment.permute_latents(credit, np.random.default_rng(0))
    orders = set()
    for before, after in zip(credit, shuffled, strict=True):
        order = tuple(int(np.flatnonzero((before == row).all(axis=1))[0]) for row in after)
        assert sorted(order) == [0, 1, 2]
        orders.add(order)
    assert len(orders) == 6
    np.testing.assert_array_equal(alignment.local_coverage(shuffled), alignment.local_coverage(credit))
    np.testing.assert_array_equal(shuffled, alignment.permute_latents(credit, np.random.default_rng(0)))


def test_control_of_one_instance_is_the_alignment_itself():
    assert alignment.permuted_latent_control(np.eye(3)[None], np.random.default_rng(0)) == 1.0


# bootstrap


def percentile(values, q):
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    position = q / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def test_bootstrap_equals_a_literal_loop():
    rng = np.random.default_rng(11)
    credit = rng.random((9, 2, 3))
    draws = np.random.default_rng(5)
    values = []
    for _ in range(200):
        picked = [credit[i] for i in draws.integers(0, 9, size=9)]
        table = sum(picked)
        values.append(max(table[0, a] + table[1, b] for a, b in itertools.permutations(range(3), 2)) / 18)
    interval = alignment.bootstrap_interval(
        lambda i: alignment.one_to_one_value(credit[i]), 9, np.random.default_rng(5), 200
    )
    assert interval == pytest.approx((percentile(values, 2.5), percentile(values, 97.5)), rel=1e-12)


def test_bootstrap_keeps_the_rows_of_an_instance_together():
    # Rows of 4 instances in shuffled order and of unequal number; instance 2 has none.
    rows_of = [3, 0, 1, 0, 3, 3, 1, 0, 0]
    correct = np.array([1, 0, 1, 1, 0, 1, 1, 0, 0], dtype=float)
    draws = np.random.default_rng(8)
    values, seen = [], []
    for _ in range(100):
        drawn = draws.integers(0, 4, size=4)
        rows = [r for i in drawn for r in range(9) if rows_of[r] == i]
        seen.append(sorted(rows))
        values.append(sum(correct[r] for r in rows) / max(len(rows), 1))
    received = []

    def statistic(rows):
        received.append(sorted(rows.tolist()))
        return float(correct[rows].sum() / max(len(rows), 1))

    low, high = alignment.bootstrap_interval(statistic, 4, np.random.default_rng(8), 100, rows_of=rows_of)
    assert received == seen
    assert (low, high) == pytest.approx((percentile(values, 2.5), percentile(values, 97.5)), rel=1e-12)


def test_bootstrap_over_instances_is_wider_where_rows_repeat_each_other():
    # 40 instances, 10 identical rows each: the information is that of 40 rows, not of 400.
    truth = np.random.default_rng(0).random(40) < 0.5
    rows = np.repeat(truth, 10).astype(float)
    by_row = alignment.bootstrap_interval(lambda i: rows[i].mean(), 400, np.random.default_rng(1), 400)
    together = alignment.bootstrap_interval(
        lambda i: rows[i].mean(), 40, np.random.default_rng(1), 400, rows_of=np.repeat(np.arange(40), 10)
    )
    ratio = (together[1] - together[0]) / (by_row[1] - by_row[0])
    assert ratio == pytest.approx(math.sqrt(10), rel=0.15)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        sample = (rng.random(60) < 0.7).astype(float)
        low, high = alignment.bootstrap_interval(lambda i, s=sample: s[i].mean(), 60, rng, 200)
        covered += low <= 0.7 <= high
    # Binomial(200, 0.95) has standard deviation 3.1; the percentile interval is a little short at n = 60.
    assert 178 <= covered <= 199


def test_bootstrap_is_deterministic_and_narrows_with_confidence():
    values = np.random.default_rng(0).normal(size=50)

    def interval(seed, confidence):
        return alignment.bootstrap_interval(
            lambda i: values[i].mean(), 50, np.random.default_rng(seed), 300, confidence=confidence
        )

    assert interval(1, 0.95) == interval(1, 0.95)
    assert interval(1, 0.95) != interval(2, 0.95)
    wide, narrow = interval(1, 0.95), interval(1, 0.5)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_bootstrap_refuses_nonsense():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="n=0"):
        alignment.bootstrap_interval(lambda i: 0.0, 0, rng)
    with pytest.raises(ValueError, match="not finite on 3 of 3 resamples"):
        alignment.bootstrap_interval(lambda i: math.nan, 2, rng, 3)
    with pytest.raises(ValueError, match=r"instances in \[0, 2\)"):
        alignment.bootstrap_interval(lambda i: 0.0, 2, rng, 3, rows_of=[0, 2])


# collapse threshold


def threshold_by_loops(b, mask, alpha, c_base, config, floor):
    """The definition, token by token, from the reference's surprisal b."""
    largest = []
    for losses, selected in zip(b, mask, strict=True):
        supervised = [x for x, m in zip(losses, selected, strict=True) if m]
        if not supervised:
            continue
        n = len(supervised)
        pi = [x**alpha / sum(y**alpha for y in supervised) for x in supervised]
        rho = [x**-alpha / sum(y**-alpha for y in supervised) for x in supervised]
        example = sum(supervised) / n
        weighted = sum(p * x for p, x in zip(pi, supervised, strict=True))
        inverse = sum(r * x for r, x in zip(rho, supervised, strict=True))
        largest.append(
            max(
                config.raw_weight / n
                + config.baseline_normalized_weight / (n * max(c_base, floor))
                + config.example_normalized_weight / (n * max(example, floor))
                + config.token_weighted_weight * p
                + config.normalized_token_weighted_weight * p / max(weighted, floor)
                + config.normalized_inverse_token_weighted_weight * r / max(inverse, floor)
                for p, r in zip(pi, rho, strict=True)
            )
        )
    return sum(largest) / len(largest)


def bundle(b, mask, alpha):
    """pi, rho and the three base losses as arrays; garbage off the mask."""
    masked = np.where(mask, b, 1.0)
    power = np.where(mask, masked**alpha, 0.0)
    inverse_power = np.where(mask, masked**-alpha, 0.0)
    total = np.maximum(power.sum(1, keepdims=True), 1e-30)
    inverse_total = np.maximum(inverse_power.sum(1, keepdims=True), 1e-30)
    pi, rho = power / total, inverse_power / inverse_total
    base = (masked * mask).sum(1) / np.maximum(mask.sum(1), 1)
    garbage = np.where(mask, 0.0, 9.0)
    return pi + garbage, rho + garbage, base, (pi * masked).sum(1), (rho * masked).sum(1)


EVERY_TERM = ReconstructionLossConfig(
    raw_weight=0.7,
    baseline_normalized_weight=0.3,
    example_normalized_weight=0.9,
    token_weighted_weight=2.0,
    normalized_token_weighted_weight=0.4,
    normalized_inverse_token_weighted_weight=1.1,
)
ONE_TERM = [
    ReconstructionLossConfig(**{"raw_weight": 0.0, field: 1.3})
    for field in (
        "raw_weight",
        "baseline_normalized_weight",
        "example_normalized_weight",
        "token_weighted_weight",
        "normalized_token_weighted_weight",
        "normalized_inverse_token_weighted_weight",
    )
]


@pytest.mark.parametrize("config", [EVERY_TERM, *ONE_TERM])
@pytest.mark.parametrize("floor", [1e-3, 0.6])  # the second one acts on many of the divisors
def test_collapse_threshold_equals_plain_loops(config, floor):
    rng = np.random.default_rng(4)
    b = rng.gamma(0.5, 1.0, (12, 9)) + 1e-3
    mask = np.arange(9) < rng.integers(1, 10, (12, 1))
    mask[5] = False  # no supervised token: in no mean
    pi, rho, base, weighted, inverse = bundle(b, mask, 0.8)
    value = alignment.collapse_threshold(pi, rho, mask, base, weighted, inverse, 0.5, config, floor)
    assert value == pytest.approx(threshold_by_loops(b, mask, 0.8, 0.5, config, floor), rel=1e-12)


def test_collapse_threshold_of_the_two_worked_cases():
    # Raw weight 1 over 25 tokens: 1/25. With token weight 2 and 0.73 of pi on one token: 1/25 + 1.46 = 1.5.
    pi = np.full((1, 25), 0.27 / 24)
    pi[0, 7] = 0.73
    ones = np.ones(1)
    mask = np.ones((1, 25), bool)

    def threshold(**weights):
        return alignment.collapse_threshold(
            pi, pi, mask, ones, ones, ones, 1.0, ReconstructionLossConfig(**weights), 1e-3
        )

    assert threshold(raw_weight=1.0) == pytest.approx(0.04, rel=1e-12)
    assert threshold(raw_weight=1.0, token_weighted_weight=2.0) == pytest.approx(1.5, rel=1e-12)


def test_collapse_threshold_refuses_an_empty_mean_and_other_shapes():
    pi, one = np.ones((1, 2)) / 2, np.ones(1)
    with pytest.raises(ValueError, match="no example has a supervised token"):
        alignment.collapse_threshold(pi, pi, pi > 1, one, one, one, 1.0, EVERY_TERM, 1e-3)
    with pytest.raises(ValueError, match=r"must share one shape"):
        alignment.collapse_threshold(pi, pi[:, :1], pi > 0, one, one, one, 1.0, EVERY_TERM, 1e-3)
    with pytest.raises(ValueError, match=r"base losses must have shape \(1,\)"):
        alignment.collapse_threshold(pi, pi, pi > 0, one, pi, one, 1.0, EVERY_TERM, 1e-3)
    with pytest.raises(ValueError, match="divisor_floor must be positive"):
        alignment.collapse_threshold(pi, pi, pi > 0, one, one, one, 1.0, EVERY_TERM, 0.0)


# strategy-revealing tokens


@pytest.mark.parametrize(
    ("y", "others", "expected"),
    [
        ("a b c", ["a x c"], [1]),  # they part at b; after that nothing shares the prefix
        ("a b c", ["x b c"], [0]),
        ("a b c d", ["a b x d", "x b c d"], [0, 2]),  # each of the two parts at its own place
        ("a b c", ["a x c", "a y z"], [1]),  # both at the same place
        ("a b", ["a b c"], [2]),  # y ends where the other goes on: its closing tag tells
        ("a b c", ["a b"], [2]),  # the other ends where y goes on: c tells
        ("a b", ["a b"], []),  # the same trace tells nothing, nor does <eos>
        ("", ["a"], [0]),
        ("a", [""], [0]),
        ("a b", [], []),
    ],
)
def test_revealing_positions_by_hand(y, others, expected):
    tokens = y.split()
    found = alignment.strategy_revealing_positions(tokens, [other.split() for other in others])
    assert found.dtype == bool
    assert found.shape == (len(tokens) + 2,)
    assert np.flatnonzero(found).tolist() == expected


def test_revealing_positions_equal_the_definition():
    rng = np.random.default_rng(6)
    for _ in range(300):
        y, *others = (["ab"[i] for i in rng.integers(0, 2, rng.integers(0, 6))] for _ in range(4))
        whole = [*y, "</y>", "<eos>"]
        expected = []
        for t in range(len(whole)):
            closed = [[*other, "</y>", "<eos>"] for other in others]
            expected.append(any(len(o) > t and o[:t] == whole[:t] and o[t] != whole[t] for o in closed))
        assert alignment.strategy_revealing_positions(y, others).tolist() == expected


def test_positions_are_laid_on_the_mask_row_by_row():
    mask = np.array([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 1]], bool)
    flags = [np.array([True, False, True]), np.zeros(0, bool), np.array([False, False, True])]
    laid = alignment.positions_on_mask(flags, mask)
    np.testing.assert_array_equal(laid, np.array([[0, 1, 0, 1, 0], [0] * 5, [0, 0, 0, 0, 1]], bool))
    with pytest.raises(ValueError, match="example 1 has 1 supervised tokens, its mask selects 0"):
        alignment.positions_on_mask([flags[0], np.ones(1, bool), flags[2]], mask)
    with pytest.raises(ValueError, match="2 examples have flags, the mask has 3 rows"):
        alignment.positions_on_mask(flags[:2], mask)


def test_strategy_token_share_by_hand():
    pi = np.array([[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]])
    flags = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], bool)
    np.testing.assert_allclose(alignment.strategy_token_share(pi, flags), [0.9, 0.25, 0.0], rtol=1e-15)
    with pytest.raises(ValueError, match=r"weights have shape \(3, 4\), positions \(3, 3\)"):
        alignment.strategy_token_share(pi, flags[:, :3])
