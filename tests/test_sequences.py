"""Templates, masks, offsets and vocabulary, against rows written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from surprisal_jax import sequences
from surprisal_jax.losses import masked_token_nll_per_position
from surprisal_jax.sequences import (
    SequenceArrays,
    Vocabulary,
    build_conditioned,
    build_sequences,
    check_alignment,
    detokenize,
    tokenize,
)

VOCABULARY = Vocabulary(("a", "b", "c"), num_latents=3)

# x and y of different lengths in both directions; the third y has no token at all.
TEXTS = [("a b", "c"), ("b", "a a c b"), ("c a b", "")]
PAIRS = [(VOCABULARY.encode(x.split()), VOCABULARY.encode(y.split())) for x, y in TEXTS]

Z_FREE = [
    "<bos> <x> a b </x> <y> c </y> <eos> <pad> <pad>",
    "<bos> <x> b </x> <y> a a c b </y> <eos>",
    "<bos> <x> c a b </x> <y> </y> <eos> <pad> <pad>",
]
Z_FREE_MASK = ["00000011100", "00000111111", "00000001100"]
PREFIX = [
    "<bos> <x> a b </x> <z> <pad>",
    "<bos> <x> b </x> <z> <pad> <pad>",
    "<bos> <x> c a b </x> <z>",
]
PREFIX_LENGTHS = [6, 5, 7]
SUFFIX = [
    "<z_0> </z> <y> c </y> <eos> <pad> <pad> <pad>",
    "<z_0> </z> <y> a a c b </y> <eos>",
    "<z_0> </z> <y> </y> <eos> <pad> <pad> <pad> <pad>",
]
SUFFIX_MASK = ["000111000", "000111111", "000110000"]
# c stands at 3 in the first suffix and at 6 in its z-free sequence, and so on.
SUFFIX_OFFSETS = [3 - 6, 3 - 5, 3 - 7]
CONDITIONED = [
    "<bos> <x> a b </x> <z> <z_1> </z> <y> c </y> <eos> <pad> <pad>",
    "<bos> <x> b </x> <z> <z_1> </z> <y> a a c b </y> <eos>",
    "<bos> <x> c a b </x> <z> <z_1> </z> <y> </y> <eos> <pad> <pad>",
]
CONDITIONED_MASK = ["00000000011100", "00000000111111", "00000000001100"]


def words(rows: np.ndarray) -> list[str]:
    return [" ".join(VOCABULARY.decode(row)) for row in rows]


def bits(mask: np.ndarray) -> list[str]:
    return ["".join("01"[int(value)] for value in row) for row in mask]


@pytest.fixture(scope="module")
def arrays() -> SequenceArrays:
    return build_sequences(PAIRS, VOCABULARY)


def check(arrays: SequenceArrays) -> None:
    check_alignment(
        arrays.suffix_tokens,
        arrays.suffix_loss_mask,
        arrays.z_free_tokens,
        arrays.z_free_loss_mask,
        arrays.alignment_offsets,
    )


def test_the_templates_token_by_token(arrays: SequenceArrays) -> None:
    assert words(arrays.z_free_tokens) == Z_FREE
    assert words(arrays.prefix_tokens) == PREFIX
    assert words(arrays.suffix_tokens) == SUFFIX
    assert arrays.prefix_lengths.tolist() == PREFIX_LENGTHS
    tokens, _ = build_conditioned(PAIRS, VOCABULARY, 1)
    assert words(tokens) == CONDITIONED


def test_every_latent_has_its_own_conditioned_sequence() -> None:
    for latent in range(3):
        tokens, mask = build_conditioned(PAIRS, VOCABULARY, latent)
        assert words(tokens) == [row.replace("<z_1>", f"<z_{latent}>") for row in CONDITIONED]
        assert bits(mask) == CONDITIONED_MASK


def test_prefix_and_suffix_together_are_the_conditioned_sequence(arrays: SequenceArrays) -> None:
    tokens, mask = build_conditioned(PAIRS, VOCABULARY, 0)
    for n, (x, y) in enumerate(PAIRS):
        length = arrays.prefix_lengths[n]
        suffix = slice(0, len(y) + 5)
        assert len(x) + 4 == length
        whole = [*arrays.prefix_tokens[n, :length], *arrays.suffix_tokens[n, suffix]]
        assert tokens[n, : len(whole)].tolist() == whole
        supervised = [*[False] * length, *arrays.suffix_loss_mask[n, suffix]]
        assert mask[n, : len(whole)].tolist() == supervised


def test_shapes_and_dtypes(arrays: SequenceArrays) -> None:
    for name in ("prefix_tokens", "prefix_lengths", "suffix_tokens", "z_free_tokens", "alignment_offsets"):
        assert getattr(arrays, name).dtype == np.int32, name
    for name in ("suffix_loss_mask", "z_free_loss_mask"):
        assert getattr(arrays, name).dtype == np.bool_, name


def test_loss_masks_cover_y_its_closing_tag_and_eos(arrays: SequenceArrays) -> None:
    assert bits(arrays.z_free_loss_mask) == Z_FREE_MASK
    assert bits(arrays.suffix_loss_mask) == SUFFIX_MASK
    assert bits(build_conditioned(PAIRS, VOCABULARY, 1)[1]) == CONDITIONED_MASK


@pytest.mark.parametrize("impostor", ["<pad>", "<eos>", "</y>", "<y>"])
def test_masks_come_from_lengths_also_where_a_text_token_looks_like_a_tag(impostor: str) -> None:
    """A mask made of `token != pad` loses targets (of every <eos>, where the two are one id)."""
    token, a = VOCABULARY.id(impostor), VOCABULARY.id("a")
    pairs = [([token, a], [token, a, token]), ([a], [token]), ([a, a, token], [a, a, a, token])]
    arrays = build_sequences(pairs, VOCABULARY)
    assert bits(arrays.suffix_loss_mask) == ["000111110", "000111000", "000111111"]
    # z-free lengths: 2 + 3 + 6, 1 + 1 + 6, 3 + 4 + 6.
    assert bits(arrays.z_free_loss_mask) == ["0000001111100", "0000011100000", "0000000111111"]
    _, mask = build_conditioned(pairs, VOCABULARY, 2)
    assert bits(mask) == ["0000000001111100", "0000000011100000", "0000000000111111"]


def test_whole_sequences_are_three_positions_behind(arrays: SequenceArrays) -> None:
    tokens, mask = build_conditioned(PAIRS, VOCABULARY, 2)
    three = np.full(len(PAIRS), 3, np.int32)
    check_alignment(tokens, mask, arrays.z_free_tokens, arrays.z_free_loss_mask, three)
    for n, row in enumerate(mask):
        for position in np.flatnonzero(row):
            assert arrays.z_free_loss_mask[n, position - 3]
            assert arrays.z_free_tokens[n, position - 3] == tokens[n, position]
    for wrong in (-3, 0, 2, 4):
        with pytest.raises(ValueError, match="example 0"):
            check_alignment(tokens, mask, arrays.z_free_tokens, arrays.z_free_loss_mask, three * 0 + wrong)


def test_suffix_offsets_are_suffix_position_minus_z_free_position(arrays: SequenceArrays) -> None:
    assert arrays.alignment_offsets.tolist() == SUFFIX_OFFSETS
    for n, row in enumerate(arrays.suffix_loss_mask):
        source = np.flatnonzero(row) - arrays.alignment_offsets[n]
        assert source.tolist() == np.flatnonzero(arrays.z_free_loss_mask[n]).tolist()
        assert arrays.z_free_tokens[n, source].tolist() == arrays.suffix_tokens[n, row].tolist()


# One token throughout: only the masks can tell a shift by one.
REPEATED = [VOCABULARY.encode(["a"] * 5)] * 2
ALIGNMENT_CASES = {"distinct": PAIRS, "repeated": [tuple(REPEATED), tuple(REPEATED), tuple(REPEATED)]}


@pytest.mark.parametrize("pairs", ALIGNMENT_CASES.values(), ids=ALIGNMENT_CASES.keys())
@pytest.mark.parametrize("example", [0, 1, 2])
@pytest.mark.parametrize("shift", [-1, 1])
def test_an_offset_off_by_one_is_refused(pairs: Any, example: int, shift: int) -> None:
    arrays = build_sequences(pairs, VOCABULARY)
    offsets = arrays.alignment_offsets.copy()
    offsets[example] += shift
    with pytest.raises(ValueError, match=rf"example {example}\b.*{int(offsets[example])}\b"):
        check(replace(arrays, alignment_offsets=offsets))


@pytest.mark.parametrize("example", [0, 1, 2])
@pytest.mark.parametrize("direction", [-1, 1])
@pytest.mark.parametrize("lengths", [1, 1000])
def test_an_offset_out_of_range_is_refused(arrays: SequenceArrays, example: int, direction: int, lengths: int) -> None:
    """A whole length too far: an index that wraps around would find the very same tokens."""
    offsets = arrays.alignment_offsets.copy()
    offsets[example] += direction * lengths * arrays.z_free_tokens.shape[1]
    with pytest.raises(ValueError, match=rf"example {example}\b"):
        check(replace(arrays, alignment_offsets=offsets))


def test_the_flipped_sign_is_refused(arrays: SequenceArrays) -> None:
    with pytest.raises(ValueError, match="example 0"):
        check(replace(arrays, alignment_offsets=-arrays.alignment_offsets))


@pytest.mark.parametrize("mask_name", ["suffix_loss_mask", "z_free_loss_mask"])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("example", [0, 1, 2])
def test_a_lost_target_is_refused(arrays: SequenceArrays, mask_name: str, place: int, example: int) -> None:
    mask = getattr(arrays, mask_name).copy()
    mask[example, np.flatnonzero(mask[example])[place]] = False
    with pytest.raises(ValueError, match=rf"example {example}\b"):
        check(replace(arrays, **{mask_name: mask}))


@pytest.mark.parametrize("mask_name", ["suffix_loss_mask", "z_free_loss_mask"])
def test_a_tag_among_the_targets_is_refused(arrays: SequenceArrays, mask_name: str) -> None:
    mask = getattr(arrays, mask_name).copy()
    mask[2, np.flatnonzero(mask[2])[0] - 1] = True
    with pytest.raises(ValueError, match=r"example 2\b"):
        check(replace(arrays, **{mask_name: mask}))


@pytest.mark.parametrize("tokens_name", ["suffix_tokens", "z_free_tokens"])
def test_another_token_at_a_target_is_refused(arrays: SequenceArrays, tokens_name: str) -> None:
    mask = {"suffix_tokens": arrays.suffix_loss_mask, "z_free_tokens": arrays.z_free_loss_mask}[tokens_name]
    tokens = getattr(arrays, tokens_name).copy()
    tokens[1, np.flatnonzero(mask[1])[2]] = VOCABULARY.id("b")
    with pytest.raises(ValueError, match=r"example 1\b"):
        check(replace(arrays, **{tokens_name: tokens}))


@pytest.mark.parametrize(("offset", "source"), [(-1, 2), (1, 0), (-3, 4), (-9, 10), (4, -3), (9, -8)])
def test_equal_tokens_alone_are_no_alignment(offset: int, source: int) -> None:
    """One token everywhere, so that only the mask and the range tell where its target is."""
    tokens, mask = np.full((2, 4), 7), np.asarray([[0, 1, 0, 0]] * 2, bool)
    check_alignment(tokens, mask, tokens, mask, np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=rf"example 1: alignment_offsets {offset} .*position 1 .*position {source} "):
        check_alignment(tokens, mask, tokens, mask, np.asarray([0, offset]))


@pytest.mark.parametrize(("offset", "target"), [(-9, 3), (-1, 3), (9, 0), (1, 0)])
def test_nothing_lies_beyond_the_ends(offset: int, target: int) -> None:
    """An index that is clipped would find the target at the end."""
    tokens, mask = np.full((1, 4), 7), np.arange(4)[None] == target
    check_alignment(tokens, mask, tokens, mask, np.asarray([0]))
    with pytest.raises(ValueError, match=r"example 0\b"):
        check_alignment(tokens, mask, tokens, mask, np.asarray([offset]))


def test_what_differs_off_the_mask_does_not_matter(arrays: SequenceArrays) -> None:
    tokens = np.where(arrays.suffix_loss_mask, arrays.suffix_tokens, -100)
    z_free = np.where(arrays.z_free_loss_mask, arrays.z_free_tokens, -1)
    check(replace(arrays, suffix_tokens=tokens, z_free_tokens=z_free))


def test_building_sequences_checks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(sequences, "check_alignment", lambda *arrays: checked.append(arrays))
    arrays = build_sequences(PAIRS, VOCABULARY)
    ((tokens, mask, z_free_tokens, z_free_mask, offsets),) = checked
    assert words(tokens) == words(arrays.suffix_tokens)
    assert words(z_free_tokens) == words(arrays.z_free_tokens)
    assert bits(mask) == bits(arrays.suffix_loss_mask)
    assert bits(z_free_mask) == bits(arrays.z_free_loss_mask)
    assert offsets.tolist() == arrays.alignment_offsets.tolist()


# Vocabulary.


def test_ids_are_positions_special_tokens_first() -> None:
    assert VOCABULARY.tokens == (
        *("<pad>", "<bos>", "<eos>", "<x>", "</x>", "<y>", "</y>", "<z>", "</z>"),
        *("<z_0>", "<z_1>", "<z_2>"),
        *("a", "b", "c"),
    )
    assert VOCABULARY.size == 15
    assert list(VOCABULARY.latent_ids) == [9, 10, 11]
    assert VOCABULARY.encode(["c", "<z_1>", "<pad>"]) == [14, 10, 0]
    assert VOCABULARY.decode(np.asarray([14, 10, 0])) == ["c", "<z_1>", "<pad>"]
    assert VOCABULARY.decode(range(15)) == list(VOCABULARY.tokens)


def test_the_vocabulary_does_not_depend_on_the_order_of_records() -> None:
    texts = [["b", "a"], ["10", "9", "a"], ["é", "B"]]
    built = {Vocabulary.from_texts(order, 2) for order in permutations(texts)}
    built |= {Vocabulary.from_texts([text[::-1] for text in texts] * 2, 2)}
    assert [vocabulary.text_tokens for vocabulary in built] == [("10", "9", "B", "a", "b", "é")]


def test_the_vocabulary_is_that_of_an_iterator_too() -> None:
    assert Vocabulary.from_texts((text for text in [["b"], ["a", "b"]]), 2).text_tokens == ("a", "b")


@pytest.mark.parametrize("token", ["<pad>", "<eos>", "</y>", "<z>", "<z_0>", "<z_1>"])
def test_a_reserved_token_in_the_text_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=token):
        Vocabulary.from_texts([["a", token]], 2)
    with pytest.raises(ValueError, match=token):
        Vocabulary((token,), 2)


def test_a_doubled_token_is_refused() -> None:
    with pytest.raises(ValueError, match="'b'"):
        Vocabulary(("a", "b", "c", "b"), 2)


def test_an_unknown_token_is_named() -> None:
    with pytest.raises(ValueError, match="'<z_3>'"):
        VOCABULARY.encode(["a", "<z_3>"])
    with pytest.raises(ValueError, match=r"'d' .*15"):
        VOCABULARY.id("d")


@pytest.mark.parametrize(
    ("tokenization", "text", "tokens"),
    [
        ("whitespace", "a <b> c", ["a", "<b>", "c"]),
        ("whitespace", "", []),
        ("characters", "a b", ["a", " ", "b"]),
        ("characters", "", []),
    ],
)
def test_tokenization(tokenization: str, text: str, tokens: list[str]) -> None:
    assert tokenize(text, tokenization) == tokens
    assert detokenize(tokens, tokenization) == text


def test_any_white_space_parts_tokens() -> None:
    assert tokenize(" a\tb\n  c ", "whitespace") == ["a", "b", "c"]


# The shift by one: which token a position is scored on.


def scored(logits: Any, tokens: Any, loss_mask: Any) -> np.ndarray:
    arrays = (jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(loss_mask, bool))
    return np.asarray(masked_token_nll_per_position(*arrays))


def hand_made_probabilities(positions: int, vocabulary_size: int) -> Any:
    """`p[t, v]`, proportional to (1 + t) + v, so that no two neighbours agree."""
    weights = np.asarray([[1.0 + t + v for v in range(vocabulary_size)] for t in range(positions)])
    return weights / weights.sum(axis=1, keepdims=True)


def test_position_t_is_scored_on_token_t_plus_one() -> None:
    p = hand_made_probabilities(4, 14)
    nll = scored(np.log(p), [10, 11, 12, 13], [1, 1, 1, 1])
    # Three targets: the last position predicts nothing, and the first token is predicted by nothing.
    np.testing.assert_allclose(nll, [-math.log(p[0, 11]), -math.log(p[1, 12]), -math.log(p[2, 13])], rtol=1e-5)


def test_the_mask_of_a_token_selects_the_position_before_it() -> None:
    p = hand_made_probabilities(4, 14)
    nll = scored(np.log(p), [10, 11, 12, 13], [0, 0, 1, 0])
    np.testing.assert_allclose(nll, [0.0, -math.log(p[1, 12]), 0.0], rtol=1e-5)


@pytest.mark.parametrize("layout", ["suffix", "z_free"])
def test_built_sequences_are_scored_from_the_opening_tag_to_eos(arrays: SequenceArrays, layout: str) -> None:
    tokens, mask = getattr(arrays, f"{layout}_tokens"), getattr(arrays, f"{layout}_loss_mask")
    p = hand_made_probabilities(tokens.shape[1], VOCABULARY.size)
    logits = np.broadcast_to(np.log(p), (len(PAIRS), *p.shape))
    nll = scored(logits, tokens, mask)
    for n, (x, y) in enumerate(PAIRS):
        opening = 2 if layout == "suffix" else len(x) + 3  # where <y> stands
        expected = np.zeros(tokens.shape[1] - 1)
        for i, target in enumerate([*y, VOCABULARY.id("</y>"), VOCABULARY.id("<eos>")]):
            expected[opening + i] = -math.log(p[opening + i, target])
        np.testing.assert_allclose(nll[n], expected, rtol=1e-5)
