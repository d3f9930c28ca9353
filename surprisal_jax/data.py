"""Records, from a task or a user's JSONL file, and the order in which training reads them (numpy, host).

Every choice is a pure function of its arguments (PCG64 streams of integer seeds, sha256 of x; never `hash()`,
a clock or the number of processes), so a run that is killed and started again, on one machine or eight, reads
the same rows at the same step.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from surprisal_jax.config import DataConfig, InputError
from surprisal_jax.files import write_text
from surprisal_jax.sequences import SPECIAL_TOKENS, detokenize, tokenize
from surprisal_jax.tasks.task import Instance, Task

SPLITS = ("train", "validation", "test")

_REQUIRED_KEYS = ("x", "y")
_KEYS = (*_REQUIRED_KEYS, "strategy", "group")
_EXPECTED_LINE = "expected one JSON object with the keys x, y and optionally strategy, group"
_LATENT_TOKEN = re.compile(r"<z_[0-9]+>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_ORDER_MARKS = (  # UTF-32 before UTF-16: the little-endian marks share their first two bytes
    (codecs.BOM_UTF8, "UTF-8"),
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)

# Streams drawn from one seed stay independent: each purpose spawns its own.
_GENERATION, _ORDER = 0, 1

# Draws without a new x before a split counts as used up; each prompt of the grid comes once in 6,480 draws.
_MAX_DRAWS = 50_000


@dataclass(frozen=True)
class Record:
    """One example. `strategy` is for evaluation only; a `group` shares z under `latent_scope: group`."""

    x: str
    y: str
    strategy: str | None = None
    group: str | None = None


# ------------------------------------------------------------------------------------------------------ files


def read_jsonl(path: str | Path, tokenization: str, max_tokens: int) -> list[Record]:
    """Read a user's records, one JSON object a line: `x`, `y` and optionally `strategy` and `group`.

    UTF-8 without byte order mark; LF or CRLF; no blank lines. Under `whitespace` tokenization the space
    between tokens becomes one blank, so that the same tokens are the same x. A null strategy or group is the
    same as none, and the group 7 is the group "7".

    Raises:
      InputError: one line, `FILE: line 3: y: got '', expected ...`.
    """
    records = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                # Only LF ends a line here; str.splitlines would also cut at U+2028, legal inside a text.
                records.append(_read_line(f"{path}: line {number}", line, tokenization, max_tokens))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"{path}: got {reason}, expected a readable JSONL file of records") from None
    if not records:
        raise InputError(f"{path}: got an empty file, expected one JSON object a line with the keys x, y")
    return records


def write_jsonl(path: str | Path, records: Iterable[Record]) -> None:
    """Write what `read_jsonl` reads, whole or not at all; the same records give the same bytes everywhere."""
    lines = []
    for record in records:
        given = {key: value for key, value in asdict(record).items() if value is not None}
        lines.append(json.dumps(given, ensure_ascii=False) + "\n")
    write_text(Path(path), "".join(lines))


def _read_line(where: str, line: bytes, tokenization: str, max_tokens: int) -> Record:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if line.startswith(mark):
            raise InputError(f"{where}: got the byte order mark of {encoding}, expected UTF-8 without one")
    if b"\0" in line:
        raise InputError(f"{where}: got a NUL byte at byte {line.index(0) + 1}, expected UTF-8 text")
    try:
        text = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        bad = line[error.start : error.start + 1].hex()
        raise InputError(f"{where}: got byte 0x{bad} at byte {error.start + 1}, expected UTF-8 text") from None
    values = _parse_object(where, text)
    for key in values:
        if key not in _KEYS:
            close = get_close_matches(key, _KEYS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(f"{where}: got the unknown key {_shorten(key)}, expected x, y, strategy or group{hint}")
    for key in _REQUIRED_KEYS:
        if key not in values:
            raise InputError(f"{where}: {key}: got no value, expected a text")
    return Record(
        x=_read_text(f"{where}: x", values["x"], tokenization, max_tokens),
        y=_read_text(f"{where}: y", values["y"], tokenization, max_tokens),
        strategy=_read_label(f"{where}: strategy", values.get("strategy"), allow_integer=False),
        group=_read_label(f"{where}: group", values.get("group"), allow_integer=True),
    )


class _DuplicateKeyError(ValueError):
    """Carries the key out of the JSON parser, which would keep the last value in silence."""


def _parse_object(where: str, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys)
    except _DuplicateKeyError as error:
        raise InputError(f"{where}: got the key {_shorten(error.args[0])} twice, expected each key once") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
        raise InputError(f"{where}: got {_shorten(text)}, {_EXPECTED_LINE}: {reason}") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits, thousands of brackets
        raise InputError(f"{where}: got {_shorten(text)}, {_EXPECTED_LINE}") from None
    if not isinstance(values, dict):
        raise InputError(f"{where}: got {_shorten(values)}, {_EXPECTED_LINE}")
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DuplicateKeyError(key)
        values[key] = value
    return values


def _read_text(where: str, value: object, tokenization: str, max_tokens: int) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: got {_shorten(value)}, expected a text")
    _check_characters(where, value)
    tokens = tokenize(value, tokenization)
    if not tokens:
        raise InputError(f"{where}: got {_shorten(value)}, expected at least one token")
    if len(tokens) > max_tokens:
        raise InputError(
            f"{where}: got {_shorten(value)} of {len(tokens)} tokens, expected at most {max_tokens} (data.max_tokens)"
        )
    for token in tokens:
        if token[0] == "<" and (token in SPECIAL_TOKENS or _LATENT_TOKEN.fullmatch(token)):
            raise InputError(f"{where}: got the reserved tag {_shorten(token)}, expected tokens of the text only")
    return detokenize(tokens, tokenization)


def _read_label(where: str, value: object, *, allow_integer: bool) -> str | None:
    if value is None:
        return None
    if allow_integer and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    expected = "a non-empty text or an integer" if allow_integer else "a non-empty text"
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: got {_shorten(value)}, expected {expected}")
    _check_characters(where, value)
    return value


def _check_characters(where: str, value: str) -> None:
    if "\0" in value:
        raise InputError(f"{where}: got {_shorten(value)}, expected a text without NUL")
    if _SURROGATE.search(value):
        raise InputError(f"{where}: got {_shorten(value)}, expected a text without lone surrogates")


def _shorten(value: object) -> str:
    """A value as the user wrote it, on one line of at most 60 characters."""
    if isinstance(value, str):
        text = repr(value[:60])
        shortened = len(value) > 60
    else:
        # reprlib looks only a few levels deep, so a value nested a thousand deep is shown as well
        text = reprlib.repr(value) if isinstance(value, list | dict) else json.dumps(value)
        shortened = False
    return text if len(text) <= 60 and not shortened else text[:57] + "..."


# ----------------------------------------------------------------------------------------------------- splits


def split_of(x: str) -> str:
    """The split of x, from sha256 of x alone: 80% train, 10% validation, 10% test in any file."""
    bucket = int.from_bytes(hashlib.sha256(x.encode("utf-8")).digest()[:8], "big") % 10
    return "train" if bucket < 8 else "validation" if bucket == 8 else "test"


def split_records(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by the split of their x, in order; a split may be empty, and a group may be parted."""
    splits: dict[str, list[Record]] = {split: [] for split in SPLITS}
    for record in records:
        splits[split_of(record.x)].append(record)
    return splits


def read_splits(path: str | Path, data_config: DataConfig) -> dict[str, list[Record]]:
    """A user's file by split: `read_jsonl`, then `split_records`.

    Raises:
      InputError: a malformed file, or one with too few distinct x to fill every split.
    """
    records = read_jsonl(path, data_config.tokenization, data_config.max_tokens)
    splits = split_records(records)
    distinct = len({record.x for record in records})
    for split, members in splits.items():
        if not members:
            raise InputError(
                f"{path}: x: got {distinct} distinct values and none in the {split}"
                " split (80% train, 10% validation, 10% test, by sha256 of x), expected enough to fill each"
            )
    return splits


# ------------------------------------------------------------------------------------------------- generation


def generate_records(task: Task, data_config: DataConfig, seed: int) -> dict[str, list[Record]]:
    """Draw the records of every split.

    Train holds `train_groups` groups, validation `validation_records` records in groups (the last one may be
    short). A group has one strategy, drawn uniformly, `group_size` different x drawn independently of it, and
    lies within one split. Test holds `test_instances` distinct x, each with the trace of every strategy,
    without groups. Each split has a stream of its own: a larger one begins with the records of a smaller one,
    and changes no other.

    Raises:
      InputError: a split has fewer distinct x than asked for, or a text is longer than `max_tokens`.
    """
    size = data_config.group_size
    wanted = {"train": data_config.train_groups * size, "validation": data_config.validation_records}
    splits = {
        split: _generate_groups(task, split, count, size, _generation_rng(seed, split))
        for split, count in wanted.items()
    }
    splits["test"] = _generate_instances(task, data_config.test_instances, _generation_rng(seed, "test"))
    _check_lengths(task, data_config, splits)
    return splits


def _generation_rng(seed: int, split: str) -> np.random.Generator:
    stream = np.random.SeedSequence(seed, spawn_key=(_GENERATION, SPLITS.index(split)))
    return np.random.Generator(np.random.PCG64(stream))


def _generate_groups(task: Task, split: str, count: int, group_size: int, rng: np.random.Generator) -> list[Record]:
    records: list[Record] = []
    while len(records) < count:
        group = f"{split}-{len(records) // group_size}"
        strategy = task.strategies[int(rng.integers(len(task.strategies)))]
        drawn: set[str] = set()
        for _ in range(min(group_size, count - len(records))):
            instance = _draw_new(task, split, rng, drawn, "data.group_size", group_size)
            records.append(Record(instance.x, instance.traces[strategy], strategy, group))
    return records


def _generate_instances(task: Task, count: int, rng: np.random.Generator) -> list[Record]:
    drawn: set[str] = set()
    records: list[Record] = []
    for _ in range(count):
        instance = _draw_new(task, "test", rng, drawn, "data.test_instances", count)
        records.extend(Record(instance.x, instance.traces[strategy], strategy) for strategy in task.strategies)
    return records


def _draw_new(task: Task, split: str, rng: np.random.Generator, drawn: set[str], field: str, wanted: int) -> Instance:
    """An instance of the split whose x is not among those drawn, which it joins."""
    for _ in range(_MAX_DRAWS):
        instance = task.generate(rng)
        if split_of(instance.x) == split and instance.x not in drawn:
            drawn.add(instance.x)
            return instance
    raise InputError(
        f"{field}: got {wanted}, expected at most {len(drawn)},"
        f" the distinct x that task {task.name} has in the {split} split"
    )


def _check_lengths(task: Task, data_config: DataConfig, splits: Mapping[str, Sequence[Record]]) -> None:
    texts = {text for records in splits.values() for record in records for text in (record.x, record.y)}
    longest = max((len(tokenize(text, data_config.tokenization)) for text in texts), default=0)
    if longest > data_config.max_tokens:
        raise InputError(
            f"data.max_tokens: got {data_config.max_tokens}, expected at least {longest},"
            f" the longest text drawn from task {task.name}"
        )


# ------------------------------------------------------------------------------------------------------ order


def units(records: Sequence[Record], group_size: int) -> np.ndarray:
    """What the order keeps together: int32 [U, group_size] of rows into `records`, -1 where a unit is short.

    The rows of a unit share a group. A larger group is cut into several units; a record without group is a
    unit of its own. With `group_size` 1 every record is its own unit, in the order of the records; else units
    stand in the order of their first records.
    """
    if group_size < 1:
        raise ValueError(f"group_size: got {group_size}, expected at least 1")
    members: dict[tuple[str, str | int], list[int]] = {}
    for row, record in enumerate(records):
        # The kind in the key keeps a group named "3" apart from the ungrouped record 3.
        key = ("row", row) if record.group is None or group_size == 1 else ("group", record.group)
        members.setdefault(key, []).append(row)
    pieces = [rows[i : i + group_size] for rows in members.values() for i in range(0, len(rows), group_size)]
    pieces.sort(key=lambda rows: rows[0])
    result = np.full((len(pieces), group_size), -1, np.int32)
    for unit, rows in enumerate(pieces):
        result[unit, : len(rows)] = rows
    return result


def batch_rows(
    units: np.ndarray, step: int, batch_size: int, seed: int, anchors: np.ndarray | None = None
) -> np.ndarray:
    """The rows that step `step` (from 0) trains on, over all devices: int32 [batch_size].

    Units are contiguous, with -1 where one is short. Epoch e visits every unit once, in an order drawn from
    (seed, e). The epochs make one endless stream, which is cut into batches without regard to where an epoch
    ends: nothing is dropped or repeated, and a batch may hold the end of one and the start of the next. A
    pure function of its arguments: a resumed run needs only its step.

    Args:
      anchors: units [A, group_size] that come round again and again: each batch begins with as many of them as
        there are, at most a quarter of it, in turn.
    """
    num_units, group_size = _check_batch(units, batch_size)
    if step < 0:
        raise ValueError(f"step: got {step}, expected at least 0")
    per_batch = batch_size // group_size
    held = 0 if anchors is None else min(len(anchors), per_batch // 4)
    rest = per_batch - held
    first = step * rest
    picked = [_epoch_order(num_units, seed, i // num_units)[i % num_units] for i in range(first, first + rest)]
    if anchors is None or held == 0:
        return units[picked].reshape(-1)
    turn = anchors[(step * held + np.arange(held)) % len(anchors)]
    return np.concatenate([turn, units[picked]]).reshape(-1)


def evaluation_rows(units: np.ndarray, batch_size: int) -> np.ndarray:
    """One pass over every unit, in order: int32 [number of batches, batch_size], filled up with -1.

    Sum over examples and divide by the sum of `example_mask`: then a mean depends neither on the batch size
    nor on the filling.
    """
    num_units, group_size = _check_batch(units, batch_size)
    per_batch = batch_size // group_size
    missing = -num_units % per_batch
    filled = np.concatenate([units, np.full((missing, group_size), -1, np.int32)])
    return filled.reshape(-1, batch_size)


def gather(arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """The given rows of every array, and `example_mask` bool [len(rows)], False where the row is -1.

    A row of -1 repeats row 0 with every mask (every bool array) False: its token ids and lengths stay valid,
    and it counts nowhere.

    Raises:
      ValueError: arrays of different lengths, a mask that is not bool, or a row that is neither -1 nor in the
      arrays.
    """
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"arrays: got lengths {lengths}, expected one or more arrays of one length")
    if "example_mask" in arrays:
        raise ValueError("arrays: got example_mask, expected it to be left to gather")
    length = next(iter(lengths.values()))
    outside = (rows < -1) | (rows >= length)
    if outside.any():
        raise ValueError(f"rows: got {int(rows[outside][0])}, expected -1 or a row of the {length} there are")
    example_mask = rows >= 0
    taken = np.where(example_mask, rows, 0)
    batch = {}
    for name, array in arrays.items():
        values = np.asarray(array[taken])
        if values.dtype == bool:
            values &= example_mask.reshape(-1, *[1] * (values.ndim - 1))
        elif name.endswith("mask"):
            raise ValueError(f"arrays: got {name} of type {values.dtype}, expected a mask to be bool")
        batch[name] = values
    batch["example_mask"] = example_mask
    return batch


#: The arrays that have a column for each position of a sequence, or of those that have a next one; the sequence ends
#: where the mask, or the array of lengths, says.
_BY_POSITION = {
    "z_free_loss_mask": ("z_free_tokens", "z_free_loss_mask", "base_token_nll", "base_token_entropy"),
    "suffix_loss_mask": ("suffix_tokens", "suffix_loss_mask"),
    "prefix_lengths": ("prefix_tokens",),
}


def bucket_of_rows(arrays: Mapping[str, np.ndarray], buckets: int) -> np.ndarray:
    """The least of `buckets` even shares of the columns that holds each record: int [N], 1 to `buckets`."""
    needed = np.ones(len(next(iter(arrays.values()))), int)
    for name, (first, *_) in _BY_POSITION.items():
        if first in arrays:
            width, ends = arrays[first].shape[1], arrays[name]
            # A sequence ends with a supervised token.
            lengths = ends if ends.ndim == 1 else width - np.argmax(ends[:, ::-1], axis=1)
            needed = np.maximum(needed, -(-lengths * buckets // width))
    return needed


def cut_to_bucket(batch: Mapping[str, np.ndarray], bucket: int, buckets: int) -> dict[str, np.ndarray]:
    """The batch without the columns beyond a bucket that holds all its records."""
    cut = dict(batch)
    for first, *rest in _BY_POSITION.values():
        if first in batch:
            width = batch[first].shape[1]
            kept = -(-width * bucket // buckets)
            for name in (first, *rest):
                if name in batch:
                    cut[name] = batch[name][:, : kept - (width - batch[name].shape[1])]
    return cut


def _check_batch(units: np.ndarray, batch_size: int) -> tuple[int, int]:
    num_units, group_size = units.shape
    if num_units == 0:
        raise ValueError("units: got none, expected at least one")
    if batch_size < 1 or batch_size % group_size != 0:
        raise ValueError(f"batch_size: got {batch_size}, expected a positive multiple of the group size {group_size}")
    return num_units, group_size


@functools.lru_cache(maxsize=4)
def _epoch_order(num_units: int, seed: int, epoch: int) -> np.ndarray:
    # Sorting raw 64-bit draws, rather than Generator.permutation: numpy keeps the stream of a bit generator
    # for good, and reserves the right to change what Generator makes of it. A tie has odds of n**2 / 2**65
    # and stays in order.
    stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_ORDER, epoch)))
    return np.argsort(stream.random_raw(num_units), kind="stable")
