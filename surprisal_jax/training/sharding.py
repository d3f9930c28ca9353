"""The one place that compiles: a mesh of data and parameter axes, what is split over which, and donation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from surprisal_jax.config import ExperimentConfig, InputError
from surprisal_jax.data import gather
from surprisal_jax.training.gradients import Step, value_and_gradient

DATA_AXIS, FSDP_AXIS = "data", "fsdp"
#: The batch is split over both: `fsdp` is data parallelism whose devices share out the parameters too.
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)

#: The axes of every parameter by the end of its name. Optimizer moments end in the same names.
PARAMETER_AXES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("vocabulary", "width"),
    "output_embedding": ("width", "vocabulary"),
    **{f"{name}/kernel": ("width", "heads") for name in ("query", "key", "value")},
    **{f"{name}/bias": ("heads",) for name in ("query", "key", "value")},
    **{f"{name}/scale": ("head",) for name in ("query_norm", "key_norm")},
    "output/kernel": ("heads", "width"),
    **{f"{name}/kernel": ("width", "mlp") for name in ("gate", "up")},
    "down/kernel": ("mlp", "width"),
    **{f"{name}/scale": ("width",) for name in ("attention_norm", "mlp_norm", "norm")},
    "head/kernel": ("width", "latents"),
    "head/bias": ("latents",),
}
#: Which of these are split: every large parameter has a width.
MESH_AXES: Mapping[str, str] = {"width": FSDP_AXIS}

Result = TypeVar("Result")


def make_mesh(config: ExperimentConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data_parallel` x `fsdp` devices (None: as many as there are), of those given or of all.

    Raises:
      InputError: there are fewer devices, or a batch, in whole groups and micro-batches, does not divide over them.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    if config.fsdp > count:
        raise InputError(f"fsdp: got {config.fsdp}, expected at most {count}, the devices there are")
    data = count // config.fsdp if config.data_parallel is None else config.data_parallel
    if data * config.fsdp > count:
        with_fsdp = f" with fsdp {config.fsdp}" if config.fsdp > 1 else ""
        raise InputError(
            f"data_parallel: got {data}{with_fsdp}, expected at most {count // config.fsdp}: {count} devices are there"
        )
    group_size = config.data.group_size if config.latent_scope == "group" else 1
    for field, batch_size, group in (
        ("reference.batch_size", config.reference.batch_size, 1),
        ("disentangle.batch_size", config.disentangle.batch_size, group_size),
    ):
        if batch_size % (data * config.fsdp * config.micro_batches * group):
            parts = [f"{data * config.fsdp} devices"]
            parts += [f"{config.micro_batches} micro-batches"] if config.micro_batches > 1 else []
            parts += [f"{group} examples a group"] if group > 1 else []
            raise InputError(
                f"{field}: got {batch_size}, expected a multiple of {' x '.join(parts)} (see data_parallel)"
            )
    return jax.make_mesh(
        (data, config.fsdp),
        BATCH_AXES,
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[: data * config.fsdp],
    )


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


def as_first_process(values: np.ndarray) -> np.ndarray:
    """What the first process has computed, in every process: hosts may differ in the last bits of a decomposition."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def over_data(mesh: Mesh) -> NamedSharding:
    """The leading axis split over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def parameter_specs(tree: Any) -> Any:
    """How each leaf of a pytree lies on the mesh: by the rules above for what ends in a parameter's name, else
    replicated."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))) for key in path]
        axes = PARAMETER_AXES.get("/".join(names[-2:])) or PARAMETER_AXES.get("".join(names[-1:]))
        if axes is None:
            return PartitionSpec()
        # Runs of one program are stacked: axes before those of the parameter.
        return PartitionSpec(*[None] * (leaf.ndim - len(axes)), *(MESH_AXES.get(axis) for axis in axes))

    return jax.tree_util.tree_map_with_path(spec, tree)


def parameter_shardings(tree: Any, mesh: Mesh) -> Any:
    """`parameter_specs` on the mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(tree))


def put_on_mesh(tree: Any, mesh: Mesh) -> Any:
    """A pytree, the same in every process, on the mesh: parameters and their moments split by the rules, all else on
    every device."""
    shardings = parameter_shardings(tree, mesh)
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = put(jax.random.key_data(leaf), sharding)
            key: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return key
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: np.asarray(host[index]))

    return jax.tree.map(put, tree, shardings)


@functools.lru_cache
def rows_here(count: int, mesh: Mesh) -> np.ndarray:
    """Which of `count` rows of a batch this process has to make: those that lie on its devices, in order."""
    slices = over_data(mesh).addressable_devices_indices_map((count,)).values()
    return np.unique(np.concatenate([np.arange(count)[index] for index in slices]))


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Host arrays with a leading example axis, the rows of `rows_here`, as global arrays split over all devices."""
    sharding = over_data(mesh)
    if jax.process_count() == 1:
        return {name: jax.device_put(value, sharding) for name, value in batch.items()}
    return {name: jax.make_array_from_process_local_data(sharding, value) for name, value in batch.items()}


def put_rows(arrays: Mapping[str, np.ndarray], rows: np.ndarray, mesh: Mesh) -> dict[str, jax.Array]:
    """The given rows of host arrays, as `gather` takes them, of which each process makes its own."""
    return put_batch(gather(arrays, rows[rows_here(len(rows), mesh)]), mesh)


def compile_over_rows(function: Callable[..., Any], mesh: Mesh, *, batched: Sequence[bool]) -> Callable[..., Any]:
    """`jit` of a function that does the same to every row: each device computes its rows, and all get all results.

    Args:
      function: of arguments whose leaves have a leading axis where `batched` says so, and which gives such leaves.
        Other arguments it gets whole, also where parameters are split.
    """

    def local(*arguments: Any) -> Any:
        return function(*(x if split else gather_parameters(x) for x, split in zip(arguments, batched, strict=True)))

    def over_rows(*arguments: Any) -> Any:
        specs = tuple(
            PartitionSpec(BATCH_AXES) if split else parameter_specs(x)
            for x, split in zip(arguments, batched, strict=True)
        )
        return _on_mesh(local, mesh, specs, PartitionSpec(BATCH_AXES))(*arguments)

    in_shardings = tuple(over_data(mesh) if split else None for split in batched)
    compiled: Callable[..., Any] = jax.jit(
        over_rows, in_shardings=in_shardings, out_shardings=NamedSharding(mesh, PartitionSpec())
    )
    return compiled


def over_mesh(step: Step, mesh: Mesh) -> Callable[..., tuple[Any, Any]]:
    """`step.train_step` over global arrays: the batch split over all devices, parameters and optimizer state by the
    rules.

    Each device gathers the parameters, differentiates its rows, one micro-batch after another, and only then is every
    parameter's gradient reduced: once, whatever the number of latents, micro-batches and chunks. Left to the
    partitioner, a gradient that is summed over chunks is reduced once a chunk. The update is of the parts each device
    holds.
    """

    def train_step(state: Any, batch: Any, *others: Any) -> tuple[Any, Any]:
        specs = parameter_specs(state.params)

        def local(params: Any, batch: Any, *others: Any) -> Any:
            value, gradients = value_and_gradient(
                step, gather_parameters(params), batch, tuple(map(gather_parameters, others)), BATCH_AXES
            )
            return value, _reduce_gradients(gradients, mesh.size)

        in_specs = (specs, PartitionSpec(BATCH_AXES), *map(parameter_specs, others))
        value, gradients = _on_mesh(local, mesh, in_specs, (PartitionSpec(), specs))(state.params, batch, *others)
        new_state, metrics = step.update(state, value, gradients)
        return jax.lax.with_sharding_constraint(new_state, parameter_shardings(new_state, mesh)), metrics

    return train_step


def compile_step(train_step: Callable[..., Any]) -> jax.stages.Wrapped:
    """`jit` of `over_mesh`, or of a function over it. The state is consumed."""
    return jax.jit(train_step, donate_argnums=(0,))


def gather_parameters(tree: Any) -> Any:
    """Whole parameters from this device's parts; inside the mesh's axes only."""

    def gather(leaf: Any, spec: PartitionSpec) -> Any:
        axis = _split_axis(spec)
        return leaf if axis is None else jax.lax.all_gather(leaf, FSDP_AXIS, axis=axis, tiled=True)

    return jax.tree.map(gather, tree, parameter_specs(tree))


def _reduce_gradients(gradients: Any, devices: int) -> Any:
    """The mean over devices of whole gradients, each device left with its part."""

    def reduce(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        axis = _split_axis(spec)
        total: jax.Array
        if axis is None:
            total = jax.lax.psum(leaf, BATCH_AXES)
        else:
            total = jax.lax.psum_scatter(leaf, FSDP_AXIS, scatter_dimension=axis, tiled=True)
            if jax.lax.axis_size(DATA_AXIS) > 1:
                total = jax.lax.psum(total, DATA_AXIS)
        return total / devices

    return jax.tree.map(reduce, gradients, parameter_specs(gradients))


def _split_axis(spec: PartitionSpec) -> int | None:
    """The axis of a leaf that is in parts, inside the mesh's axes: a collective in a group of one is not free."""
    if jax.lax.axis_size(FSDP_AXIS) == 1:
        return None
    return next((axis for axis, name in enumerate(spec) if name == FSDP_AXIS), None)


def _on_mesh(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mapped: Callable[..., Any] = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return mapped


def compile_with_pmap(train_step: Callable[..., Any], num_devices: int) -> Callable[..., Any]:
    """The same step under `pmap`: state `[D, ...]` donated, batch `[D, B / D, ...]`, hyperparameters and reference
    broadcast."""
    mapped = functools.partial(train_step, axis_name=DATA_AXIS)
    devices = jax.devices()[:num_devices]
    compiled: Callable[..., Any] = jax.pmap(
        mapped, axis_name=DATA_AXIS, in_axes=(0, 0, None, None), donate_argnums=(0,), devices=devices
    )
    return compiled
