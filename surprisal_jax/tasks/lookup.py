"""The task behind a user's file: all it knows is which traces were recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from surprisal_jax.sequences import detokenize, tokenize
from surprisal_jax.tasks.task import Instance

if TYPE_CHECKING:
    import numpy as np

    from surprisal_jax.data import Record


class LookupTask:
    """Evaluates a user's file as far as recorded traces allow.

    A decoded y counts for a strategy only where it equals, token for token, a trace that the file records
    under that strategy for the same x. A right answer that nobody wrote down counts for none, and an x
    recorded under few strategies can show only those. So coverage and alignment mean most where the file
    holds every strategy for each held-out x. Nothing here can tell a right final answer from a wrong one, so
    there are none. Records without a strategy are known prompts and fit no strategy.
    """

    name = "lookup"
    has_final_answer = False

    def __init__(self, records: Iterable[Record], tokenization: str = "whitespace") -> None:
        self._tokenization = tokenization
        self._recorded: dict[str, dict[str, list[str]]] = {}  # x -> strategy -> traces
        for record in records:
            by_strategy = self._recorded.setdefault(self._canonical(record.x), {})
            if record.strategy is not None:
                by_strategy.setdefault(record.strategy, []).append(self._canonical(record.y))
        self.strategies: tuple[str, ...] = tuple(sorted({s for by in self._recorded.values() for s in by}))
        self._prompts = tuple(sorted(self._recorded))

    def generate(self, rng: np.random.Generator) -> Instance:
        """Draw one recorded x uniformly."""
        x = self._prompts[int(rng.integers(len(self._prompts)))]
        return Instance(x, self.traces(x))

    def traces(self, x: str) -> Mapping[str, str]:
        """The first recorded trace of each strategy x is recorded under, which need not be all."""
        recorded = self._lookup(x)
        return {strategy: recorded[strategy][0] for strategy in self.strategies if strategy in recorded}

    def classify(self, x: str, y: str) -> set[str]:
        """The strategies under which y is recorded for x: any of several traces of one strategy counts."""
        trace = self._canonical(y)
        return {strategy for strategy, traces in self._lookup(x).items() if trace in traces}

    def answer(self, x: str) -> str:
        raise ValueError(f"x: got {x!r}, but recorded traces have no final answers (has_final_answer is False)")

    def final_answer(self, y: str) -> str | None:
        """None always."""
        return None

    def _lookup(self, x: str) -> dict[str, list[str]]:
        try:
            return self._recorded[self._canonical(x)]
        except KeyError:
            raise ValueError(f"x: got {x!r}, expected one of the {len(self._recorded)} recorded x") from None

    def _canonical(self, text: str) -> str:
        return detokenize(tokenize(text, self._tokenization), self._tokenization)
