"""What a task is: it draws instances, and knows which strategy a trace follows (for evaluation only)."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Instance:
    """A prompt x and the trace each strategy writes for it, pairwise different; tokens joined by a space."""

    x: str
    traces: Mapping[str, str]


class Task(Protocol):
    """The strategies of a task share one trace grammar: no token is written merely to name a strategy."""

    @property
    def name(self) -> str: ...

    @property
    def strategies(self) -> tuple[str, ...]: ...

    @property
    def has_final_answer(self) -> bool:
        """False where no final answer can be told right or wrong: accuracy is then undefined, not 0."""
        ...

    def generate(self, rng: np.random.Generator) -> Instance:
        """Draw one instance."""
        ...

    def traces(self, x: str) -> Mapping[str, str]:
        """The trace of each strategy. Raises ValueError where x is no prompt of this task."""
        ...

    def classify(self, x: str, y: str) -> set[str]:
        """The strategies whose trace for x is y. Raises ValueError where x is no prompt of this task."""
        ...

    def answer(self, x: str) -> str:
        """The true final answer. Raises ValueError where x is no prompt, or the task has no final answers."""
        ...

    def final_answer(self, y: str) -> str | None:
        """The final answer y arrives at, None where y is malformed."""
        ...


class GeneratedTask(ABC):
    """A `Task` whose strategies are programs: from a prompt to the tokens that each of them writes.

    `size` is the task's difficulty. Instances on which two strategies write the same trace are not drawn.
    """

    name: str
    strategies: tuple[str, ...]
    sizes: range
    default_size: int
    has_final_answer = True

    def __init__(self, size: int | None = None) -> None:
        """Raises ValueError for a size that the task does not take."""
        self.size = self.default_size if size is None else size
        if self.size not in self.sizes:
            raise ValueError(
                f"got {self.size}, expected an integer from {self.sizes[0]} to {self.sizes[-1]} for task {self.name}"
            )
        self._cached_traces = functools.lru_cache(maxsize=65536)(self._distinct_traces)

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Sequence[str]:
        """The tokens of one prompt, which may be one on which two strategies agree."""

    @abstractmethod
    def write(self, x: Sequence[str]) -> tuple[Sequence[str], ...]:
        """The trace of each strategy, in the order of `strategies`. Raises ValueError, `expected ...`, for a bad x."""

    @abstractmethod
    def solve(self, x: Sequence[str]) -> str:
        """The final answer of a prompt that `write` takes."""

    @abstractmethod
    def read_answer(self, y: Sequence[str]) -> str | None:
        """What stands at the place of the final answer; None where the trace is malformed."""

    def generate(self, rng: np.random.Generator) -> Instance:
        while True:
            x = " ".join(self.draw(rng))
            traces = self._write(x)
            if len(set(traces)) == len(traces):
                return Instance(x, dict(zip(self.strategies, traces, strict=True)))

    def traces(self, x: str) -> Mapping[str, str]:
        return dict(zip(self.strategies, self._cached_traces(" ".join(x.split())), strict=True))

    def classify(self, x: str, y: str) -> set[str]:
        trace = " ".join(y.split())
        return {strategy for strategy, expected in self.traces(x).items() if expected == trace}

    def answer(self, x: str) -> str:
        self.traces(x)
        return self.solve(x.split())

    def final_answer(self, y: str) -> str | None:
        return self.read_answer(y.split())

    def _distinct_traces(self, x: str) -> tuple[str, ...]:
        traces = self._write(x)
        if len(set(traces)) < len(traces):
            raise ValueError(f"x: got {x!r}, expected a prompt on which the strategies' traces differ")
        return traces

    def _write(self, x: str) -> tuple[str, ...]:
        try:
            return tuple(" ".join(trace) for trace in self.write(x.split()))
        except ValueError as error:
            raise ValueError(f"x: got {x!r}, {error}") from None


def numbers(tokens: Sequence[str], most: int) -> list[int] | None:
    """Tokens as integers from 0 to `most`, None where one is not written as such."""
    known = {str(value): value for value in range(most + 1)}
    values = [known.get(token, -1) for token in tokens]
    return None if -1 in values else values
