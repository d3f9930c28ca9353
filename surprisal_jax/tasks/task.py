"""What a task is: it draws instances, and knows which strategy a trace follows (for evaluation only)."""

from __future__ import annotations

from collections.abc import Mapping
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
