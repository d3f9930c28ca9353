"""Templates, vocabulary, loss masks and alignment offsets, made together in this one place, on the host.

    z-free       <bos> <x> x... </x>                <y> y... </y> <eos>
    conditioned  <bos> <x> x... </x> <z> <z_k> </z> <y> y... </y> <eos>

The training step reads a conditioned sequence as a prefix `<bos> <x> x... </x> <z>`, computed once an example, and K
suffixes `<z_k> </z> <y> y... </y> <eos>`. `alignment_offsets` is the position of a target in the conditioned array
minus its position in the z-free array; it is 3 for whole sequences and negative for suffixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<x>", "</x>", "<y>", "</y>", "<z>", "</z>")

#: Tokens a whole conditioned sequence has and the z-free one does not: `<z> <z_k> </z>`.
WHOLE_SEQUENCE_OFFSET = 3

# <z_k> </z> <y> stand before the first token of y in a suffix, and </y> <eos> after the last.
_SUFFIX_HEAD, _SUFFIX_TAIL = 3, 2


def tokenize(text: str, tokenization: str) -> list[str]:
    """Split a text into tokens: at white space (`whitespace`), or one token a character (`characters`)."""
    return text.split() if tokenization == "whitespace" else list(text)


def detokenize(tokens: Sequence[str], tokenization: str) -> str:
    """The text that `tokenize` splits into these tokens."""
    return (" " if tokenization == "whitespace" else "").join(tokens)


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens, then K latent tokens, then the text's tokens; an id is a position in `tokens`."""

    text_tokens: tuple[str, ...]
    num_latents: int

    def __post_init__(self) -> None:
        tokens = self.tokens
        if len(set(tokens)) != len(tokens):
            doubled = next(t for i, t in enumerate(tokens) if t in tokens[:i])
            raise ValueError(f"vocabulary: token {doubled!r} appears twice or is reserved")
        object.__setattr__(self, "_ids", {token: i for i, token in enumerate(tokens)})

    @classmethod
    def from_texts(cls, texts: Iterable[Sequence[str]], num_latents: int) -> Vocabulary:
        """The sorted set of all tokens: the same for any order of the records."""
        return cls(tuple(sorted({token for text in texts for token in text})), num_latents)

    @property
    def tokens(self) -> tuple[str, ...]:
        latents = tuple(f"<z_{k}>" for k in range(self.num_latents))
        return SPECIAL_TOKENS + latents + self.text_tokens

    @property
    def size(self) -> int:
        return len(SPECIAL_TOKENS) + self.num_latents + len(self.text_tokens)

    @property
    def latent_ids(self) -> range:
        return range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + self.num_latents)

    def id(self, token: str) -> int:
        return self.encode([token])[0]

    def encode(self, tokens: Sequence[str]) -> list[int]:
        ids: dict[str, int] = self._ids  # type: ignore[attr-defined]
        try:
            return [ids[token] for token in tokens]
        except KeyError as error:
            raise ValueError(f"token {error.args[0]!r} is not in the vocabulary of {self.size} tokens") from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        tokens, decoded = self.tokens, [int(i) for i in ids]
        for i in decoded:
            if not 0 <= i < len(tokens):
                raise ValueError(f"id {i} is not in the vocabulary of {len(tokens)} tokens")
        return [tokens[i] for i in decoded]


@dataclass(frozen=True)
class SequenceArrays:
    """N examples as padded arrays (row n of every field is one example); masks are per token, True where supervised.

    A loss mask covers the tokens of y, `</y>` and `<eos>`: never x, a tag before y, the latent token or padding. It is
    built from lengths, never from `token != pad`.
    """

    prefix_tokens: np.ndarray  # int32 [N, P]      <bos> <x> x... </x> <z>
    prefix_lengths: np.ndarray  # int32 [N]         true length; rotary positions of the suffix go on from here
    suffix_tokens: np.ndarray  # int32 [N, U]      <z_0> </z> <y> y... </y> <eos>; the step writes <z_k> into column 0
    suffix_loss_mask: np.ndarray  # bool  [N, U]
    z_free_tokens: np.ndarray  # int32 [N, S]
    z_free_loss_mask: np.ndarray  # bool  [N, S]
    alignment_offsets: np.ndarray  # int32 [N]         suffix position minus z-free position of the same target


def build_sequences(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: Vocabulary) -> SequenceArrays:
    """Both templates of every `(x_ids, y_ids)`, padded to the longest, checked before they are returned.

    Raises:
      ValueError: an alignment offset that points a supervised target at another token; names the example.
    """
    prefix_length = max(len(x) for x, _ in pairs) + 4
    suffix_length = max(len(y) for _, y in pairs) + _SUFFIX_HEAD + _SUFFIX_TAIL
    z_free_length = max(len(x) + len(y) for x, y in pairs) + 6
    pad = vocabulary.id("<pad>")
    n = len(pairs)
    arrays = SequenceArrays(
        prefix_tokens=np.full((n, prefix_length), pad, np.int32),
        prefix_lengths=np.asarray([len(x) + 4 for x, _ in pairs], np.int32),
        suffix_tokens=np.full((n, suffix_length), pad, np.int32),
        suffix_loss_mask=np.zeros((n, suffix_length), bool),
        z_free_tokens=np.full((n, z_free_length), pad, np.int32),
        z_free_loss_mask=np.zeros((n, z_free_length), bool),
        alignment_offsets=np.asarray([_SUFFIX_HEAD - (len(x) + 4) for x, _ in pairs], np.int32),
    )
    for i, (x, y) in enumerate(pairs):
        prompt, answer = _prompt(x, vocabulary), _answer(y, vocabulary)
        _write_row(arrays.prefix_tokens[i], [*prompt, vocabulary.id("<z>")])
        suffix_start = [vocabulary.latent_ids[0], vocabulary.id("</z>"), vocabulary.id("<y>")]
        _write_row(arrays.suffix_tokens[i], suffix_start + answer, arrays.suffix_loss_mask[i], len(answer))
        z_free_start = [*prompt, vocabulary.id("<y>")]
        _write_row(arrays.z_free_tokens[i], z_free_start + answer, arrays.z_free_loss_mask[i], len(answer))
    check_alignment(
        arrays.suffix_tokens,
        arrays.suffix_loss_mask,
        arrays.z_free_tokens,
        arrays.z_free_loss_mask,
        arrays.alignment_offsets,
    )
    return arrays


def build_conditioned(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: Vocabulary, latent: int
) -> tuple[np.ndarray, np.ndarray]:
    """Whole conditioned sequences under one latent: tokens int32 [N, T] and loss mask bool [N, T]."""
    length = max(len(x) + len(y) for x, y in pairs) + 6 + WHOLE_SEQUENCE_OFFSET
    tokens = np.full((len(pairs), length), vocabulary.id("<pad>"), np.int32)
    loss_mask = np.zeros((len(pairs), length), bool)
    latent_tags = [vocabulary.id("<z>"), vocabulary.latent_ids[latent], vocabulary.id("</z>")]
    for i, (x, y) in enumerate(pairs):
        answer = _answer(y, vocabulary)
        row = [*_prompt(x, vocabulary), *latent_tags, vocabulary.id("<y>"), *answer]
        _write_row(tokens[i], row, loss_mask[i], len(answer))
    return tokens, loss_mask


def check_alignment(
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    z_free_tokens: np.ndarray,
    z_free_loss_mask: np.ndarray,
    alignment_offsets: np.ndarray,
) -> None:
    """Every supervised target must be the same supervised token at its z-free position, in both directions.

    Raises:
      ValueError: names the first example, the position and what is wrong.
    """
    length = z_free_tokens.shape[1]
    source = np.arange(tokens.shape[1])[None, :] - alignment_offsets[:, None]
    inside = (source >= 0) & (source < length)
    clipped = np.clip(source, 0, length - 1)
    matches = (
        inside
        & np.take_along_axis(z_free_loss_mask, clipped, axis=1)
        & (np.take_along_axis(z_free_tokens, clipped, axis=1) == tokens)
    )
    wrong = loss_mask & ~matches
    if wrong.any():
        example, position = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"example {example}: alignment_offsets {int(alignment_offsets[example])} sends position {position} to"
            f" z-free position {int(source[example, position])} of {length}, not the same supervised token"
        )
    unequal = loss_mask.sum(axis=1) != z_free_loss_mask.sum(axis=1)
    if unequal.any():
        example = int(np.argmax(unequal))
        raise ValueError(
            f"example {example}: {int(loss_mask[example].sum())} supervised tokens in the conditioned sequence,"
            f" {int(z_free_loss_mask[example].sum())} in the z-free one"
        )


def _prompt(x: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    return [vocabulary.id("<bos>"), vocabulary.id("<x>"), *x, vocabulary.id("</x>")]


def _answer(y: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    return [*y, vocabulary.id("</y>"), vocabulary.id("<eos>")]


def _write_row(tokens: np.ndarray, row: Sequence[int], mask: np.ndarray | None = None, supervised: int = 0) -> None:
    """Write a row, and mark its last `supervised` tokens."""
    tokens[: len(row)] = row
    if mask is not None:
        mask[len(row) - supervised : len(row)] = True
