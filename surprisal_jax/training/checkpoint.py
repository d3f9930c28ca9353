"""Checkpoints of a training state: written whole, compared before they are restored, verified after.

A finished step is `directory/<step>/` with two Orbax items: `state`, every leaf under its path in the pytree,
and `manifest`, JSON with the path, shape, dtype and checksum of every leaf beside the caller's metadata. The
manifest is what a restore compares with the state it is asked for: Orbax itself casts to the dtype it is
given without a word, and neither it nor the array store below it notices a flipped bit.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

logger = logging.getLogger(__name__)

_ITEMS = ("state", "manifest")
_NAMED_AT_MOST = 8


class CheckpointError(RuntimeError):
    """A checkpoint was not saved, or none of those that are there can be read."""


class CheckpointMismatchError(ValueError):
    """A checkpoint holds other leaves, shapes or dtypes than the state it should become."""


class Checkpoints:
    """The checkpoints of one training stage. One run at a time owns the directory.

    Args:
        directory: created when missing. Step directories in it that are empty or unfinished are renamed to
            `<step>.unfinished`, with a warning: Orbax would take the newest of them for the latest step.
        keep: how many of the newest steps stay on disk, at least 1.

    Saving copies the state to the host, so its buffers may be donated as soon as `save` returns, and writes
    in a background thread. A step appears under its name by one rename at the end, and only then are older
    steps removed, so a process killed at any moment leaves the step before. Every process of a run makes the
    same calls.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._directory = Path(directory).absolute()
        self._set_aside(self._unfinished())
        # Orbax 0.12.8 has a second API (v1): a wrapper around this class, without `reached_preemption`.
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep), save_root_metadata=False
            ),
        )
        self._newest: tuple[int, dict[str, Any]] | None = None

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Saves `state` as `step`; returns once the state is copied, before it is on disk (see `wait`).

        Args:
            step: above every step in the directory. The step just saved or restored by this object may be
                saved again if nothing in it changed; that writes nothing.
            state: a pytree of JAX and NumPy arrays, typed PRNG keys included.
            metadata: what JSON gives back as it was: dicts with string keys, lists, strings, finite numbers.

        Raises:
            CheckpointError: Orbax did not take the step, the step is not above the newest one, or a leaf is
                of a kind that would not come back as it was. A failure of the previous background write
                surfaces here.
        """
        names, leaves, _ = _named_leaves(state)
        values = [_on_host(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        manifest = {
            "leaves": [_describe(*row) for row in zip(names, leaves, values, strict=True)],
            "metadata": _checked_metadata(metadata),
        }
        self.wait()
        if self._newest == (step, manifest):
            return
        newest = max(self._manager.all_steps(), default=None)
        if newest is not None and step <= newest:
            raise CheckpointError(
                f"{self._directory}: step {step} cannot be saved, step {newest} is there; a run "
                "continues from its newest checkpoint, or starts in an empty directory"
            )
        stored = {name: value for name, value in zip(names, values, strict=True) if value.size}
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(stored),
                manifest=ocp.args.JsonSave({"body": manifest, "crc32": _json_checksum(manifest)}),
            ),
        )
        if not saved:
            raise CheckpointError(f"{self._directory}: Orbax did not save step {step}")
        self._newest = (step, manifest)

    def restore_newest(self, abstract_state: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest checkpoint that can be read, as (step, state, metadata), or None in an empty directory.

        Args:
            abstract_state: the state's pytree with `jax.ShapeDtypeStruct` (placed on its sharding),
                `jax.Array` (likewise) or NumPy (stays on the host) leaves. No value in it is read.

        Steps that cannot be read, or whose values are not those that were saved, are renamed to
        `<step>.unreadable` with a warning once an older step has been restored instead.

        Raises:
            CheckpointMismatchError: leaves, shapes or dtypes differ. The directory is left as it is.
            CheckpointError: there are checkpoints and none can be read. Nothing is renamed: the cause may
                pass.
        """
        names, targets, treedef = _named_leaves(abstract_state)
        wanted = {name: _shape_text(name, leaf) for name, leaf in zip(names, targets, strict=True)}
        self.wait()
        unreadable: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            failure = None
            try:
                manifest = self._read_manifest(step)
                entries = _matched(manifest["leaves"], wanted, self._directory / str(step))
                values = self._read_values(step, entries, targets)
            except (CheckpointMismatchError, MemoryError):
                raise  # an older step cures neither
            except Exception as error:  # whatever the stores below Orbax raise on damaged files
                failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            if not _everywhere(failure is None):
                unreadable[step] = failure or "another process could not read it"
                continue
            self._set_aside((self._directory / str(bad), "unreadable", why) for bad, why in unreadable.items())
            self._manager.reload()
            self._newest = (step, manifest)
            placed = [_placed(*row) for row in zip(entries, targets, values, strict=True)]
            return step, treedef.unflatten(placed), manifest["metadata"]
        if unreadable:
            listed = "; ".join(f"step {step}: {reason}" for step, reason in unreadable.items())
            raise CheckpointError(
                f"{self._directory}: no checkpoint can be read ({listed}); move the directory away to start again"
            )
        return None

    def wait(self) -> None:
        """Blocks until the last save is on disk; raises what went wrong in the background."""
        self._manager.wait_until_finished()
        if self._newest is not None and not _is_whole(self._directory / str(self._newest[0])):
            raise CheckpointError(f"{self._directory}: step {self._newest[0]} was saved and is not on disk")

    def close(self) -> None:
        """Waits for the last save and ends the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _read_manifest(self, step: int) -> dict[str, Any]:
        # Not through the manager, which then waits for every process: forever, where one of them cannot read.
        sealed = ocp.JsonCheckpointHandler().restore(epath.Path(self._directory / str(step) / "manifest"))
        if _json_checksum(sealed["body"]) != sealed["crc32"]:
            raise CheckpointError("the manifest is not the one that was saved")
        body: dict[str, Any] = sealed["body"]
        return body

    def _read_values(self, step: int, entries: Sequence[Mapping[str, Any]], targets: Sequence[Any]) -> list[Any]:
        templates = {entry["path"]: _template(entry, target) for entry, target in zip(entries, targets, strict=True)}
        stored = {path: template for path, template in templates.items() if template.size}
        restored = ocp.StandardCheckpointHandler().restore(
            epath.Path(self._directory / str(step) / "state"), args=ocp.args.StandardRestore(stored)
        )
        values = [(templates | restored)[entry["path"]] for entry in entries]
        for entry, value in zip(entries, values, strict=True):
            if entry["crc32"] is not None and _checksum(value) != entry["crc32"]:
                raise CheckpointError(f"the values of {entry['path']} are not those that were saved")
        return values

    def _unfinished(self) -> Iterator[tuple[Path, str, str]]:
        for path in sorted(self._directory.iterdir()) if self._directory.is_dir() else ():
            if path.name.isdecimal() and not _is_whole(path):
                yield path, "unfinished", "it does not hold a whole checkpoint"
            elif ocp.utils.TMP_DIR_SUFFIX in path.name:
                # Not a step to Orbax either, which replaces it when that step is saved again.
                logger.warning("%s was being written when its process ended; it is not used", path)

    def _set_aside(self, found: Iterable[tuple[Path, str, str]]) -> None:
        if jax.process_index() == 0:
            for path, label, reason in found:
                aside, count = path.with_name(f"{path.name}.{label}"), 1
                while aside.exists():
                    count += 1
                    aside = path.with_name(f"{path.name}.{label}-{count}")
                logger.warning("checkpoint %s is skipped and renamed to %s: %s", path, aside.name, reason)
                path.rename(aside)
        ocp.multihost.sync_global_processes("surprisal_jax.checkpoint:set_aside")


def _is_whole(path: Path) -> bool:
    return all((path / item).is_dir() for item in _ITEMS)


def _named_leaves(tree: Any) -> tuple[list[str], list[Any], Any]:
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("two leaves of the state have the same path")
    return names, [leaf for _, leaf in pairs], treedef


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_host(name: str, leaf: Any) -> Any:
    """The leaf's values as a NumPy array, which Orbax copies before `save` returns: it may be a view.

    A leaf that is divided between processes stays a `jax.Array`.
    """
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise CheckpointError(
            f"leaf {name} is a {type(leaf).__name__}; a state holds arrays, other values go into the metadata"
        )
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    is_key = _is_key(leaf)
    if is_key:
        leaf = jax.random.key_data(leaf)
    if leaf.is_fully_addressable:
        return np.asarray(jax.device_get(leaf))
    if leaf.is_fully_replicated:
        return np.asarray(jax.device_get(leaf.addressable_data(0)))
    if is_key:
        raise CheckpointError(f"leaf {name}: a key array divided between processes cannot be saved")
    return leaf


def _describe(name: str, leaf: Any, value: Any) -> dict[str, Any]:
    return {
        "path": name,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "key_impl": str(jax.random.key_impl(leaf)) if _is_key(leaf) else None,
        "data_shape": list(value.shape),
        # No process sees all values of a leaf that is divided between them.
        "crc32": _checksum(value) if isinstance(value, np.ndarray) else None,
    }


def _checksum(value: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _json_checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        returned = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metadata is not JSON: {error}") from error
    if returned != metadata:
        raise CheckpointError(f"metadata would come back from JSON as {returned}, not as {metadata}")
    return dict(returned)


def _shape_text(name: str, leaf: Any) -> str:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(f"abstract leaf {name} is a {type(leaf).__name__}, expected an array or a ShapeDtypeStruct")
    return f"{leaf.dtype}{list(leaf.shape)}"


def _matched(entries: Sequence[dict[str, Any]], wanted: Mapping[str, str], path: Path) -> list[dict[str, Any]]:
    """The manifest's leaves in the order of `wanted`, which maps each path to its dtype and shape."""
    saved = {entry["path"]: f"{entry['dtype']}{entry['shape']}" for entry in entries}
    differences = [
        f"{name or 'the state'}: checkpoint {saved.get(name, 'nothing')}, state {wanted.get(name, 'nothing')}"
        for name in dict.fromkeys([*wanted, *saved])
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        more = len(differences) - _NAMED_AT_MOST
        listed = "; ".join(differences[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointMismatchError(f"{path} does not fit this state: {listed}")
    by_path = {entry["path"]: entry for entry in entries}
    return [by_path[name] for name in wanted]


def _template(entry: Mapping[str, Any], target: Any) -> Any:
    """What Orbax restores onto: host memory, or the target's shards where no process holds the whole leaf."""
    sharding = getattr(target, "sharding", None)
    if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
        dtype = np.dtype(np.uint32) if entry["key_impl"] else np.dtype(target.dtype)
        return np.empty(entry["data_shape"], dtype)
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=sharding)


def _placed(entry: Mapping[str, Any], target: Any, value: Any) -> Any:
    if isinstance(target, np.ndarray | np.generic) or not isinstance(value, np.ndarray):
        return value
    # An array that was never committed to a device must not come back committed to one.
    sharding = getattr(target, "sharding", None) if getattr(target, "committed", True) else None
    if entry["key_impl"]:
        value = jax.random.wrap_key_data(jax.device_put(value), impl=entry["key_impl"])
    if sharding is None or sharding.is_fully_addressable:
        array = jax.device_put(value, sharding)
    else:  # replicated over processes
        array = jax.make_array_from_callback(target.shape, sharding, jax.device_put(value).__getitem__)
    if array.dtype != target.dtype:
        raise CheckpointMismatchError(
            f"{entry['path']}: checkpoint {entry['dtype']}, comes back as {array.dtype}: set jax_enable_x64"
        )
    return array


def _everywhere(fine: bool) -> bool:
    """True if `fine` in every process, so that all of them restore the same step."""
    if jax.process_count() == 1:
        return fine
    return bool(np.all(multihost_utils.process_allgather(np.array(fine))))
