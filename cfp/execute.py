"""Runs a step under a plan's shardings, or plainly on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_leaves, tree_unflatten

from cfp.analysis.strategies import Spec
from cfp.errors import PlanMismatch
from cfp.profiling.overwritten import compile_right
from cfp.program.graft import Constraints, constrain, partition_spec
from cfp.program.step import FlatStep, abstract
from cfp.program.trace import lower_step, read_lowering
from cfp.program.widen import widened


@dataclass(frozen=True)
class CompiledStep:
    """A step, compiled under a plan, that is called like the function it came from.

    Attributes:
        step: the user's function and the structure of its arguments.
        compiled: the compiled program over flat arguments.
        in_shardings, out_shardings: one for each leaf.
        out_tree: the structure of the results.
        narrow: of a step that was to compute in float32, what still computes in less.
    """

    step: FlatStep
    compiled: jax.stages.Compiled
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    out_tree: Any
    narrow: tuple[str, ...] = ()

    def __repr__(self) -> str:
        name = getattr(self.step.fn, "__name__", "a step")
        return (
            f"CompiledStep of {name}: {len(self.in_shardings)} arguments, "
            f"{len(self.out_shardings)} results"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; arguments go to their shardings where they are elsewhere."""
        leaves = self.step.flatten(args, kwargs)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise PlanMismatch(
                "A planned step is compiled already, and cannot be called inside "
                "jax.jit, jax.grad or the like. Plan the outer function instead."
            )
        for name, leaf in zip(self.step.arg_names, leaves, strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise PlanMismatch(
                    f"The array of argument {name!r} is gone: a step that it was "
                    "donated to has used its memory. Pass the state that the step "
                    "returned, or plan without donating it."
                )
        placed = [
            leaf
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding
            else _place(leaf, sharding, aval)
            for leaf, sharding, aval in zip(
                self._apart(leaves), self.in_shardings, self.step.avals, strict=True
            )
        ]
        return self.compiled(*placed)

    def _apart(self, leaves: list[Any]) -> list[Any]:
        """Leaves of which none is a second time what the step may overwrite.

        The weights that a moving average begins with are such. Put onto devices each by
        itself they still share memory, and XLA refuses to give that away twice, or ends
        the process (on virtual CPU devices, jaxlib 0.10.2).
        """
        if not any(self.step.donated) or len({*map(id, leaves)}) == len(leaves):
            return leaves
        first: dict[int, int] = {}
        found = []
        for position, leaf in enumerate(leaves):
            other = first.setdefault(id(leaf), position)
            given = self.step.donated[position] or self.step.donated[other]
            again = isinstance(leaf, jax.Array) and other != position and given
            found.append(jnp.copy(leaf) if again else leaf)
        return found

    def arg_shardings(self) -> tuple[Any, ...]:
        """The arguments' shardings as a pytree like the dynamic arguments."""
        args, _ = tree_unflatten(self.step.in_tree, list(self.in_shardings))
        return args

    def result_shardings(self) -> Any:
        """The results' shardings as a pytree like the results."""
        return tree_unflatten(self.out_tree, list(self.out_shardings))

    @cached_property
    def hlo(self) -> str:
        """The optimised program as text."""
        return self.compiled.as_text() or ""


def _place(leaf: Any, sharding: NamedSharding, aval: jax.ShapeDtypeStruct) -> jax.Array:
    if np.shape(leaf) != aval.shape:
        raise PlanMismatch(
            f"The plan is for an argument of shape {aval.shape}, got {np.shape(leaf)}. "
            "Plan again for the new shapes."
        )
    dtype = abstract(leaf, "of the step").dtype
    if dtype != aval.dtype:
        raise PlanMismatch(
            f"The plan is for an argument of type {aval.dtype}, got {dtype}. Pass what "
            "was planned for, or plan again."
        )
    if not isinstance(leaf, jax.Array):
        leaf = jnp.asarray(leaf, aval.dtype)
    return jax.device_put(leaf, sharding)


def compile_step(
    step: FlatStep,
    mesh: Mesh,
    fingerprint: str | None,
    arg_specs: Sequence[Spec],
    output_specs: Sequence[Spec],
    constraints: Constraints,
    options: Mapping[str, str] | None = None,
    *,
    wide: bool = False,
) -> CompiledStep:
    """Lowers a step under shardings, inserts the constraints, and compiles it.

    Args:
        step: the step and its arguments.
        mesh: the devices.
        fingerprint: of the program that the constraints were made for; None where
            there are none.
        arg_specs, output_specs: a sharding for each leaf.
        constraints: what the partitioner is told about values inside.
        options: XLA compiler options.
        wide: compute in float32 what the step computes in less, with precise matrix
            products; arguments and results are float32, too.

    Raises:
        PlanMismatch: the step's program is not the one that was planned.
        CompilerError: the compiler made another program of it.
    """
    ins = tuple(
        NamedSharding(mesh, partition_spec(spec, len(aval.shape)))
        for spec, aval in zip(arg_specs, step.avals, strict=True)
    )
    ranks = [len(aval.shape) for aval in _results(step)]
    if len(ranks) != len(output_specs):
        raise PlanMismatch(
            f"The plan is for {len(output_specs)} results, the step has {len(ranks)}."
        )
    outs = tuple(
        NamedSharding(mesh, partition_spec(spec, rank))
        for spec, rank in zip(output_specs, ranks, strict=True)
    )
    lowering = lower_step(step, ins, list(outs))
    program = read_lowering(step, lowering)
    if fingerprint is not None and program.fingerprint != fingerprint:
        raise PlanMismatch(
            "The step's program is not the one that was planned: the function, the "
            "shapes or dtypes of its arguments, or the versions of jax and jaxlib "
            "have changed. Plan again."
        )
    constrain(lowering.module, program, mesh, constraints)
    narrow: tuple[str, ...] = ()
    if wide:
        found = widened(step, lowering, ins, outs)
        step, lowering, narrow = found.step, found.lowering, found.narrow
    compiled, _ = compile_right(lowering.lowered, options or {})
    return CompiledStep(step, compiled, ins, outs, lowering.out_tree, narrow)


def _results(step: FlatStep) -> list[Any]:
    return tree_leaves(jax.eval_shape(step.flat_fn, *step.avals))


def run_on_one_device(fn: Callable[..., Any], args: Sequence[Any], device: Any) -> Any:
    """Runs a step, plainly jitted, on one device."""
    local = jax.device_put(tuple(args), device)
    return jax.jit(fn)(*local)
