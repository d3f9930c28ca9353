"""The one place that compiles: a mesh with a data axis, shardings, donation, and the three ways to run a step over
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from surprisal_jax.config import ExperimentConfig, InputError

DATA_AXIS = "data"

Result = TypeVar("Result")


def make_mesh(config: ExperimentConfig) -> Mesh:
    """A one-axis mesh over `data_parallel` devices (None: all).

    Raises:
      InputError: there are fewer devices, or a batch, in whole groups, does not divide over them.
    """
    count = jax.device_count() if config.data_parallel is None else config.data_parallel
    if count > jax.device_count():
        raise InputError(f"data_parallel: got {count}, expected at most {jax.device_count()}, the devices there are")
    group_size = config.data.group_size if config.latent_scope == "group" else 1
    for field, batch_size, unit in (
        ("reference.batch_size", config.reference.batch_size, 1),
        ("disentangle.batch_size", config.disentangle.batch_size, group_size),
    ):
        if batch_size % (count * unit):
            groups = f" x {unit} examples a group" if unit > 1 else ""
            raise InputError(
                f"{field}: got {batch_size}, expected a multiple of {count} devices{groups} (see data_parallel)"
            )
    return jax.make_mesh((count,), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def join_cluster() -> None:
    """Make this process one of those that the cluster started; call it before anything else touches a device.

    Raises:
      InputError: no cluster is found.
    """
    try:
        jax.distributed.initialize()
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"distributed: got true, expected a cluster that jax.distributed finds ({reason})") from None


def first_process_first(name: str, function: Callable[[], Result]) -> Result:
    """`function()` in the first process and then, when that is done, in the others: what it wrote is there for them."""
    if jax.process_count() == 1:
        return function()
    if jax.process_index() > 0:
        multihost_utils.sync_global_devices(name)
        return function()
    result = function()
    multihost_utils.sync_global_devices(name)
    return result


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def over_data(mesh: Mesh) -> NamedSharding:
    """The leading axis split over the data axis."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def put_replicated(tree: Any, mesh: Mesh) -> Any:
    """A pytree, the same in every process, on every device of the mesh."""
    sharding = replicated(mesh)
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key: jax.Array = jax.random.wrap_key_data(place(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
            return key
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: np.asarray(host[index]))

    return jax.tree.map(place, tree)


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Host arrays with a leading example axis as global arrays split over the data axis.

    Every process makes the same rows and gives its devices theirs.
    """
    sharding = over_data(mesh)
    if jax.process_count() == 1:
        return {name: jax.device_put(value, sharding) for name, value in batch.items()}
    return {
        name: jax.make_array_from_callback(value.shape, sharding, value.__getitem__) for name, value in batch.items()
    }


def compile_over_data(
    function: Callable[..., Any], mesh: Mesh, *, batched: Sequence[bool], donate: Sequence[int] = ()
) -> Callable[..., Any]:
    """`jit` over global arrays: the arguments marked `batched` split over the data axis, the others and all results
    replicated.

    Reductions over the batch are global, and XLA puts in the one gradient reduction. Donated arguments are consumed.
    """
    in_shardings = tuple(over_data(mesh) if split else replicated(mesh) for split in batched)
    compiled: Callable[..., Any] = jax.jit(
        function, in_shardings=in_shardings, out_shardings=replicated(mesh), donate_argnums=tuple(donate)
    )
    return compiled


def compile_with_pmap(train_step: Callable[..., Any], num_devices: int) -> Callable[..., Any]:
    """The same step under `pmap`: state `[D, ...]` donated, batch `[D, B / D, ...]`, hyperparameters and reference
    broadcast."""
    mapped = partial(train_step, axis_name=DATA_AXIS)
    devices = jax.devices()[:num_devices]
    compiled: Callable[..., Any] = jax.pmap(
        mapped, axis_name=DATA_AXIS, in_axes=(0, 0, None, None), donate_argnums=(0,), devices=devices
    )
    return compiled


def compile_with_shard_map(train_step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The same step under `shard_map`: state replicated, batch split over the data axis."""
    mapped = jax.shard_map(
        partial(train_step, axis_name=DATA_AXIS),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(DATA_AXIS), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    compiled: Callable[..., Any] = jax.jit(mapped, donate_argnums=(0,))
    return compiled
