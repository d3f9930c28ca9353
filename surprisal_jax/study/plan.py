"""What the study runs: settings x tasks x seeds. This is the file to change for a study of your own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surprisal_jax.config import ExperimentConfig, load_config
from surprisal_jax.tasks import TASK_NAMES


@dataclass(frozen=True)
class Block:
    """Every one of `settings` on every one of `tasks` with every one of `seeds`."""

    name: str
    settings: tuple[str, ...]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One run of the study."""

    task: str
    seed: int
    setting: str


#: What each setting changes of a task's own file in `configs/`.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "scope example": {"latent_scope": "example"},
    # At equal total weight: raw 3 in place of raw 1 and token-weighted 2.
    "token weight 0": {"reconstruction.raw_weight": 3.0, "reconstruction.token_weighted_weight": 0.0},
    # The same with as large a ratio of collapse threshold to beta as the default has: is it more than a smaller beta?
    "token weight 0, beta 0.01": {
        "reconstruction.raw_weight": 3.0,
        "reconstruction.token_weighted_weight": 0.0,
        "beta": 0.01,
    },
    "beta 0.01": {"beta": 0.01},
    "start by chance, no splits": {"disentangle.reseed_until": 0},
    "amortized": {"posterior": "amortized"},
    "amortized, example": {"posterior": "amortized", "latent_scope": "example"},
    "example, token weight 0": {
        "latent_scope": "example",
        "reconstruction.raw_weight": 3.0,
        "reconstruction.token_weighted_weight": 0.0,
    },
    **{f"alpha {alpha:g}": {"reconstruction.token_weight_alpha": alpha} for alpha in (0.0, 0.5, 2.0)},
    **{
        f"{term} alone": {
            "reconstruction.raw_weight": 0.0,
            "reconstruction.token_weighted_weight": 0.0,
            f"reconstruction.{term}_weight": 3.0,
        }
        # Raw alone is "token weight 0".
        for term in (
            "baseline_normalized",
            "example_normalized",
            "token_weighted",
            "normalized_token_weighted",
            "normalized_inverse_token_weighted",
        )
    },
    **{
        f"weights from {source.replace('_', ' ')}": {"reconstruction.token_weight_source": source}
        for source in ("reference_entropy", "model_surprisal", "uniform")
    },
    "mix 0.5": {"reconstruction.token_weight_mix": 0.5},
    "inter-latent divergence 0.1": {"inter_latent_divergence_weight": 0.1},
    "groups of 4": {"data.group_size": 4},
    "anchors 1": {"anchors": 1},
    "anchors 3": {"anchors": 3},
    "K = 2": {"num_latents": 2},
    "K = 5": {"num_latents": 5},
    "traces from the reference": {"traces": "reference_samples", "latent_scope": "example"},
}

_EVERYWHERE = ("default", "scope example", "token weight 0", "amortized")
#: What else could have made the difference: a smaller beta, the start.
_PARTS = ("token weight 0, beta 0.01", "start by chance, no splits")

FROZEN = Block("the recipe, frozen", _EVERYWHERE[:2], TASK_NAMES, tuple(range(10, 15)))
# The same seeds, which share their references.
EVERYWHERE = Block("everywhere", _EVERYWHERE, TASK_NAMES, FROZEN.seeds)
ABLATIONS = Block(
    "ablations",
    tuple(name for name in SETTINGS if name not in _EVERYWHERE),
    ("grid_pathfinding", "sorting_algorithms"),
    FROZEN.seeds[:3],
)
# The first of the seeds that the recipe was developed on.
PARTS = Block("parts", (*_EVERYWHERE, *_PARTS), TASK_NAMES, (0,))
PLAN = (FROZEN, EVERYWHERE, ABLATIONS, PARTS)


def members(blocks: tuple[Block, ...] = PLAN) -> Iterator[Member]:
    """Every run once, block by block; within a block all settings of a task and seed, which share a reference."""
    seen: set[Member] = set()
    for block in blocks:
        for seed in block.seeds:
            for task in block.tasks:
                for setting in block.settings:
                    member = Member(task, seed, setting)
                    if member not in seen:
                        seen.add(member)
                        yield member


def configuration(member: Member, output_dir: str) -> ExperimentConfig:
    """The task's file in `configs/` with the setting, the seed and the directory over it.

    Groups of 4 are other data; there the number of records stays.
    """
    overrides = {**SETTINGS[member.setting], "seed": member.seed, "output_dir": output_dir}
    path = f"configs/{member.task}.yaml"
    if "data.group_size" in overrides:
        data = load_config(path).data
        overrides["data.train_groups"] = data.train_groups * data.group_size // overrides["data.group_size"]
    return load_config(path, overrides)
