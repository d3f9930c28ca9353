"""The configuration of a run: frozen dataclasses, one checker, a strict YAML reader, flags over files.

Imports the standard library only (yaml inside the reader), so that `--help` and a mistake in a file come back
at once. A value is checked where its dataclass is built, whether it came from a file, a flag or Python, so
the same mistake reads the same everywhere:

    configs/mine.yaml: disentangle.learning_rate: got 'fast', expected a number > 0
    --disentangle.learning-rate: got 'fast', expected a number > 0
    DisentangleConfig.learning_rate: got 'fast', expected a number > 0
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from surprisal_jax.files import write_text

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_SMALLEST_NORMAL = 1.1754943508222875e-38


class InputError(ValueError):
    """One line about something the user gave: where, which field, which value, what was expected.

    `fields` and `problem` are set by the dataclasses below, so that whoever knows where a value came from (a
    file, a flag) can put that in front of the problem; code that knows already writes the whole line.
    """

    def __init__(self, message: str, *, fields: Sequence[str] = (), problem: str = "") -> None:
        super().__init__(message)
        self.fields = tuple(fields)
        self.problem = problem


# --------------------------------------------------------------------------------------------------------
# One field: what it is, which values it takes
# --------------------------------------------------------------------------------------------------------


def setting(
    help_text: str,
    default: Any = dataclasses.MISSING,
    *,
    at_least: int | float | None = None,
    above: int | float | None = None,
    at_most: int | float | None = None,
    flag: str | None = None,
) -> Any:
    """A dataclass field with its help line, its range and, where it is not the field's path, its flag."""
    metadata = {"help": help_text, "at_least": at_least, "above": above, "at_most": at_most, "flag": flag}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """What is known about one field: `name` is dotted where it stands in a section (`model.width`)."""

    name: str
    kind: type  # bool, int, float or str
    optional: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    at_least: int | float | None
    above: int | float | None
    at_most: int | float | None
    flag: str

    @property
    def expected(self) -> str:
        """What the field takes, as error messages and `--help` say it."""
        if self.kind is bool:
            text = "true or false"
        elif self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.kind is str:
            text = "text"
        else:
            text = "an integer" if self.kind is int else "a number"
            if self.at_least is not None and self.at_most is not None:
                text += f" from {self.at_least} to {self.at_most}"
            elif self.at_least is not None:
                text += f" >= {self.at_least}"
            elif self.above is not None:
                text += f" > {self.above}"
        return text + ", or none" if self.optional else text

    def parse(self, text: str) -> Any:
        """The value of an unquoted YAML scalar or of a flag; text that is none stays text, for `check`."""
        if text.lower() in ("~", "null", "none"):
            return None
        return text if self.kind is str else _plain_scalar(text)

    def check(self, value: Any) -> Any:
        """`value` as the field's type. Raises `InputError` with `fields` and `problem` where it has none."""
        if value is None and self.optional:
            return None
        # bool is a subclass of int in Python, but `steps: true` is a mistake.
        if self.kind is bool:
            if isinstance(value, bool):
                return value
        elif self.kind is str:
            if isinstance(value, str):
                return self._check_text(value)
        elif self.kind is int:
            if isinstance(value, numbers.Integral) and not isinstance(value, bool):
                return self._check_integer(int(value))
        elif isinstance(value, numbers.Real) and not isinstance(value, bool):
            return self._check_number(value)
        self._reject(value, self.expected)

    def _check_text(self, value: str) -> str:
        if self.choices:
            if value not in self.choices:
                self._reject(value, self.expected)
        elif not value.strip() or any(ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF for c in value):
            expected = self.expected.replace("text", "non-empty text without control characters")
            self._reject(value, expected)
        return value

    def _check_integer(self, value: int) -> int:
        if not self._in_range(value):
            self._reject(value, self.expected)
        if self.at_most is None and value > INT32_MAX:
            self._reject(value, f"{self.expected} and < 2**31")
        return value

    def _check_number(self, value: numbers.Real) -> float:
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the largest float
            number = math.inf
        if not math.isfinite(number):
            self._reject(value, self.expected.replace("a number", "a finite number"))
        if not self._in_range(number):
            self._reject(value, self.expected)
        # The run computes in float32: outside its range this would silently become inf, or 0 (XLA flushes
        # subnormal numbers).
        if number != 0 and not FLOAT32_SMALLEST_NORMAL <= abs(number) <= FLOAT32_MAX:
            self._reject(value, f"{self.expected} that float32 can hold")
        return number + 0.0  # -0.0 and 0.0 are one value, and one run identity

    def _in_range(self, value: int | float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )

    def _reject(self, value: Any, expected: str) -> NoReturn:
        problem = f"got {show(value)}, expected {expected}"
        raise InputError(f"{self.name}: {problem}", fields=(self.name,), problem=problem)


# YAML 1.1 reads 1e-4 as text, 012 as 10, 1:30 as 90 and 1_000 as 1000. Here a number is what JSON calls one,
# also with a plus sign or no digit on one side of the point; the rest is text, which no number field takes.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


def _plain_scalar(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return text


def show(value: Any) -> str:
    """A value as messages write it: in the words of the YAML files, text quoted, on one line, never long."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of more than 4300 digits
        return "an integer of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:60] + "... (" + str(len(text)) + " characters)"


def sections_of(cls: type) -> dict[str, type]:
    """The fields of `cls` that are dataclasses themselves, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if dataclasses.is_dataclass(hints[f.name])}


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The fields of `cls` that hold one value each, in order, under their own (undotted) names."""
    hints = typing.get_type_hints(cls)
    sections = sections_of(cls)
    return tuple(_describe(cls, f, hints[f.name]) for f in dataclasses.fields(cls) if f.name not in sections)


def _describe(cls: type, field: dataclasses.Field[Any], hint: Any) -> Setting:
    optional = isinstance(hint, types.UnionType)
    if optional:
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    # A subclass that only restates a default (`steps: int = 600`) keeps what its base says about the field.
    metadata = next(
        base_field.metadata
        for base in cls.__mro__
        if (base_field := getattr(base, "__dataclass_fields__", {}).get(field.name)) and base_field.metadata
    )
    return Setting(
        name=field.name,
        kind=str if choices else hint,
        optional=optional,
        choices=choices,
        default=field.default,
        help=metadata["help"],
        at_least=metadata["at_least"],
        above=metadata["above"],
        at_most=metadata["at_most"],
        flag=metadata["flag"] or "--" + field.name.replace("_", "-"),
    )


def _check_fields(config: Any) -> None:
    """The `__post_init__` of every dataclass below: each field checked and brought to its type."""
    for item in settings_of(type(config)):
        try:
            # The dataclasses are frozen for their users; an integer given for a number becomes one here.
            object.__setattr__(config, item.name, item.check(getattr(config, item.name)))
        except InputError as error:
            _contradiction(config, error.fields, error.problem)


def _contradiction(config: Any, fields: Sequence[str], problem: str) -> NoReturn:
    raise InputError(f"{type(config).__name__}.{fields[0]}: {problem}", fields=fields, problem=problem)


# --------------------------------------------------------------------------------------------------------
# The dataclasses
# --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReconstructionLossConfig:
    """the six reconstruction terms and the temper of the token weights"""

    raw_weight: float = setting(
        "weight of the plain mean of the token losses",
        1.0,
        at_least=0,
        flag="--raw-reconstruction-weight",
    )
    baseline_normalized_weight: float = setting(
        "weight of that mean divided by the reference's mean loss over the validation set",
        0.0,
        at_least=0,
        flag="--baseline-normalized-reconstruction-weight",
    )
    example_normalized_weight: float = setting(
        "weight of that mean divided by the reference's loss on the same example",
        0.0,
        at_least=0,
        flag="--example-normalized-reconstruction-weight",
    )
    token_weighted_weight: float = setting(
        "weight of the sum of token losses weighted by their share of the reference's surprisal",
        0.0,
        at_least=0,
        flag="--token-weighted-reconstruction-weight",
    )
    normalized_token_weighted_weight: float = setting(
        "weight of that weighted sum divided by the same sum of the reference",
        0.0,
        at_least=0,
        flag="--normalized-token-weighted-reconstruction-weight",
    )
    normalized_inverse_token_weighted_weight: float = setting(
        "the same with inverse weights, which favour the tokens the reference finds easy",
        0.0,
        at_least=0,
        flag="--normalized-inverse-token-weighted-reconstruction-weight",
    )
    token_weight_alpha: float = setting(
        "temper: token weights are proportional to surprisal ** alpha; 0 makes them uniform",
        1.0,
        at_least=0,
        flag="--token-weighted-reconstruction-alpha",
    )
    token_weight_source: Literal["reference_surprisal", "reference_entropy", "model_surprisal", "uniform"] = setting(
        "what weighs the tokens: the reference's surprisal or predictive entropy, the surprisal of the model that is "
        "being trained, or nothing",
        "reference_surprisal",
    )
    token_weight_mix: float = setting(
        "token weights are this share of the tempered weights, and uniform for the rest", 1.0, at_least=0, at_most=1
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        weights = [item.name for item in settings_of(type(self)) if item.name.endswith("_weight")]
        if not any(getattr(self, name) for name in weights):
            _contradiction(self, weights, "got 0.0 for this and every other reconstruction weight, expected one > 0")


@dataclass(frozen=True)
class ModelConfig:
    """the decoder that reference, router and generator share, and the posterior's"""

    num_layers: int = setting("decoder layers", 2, at_least=1)
    width: int = setting("size of the hidden states", 64, at_least=1)
    num_heads: int = setting("query heads of each attention layer", 4, at_least=1)
    num_kv_heads: int = setting("key and value heads; they divide the query heads", 4, at_least=1)
    head_dim: int = setting("size of one head; even, as rotary positions turn pairs", 16, at_least=2)
    mlp_width: int = setting("hidden size of the SwiGLU feed-forward layer", 192, at_least=1)
    rope_theta: float = setting("base of the rotary wavelengths, in tokens", 10000.0, above=0)
    qkv_bias: bool = setting("biases in the query, key and value projections", False)
    qk_norm: bool = setting("RMSNorm on queries and keys", False)
    tied_embeddings: bool = setting("the output layer reuses the token embeddings", True)
    norm_epsilon: float = setting("added to the mean square in RMSNorm", 1e-6, above=0)
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "type the layers compute in; parameters, losses and logits stay float32", "float32"
    )
    logit_precision: Literal["default", "high", "highest"] = setting(
        "precision of the logit product in training; it matters on a TPU", "highest"
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.head_dim % 2:
            _contradiction(self, ("head_dim",), f"got {self.head_dim}, expected an even integer >= 2")
        if self.num_heads % self.num_kv_heads:
            _contradiction(
                self,
                ("num_heads", "num_kv_heads"),
                f"got num_heads {self.num_heads} with num_kv_heads {self.num_kv_heads}, "
                "expected num_heads to be a multiple of num_kv_heads",
            )


@dataclass(frozen=True)
class DataConfig:
    """the traces: generated from the task, or a JSONL file of your own"""

    path: str | None = setting(
        "JSONL file, relative to the working directory, with x, y and optionally strategy and group on each "
        "line; none: generated from the task",
        None,
    )
    task_size: int | None = setting(
        "difficulty of the task: cells a side, numbers to sort, digits, ...; none: the task's own default",
        None,
        at_least=1,
    )
    tokenization: Literal["whitespace", "characters"] = setting("what a token of the text is", "whitespace")
    group_size: int = setting("records of one strategy that share a group (latent_scope group uses it)", 2, at_least=1)
    train_groups: int = setting("groups of training records to generate", 8192, at_least=1)
    validation_records: int = setting("validation records to generate", 512, at_least=1)
    test_instances: int = setting("different x the run is evaluated on", 512, at_least=1)
    max_tokens: int = setting("longest x or y, in tokens", 256, at_least=1)

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class OptimizerConfig:
    """what the two training stages have in common"""

    steps: int = setting("optimizer updates of this stage", at_least=1)
    batch_size: int = setting("examples an update, over all devices", at_least=1)
    learning_rate: float = setting("peak learning rate of AdamW", above=0)
    warmup_steps: int = setting("updates over which the learning rate rises from 0", at_least=0)
    weight_decay: float = setting("decoupled weight decay of AdamW", 0.0, at_least=0)
    max_gradient_norm: float = setting("gradients with a larger global norm are scaled down to it", 1.0, above=0)

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class ReferenceConfig(OptimizerConfig):
    """the first training stage: the entangled model, whose surprisal weighs the tokens"""

    steps: int = 3000
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    evaluate_every: int = setting("updates between two looks at the validation loss; the best is kept", 250, at_least=1)


@dataclass(frozen=True)
class DisentangleConfig(OptimizerConfig):
    """the second training stage: router, generator and posterior, from the reference's weights"""

    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    evaluate_every: int = setting(
        "updates between two looks at the validation set; what groups are held to ends at the next one, and after 50 "
        "updates",
        50,
        at_least=1,
    )
    reseed_until: int = setting(
        "up to this update, each look at the validation set splits the latent with most of the loss where another "
        "latent is dead or doubles a third; with groups, where these show two sides, and the first updates hold groups "
        "to what the reference tells apart; 0: neither",
        0,
        at_least=0,
    )
    latent_embedding_scale: float = setting(
        "scale at which latent embeddings are drawn, relative to the other tokens' embeddings", 0.5, above=0
    )


@dataclass(frozen=True)
class LoggingConfig:
    """logs and checkpoints; nothing here changes the result"""

    log_every: int = setting("updates between two lines of metrics", 10, at_least=1)
    checkpoint_every: int = setting("updates between two checkpoints", 100, at_least=1)
    keep_checkpoints: int = setting("newest checkpoints kept for each stage", 2, at_least=1)

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class ExperimentConfig:
    """the run, the latents and the objective"""

    task: str | None = setting("task the traces come from; none needs data.path", "grid_pathfinding")
    num_latents: int = setting("latent values K, each of which should become one strategy", 3, at_least=2, at_most=64)
    seed: int = setting("seed of initialisation, data order and sampling", 0, at_least=0, at_most=2**32 - 1)
    data_seed: int | None = setting(
        "seed of the generated data; none: follows seed", None, at_least=0, at_most=2**32 - 1
    )
    reference_seed: int | None = setting(
        "seed of the reference; none: follows seed", None, at_least=0, at_most=2**32 - 1
    )
    output_dir: str = setting("directory under which run directories are made", "runs")
    run_dir: str | None = setting("this run's directory; none: named after the file and the seed, in output_dir", None)
    beta: float = setting("weight of KL(posterior || router), in nats", 0.1, at_least=0)
    posterior: Literal["closed_form", "amortized"] = setting(
        "posterior in the objective: its known minimiser, or the network", "amortized"
    )
    latent_scope: Literal["example", "group"] = setting("what shares one latent: an example, or its group", "example")
    anchors: int = setting(
        "labelled training examples of each strategy, the first in the data, whose posterior is fixed to the "
        "strategy's latent; 0: the labels are never read",
        0,
        at_least=0,
    )
    traces: Literal["dataset", "reference_samples"] = setting(
        "what router, generator and posterior are trained on: the data's y, or one y for each x drawn from the "
        "reference",
        "dataset",
    )
    reference_scoring: Literal["cached", "online"] = setting(
        "the reference scores the training set once, or each batch inside the compiled step", "cached"
    )
    inter_latent_divergence_weight: float = setting(
        "weight of the Jensen-Shannon divergence between the latents' predictions, in nats, subtracted from the loss",
        0.0,
        at_least=0,
    )
    posterior_entropy_weight: float = setting("weight of the posterior's entropy, in nats", 0.0, at_least=0)
    router_marginal_kl_weight: float = setting(
        "weight of KL(batch mean of the router || uniform), in nats", 0.0, at_least=0
    )
    posterior_fit_weight: float = setting(
        "weight of KL(closed form || network), in nats; it trains the network alone", 1.0, at_least=0
    )
    inverse_nll_floor: float = setting("least surprisal in the inverse token weights, in nats", 1e-6, above=0)
    divisor_floor: float = setting("least divisor of a normalised term, in nats", 1e-3, above=0)
    chunk_size: int = setting("rows of vocabulary-sized logits alive at once", 2048, at_least=1)
    data_parallel: int | None = setting(
        "devices, or groups of fsdp devices, that each batch is spread over; none: all there are", None, at_least=1
    )
    fsdp: int = setting("devices that share out parameters and optimizer state, beside the batch", 1, at_least=1)
    micro_batches: int = setting(
        "parts of a batch computed one after another, with one update from all of them (gradient accumulation)",
        1,
        at_least=1,
    )
    length_buckets: int = setting(
        "lengths that the step is compiled for, an even share of the longest each; a batch is cut to the least that "
        "holds it",
        1,
        at_least=1,
    )
    rematerialize: bool = setting("compute each layer again in the backward pass and keep only its input", False)
    distributed: bool = setting(
        "this process is one of several that a cluster started (a TPU pod, Slurm, Open MPI)", False
    )
    profile: bool = setting(
        "write a trace of ten updates of each stage that trains, for TensorBoard or Perfetto", False
    )
    reconstruction: ReconstructionLossConfig = ReconstructionLossConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reference: ReferenceConfig = ReferenceConfig()
    disentangle: DisentangleConfig = DisentangleConfig()
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        _check_fields(self)
        for name, section in sections_of(type(self)).items():
            if not isinstance(getattr(self, name), section):
                value = getattr(self, name)
                _contradiction(self, (name,), f"got {show(value)}, expected a {section.__name__}")
        self._check_task()
        self._check_closed_form()
        self._check_mesh()
        self._check_batches()
        self._check_traces()

    @property
    def effective_data_seed(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def effective_reference_seed(self) -> int:
        return self.seed if self.reference_seed is None else self.reference_seed

    @property
    def holds_groups(self) -> bool:
        """Whether the start and splits fix the posterior of groups for a while. With anchors the labels decide which
        latent is which."""
        grouped = self.latent_scope == "group" and self.data.group_size > 1
        return grouped and self.disentangle.reseed_until > 0 and self.anchors == 0

    def _check_task(self) -> None:
        if self.task is None:
            if self.data.path is None:
                _contradiction(
                    self,
                    ("task", "data.path"),
                    "got task none with data.path none, expected a task or a data file",
                )
            if self.data.task_size is not None:
                _contradiction(
                    self,
                    ("data.task_size", "task"),
                    f"got data.task_size {self.data.task_size} with task none, expected data.task_size none",
                )
        elif self.task not in known_tasks():
            known = ", ".join(known_tasks())
            _contradiction(
                self,
                ("task",),
                f"got {show(self.task)}, expected one of {known}, or none together with data.path",
            )

    def _check_closed_form(self) -> None:
        if self.posterior != "closed_form":
            return
        if self.beta == 0:
            _contradiction(
                self,
                ("beta", "posterior"),
                "got beta 0.0 with posterior 'closed_form', expected a number > 0",
            )
        if self.posterior_entropy_weight != 0:
            _contradiction(
                self,
                ("posterior_entropy_weight", "posterior"),
                f"got posterior_entropy_weight {self.posterior_entropy_weight} with posterior 'closed_form', "
                "expected 0, or posterior 'amortized' (the closed form is the minimiser without that term)",
            )

    def _check_traces(self) -> None:
        if self.traces == "dataset":
            return
        if self.latent_scope == "group":
            _contradiction(
                self,
                ("traces", "latent_scope"),
                "got traces 'reference_samples' with latent_scope 'group', expected latent_scope 'example' "
                "(each sample is drawn on its own and belongs to no group)",
            )
        if self.anchors:
            _contradiction(
                self,
                ("traces", "anchors"),
                f"got traces 'reference_samples' with anchors {self.anchors}, expected anchors 0 "
                "(a sample has no label)",
            )

    def _check_mesh(self) -> None:
        if self.model.width % self.fsdp:
            _contradiction(
                self,
                ("fsdp", "model.width"),
                f"got fsdp {self.fsdp} with model.width {self.model.width}, expected fsdp to divide it",
            )

    def _check_batches(self) -> None:
        # A group is summed where its examples lie, so each micro-batch of a device has to hold whole groups.
        parts = {"data_parallel": self.data_parallel or 1, "fsdp": self.fsdp, "micro_batches": self.micro_batches}
        parts = {name: count for name, count in parts.items() if count > 1}
        together = math.prod(parts.values())
        group = self.data.group_size if self.latent_scope == "group" else 1
        if self.anchors and self.disentangle.batch_size < 4 * group:
            _contradiction(
                self,
                ("disentangle.batch_size", "anchors"),
                f"got disentangle.batch_size {self.disentangle.batch_size} with anchors {self.anchors}, "
                f"expected at least {4 * group} (anchors take at most a quarter of a batch)",
            )
        for name, batch_size, unit in (
            ("reference.batch_size", self.reference.batch_size, together),
            ("disentangle.batch_size", self.disentangle.batch_size, together * group),
        ):
            if batch_size % unit == 0:
                continue
            fields, given = [name], []
            if group > 1 and unit != together:
                fields += ["latent_scope", "data.group_size"]
                given.append(f"latent_scope 'group' and data.group_size {group}")
            fields += parts
            given += [f"{name} {count}" for name, count in parts.items()]
            problem = f"got {name} {batch_size} with {' and '.join(given)}, expected {name} to be a multiple of {unit}"
            _contradiction(self, fields, problem)


def known_tasks() -> tuple[str, ...]:
    """The names `task` takes. Imported late: tasks read this module's dataclasses."""
    from surprisal_jax.tasks import TASK_NAMES

    return TASK_NAMES


# --------------------------------------------------------------------------------------------------------
# Looking at the dataclasses
# --------------------------------------------------------------------------------------------------------


@functools.cache
def all_settings() -> dict[str, Setting]:
    """Every value of `ExperimentConfig` by its dotted name, the top level first, then section by section."""
    found = {item.name: item for item in settings_of(ExperimentConfig)}
    for section, cls in sections_of(ExperimentConfig).items():
        for item in settings_of(cls):
            plain_flag = item.flag == "--" + item.name.replace("_", "-")
            flag = f"--{section}.{item.flag[2:]}" if plain_flag else item.flag
            name = f"{section}.{item.name}"
            found[name] = dataclasses.replace(item, name=name, flag=flag)
    return found


def closest_settings(given: str) -> tuple[Setting, ...]:
    """The settings a mistyped field or flag may mean: by dotted name, by name alone, by flag; maybe none."""
    by_spelling: dict[str, list[Setting]] = {}
    for item in all_settings().values():
        spellings = {item.name, item.name.rpartition(".")[2], item.flag[2:].replace("-", "_")}
        for spelling in spellings:
            by_spelling.setdefault(spelling, []).append(item)
    wanted = given.lstrip("-").replace("-", "_").lower()
    for candidate in (wanted, wanted.rpartition(".")[2]):
        if matches := difflib.get_close_matches(candidate, by_spelling, n=1, cutoff=0.75):
            return tuple(by_spelling[matches[0]])
    return ()


# --------------------------------------------------------------------------------------------------------
# YAML in, flags over it
# --------------------------------------------------------------------------------------------------------


def load_config(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Reads a YAML file and puts `overrides` (dotted field -> value) over it.

    Raises `InputError`, one line, for anything wrong with the file, a field or a combination of fields. What
    is wrong with an override is reported under its flag's name.
    """
    settings = all_settings()
    values = _read_yaml(path)
    origins = {name: f"{os.fspath(path)}: {name}" for name in values}
    for name, value in (overrides or {}).items():
        if name not in settings:
            raise InputError(f"overrides: unknown field {show(name)}{_did_you_mean(name)}")
        values[name] = value
        origins[name] = settings[name].flag
    return _build(values, origins)


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> ExperimentConfig:
    arguments: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for section, cls in sections_of(ExperimentConfig).items():
        prefix = section + "."
        inside = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        try:
            arguments[section] = cls(**inside)
        except InputError as error:
            raise _located(error, [prefix + field for field in error.fields], origins) from None
    try:
        return ExperimentConfig(**arguments)
    except InputError as error:
        raise _located(error, error.fields, origins) from None


def _located(error: InputError, fields: Sequence[str], origins: Mapping[str, str]) -> InputError:
    # Of fields that contradict each other the user most likely means to change the one given last: a flag.
    given = sorted((field for field in fields if field in origins), key=lambda f: not origins[f].startswith("--"))
    where = origins[given[0]] if given else fields[0]
    return InputError(f"{where}: {error.problem}", fields=fields, problem=error.problem)


def _read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Dotted field -> value, with every key known and given once."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: byte {error.start} is not valid UTF-8, expected a UTF-8 text file") from None
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}, expected a YAML file") from None
    except ValueError as error:  # a NUL in the path
        raise InputError(f"{show(name)}: {error}, expected the name of a YAML file") from None
    try:
        events = list(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, reason = mark.line + 1 if mark else 1, error.problem or error.context
    except yaml.YAMLError as error:  # the reader's: a character that YAML does not allow
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        reason = getattr(error, "reason", "cannot be read")
    except (OverflowError, ValueError):  # what PyYAML lets chr() say about "\U99999999"
        raise InputError(f"{name}: not valid YAML: an escape \\U... that names no character") from None
    else:
        return _YamlReader(name, iter(events)).read()
    raise InputError(f"{name}: line {line}: not valid YAML: {reason}")


class _YamlReader:
    """Reads the parser's events rather than constructed objects.

    So duplicate keys are seen, nothing is resolved by YAML 1.1's rules, and tags, anchors and aliases (Python
    objects, alias bombs) are refused before anything is built from them.
    """

    def __init__(self, path: str, events: Iterator[Any]) -> None:
        self.path = path
        self.events = events
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}

    def read(self) -> dict[str, Any]:
        self._next()  # the stream's start
        if self._next() == "StreamEnd":
            self._reject_empty()
        kind = self._next()
        if kind == "Scalar" and self.event.value.lower() in ("", "~", "null"):
            self._reject_empty()
        if kind != "MappingStart":
            self._fail(f"got {self._node()}, expected fields such as 'beta: 0.1'")
        self._read_fields(section=None)
        self._next()  # the document's end
        if self._next() != "StreamEnd":
            self._fail("a second document begins, expected one")
        return self.values

    def _read_fields(self, section: str | None) -> None:
        settings, sections = all_settings(), sections_of(ExperimentConfig)
        while self._next() != "MappingEnd":
            if type(self.event).__name__ != "ScalarEvent":
                self._fail(f"got {self._node()} as a field's name, expected text")
            key = self.event.value
            name = key if section is None else f"{section}.{key}"
            if "." in key or not (name in settings or (section is None and name in sections)):
                self._fail(f"unknown field {show(name)}{_did_you_mean(name)}")
            if name in self.lines:
                self._fail(f"{name}: given twice, first on line {self.lines[name]}, expected once")
            self.lines[name] = self.event.start_mark.line + 1
            kind = self._next()
            if name in settings:
                if kind != "Scalar":
                    self._fail_field(name, self._node(), settings[name].expected)
                # implicit[0]: written without quotes, so the field's type decides; quoted text is text.
                parsed = settings[name].parse(self.event.value) if self.event.implicit[0] else self.event.value
                self.values[name] = None if self.event.implicit[0] and parsed == "" else parsed
            elif kind == "MappingStart":
                self._read_fields(section=name)
            else:
                example = next(field for field in settings if field.startswith(name + "."))
                expected = f"fields such as {example.removeprefix(name + '.')}, indented, on the lines below"
                self._fail_field(name, self._node(), expected)

    def _next(self) -> str:
        self.event = next(self.events)
        kind = type(self.event).__name__.removesuffix("Event")
        if kind == "Alias" or getattr(self.event, "anchor", None) is not None:
            self._fail("got an anchor or alias (& or *), expected the value itself")
        if kind != "DocumentStart" and getattr(self.event, "tag", None) is not None:
            self._fail(f"got the tag {show(self.event.tag)}, expected a plain value")
        return kind

    def _node(self) -> str:
        kind = type(self.event).__name__
        if kind == "ScalarEvent":
            return show(self.event.value) if self.event.value else "nothing"
        return "a list" if kind == "SequenceStartEvent" else "a mapping"

    def _reject_empty(self) -> NoReturn:
        raise InputError(f"{self.path}: the file is empty, expected fields such as 'beta: 0.1'")

    def _fail_field(self, name: str, got: str, expected: str) -> NoReturn:
        raise InputError(f"{self.path}: {name}: got {got}, expected {expected}")

    def _fail(self, problem: str) -> NoReturn:
        raise InputError(f"{self.path}: line {self.event.start_mark.line + 1}: {problem}")


def _did_you_mean(name: str) -> str:
    if name in all_settings():  # `model.width: 64` on one line
        section, _, field = name.rpartition(".")
        return f", expected {field} inside the section {section}"
    if matches := closest_settings(name):
        return ", did you mean " + " or ".join(item.name for item in matches) + "?"
    section = name.rpartition(".")[0]
    if section in sections_of(ExperimentConfig):
        return ", expected one of " + ", ".join(
            item.name for item in settings_of(sections_of(ExperimentConfig)[section])
        )
    if sections := difflib.get_close_matches(name, sections_of(ExperimentConfig), n=1):
        return f", did you mean {sections[0]}?"
    return ", expected a field that --help lists"


# --------------------------------------------------------------------------------------------------------
# Out again: dictionaries, files, identities
# --------------------------------------------------------------------------------------------------------

# Where a run lies, what it logs, how many devices it uses and how much it computes at once do not make it another run.
NOT_IDENTITY = (
    "output_dir",
    "run_dir",
    "logging",
    "data_parallel",
    "fsdp",
    "micro_batches",
    "length_buckets",
    "rematerialize",
    "distributed",
    "profile",
)


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Nested dictionaries of plain values, one entry a field."""
    return dataclasses.asdict(config)


def save_config(config: ExperimentConfig, path: str | os.PathLike[str]) -> None:
    """Writes every field as YAML that `load_config` reads back to an equal config. The write is atomic."""
    from surprisal_jax import __version__

    lines = [f"# Every field of one run's configuration, written by surprisal_jax {__version__}."]
    for name, value in to_dict(config).items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines.extend(f"  {field}: {_yaml_scalar(inner)}" for field, inner in value.items())
        else:
            lines.append(f"{name}: {_yaml_scalar(value)}")
    # A run killed half-way through a write must not leave a configuration that its resumption cannot read.
    write_text(Path(path), "\n".join(lines) + "\n")


def _yaml_scalar(value: Any) -> str:
    import yaml

    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # Always quoted: unquoted, 'none' would come back as no value.
        return str(yaml.safe_dump(value, default_style='"', width=2**31)).rstrip("\n")
    return repr(value)


def reference_settings(config: ExperimentConfig) -> dict[str, Any]:
    """What of a configuration the reference depends on beside the data."""
    return {
        "model": dataclasses.asdict(config.model),
        "reference": dataclasses.asdict(config.reference),
        "reference_seed": config.effective_reference_seed,
        "chunk_size": config.chunk_size,
    }


def run_identity(config: ExperimentConfig) -> str:
    """8 hexadecimal digits that name the run; what only differs in `NOT_IDENTITY` shares them."""
    canonical = json.dumps(_identity(to_dict(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`field: old -> new` where two runs (`to_dict` of each) differ in their identity; none: the same run."""
    before, after = _flatten(_identity(old)), _flatten(_identity(new))
    absent = object()
    differences = []
    for name in [*before, *(name for name in after if name not in before)]:
        left, right = before.get(name, absent), after.get(name, absent)
        if left != right:
            shown = ["absent" if value is absent else show(value) for value in (left, right)]
            differences.append(f"{name}: {shown[0]} -> {shown[1]}")
    return differences


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in NOT_IDENTITY}
    for name in ("data_seed", "reference_seed"):  # none and the seed itself are the same run
        if kept.get(name) is None:
            kept[name] = kept.get("seed")
    return kept


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{field}": inner for field, inner in value.items()})
        else:
            flat[name] = value
    return flat
