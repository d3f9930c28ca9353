"""`make pod`: the whole train step, compiled ahead of time for TPU v5e on a machine without one.

Prints peak bytes a chip, collectives by kind with the bytes they move, and floating-point operations. It needs
`libtpu`, which `make pod` installs into an environment of its own; without it this program says "skipped".
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

# Before jax is imported: no TPU is asked for, and none is looked for on the network.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.program import collectives, trip_weighted_bytes
from benchmarks.workload import Workload
from surprisal_jax.config import ExperimentConfig, InputError, load_config
from surprisal_jax.training.sharding import compile_step, make_mesh, over_data, over_mesh, parameter_specs

TOPOLOGIES = {4: "v5e:2x2", 16: "v5e:4x4", 64: "v5e:8x8", 256: "v5e:16x16"}
#: Qwen2.5's tokens, and the tags and latents of this project.
VOCABULARY = 151936
PREFIX, SUFFIX = 512, 512


def shapes_on_mesh(workload: Workload, mesh: Mesh) -> tuple[Any, ...]:
    """Shapes and shardings of the step's arguments: nothing of their size is made."""
    state, batch, hyperparameters = jax.eval_shape(workload.arguments)

    def shaped(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, sharding
        )

    by_rule = jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(state))
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), hyperparameters)
    split = {name: over_data(mesh) for name in batch}
    return shaped(state, by_rule), shaped(batch, split), shaped(hyperparameters, whole), None


def on_chips(config: ExperimentConfig, chips: int) -> ExperimentConfig:
    """The configuration on another number of chips: as many of them share parameters as do in it, at most all, and each
    has as many examples."""
    per_chip = config.disentangle.batch_size // ((config.data_parallel or 1) * config.fsdp)
    fsdp = min(config.fsdp, chips)
    stage = replace(config.disentangle, batch_size=per_chip * chips)
    reference = replace(config.reference, batch_size=per_chip * chips)
    return replace(config, fsdp=fsdp, data_parallel=chips // fsdp, disentangle=stage, reference=reference)


def report(config: ExperimentConfig, chips: int, arguments: argparse.Namespace) -> None:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chips])
    config = on_chips(config, chips)
    mesh = make_mesh(config, topology.devices)
    workload = Workload(config, arguments.vocabulary, arguments.prefix, arguments.suffix)
    shapes = shapes_on_mesh(workload, mesh)
    compiled = compile_step(over_mesh(workload.step(), mesh)).lower(*shapes).compile()
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    found = collectives(compiled.as_text() or "")
    counts, sizes = Counter(kind for kind, _, _ in found), trip_weighted_bytes(found)
    parameters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes[0].params))
    print(
        f"{chips} chips, data {config.data_parallel} x fsdp {config.fsdp}, {config.disentangle.batch_size} examples: "
        f"peak {memory.peak_memory_in_bytes / 2**30:.2f} GiB a chip, arguments "
        f"{memory.argument_size_in_bytes / 2**30:.3f} GiB, parameters {parameters / 2**30:.2f} GiB in all, "
        f"{cost['flops']:.3g} FLOPs outside loops"
    )
    for kind in sorted(counts):
        print(f"  {kind}: {counts[kind]} in the program, {sizes[kind] / 2**30:.3f} GiB over all trips")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pod", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default="configs/pod_qwen2.5_0.5b.yaml", metavar="FILE")
    parser.add_argument("--chips", type=int, action="append", choices=list(TOPOLOGIES), help="only this many [all]")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"tokens [{VOCABULARY}]")
    parser.add_argument("--prefix", type=int, default=PREFIX, help=f"tokens of the prefix [{PREFIX}]")
    parser.add_argument("--suffix", type=int, default=SUFFIX, help=f"tokens of a suffix [{SUFFIX}]")
    arguments = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        print("pod: skipped, libtpu is not installed here; `make pod` installs it into an environment of its own")
        return 0
    try:
        config = load_config(arguments.config)
    except InputError as error:
        print(f"pod: error: {error}", file=sys.stderr)
        return 2
    for chips in arguments.chips or TOPOLOGIES:
        report(config, chips, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
