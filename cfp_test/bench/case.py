"""A training step on devices, ready for any competitor: at full size or small."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from cfp.analysis.strategies import Spec
from cfp.cli.session import Session, analyse
from cfp.errors import CfpError
from cfp.models.model import Scalar
from cfp.plan.describe import compose_plan
from cfp.plan.execute import load_or_lower
from cfp.profiling.builder import Built
from cfp.profiling.hlo import collectives_in, miscompile_reason
from cfp.profiling.inputs import InputKind
from cfp.profiling.record import ProfileKey
from cfp.race.programs import RaceOutcome
from cfp.search.guided import Candidate, Solution
from cfp.targets import model_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A compiled competitor.

    Attributes:
      built: takes and returns flat arrays: the state's leaves, then the batch's; the
        state's leaves, then the metrics.
      kinds: what there is to know of its inputs.
      feedback: which result takes the place of which input: the state.
    """

    built: Built
    kinds: tuple[InputKind, ...]
    feedback: tuple[tuple[int, int], ...]


def session_of(model: str, options: Mapping[str, Scalar], mesh: Mesh) -> Session:
    """A model's step, analysed on a mesh."""
    return analyse(model_target(model, dict(options)), mesh)


def ready(
    name: str,
    compiled: Callable[[Mapping[str, str]], Any],
    args: tuple[Any, Any],
    shardings: Sequence[NamedSharding],
    options: Mapping[str, str],
) -> Ready:
    """Compiles a step, and asks the compiler about it.

    Args:
      name: the competitor's.
      compiled: compiles with options, into something that takes flat arrays.
      args: abstract (state, batch).
      shardings: one for each leaf of `args`.
      options: compiler options.
    """
    key = ProfileKey((("what", "benchmark"), ("name", name)))
    started = time.perf_counter()
    made = compiled(options)
    text = made.as_text() or ""
    if (reason := miscompile_reason(text)) is not None:
        raise CfpError(reason)
    sizes: dict[str, int] = {}
    if (memory := made.memory_analysis()) is not None:
        sizes = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
        }
    built = Built(
        key=key,
        compiled=made,
        collectives=collectives_in(text),
        build_seconds=time.perf_counter() - started,
        **sizes,
    )
    leaves = jax.tree.leaves_with_path(args)
    kinds = tuple(
        InputKind(
            leaf.shape,
            str(leaf.dtype),
            full_spec(sharding, len(leaf.shape)),
            # Adam's second moment, of which it takes the root, is all above zero.
            signed=".nu" not in jax.tree_util.keystr(path),
        )
        for (path, leaf), sharding in zip(leaves, shardings, strict=True)
    )
    state = len(jax.tree.leaves(args[0]))
    return Ready(built=built, kinds=kinds, feedback=tuple((i, i) for i in range(state)))


def make_choice(
    session: Session, candidate: Candidate, options: Mapping[str, str]
) -> Ready:
    """Compiles a choice, as cfp compiles its own plans.

    Args:
      session: the step, analysed.
      candidate: the choice, and how much the compiler is constrained.
      options: compiler options, besides the candidate's.
    """
    analysis, mesh = session.analysis, session.mesh
    plan = compose_plan(
        analysis,
        mesh,
        {},
        RaceOutcome(winner=candidate, solution=Solution([candidate])),
    )
    bound = plan.bound_to(session.step, session.lowering.out_tree)

    def compiled(chosen: Mapping[str, str]) -> Flat:
        made = load_or_lower(
            session.step,
            mesh,
            plan.fingerprint,
            plan.arg_specs,
            plan.output_specs,
            plan.constraints,
            chosen,
        ).compile()
        return Flat(made.compiled)

    state, batch = session.target.args
    shardings = jax.tree.leaves(bound.in_shardings)
    every = {**options, **plan.options}
    return ready(candidate.name, compiled, (state, batch), shardings, every)


@dataclass(frozen=True, slots=True)
class Flat:
    """A compiled step as one that takes and returns flat arrays.

    Attributes:
      compiled: the step; it returns trees.
      tree: of the arguments that it takes; None if it takes flat arrays.
    """

    compiled: jax.stages.Compiled
    tree: Any = None

    def __call__(self, *leaves: jax.Array) -> list[jax.Array]:
        args = leaves if self.tree is None else jax.tree.unflatten(self.tree, leaves)
        return jax.tree.leaves(self.compiled(*args))

    def as_text(self) -> str | None:
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()

    @property
    def args_info(self) -> Any:
        return self.compiled.args_info

    @property
    def out_info(self) -> Any:
        return self.compiled.out_info

    @property
    def input_shardings(self) -> Any:
        return self.compiled.input_shardings

    @property
    def output_shardings(self) -> Any:
        return self.compiled.output_shardings


def full_spec(sharding: NamedSharding, rank: int) -> Spec:
    """A sharding as cfp writes it: the axes of every dim."""
    dims = [
        () if names is None else (names,) if isinstance(names, str) else tuple(names)
        for names in sharding.spec
    ]
    return tuple(dims) + ((),) * (rank - len(dims))
