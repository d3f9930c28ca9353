"""Records, splits and the order of training, against counts made by hand and restarts at every step."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from surprisal_jax.config import DataConfig, InputError
from surprisal_jax.data import (
    Record,
    batch_rows,
    bucket_of_rows,
    cut_to_bucket,
    evaluation_rows,
    gather,
    generate_records,
    read_jsonl,
    read_splits,
    split_of,
    split_records,
    units,
    write_jsonl,
)
from surprisal_jax.tasks import Task, get_task
from surprisal_jax.tasks.lookup import LookupTask

EXAMPLES = Path(__file__).parents[1] / "examples"
GRID = get_task("grid_pathfinding")
SMALL = DataConfig(group_size=2, train_groups=50, validation_records=21, test_instances=15)


def write(path: Path, content: bytes) -> Path:
    file = path / "traces.jsonl"
    file.write_bytes(content)
    return file


# ------------------------------------------------------------------------------------------------------ files


def test_reads_every_field(tmp_path):
    file = write(
        tmp_path,
        b'{"x": "3 1", "y": "swap = 1 3", "strategy": "bubble sort", "group": "s1"}\n'
        b'{"group": 7, "y": "= 1", "x": "1"}\r\n'
        b'{"x": "\xc3\xa9 \\u00e9", "y": "\xe6\x97\xa5", "strategy": null, "group": null}',
    )
    assert read_jsonl(file, "whitespace", 4) == [
        Record("3 1", "swap = 1 3", "bubble sort", "s1"),
        Record("1", "= 1", None, "7"),
        Record("é é", "日", None, None),
    ]
    assert read_jsonl(str(file), "whitespace", 4) == read_jsonl(file, "whitespace", 4)


def test_white_space_between_tokens_does_not_make_another_x(tmp_path):
    file = write(tmp_path, b'{"x": " 3  1\\t2\\n", "y": "a\\u00a0b"}\n')
    assert read_jsonl(file, "whitespace", 3) == [Record("3 1 2", "a b")]


def test_characters_keep_white_space(tmp_path):
    file = write(tmp_path, b'{"x": " 3  1\\n", "y": "<x>"}\n')
    assert read_jsonl(file, "characters", 6) == [Record(" 3  1\n", "<x>")]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    file = write(tmp_path, '{"x": "1", "y": "a\u2028b\x85c"}\n'.encode())
    assert read_jsonl(file, "characters", 5) == [Record("1", "a\u2028b\x85c")]


def test_round_trip(tmp_path):
    records = [
        Record("3 1", "é 日 \U0001f600", "s t", "g"),
        Record("1", '"quoted" \\ /', None, None),
        Record("1", "2", "s"),
    ]
    write_jsonl(tmp_path / "records.jsonl", records)
    assert (tmp_path / "records.jsonl").read_bytes().split(b"\n")[2] == b'{"x": "1", "y": "2", "strategy": "s"}'
    assert read_jsonl(tmp_path / "records.jsonl", "whitespace", 9) == records


GOOD = b'{"x": "1", "y": "2"}'
A_LINE = "expected one JSON object with the keys x, y and optionally strategy, group"
LONG = "'" + "a" * 56 + "..."

# the bad line, and the message after `FILE: line 3: `
BAD_LINES = [
    # not a line of JSON
    (b"", f"got '', {A_LINE}: Expecting value at column 1"),
    (b"   ", f"got '   ', {A_LINE}: Expecting value at column 4"),
    (b"x: 1", f"got 'x: 1', {A_LINE}: Expecting value at column 1"),
    (b"[", f"got '[', {A_LINE}: Expecting value at column 2"),
    (
        b'{"x": "1", "y": "2"',
        f'got \'{{"x": "1", "y": "2"\', {A_LINE}: Expecting \',\' delimiter at column 20',
    ),
    (GOOD + b",", f'got \'{{"x": "1", "y": "2"}},\', {A_LINE}: Extra data at column 21'),
    (GOOD + GOOD, f'got \'{{"x": "1", "y": "2"}}{{"x": "1", "y": "2"}}\', {A_LINE}: Extra data at column 21'),
    (
        b"{'x': '1', 'y': '2'}",
        f"got \"{{'x': '1', 'y': '2'}}\", {A_LINE}: Expecting property name enclosed in double quotes at column 2",
    ),
    (
        b'{"x": "1", "y": "a\tb"}',
        f'got \'{{"x": "1", "y": "a\\tb"}}\', {A_LINE}: Invalid control character at at column 19',
    ),
    (b"[" * 100_000, f"got '{'[' * 56}..., {A_LINE}"),
    (b"9" * 5_000, f"got '{'9' * 56}..., {A_LINE}"),
    # JSON, and no object
    (b'["1", "2"]', f"got ['1', '2'], {A_LINE}"),
    (b'"x"', f"got 'x', {A_LINE}"),
    (b"3.5", f"got 3.5, {A_LINE}"),
    (b"null", f"got null, {A_LINE}"),
    (b"true", f"got true, {A_LINE}"),
    # bytes that are no text
    (b'{"x": "1", "y": "\xff"}', "got byte 0xff at byte 18, expected UTF-8 text"),
    (b'{"x": "1", "y": "\xed\xa0\x80"}', "got byte 0xed at byte 18, expected UTF-8 text"),
    (b'{"x": "1", "y": "caf\xe9"}', "got byte 0xe9 at byte 21, expected UTF-8 text"),
    (b"\xef\xbb\xbf" + GOOD, "got the byte order mark of UTF-8, expected UTF-8 without one"),
    (
        b"\xff\xfe" + GOOD.decode().encode("utf-16-le"),
        "got the byte order mark of UTF-16, expected UTF-8 without one",
    ),
    (b"\xff\xfe\0\0{\0\0\0", "got the byte order mark of UTF-32, expected UTF-8 without one"),
    (GOOD.decode().encode("utf-16-le"), "got a NUL byte at byte 2, expected UTF-8 text"),
    (b'{"x": "1", "y": "a\0b"}', "got a NUL byte at byte 19, expected UTF-8 text"),
    # keys
    (b"{}", "x: got no value, expected a text"),
    (b'{"y": "2"}', "x: got no value, expected a text"),
    (b'{"x": "1"}', "y: got no value, expected a text"),
    (
        b'{"x": "1", "y": "2", "stratgy": "s"}',
        "got the unknown key 'stratgy', expected x, y, strategy or group (did you mean strategy?)",
    ),
    (b'{"x": "1", "y": "2", "X": "1"}', "got the unknown key 'X', expected x, y, strategy or group"),
    (b'{"x": "1", "y": "2", "": 1}', "got the unknown key '', expected x, y, strategy or group"),
    (b'{"x": "1", "y": "2", "a\\nb": 1}', "got the unknown key 'a\\nb', expected x, y, strategy or group"),
    (b'{"x": "1", "y": "2", "y": "3"}', "got the key 'y' twice, expected each key once"),
    (b'{"x": "1", "y": "2", "\\u0078": "1"}', "got the key 'x' twice, expected each key once"),
    # types
    (b'{"x": 1, "y": "2"}', "x: got 1, expected a text"),
    (b'{"x": "1", "y": null}', "y: got null, expected a text"),
    (b'{"x": "1", "y": ["2"]}', "y: got ['2'], expected a text"),
    (b'{"x": "1", "y": NaN}', "y: got NaN, expected a text"),
    (b'{"x": {"x": "1"}, "y": "2"}', "x: got {'x': '1'}, expected a text"),
    (b'{"x": "1", "y": "2", "strategy": 3}', "strategy: got 3, expected a non-empty text"),
    (b'{"x": "1", "y": "2", "strategy": ""}', "strategy: got '', expected a non-empty text"),
    (b'{"x": "1", "y": "2", "group": true}', "group: got true, expected a non-empty text or an integer"),
    (b'{"x": "1", "y": "2", "group": 1.0}', "group: got 1.0, expected a non-empty text or an integer"),
    (b'{"x": "1", "y": "2", "group": " "}', "group: got ' ', expected a non-empty text or an integer"),
    # texts
    (b'{"x": "", "y": "2"}', "x: got '', expected at least one token"),
    (b'{"x": "1", "y": " \\n\\t"}', "y: got ' \\n\\t', expected at least one token"),
    (b'{"x": "1", "y": "a\\u0000b"}', "y: got 'a\\x00b', expected a text without NUL"),
    (b'{"x": "1", "y": "2", "group": "\\u0000"}', "group: got '\\x00', expected a text without NUL"),
    (b'{"x": "1", "y": "a \\ud800"}', "y: got 'a \\ud800', expected a text without lone surrogates"),
    (
        b'{"x": "1", "y": "1 2 3 4 5 6 7"}',
        "y: got '1 2 3 4 5 6 7' of 7 tokens, expected at most 6 (data.max_tokens)",
    ),
    (
        b'{"x": "1 2 3 4 5 6 7", "y": "1"}',
        "x: got '1 2 3 4 5 6 7' of 7 tokens, expected at most 6 (data.max_tokens)",
    ),
    (
        b'{"x": "1", "y": "%s 2 3 4 5 6 7"}' % (b"a" * 99),
        f"y: got {LONG} of 7 tokens, expected at most 6 (data.max_tokens)",
    ),
    *[
        (
            f'{{"x": "1", "y": "a {tag} b"}}'.encode(),
            f"y: got the reserved tag '{tag}', expected tokens of the text only",
        )
        # the template's tags, written out: every one of them would be read as structure
        for tag in ["<pad>", "<bos>", "<eos>", "<x>", "</x>", "<y>", "</y>", "<z>", "</z>", "<z_0>", "<z_12>"]
    ],
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_a_bad_line_is_named(tmp_path, line, message, newline):
    file = write(tmp_path, newline.join([GOOD, GOOD, line, GOOD, b""]))
    with pytest.raises(InputError) as raised:
        read_jsonl(file, "whitespace", 6)
    assert str(raised.value) == f"{file}: line 3: {message}"
    assert "\n" not in str(raised.value)


def test_a_byte_order_mark_at_the_start_is_named(tmp_path):
    file = write(tmp_path, b"\xef\xbb\xbf" + GOOD)
    with pytest.raises(InputError, match="line 1: got the byte order mark of UTF-8, expected UTF-8 without one"):
        read_jsonl(file, "whitespace", 6)


def test_what_is_no_file_is_named(tmp_path):
    for path, got in [
        (tmp_path / "nowhere.jsonl", "no such file or directory"),
        (tmp_path, "is a directory"),
        (write(tmp_path, b"") / "below", "not a directory"),
    ]:
        with pytest.raises(InputError) as raised:
            read_jsonl(path, "whitespace", 6)
        assert str(raised.value) == f"{path}: got {got}, expected a readable JSONL file of records"
    with pytest.raises(InputError, match=r"traces\.jsonl: got an empty file, expected one JSON object a line"):
        read_jsonl(write(tmp_path, b""), "whitespace", 6)


def test_tags_that_are_not_reserved_and_longest_text_pass(tmp_path):
    file = write(tmp_path, b'{"x": "1 2 3 4 5 6", "y": "<b> <z_k> <z_> <eos>. x> <X>"}')
    assert read_jsonl(file, "whitespace", 6)[0].y == "<b> <z_k> <z_> <eos>. x> <X>"


# ----------------------------------------------------------------------------------------------------- splits


def test_split_depends_on_x_alone():
    names = [*["train"] * 8, "validation", "test"]
    for x in (*map(str, range(200)), "r2 c7 r6 c1", "é", ""):
        assert split_of(x) == names[int(hashlib.sha256(x.encode()).hexdigest()[:16], 16) % 10]
    # By `printf 5 | sha256sum` and so on, the first 16 digits modulo 10: a change here moves the records of
    # every user.
    assert 0xEF2D127DE37B942B % 10 == 3 and 0x4FC82B26AECB47D2 % 10 == 8 and 0xE7F6C011776E8DB7 % 10 == 9
    assert [split_of(x) for x in ("5", "11", "6")] == ["train", "validation", "test"]


def test_splits_are_eighty_ten_ten():
    counts = Counter(split_of(str(i)) for i in range(20_000))
    # 4 standard deviations: sqrt(20000 * 0.8 * 0.2) = 57, sqrt(20000 * 0.1 * 0.9) = 42
    assert abs(counts["train"] - 16_000) < 228
    assert abs(counts["validation"] - 2_000) < 168
    assert abs(counts["test"] - 2_000) < 168


def test_split_records_keeps_order_and_every_record():
    records = [Record(str(i % 40), f"y{i}", group=str(i // 2)) for i in range(100)]
    splits = split_records(records)
    assert list(splits) == ["train", "validation", "test"]
    assert sorted((r for rs in splits.values() for r in rs), key=lambda r: int(r.y[1:])) == records
    for split, members in splits.items():
        assert members == [r for r in records if split_of(r.x) == split]


def test_read_splits_needs_something_in_each(tmp_path):
    lines = [b'{"x": "%d", "y": "1"}' % i for i in range(100)]
    assert [len(r) > 0 for r in read_splits(write(tmp_path, b"\n".join(lines)), DataConfig()).values()] == [True] * 3
    only_train = [line for i, line in enumerate(lines) if split_of(str(i)) == "train"][:5]
    with pytest.raises(InputError, match=r"traces\.jsonl: x: got 5 distinct values and none in the validation split"):
        read_splits(write(tmp_path, b"\n".join(only_train)), DataConfig())


# ------------------------------------------------------------------------------------------------- generation


@pytest.fixture(scope="module")
def generated() -> dict[str, list[Record]]:
    return generate_records(GRID, DataConfig(), seed=0)


def test_generated_counts_and_disjoint_splits(generated):
    assert {split: len(records) for split, records in generated.items()} == {
        "train": 2 * 8192,
        "validation": 512,
        "test": 3 * 512,
    }
    prompts = {split: {r.x for r in records} for split, records in generated.items()}
    for split, xs in prompts.items():
        assert {split_of(x) for x in xs} == {split}
    assert len(prompts["train"] | prompts["validation"] | prompts["test"]) == sum(len(xs) for xs in prompts.values())
    assert len(prompts["train"]) > 4000, "nearly all of the 80% of 6,480 prompts"


def test_every_record_is_a_trace_of_its_strategy(generated):
    for records in generated.values():
        for record in records:
            assert GRID.classify(record.x, record.y) == {record.strategy}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_groups_share_a_strategy_and_nothing_else(generated, split):
    groups: dict[str, list[Record]] = {}
    for record in generated[split]:
        groups.setdefault(record.group, []).append(record)
    assert {len(members) for members in groups.values()} == {2}
    for members in groups.values():
        assert len({r.strategy for r in members}) == 1
        assert len({r.x for r in members}) == 2
    assert {r.group for r in generated["train"]}.isdisjoint(r.group for r in generated["validation"])


def test_strategies_and_prompts_are_drawn_evenly_and_apart(generated):
    train = generated["train"]
    counts = Counter(record.strategy for record in train[::2])
    # 8192 groups, three strategies: sd sqrt(8192 * 1/3 * 2/3) = 42.7
    assert all(abs(counts[s] - 8192 / 3) < 4 * 42.7 for s in GRID.strategies) and len(counts) == 3
    # nothing of x tells the strategy, and the first x of a group tells nothing of the second
    down = np.array([r.x[1] < r.x[7] for r in train])
    rows_first = np.array([r.strategy == "rows_first" for r in train])
    assert abs(np.corrcoef(down, rows_first)[0, 1]) < 4 / np.sqrt(len(train))
    assert abs(np.corrcoef(down[::2], down[1::2])[0, 1]) < 4 / np.sqrt(len(train) / 2)


def test_test_split_has_every_strategy_of_distinct_prompts(generated):
    test = generated["test"]
    assert {record.group for record in test} == {None}
    counts = Counter(record.x for record in test)
    assert len(counts) == 512 and set(counts.values()) == {3}
    assert Counter((r.x, r.strategy) for r in test) == {(x, s): 1 for x in counts for s in GRID.strategies}


def test_generation_depends_on_the_seed_and_each_split_on_its_own_size():
    base = generate_records(GRID, SMALL, seed=3)
    assert base == generate_records(GRID, SMALL, seed=3)
    other = generate_records(GRID, SMALL, seed=4)
    assert all(base[split] != other[split] for split in base)
    larger = generate_records(GRID, replace(SMALL, train_groups=80), seed=3)
    assert larger["train"][:100] == base["train"] and len(larger["train"]) == 160
    assert larger["validation"] == base["validation"] and larger["test"] == base["test"]
    assert len(base["validation"]) == 21 and Counter(Counter(r.group for r in base["validation"]).values()) == {
        2: 10,
        1: 1,
    }


@pytest.mark.parametrize("group_size", [1, 3])
def test_groups_of_any_size(group_size):
    train = generate_records(GRID, replace(SMALL, group_size=group_size), seed=0)["train"]
    groups = Counter(record.group for record in train)
    assert len(groups) == 50 and set(groups.values()) == {group_size}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(SMALL, test_instances=649),
            "data.test_instances: got 649, expected at most 626,"
            " the distinct x that task grid_pathfinding has in the test split",
        ),
        (
            replace(SMALL, train_groups=1, group_size=6480),
            "data.group_size: got 6480, expected at most 5207,"
            " the distinct x that task grid_pathfinding has in the train split",
        ),
    ],
)
def test_more_than_the_task_can_give(config, message):
    with pytest.raises(InputError) as raised:
        generate_records(GRID, config, seed=0)
    assert str(raised.value) == message


def test_a_text_longer_than_max_tokens_is_refused():
    drawn = generate_records(GRID, SMALL, seed=0)
    longest = max(len(text) for records in drawn.values() for r in records for text in (r.x, r.y))
    by_characters = replace(SMALL, tokenization="characters")
    assert generate_records(GRID, replace(by_characters, max_tokens=longest), seed=0) == drawn
    with pytest.raises(InputError) as raised:
        generate_records(GRID, replace(by_characters, max_tokens=longest - 1), seed=0)
    assert str(raised.value) == (
        f"data.max_tokens: got {longest - 1}, expected at least {longest},"
        " the longest text drawn from task grid_pathfinding"
    )


# ------------------------------------------------------------------------------------------------------ units


def records_of(*groups: str | None) -> list[Record]:
    return [Record(f"x{i}", f"y{i}", group=group) for i, group in enumerate(groups)]


def test_units_keep_groups_together():
    records = records_of("a", "b", None, "a", "c", "c", "b", "c", None, "c", "c")
    assert units(records, 2).tolist() == [[0, 3], [1, 6], [2, -1], [4, 5], [7, 9], [8, -1], [10, -1]]
    assert units(records, 3).tolist() == [
        [0, 3, -1],
        [1, 6, -1],
        [2, -1, -1],
        [4, 5, 7],
        [8, -1, -1],
        [9, 10, -1],
    ]
    assert units(records, 1).tolist() == [[row] for row in range(11)]
    assert units(records, 2).dtype == np.int32
    assert units([], 2).shape == (0, 2)


def test_a_group_named_like_a_row_is_not_that_row():
    assert units(records_of("1", None, "1", "2", None), 2).tolist() == [[0, 2], [1, -1], [3, -1], [4, -1]]


def test_strategy_changes_neither_split_nor_units_nor_batches(tmp_path):
    with_strategy = read_jsonl(EXAMPLES / "traces.jsonl", "whitespace", 256)
    # and one group that two strategies share, which a user's file may hold
    with_strategy += [Record("5", "a", "p", "mixed"), Record("5", "b", "q", "mixed")]
    without = [replace(record, strategy=None) for record in with_strategy]
    assert {record.strategy for record in with_strategy} != {None}
    orders = []
    for records in (with_strategy, without):
        splits = split_records(records)
        made = {split: units(members, 2) for split, members in splits.items()}
        batches = [batch_rows(made["train"], step, 32, seed=5) for step in range(80)]
        texts = {split: [(r.x, r.y, r.group) for r in members] for split, members in splits.items()}
        orders.append((texts, [m.tolist() for m in made.values()], np.stack(batches).tolist()))
    assert orders[0] == orders[1]


# ------------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize(
    ("num_records", "group_size", "batch_size"), [(10, 1, 4), (10, 1, 3), (13, 2, 4), (5, 1, 16), (7, 3, 6)]
)
def test_every_epoch_holds_every_unit_once(num_records, group_size, batch_size):
    made = units(records_of(*[str(i // group_size) for i in range(num_records)]), group_size)
    num_units, per_batch = len(made), batch_size // group_size
    steps = 3 * num_units  # a whole number of epochs: 3 * per_batch
    stream = np.concatenate([batch_rows(made, step, batch_size, seed=1) for step in range(steps)])
    assert stream.dtype == np.int32 and stream.shape == (steps * batch_size,)
    epochs = stream.reshape(3 * per_batch, num_units, group_size)
    wanted = sorted(made.tolist())
    for epoch in epochs:
        assert sorted(epoch.tolist()) == wanted
    orders = {tuple(epoch.reshape(-1).tolist()) for epoch in epochs}
    assert len(orders) > 1, "epochs are shuffled anew"


def test_restart_at_any_step_goes_on_as_undisturbed():
    """Ten items, batch 2: after a stop in epoch 2, the rest must not replay the order of epoch 1."""
    made = units(records_of(*[None] * 10), 1)
    whole = [batch_rows(made, step, 2, seed=9).tolist() for step in range(15)]
    assert whole[0:5] != whole[5:10] != whole[10:15]
    for start in range(15):
        # in another order of calls, so that nothing can lean on the calls before
        resumed = {step: batch_rows(made.copy(), step, 2, seed=9).tolist() for step in reversed(range(start, 15))}
        assert [resumed[step] for step in range(start, 15)] == whole[start:]


def test_another_process_draws_the_same_records_and_order(generated):
    """Neither the hash seed of the process nor what it did before moves a record or a batch."""
    code = """
import hashlib
from surprisal_jax.config import DataConfig
from surprisal_jax.data import batch_rows, generate_records, units
from surprisal_jax.tasks import get_task
splits = generate_records(get_task("grid_pathfinding"), DataConfig(), seed=0)
rows = [batch_rows(units(splits["train"], 2), step, 64, seed=2).tolist() for step in (700, 3, 1000)]
print(hashlib.sha256(repr((splits, rows)).encode()).hexdigest())
"""
    rows = [batch_rows(units(generated["train"], 2), step, 64, seed=2).tolist() for step in (700, 3, 1000)]
    here = hashlib.sha256(repr((generated, rows)).encode()).hexdigest()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONHASHSEED": "12345",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == here


def test_the_order_of_seed_0_stays():
    """Another order would change every run; SeedSequence and PCG64 give the same bits under every numpy."""
    made = units(records_of(*[None] * 6), 1)
    epochs = [batch_rows(made, step, 6, seed=0).tolist() for step in range(3)]
    assert epochs == [[4, 1, 3, 2, 5, 0], [3, 0, 2, 4, 1, 5], [0, 1, 2, 4, 3, 5]]


def test_orders_differ_by_seed_and_are_fair():
    made = units(records_of(*[None] * 4), 1)
    first = Counter(int(batch_rows(made, 0, 4, seed)[0]) for seed in range(2000))
    # sd sqrt(2000 * 1/4 * 3/4) = 19.4
    assert all(abs(first[row] - 500) < 4 * 19.4 for row in range(4))


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_rows_do_not_know_how_many_processes_read_them(processes):
    """Each process takes its slice of the global batch; together they are the batch of a single one."""
    made = units(records_of(*[str(i // 2) for i in range(50)]), 2)
    alone = [batch_rows(made, step, 16, seed=3) for step in range(12)]
    for step in range(3, 12):  # the count changes at step 3
        parts = [batch_rows(made, step, 16, seed=3).reshape(processes, -1)[p] for p in range(processes)]
        assert np.concatenate(parts).tolist() == alone[step].tolist()
        # and no unit is cut by a slice
        for part in parts:
            assert all(unit in made.tolist() for unit in part.reshape(-1, 2).tolist())


def test_cached_orders_cannot_be_spoilt():
    made = units(records_of(*[None] * 8), 1)
    before = batch_rows(made, 0, 8, seed=0).tolist()
    batch_rows(made, 0, 8, seed=0)[:] = 0
    assert batch_rows(made, 0, 8, seed=0).tolist() == before
    assert made.tolist() == [[row] for row in range(8)]


@pytest.mark.parametrize(
    ("made", "step", "batch_size", "message"),
    [
        (
            np.zeros((3, 2), np.int32),
            0,
            3,
            "batch_size: got 3, expected a positive multiple of the group size 2",
        ),
        (
            np.zeros((3, 2), np.int32),
            0,
            0,
            "batch_size: got 0, expected a positive multiple of the group size 2",
        ),
        (np.zeros((0, 2), np.int32), 0, 2, "units: got none, expected at least one"),
        (np.zeros((3, 2), np.int32), -1, 2, "step: got -1, expected at least 0"),
    ],
)
def test_what_batch_rows_refuses(made, step, batch_size, message):
    with pytest.raises(ValueError, match=message):
        batch_rows(made, step, batch_size, seed=0)


# ---------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7])
def test_evaluation_mean_does_not_depend_on_the_batch_size(batch_size):
    """Results 1, 1, 0: their mean is 2/3 in batches of any size, where a mean of means of 2 says 1/2."""
    results = np.array([1.0, 1.0, 0.0])
    rows = evaluation_rows(units(records_of(None, None, None), 1), batch_size)
    assert rows.dtype == np.int32 and rows.shape == (-(-3 // batch_size), batch_size)
    total = count = 0.0
    for batch in (gather({"result": results}, r) for r in rows):
        total += float(np.where(batch["example_mask"], batch["result"], 0).sum())
        count += int(batch["example_mask"].sum())
    assert (total, count) == (2.0, 3)


def test_evaluation_rows_keep_units_whole():
    made = units(records_of("a", "b", "a", "b", "c"), 2)
    assert evaluation_rows(made, 4).tolist() == [[0, 2, 1, 3], [4, -1, -1, -1]]
    assert evaluation_rows(made, 2).tolist() == [[0, 2], [1, 3], [4, -1]]
    with pytest.raises(ValueError, match="multiple of the group size 2"):
        evaluation_rows(made, 3)


def test_gather_masks_what_is_no_row():
    arrays = {
        "tokens": np.array([[5, 6], [7, 8], [9, 0]], np.int32),
        "loss_mask": np.array([[True, True], [True, True], [True, False]]),
        "lengths": np.array([2, 2, 1], np.int32),
    }
    batch = gather(arrays, np.array([2, -1, 1, 2], np.int32))
    assert batch["tokens"].tolist() == [[9, 0], [5, 6], [7, 8], [9, 0]], "-1 is not the last row"
    assert batch["loss_mask"].tolist() == [[True, False], [False, False], [True, True], [True, False]]
    assert batch["lengths"].tolist() == [1, 2, 2, 1]
    assert batch["example_mask"].tolist() == [True, False, True, True]
    assert {name: array.dtype for name, array in batch.items()} == {
        "tokens": np.int32, "loss_mask": bool, "lengths": np.int32, "example_mask": bool,
    }  # fmt: skip
    batch["tokens"][:] = 0
    assert arrays["tokens"][2].tolist() == [9, 0], "a batch is a copy"
    assert arrays["loss_mask"][0].all()


def test_a_bucket_is_the_least_that_holds_prefix_suffix_and_sequence():
    arrays = {
        "z_free_tokens": np.arange(4 * 9).reshape(4, 9),
        "z_free_loss_mask": np.arange(9)[None] < np.asarray([3, 4, 9, 2])[:, None],
        "base_token_nll": np.ones((4, 8), np.float32),
        "suffix_tokens": np.arange(4 * 6).reshape(4, 6),
        "suffix_loss_mask": np.arange(6)[None] < np.asarray([2, 2, 2, 2])[:, None],
        "prefix_tokens": np.arange(4 * 4).reshape(4, 4),
        "prefix_lengths": np.asarray([1, 1, 1, 3]),
        "alignment_offsets": np.zeros(4, np.int32),
    }
    # Of three buckets: 3, 6 or 9 columns, 2, 4 or 6, and 2, 3 or 4.
    np.testing.assert_array_equal(bucket_of_rows(arrays, 3), [1, 2, 3, 3])
    np.testing.assert_array_equal(bucket_of_rows(arrays, 1), 1)
    widths = {name: array.shape[1] for name, array in cut_to_bucket(arrays, 2, 3).items() if array.ndim == 2}
    assert widths == {
        "z_free_tokens": 6,
        "z_free_loss_mask": 6,
        "base_token_nll": 5,
        "suffix_tokens": 4,
        "suffix_loss_mask": 4,
        "prefix_tokens": 3,
    }
    for name, array in cut_to_bucket(arrays, 3, 3).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_gather_reads_arrays_on_disk(tmp_path):
    np.save(tmp_path / "nll.npy", np.arange(12, dtype=np.float32).reshape(4, 3))
    batch = gather({"nll": np.load(tmp_path / "nll.npy", mmap_mode="r")}, np.array([3, 0], np.int32))
    assert batch["nll"].tolist() == [[9, 10, 11], [0, 1, 2]] and type(batch["nll"]) is np.ndarray


@pytest.mark.parametrize(
    ("arrays", "rows", "message"),
    [
        ({"a": np.zeros(4)}, [0, 4], "rows: got 4, expected -1 or a row of the 4 there are"),
        ({"a": np.zeros(4)}, [-2, 0], "rows: got -2, expected -1 or a row of the 4 there are"),
        ({"a": np.zeros(4), "b": np.zeros(3)}, [0], "arrays: got lengths"),
        ({}, [0], "arrays: got lengths"),
        ({"loss_mask": np.ones(4)}, [0], "arrays: got loss_mask of type float64, expected a mask to be bool"),
        ({"example_mask": np.ones(4, bool)}, [0], "arrays: got example_mask"),
    ],
)
def test_what_gather_refuses(arrays, rows, message):
    with pytest.raises(ValueError, match=message):
        gather(arrays, np.array(rows, np.int32))


# --------------------------------------------------------------------------------------------------- examples


@pytest.fixture(scope="module")
def make_traces() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_traces", EXAMPLES / "make_traces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_example_is_what_the_script_writes(make_traces, tmp_path, monkeypatch):
    output = tmp_path / "traces.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_traces.py", "--seed", "0", "--output", str(output)])
    make_traces.main()
    assert output.read_bytes() == (EXAMPLES / "traces.jsonl").read_bytes()
    assert make_traces.make_records(1) != make_traces.make_records(0)


def insertion(x: list[int]) -> list[str]:
    """Each item passes the larger ones before it, which stand sorted: largest first."""
    return [f"{big}/{v}" for i, v in enumerate(x) for big in sorted(x[:i], reverse=True) if big > v]


def selection(x: list[int]) -> list[str]:
    swaps, rest = [], x
    while rest:
        head, smallest = rest[0], min(rest)
        if head != smallest:
            swaps.append(f"{head}/{smallest}")
        rest = [head if v == smallest else v for v in rest[1:]]
    return swaps


def bubble(x: list[int]) -> list[str]:
    """Each pass carries the largest item so far past every smaller one."""
    swaps, rest = [], x
    while rest:
        carried, passed = rest[0], []
        for v in rest[1:]:
            if v < carried:
                swaps.append(f"{carried}/{v}")
            passed.append(min(v, carried))
            carried = max(v, carried)
        rest = passed
    return swaps


def test_the_example_holds_real_traces():
    file = EXAMPLES / "traces.jsonl"
    assert file.stat().st_size < 600_000
    records = read_jsonl(file, "whitespace", 256)
    assert len(records) == 3000
    programs = {"insertion_sort": insertion, "selection_sort": selection, "bubble_sort": bubble}
    traces: dict[str, dict[str, str]] = {}
    for record in records:
        x = [int(token) for token in record.x.split()]
        assert len(set(x)) == 5
        swaps = programs[record.strategy or ""](x)
        assert record.y == " ".join([*swaps, "=", *map(str, sorted(x))])
        for swap in swaps:  # the log, replayed on the list
            left, right = (x.index(int(value)) for value in swap.split("/"))
            assert left < right
            x[left], x[right] = x[right], x[left]
        assert x == sorted(x)
        assert record.strategy not in traces.setdefault(record.x, {})
        traces[record.x][record.strategy or ""] = record.y
    assert len(traces) == 1000
    assert all(len(by) == len(set(by.values())) == 3 for by in traces.values())


def test_no_token_of_the_example_names_a_strategy():
    records = read_jsonl(EXAMPLES / "traces.jsonl", "whitespace", 256)
    tokens: dict[str, set[str]] = {}
    for record in records:
        tokens.setdefault(record.strategy or "", set()).update(record.y.split())
    assert tokens["insertion_sort"] == tokens["selection_sort"] == tokens["bubble_sort"]


def test_groups_of_the_example():
    records = read_jsonl(EXAMPLES / "traces.jsonl", "whitespace", 256)
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group or "", []).append(record)
    for members in groups.values():
        assert len(members) == 2
        assert len({r.strategy for r in members}) == 1
        assert len({r.x for r in members}) == 2
        assert len({split_of(r.x) for r in members}) == 1
    splits = read_splits(EXAMPLES / "traces.jsonl", DataConfig())
    assert {split: len(members) for split, members in splits.items()} == {
        "train": 2400,
        "validation": 300,
        "test": 300,
    }
    assert all((units(members, 2) >= 0).all() for members in splits.values())


def test_the_example_can_be_evaluated():
    records = read_jsonl(EXAMPLES / "traces.jsonl", "whitespace", 256)
    task: Task = LookupTask(records)
    assert task.strategies == ("bubble_sort", "insertion_sort", "selection_sort")
    for record in records[:300]:
        assert task.classify(record.x, record.y) == {record.strategy}
        assert len(set(task.traces(record.x).values())) == 3
