"""Checkpoints: bitwise round trips, comparison before, verification after, survival of damage and kills."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from surprisal_jax.training.checkpoint import CheckpointError, CheckpointMismatchError, Checkpoints


class Pair(NamedTuple):
    left: Any
    right: Any


def raw_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert raw_bytes(one) == raw_bytes(other)


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def numbered(step: int) -> dict[str, jax.Array]:
    return {"a": jnp.full((64, 64), step, jnp.float32), "b": jnp.full((8,), step, jnp.int32)}


def save_steps(directory: Path, *steps: int) -> None:
    checkpoints = Checkpoints(directory, keep=5)
    for step in steps:
        checkpoints.save(step, numbered(step), {"at": step})
    checkpoints.close()


def restore(directory: Path, state: Any) -> tuple[int, Any, dict[str, Any]] | None:
    checkpoints = Checkpoints(directory, keep=5)
    try:
        return checkpoints.restore_newest(abstract(state))
    finally:
        checkpoints.close()


def awkward_state() -> dict[str, Any]:
    params = {
        "layers": {
            0: jnp.arange(6.0).reshape(2, 3),
            10: jnp.ones(3, jnp.bfloat16),
            2: jnp.array([True, False]),
        },
        "name/with.odd ['characters']": jnp.float32(1e-45),
        "empty": jnp.zeros((0, 4)),
    }
    return {
        "params": params,
        "optimizer": optax.adamw(1e-3).init(params),
        "pair": Pair(None, (jnp.int8(-3), [jnp.uint32(2**32 - 1)])),
        "bits": jnp.asarray(np.array([0x7FC00001, 0x80000000, 0x7F800000], np.uint32).view(np.float32)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 5),
        "host": np.array([2**60 + 1, -1], np.int64),
        "host_scalar": np.float64(0.1),
    }


def test_state_of_every_kind_comes_back_bitwise(tmp_path: Path) -> None:
    state = awkward_state()
    checkpoints = Checkpoints(tmp_path / "new" / "directory", keep=1)
    checkpoints.save(7, state, {"data": {"epoch": 1, "order": [3, 1], "name": "ü", "rate": 0.1, "none": None}})
    restored = checkpoints.restore_newest(state)
    checkpoints.close()
    assert restored is not None
    step, actual, metadata = restored
    assert step == 7
    assert metadata == {"data": {"epoch": 1, "order": [3, 1], "name": "ü", "rate": 0.1, "none": None}}
    assert_same(actual, state)
    assert isinstance(actual["host"], np.ndarray)
    assert isinstance(actual["params"]["empty"], jax.Array)
    expected = jax.random.normal(state["keys"][4], (3,))
    np.testing.assert_array_equal(jax.random.normal(actual["keys"][4], (3,)), expected)


def test_restores_onto_the_sharding_that_is_asked_for(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    divided, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    state = {"a": jnp.arange(16.0).reshape(8, 2), "k": jax.random.key(1), "free": jnp.ones(2)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, jax.device_put(state, replicated), {})
    target = {
        "a": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=divided),
        "k": jax.ShapeDtypeStruct((), state["k"].dtype, sharding=replicated),
        "free": state["free"],
    }
    with jax.transfer_guard("disallow"):
        restored = checkpoints.restore_newest(target)
        assert restored is not None
        checkpoints.save(2, restored[1], {})
    checkpoints.close()
    _, actual, _ = restored
    assert actual["a"].sharding == divided
    assert actual["k"].sharding == replicated
    assert not actual["free"].committed
    assert_same(actual, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"b": jnp.zeros(8)}, r"\['b'\]: checkpoint int32\[8\], state float32\[8\]"),
        (
            lambda s: s | {"a": jnp.zeros((64, 63))},
            r"\['a'\]: checkpoint float32\[64, 64\], state float32\[64, 63\]",
        ),
        (lambda s: s | {"c": jnp.zeros(2)}, r"\['c'\]: checkpoint nothing, state float32\[2\]"),
        (lambda s: {"a": s["a"]}, r"\['b'\]: checkpoint int32\[8\], state nothing"),
        (lambda s: Pair(s["a"], s["b"]), r"\.left: checkpoint nothing"),
        (lambda s: {f"x{i}": s["a"] for i in range(40)}, r"and 34 more"),
    ],
)
def test_mismatch_is_an_error_that_names_the_leaf(tmp_path: Path, change: Any, message: str) -> None:
    save_steps(tmp_path, 1, 2)
    with pytest.raises(CheckpointMismatchError, match=message):
        restore(tmp_path, change(numbered(0)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_key_of_another_kind_is_a_mismatch(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"key": jax.random.key(0)}, {})
    with pytest.raises(CheckpointMismatchError, match=r"\['key'\]: checkpoint key<fry>\[\], state key<rbg>\[\]"):
        checkpoints.restore_newest({"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(CheckpointMismatchError, match=r"state uint32\[2\]"):
        checkpoints.restore_newest({"key": jnp.zeros(2, jnp.uint32)})
    checkpoints.close()


def test_wider_type_than_jax_makes_is_an_error_and_not_a_cast(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": np.array([0.1])}, {})
    with pytest.raises(CheckpointMismatchError, match=r"\['x'\]: checkpoint float64\[1\], state float32\[1\]"):
        checkpoints.restore_newest({"x": jnp.zeros(1)})
    with pytest.raises(CheckpointMismatchError, match=r"\['x'\].*comes back as float32"):
        checkpoints.restore_newest({"x": jax.ShapeDtypeStruct((1,), np.float64)})
    checkpoints.close()


def test_saving_a_step_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    checkpoints.save(1, numbered(1), {"at": 1})
    checkpoints.save(1, numbered(1), {"at": 1})
    with pytest.raises(CheckpointError, match="step 1 cannot be saved, step 1 is there"):
        checkpoints.save(1, numbered(2), {"at": 1})
    with pytest.raises(CheckpointError, match="step 1 cannot be saved"):
        checkpoints.save(1, numbered(1), {"at": 2})
    checkpoints.close()

    fresh = Checkpoints(tmp_path, keep=5)
    with pytest.raises(CheckpointError, match="step 1 cannot be saved"):
        fresh.save(1, numbered(1), {"at": 1})
    restored = fresh.restore_newest(numbered(0))
    assert restored is not None
    fresh.save(1, restored[1], restored[2])  # a run whose last step was already on disk
    fresh.close()
    assert_same(restored[1], numbered(1))


def test_a_step_is_saved_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    checkpoints.save(10, numbered(10), {})
    with pytest.raises(CheckpointError, match="step 5 cannot be saved, step 10 is there"):
        checkpoints.save(5, numbered(5), {})
    checkpoints.save(17, numbered(17), {})
    checkpoints.wait()
    assert (tmp_path / "17").is_dir()
    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "save", lambda *_, **__: False)
        with pytest.raises(CheckpointError, match="did not save step 20"):
            checkpoints.save(20, numbered(20), {})
    checkpoints.save(20, numbered(20), {})
    checkpoints.close()
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [10, 17, 20]


def test_failure_in_the_background_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    monkeypatch.setattr(ocp.CheckpointManager, "_finalize_checkpoint", _disk_full)
    checkpoints.save(1, numbered(1), {})
    with pytest.raises(OSError, match="disk full"):
        checkpoints.wait()


def _disk_full(*_: Any) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("metadata", [{"x": (1, 2)}, {1: "x"}, {"x": float("nan")}, {"x": np.int64(1)}])
def test_metadata_that_json_would_change_is_an_error(tmp_path: Path, metadata: Any) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="metadata"):
        checkpoints.save(1, numbered(1), metadata)
    checkpoints.close()


def test_leaf_that_is_no_array_is_an_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=r"leaf \['step'\] is a int"):
        checkpoints.save(1, {"step": 3}, {})
    checkpoints.save(1, numbered(1), {})
    with pytest.raises(TypeError, match=r"abstract leaf \['step'\] is a int"):
        checkpoints.restore_newest({"step": 3})
    checkpoints.close()


def test_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 4, 9, 16):
        checkpoints.save(step, numbered(step), {})
    checkpoints.close()
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [9, 16]
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)


def test_empty_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert restore(tmp_path / "none", numbered(0)) is None


def test_buffers_may_be_donated_at_once(tmp_path: Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.zeros((512, 512))
    checkpoints = Checkpoints(tmp_path, keep=1)
    for number in range(1, 4):
        checkpoints.save(number, {"x": state}, {})
        for _ in range(5):
            state = step(state)
        checkpoints.wait()
        restored = checkpoints.restore_newest({"x": state})
        assert restored is not None
        np.testing.assert_array_equal(restored[1]["x"], np.full((512, 512), 5 * (number - 1), np.float32))
    checkpoints.close()


def test_host_arrays_may_be_changed_at_once(tmp_path: Path) -> None:
    array = np.zeros(100_000)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": array}, {})
    array[:] = 7
    restored = checkpoints.restore_newest({"x": array})
    checkpoints.close()
    assert restored is not None
    np.testing.assert_array_equal(restored[1]["x"], np.zeros(100_000))


@pytest.mark.parametrize("leftover", ["empty", "file", "partial", "temporary"])
def test_unfinished_step_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, leftover: str) -> None:
    save_steps(tmp_path, 1)
    step = tmp_path / "2"
    if leftover == "file":
        step.write_text("")
    elif leftover == "partial":
        (step / "state").mkdir(parents=True)
    else:
        step = tmp_path / ("2.orbax-checkpoint-tmp" if leftover == "temporary" else "2")
        step.mkdir()
    with caplog.at_level(logging.WARNING, logger="surprisal_jax"):
        checkpoints = Checkpoints(tmp_path, keep=5)
    assert str(step) in caplog.text
    restored = checkpoints.restore_newest(numbered(0))
    assert restored is not None and restored[0] == 1
    assert_same(restored[1], numbered(1))
    checkpoints.save(2, numbered(2), {})
    checkpoints.close()
    restored = restore(tmp_path, numbered(0))
    assert restored is not None and restored[0] == 2
    expected = ["1", "2"] if leftover == "temporary" else ["1", "2", "2.unfinished"]
    assert sorted(p.name for p in tmp_path.iterdir()) == expected


def largest_data_file(step: Path) -> Path:
    return max((step / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda p: p.stat().st_size)


def flip_middle_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_step_in_metadata(step: Path) -> None:
    path = next((step / "manifest").glob("metadata*"))
    content = path.read_bytes()
    assert b'"at": 2' in content
    path.write_bytes(content.replace(b'"at": 2', b'"at": 3'))


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: flip_middle_bit(largest_data_file(step)),
        lambda step: largest_data_file(step).write_bytes(b""),
        lambda step: largest_data_file(step).unlink(),
        flip_step_in_metadata,
        lambda step: next((step / "manifest").glob("metadata*")).unlink(),
    ],
    ids=["bit", "truncated", "missing", "manifest bit", "no manifest"],
)
def test_damaged_step_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    # Random values do not compress: a flipped bit reaches the array instead of failing in the decoder.
    states = [{"x": jax.random.bits(jax.random.key(step), (4096,))} for step in range(4)]
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2):
        checkpoints.save(step, states[step], {"at": step})
    checkpoints.close()
    damage(tmp_path / "2")
    checkpoints = Checkpoints(tmp_path, keep=5)
    with caplog.at_level(logging.WARNING, logger="surprisal_jax"):
        restored = checkpoints.restore_newest(states[0])
    assert restored is not None
    assert (restored[0], restored[2]) == (1, {"at": 1})
    assert_same(restored[1], states[1])
    assert f"{tmp_path / '2'} is skipped and renamed to 2.unreadable" in caplog.text
    checkpoints.save(2, states[3], {"at": 2})
    checkpoints.close()
    restored = restore(tmp_path, states[0])
    assert restored is not None and restored[0] == 2
    assert_same(restored[1], states[3])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "2.unreadable"]


def test_nothing_readable_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in ("1", "2"):
        shutil.rmtree(tmp_path / step / "state")
        (tmp_path / step / "state").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read \(step 2: .*step 1: "):
        restore(tmp_path, numbered(0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


KILLED = """
import sys
from pathlib import Path
import numpy as np
from surprisal_jax.training.checkpoint import Checkpoints

def state(step):
    return {"a": np.full((256, 256), step, np.float32), "b": [np.full((9,), step, np.int32)] * 20}

sys.stdin.readline()  # imported; wait for the turn
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
restored = checkpoints.restore_newest(state(0))
step = 0
if restored is not None:
    step, values, metadata = restored
    assert metadata == {"at": step}
    assert all(bool((leaf == step).all()) for leaf in [values["a"], *values["b"]])
print(step, flush=True)
while True:
    step += 1
    checkpoints.save(step, state(step), {"at": step})
    print(step - 1, flush=True)
"""


@contextlib.contextmanager
def python_processes(script: str, *arguments: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each list of arguments, none of which outlives the block."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *own],
            env=environment,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in arguments
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_killed_while_saving_leaves_the_step_before(tmp_path: Path) -> None:
    rng = random.Random(0)
    on_disk = 0
    with python_processes(KILLED, *[[str(tmp_path)]] * 5) as processes:
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            first = int(process.stdout.readline())
            assert on_disk <= first <= on_disk + 2  # the step in flight may have been finished
            process.stdout.readline()  # the first save is under way
            time.sleep(rng.uniform(0.05, 0.4))
            process.send_signal(signal.SIGKILL)
            printed = process.stdout.read().split("\n")[:-1]
            # save(n) begins by waiting for step n - 1, so what was printed is on disk.
            on_disk = int(printed[-1]) if printed else first
    assert on_disk >= 5
    checkpoints = Checkpoints(tmp_path, keep=2)
    restored = checkpoints.restore_newest({"a": jnp.zeros((256, 256)), "b": [jnp.zeros(9, jnp.int32)] * 20})
    assert restored is not None
    assert on_disk <= restored[0] <= on_disk + 2
    np.testing.assert_array_equal(restored[1]["a"], np.full((256, 256), restored[0], np.float32))
    checkpoints.save(restored[0] + 1, restored[1], {})
    checkpoints.close()
    # A copy that was being removed when its process died is either gone or set aside, never the newest.
    assert sum(p.name.isdecimal() for p in tmp_path.iterdir()) == 2


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from surprisal_jax.training.checkpoint import Checkpoints

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
replicated, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

def values(seed):
    x = jnp.arange(12.0).reshape(4, 3) * seed
    return {"w": jnp.arange(8.0) + seed, "x": x, "k": jax.random.key(seed)}

make = jax.jit(values, out_shardings={"w": replicated, "x": divided, "k": replicated})
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for step in (1, 2, 3):
    checkpoints.save(step, make(step), {"at": step})
if jax.process_index() == 1:
    original = ocp.StandardCheckpointHandler.restore
    def restore(self, path, **kwargs):
        if path.parent.name == "3":
            raise OSError("this process cannot read step 3")
        return original(self, path, **kwargs)
    ocp.StandardCheckpointHandler.restore = restore
step, state, metadata = checkpoints.restore_newest(make(0))
same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: jnp.all(x == y), a, b))(state, make(2))
assert all(jax.tree.leaves(same)), same
assert state["x"].sharding == divided and state["k"].sharding == replicated
checkpoints.save(3, state, {})
checkpoints.close()
print(step, metadata)
"""


def test_two_processes_restore_the_same_step(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    arguments = [[str(tmp_path), address, str(index)] for index in range(2)]
    with python_processes(TWO_PROCESSES, *arguments) as processes:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert output.splitlines()[-1] == "2 {'at': 2}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "3.unreadable"]
