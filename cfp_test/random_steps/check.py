"""Runs one random step under several shardings and compares each with one device."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import lay_out
from cfp.api import run_passes
from cfp.context import DetailedSettings
from cfp.errors import CfpError, MemoryBudgetError
from cfp.passes import Analyzed, PlanOptions, analyze_step
from cfp.plan.execute import CompiledStep, load_or_lower
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.hlo import compile_right
from cfp.program.constrain import Constraints, constrain, partition_spec
from cfp.program.memory import in_memory
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import lower_step
from cfp.search.requests import constraints_of
from cfp_test.random_steps.compare import (
    MORE_NUDGES,
    NUDGES,
    Wrong,
    allowed_of,
    is_steady,
    nudged,
    rounding_of,
    wrong_leaves,
)
from cfp_test.random_steps.program import Built, Spec, build
from cfp_test.random_steps.ways import BUDGET, PLANNED, Sharding, Way, sharding_of
from cfp_test.support.checking import make_mesh, to_host

QUICK = DetailedSettings(per_kind=1, in_context=False, race=False)
# The outcome of a way.
RIGHT, WRONG, AGAIN, REFUSED = "right", "wrong", "again", "refused"
# Longer programs are tried in fewer ways.
SHORT_OPS = 150
# What XLA's CPU backend does not compile or run, with or without cfp, by its message.
UNSUPPORTED = ("UNIMPLEMENTED", "fft", "not supported on CPU")


@dataclass(frozen=True)
class Tried:
    """A way to shard a step, and how it did.

    Attributes:
        way: how the choice was made.
        outcome: "right", "wrong", "again" for constraints that the program had before,
            or "refused" where no plan fits a budget, or the CPU backend lacks an op.
        why: leaves that are wrong, or an error.
    """

    way: Way
    outcome: str
    why: str = ""


@dataclass(frozen=True)
class Checked:
    """A program, and how it did under all ways.

    Attributes:
        spec: the program.
        tried: one for each way; none where the program is of no use.
        kinds: of the ops in it.
        note: why the program is of no use, or "".
        seconds: that it took.
    """

    spec: Spec
    tried: Sequence[Tried] = ()
    kinds: tuple[str, ...] = ()
    note: str = ""
    seconds: float = 0.0

    @property
    def wrong(self) -> list[Tried]:
        """The ways under which it computes something else."""
        return [one for one in self.tried if one.outcome == WRONG]


@dataclass
class Subject:
    """A step on a mesh, traced, analysed, and computed on one device."""

    built: Built
    step: FlatStep
    analyzed: Analyzed
    leaves: list[Any] = field(repr=False)

    @classmethod
    def of(cls, spec: Spec) -> Subject:
        """Builds, traces and analyses a step."""
        return cls.of_built(build(spec), make_mesh(spec.mesh))

    @classmethod
    def of_built(cls, built: Built, mesh: Mesh) -> Subject:
        """Traces and analyses a step on a mesh."""
        step = flatten_step(built.fn, built.args, {}, donate_argnums=built.donated)
        analyzed = analyze_step(step, mesh)
        return cls(built, step, analyzed, list(step.flatten(built.args, {})))

    @property
    def analysis(self) -> Analysis:
        return self.analyzed.analysis

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.analyzed.mesh, Mesh)
        return self.analyzed.mesh

    @cached_property
    def _alone(self) -> Any:
        return jax.jit(self.step.flat_fn)

    def _run_alone(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """The step on one device."""
        with jax.default_device(jax.devices()[0]):
            # What is sharded by hand names the mesh: nothing else of it is sharded.
            by_hand = "shard_map" in self.built.kinds
            local = leaves if by_hand else [_on_one(leaf) for leaf in leaves]
            return [to_host(x) for x in jax.tree.leaves(self._alone(*local))]

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """The results on one device."""
        return self._run_alone(self.leaves)

    def allowed(self, nudges: int = NUDGES) -> list[float]:
        """The distance of each result that passes."""
        narrow = self.built.narrow
        near = [self._run_alone(nudged(self.leaves, i, narrow)) for i in range(nudges)]
        frame = self.analysis.frame
        before: list[np.ndarray | None] = [None] * len(self.expected)
        for argument, output in enumerate(frame.paired):
            if output is not None:
                before[output] = to_host(self.leaves[argument])
        return allowed_of(self.expected, rounding_of(self.expected, near), before)

    def compiled(
        self,
        arg_specs: Sequence[Any],
        output_specs: Sequence[Any],
        constraints: Constraints,
        executables: Path | None = None,
    ) -> CompiledStep:
        """Compiles the step as a plan's is compiled."""
        return load_or_lower(
            self.step,
            self.mesh,
            self.analysis.frame.program.fingerprint,
            arg_specs,
            output_specs,
            constraints,
            environment=BuildEnvironment(folder=executables),
        ).compile()

    def quickly_compiled(
        self,
        arg_specs: Sequence[Any],
        output_specs: Sequence[Any],
        constraints: Constraints,
        options: Mapping[str, str] | None = None,
    ) -> CompiledStep:
        """The same, without reading the step's program again.

        Args:
            arg_specs, output_specs, constraints: see `compiled`.
            options: of the compiler.
        """
        ins, outs = (
            tuple(
                NamedSharding(self.mesh, partition_spec(spec, len(aval.shape)))
                for spec, aval in zip(specs, avals, strict=True)
            )
            for specs, avals in (
                (arg_specs, self.step.avals),
                (output_specs, self.step.traced.jaxpr.out_avals),
            )
        )
        ins = in_memory(ins, self.step.memory_kinds)
        lowering = lower_step(self.step, ins, list(outs))
        constrain(lowering.module, self.analysis.frame.program, self.mesh, constraints)
        compiled, _ = compile_right(lowering.lowered, options or {})
        return CompiledStep(self.step, compiled, ins, outs, lowering.out_tree)

    def run(self, compiled: CompiledStep) -> list[Any]:
        """Runs a compiled step once, on arrays of its own."""
        placed = [
            jax.device_put(_host_copy(leaf), sharding)
            for leaf, sharding in zip(self.leaves, compiled.in_shardings, strict=True)
        ]
        return jax.tree.leaves(compiled.compiled(*placed))

    def differs(self, compiled: CompiledStep, allowed: Sequence[float]) -> list[Wrong]:
        """The results that a compiled step gets wrong."""
        names = self.analysis.frame.program.output_names
        found = [to_host(x) for x in self.run(compiled)]
        wrong = wrong_leaves(names, found, self.expected, allowed)
        if wrong:  # Of so few tries the largest may be far too small.
            allowed = self.allowed(MORE_NUDGES)
            wrong = wrong_leaves(names, found, self.expected, allowed)
        return wrong

    def decided(self, way: Way, sharding: Sharding | None = None) -> tuple[Any, ...]:
        """The shardings of arguments, of results, and the constraints of a way."""
        if way.source in (PLANNED, BUDGET):
            return self._planned(way)
        sharding = sharding or sharding_of(self.analysis, way)
        layout = lay_out(self.analysis.frame, sharding.choice)
        ins = tuple(layout.arg_spec(i) for i in range(len(self.step.avals)))
        constraints = constraints_of(self.analysis, sharding.choice, sharding.level)
        return ins, layout.output_specs(), constraints

    def _planned(self, way: Way) -> tuple[Any, ...]:
        budget = None
        if way.source == BUDGET:
            held = sum(leaf.nbytes for leaf in self.expected)
            held += sum(to_host(leaf).nbytes for leaf in self.leaves)
            budget = max(4096, held * (way.seed % 8 + 1) // 8)
        options = PlanOptions(memory_budget=budget, settings=QUICK)
        plan = run_passes(self.analyzed, options).plan
        return plan.arg_specs, plan.output_specs, plan.constraints


def _on_one(leaf: Any) -> Any:
    """A leaf on one device, in the kind of memory that it is in."""
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        kind = leaf.sharding.memory_kind
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        return jax.device_put(_host_copy(leaf), one)
    return leaf


def _host_copy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        return np.array(leaf)
    return leaf


def check(
    spec: Spec,
    ways: Sequence[Way],
    executables: Path | None = None,
    most: int | None = None,
) -> Checked:
    """Compares a step under several ways with one device.

    Args:
        spec: the step.
        ways: how to shard it.
        executables: where the first way's executable is kept, and looked for.
        most: of ways that differ no more are tried, and of long programs fewer; all, if
            not given.
    """
    started = time.perf_counter()
    subject = Subject.of(spec)
    kinds, tried = subject.built.kinds, list[Tried]()

    def checked(note: str = "") -> Checked:
        return Checked(spec, tried, kinds, note, time.perf_counter() - started)

    try:
        allowed = subject.allowed()
    except jax.errors.JaxRuntimeError as error:
        if "shard_map" not in kinds:
            raise
        # What is sharded by hand is on all devices there: XLA shards the rest as well.
        return checked(f"plain jax.jit does not run it: {error}"[:300])
    if not is_steady(allowed, subject.expected):
        return checked("rounding decides what it computes")
    if most is not None:
        ops = len(subject.analysis.frame.program.ops)
        most = max(3, min(most, most * SHORT_OPS // max(1, ops)))
    seen: set[str] = set()
    for number, way in enumerate(ways):
        if most is not None and sum(one.outcome != AGAIN for one in tried) >= most:
            break
        kept = executables if number == 0 else None
        tried.append(_try(subject, way, allowed, seen, kept))
    return checked()


def _try(
    subject: Subject,
    way: Way,
    allowed: Sequence[float],
    seen: set[str],
    executables: Path | None,
) -> Tried:
    try:
        decided = subject.decided(way)
    except MemoryBudgetError:
        return Tried(way, REFUSED, "nothing fits the budget")
    digest = repr(decided)
    if digest in seen:
        return Tried(way, AGAIN)
    seen.add(digest)
    try:
        if seen - {digest} and executables is None:
            compiled = subject.quickly_compiled(*decided)
        else:
            compiled = subject.compiled(*decided, executables)
        wrong = subject.differs(compiled, allowed)
    except (CfpError, jax.errors.JaxRuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        is_backend = isinstance(error, jax.errors.JaxRuntimeError) and any(
            word in text for word in UNSUPPORTED
        )
        return Tried(way, REFUSED if is_backend else WRONG, text[:600])
    if wrong:
        worst = max(wrong, key=lambda one: one.distance)
        why = f"{worst.name} is off by {worst.distance:.1e} > {worst.allowed:.1e}"
        return Tried(way, WRONG, f"{why}; {len(wrong)} of {len(allowed)} leaves")
    return Tried(way, RIGHT)


def twin_of(spec: Spec) -> Spec:
    """A step that computes something else, with the same types everywhere."""
    return replace(spec, twist=spec.twist * 1.5)


def as_row(seed: int, checked: Checked) -> dict[str, Any]:
    """A program's row in the JSON file."""
    return {
        "seed": seed,
        "spec": asdict(checked.spec),
        "kinds": list(checked.kinds),
        "note": checked.note,
        "seconds": round(checked.seconds, 2),
        "ways": [
            [one.way.source, one.way.seed, one.outcome, one.why]
            for one in checked.tried
        ],
    }


logging.getLogger("jax._src").setLevel(logging.ERROR)
