"""The step against its own matrix products, one after another in one program: how far it is from what it cannot do
without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.step import training, workload
from benchmarks.timing import Row, measure

Array = jax.Array


class Product(NamedTuple):
    """A `dot_general` of a program: its operands, what it contracts, and how often it runs."""

    left: jax.ShapeDtypeStruct
    right: jax.ShapeDtypeStruct
    dimension_numbers: Any
    precision: Any
    preferred_element_type: Any
    times: int

    @property
    def flops(self) -> int:
        """Of all its runs."""
        (_, contracted), (_, batch) = self.dimension_numbers
        kept = [size for axis, size in enumerate(self.right.shape) if axis not in (*contracted, *batch)]
        return int(2 * math.prod(self.left.shape) * math.prod(kept) * self.times)


def products(function: Callable[..., Any], *arguments: Any) -> list[Product]:
    """The matrix products of a program, those of loops with the trips around them."""
    return list(_products(jax.make_jaxpr(function)(*arguments).jaxpr, 1))


def _products(jaxpr: Any, times: int) -> Iterator[Product]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            left, right = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars)
            given = equation.params
            yield Product(
                left, right, given["dimension_numbers"], given["precision"], given["preferred_element_type"], times
            )
        if equation.primitive.name == "while":
            raise ValueError("a loop with no known trip count")
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from _products(getattr(inner, "jaxpr", inner), times * trips)


def replay(found: list[Product]) -> Callable[[], Any]:
    """A program of these products alone, on operands of their own and all of them results: so that none is merged with
    another, moved out of a loop or cut to a part."""
    rng = np.random.default_rng(0)

    def drawn(side: jax.ShapeDtypeStruct, times: int) -> Array:
        return jnp.asarray(rng.standard_normal((times, *side.shape), np.float32), side.dtype)

    operands = [(drawn(product.left, product.times), drawn(product.right, product.times)) for product in found]

    def multiply(product: Product, pair: tuple[Array, Array]) -> Any:
        return jax.lax.dot_general(
            *pair,
            product.dimension_numbers,
            precision=product.precision,
            preferred_element_type=product.preferred_element_type,
        )

    def run(operands: list[tuple[Array, Array]]) -> list[Array]:
        return [
            multiply(product, (left[0], right[0]))
            if product.times == 1
            else jax.lax.map(partial(multiply, product), (left, right))
            for product, (left, right) in zip(found, operands, strict=True)
        ]

    return partial(jax.jit(run), operands)


def rows(rounds: int = 20, **shape: Any) -> list[Row]:
    work = workload(**{"batch_size": 8, "prefix": 64, "suffix": 64, **shape})
    step = work.step()
    state, batch, hyperparameters = work.arguments()
    found = products(step.train_step, state, batch, hyperparameters)
    times = measure({"step": training(step, work), "matmuls": replay(found)}, rounds)
    rate = sum(product.flops for product in found) / min(times.seconds["matmuls"]) / 1e9
    size = f"{sum(product.times for product in found)} products, {rate:.0f} GFLOP/s"
    return [
        Row(f"matrix products of the step alone ({size}), to the step", *times.ratio("matmuls", "step"), at_least=0.4)
    ]
