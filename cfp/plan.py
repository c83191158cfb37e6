"""Plans: what was decided, as plain data that can be saved, read and applied."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_flatten, tree_unflatten

from cfp.analysis.strategies import Spec
from cfp.errors import PlanMismatch
from cfp.execute import CompiledStep, compile_step
from cfp.plan_parts import (
    PlanRow,
    RaceRow,
    constraints_from_json,
    constraints_to_json,
    spec_from_json,
    specs_like,
    type_text,
)
from cfp.plan_text import short_text
from cfp.program.graft import Constraints, partition_spec
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import planning_mesh

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shardings for a step on a mesh, and how they were found.

    Attributes:
        fingerprint: of the program that was planned.
        mesh_axes: names and sizes of the mesh's axes.
        arg_names, arg_types: paths and types of the argument leaves.
        arg_specs, output_specs: their shardings, and those of the results.
        constraints: shardings of values inside, by the program's op numbers.
        donated: which argument leaves the step may overwrite.
        static: positions and keywords of the arguments that are no arrays.
        winner: name of the finalist that won, such as "planned".
        predicted_ms: step time by the profiles, or None.
        measured_ms: step time measured on the whole program, or None.
        peak_bytes: memory that the compiled program needs on each device, or None.
        rows: the blocks.
        race: the finalists.
        options: XLA compiler options that the plan was measured with.
        environment: versions and devices that the plan was made for.
        search: counts of the search: strategies measured, answered from the cache,
            failed, and seconds of every pass.
    """

    fingerprint: str
    mesh_axes: tuple[tuple[str, int], ...]
    arg_names: tuple[str, ...]
    arg_types: tuple[str, ...]
    arg_specs: tuple[Spec, ...]
    output_specs: tuple[Spec, ...]
    constraints: Constraints
    donated: tuple[bool, ...]
    winner: str
    predicted_ms: float | None
    measured_ms: float | None
    peak_bytes: int | None
    rows: tuple[PlanRow, ...] = ()
    race: tuple[RaceRow, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    search: Mapping[str, float] = field(default_factory=dict)
    static: tuple[int | str, ...] | None = None
    mesh: Mesh | None = field(default=None, compare=False, repr=False)
    step: FlatStep | None = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return short_text(self)

    # -- shardings -----------------------------------------------------------

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """NamedShardings of the arguments: a tuple of pytrees, one per argument.

        Raises:
            PlanMismatch: the plan was loaded and has not seen the step's arguments;
                see :meth:`bind`.
        """
        step = self._bound()
        leaves = [
            NamedSharding(self._on_mesh(), partition_spec(spec, len(aval.shape)))
            for spec, aval in zip(self.arg_specs, step.avals, strict=True)
        ]
        args, _ = tree_unflatten(step.in_tree, leaves)
        return args

    @property
    def out_shardings(self) -> Any:
        """NamedShardings of the results: a pytree like the results."""
        self._bound()
        mesh = self._on_mesh()
        leaves = [
            NamedSharding(mesh, partition_spec(spec)) for spec in self.output_specs
        ]
        return tree_unflatten(self.out_tree, leaves)

    def bind(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
        """The plan with the pytrees of a step's arguments, as a loaded plan needs them.

        Args:
            fn: the step that was planned.
            args, kwargs: arrays or ``jax.ShapeDtypeStruct`` s like those planned for.

        Raises:
            PlanMismatch: the arguments are not those of the plan.
        """
        static = _static_arguments(self, args)
        step = flatten_step(
            fn,
            args,
            kwargs,
            static_argnums=[key for key in static if isinstance(key, int)],
            static_argnames=[key for key in static if isinstance(key, str)],
        )
        self._check_arguments(step)
        step = replace(step, donated=self.donated)
        out_shape = jax.eval_shape(step.flat_fn, *step.avals)
        return replace(
            self, step=step, out_tree=jax.tree_util.tree_structure(out_shape)
        )

    def bound_to(self, step: FlatStep, out_tree: Any) -> Plan:
        """The plan with the step that it was made for.

        Types are told as the step shows them: a PRNG key is a key, and not the
        integers that it is in the program.
        """
        types = tuple(type_text(aval) for aval in step.avals)
        static = tuple(key for key, _ in step.static)
        return replace(
            self, step=step, out_tree=out_tree, arg_types=types, static=static
        )

    def _bound(self) -> FlatStep:
        if self.step is None:
            raise PlanMismatch(
                "This plan was loaded from a file, which knows its arguments by path "
                "but not their pytrees. Call plan = plan.bind(step, *args) first."
            )
        return self.step

    def _on_mesh(self) -> Mesh:
        if self.mesh is None:
            raise PlanMismatch(
                "This plan was loaded without a mesh. Load it with "
                "Plan.load(path, mesh=mesh)."
            )
        return self.mesh

    def _check_arguments(self, step: FlatStep) -> None:
        found = {
            name: type_text(aval)
            for name, aval in zip(step.arg_names, step.avals, strict=True)
        }
        planned = dict(zip(self.arg_names, self.arg_types, strict=True))
        if found == planned and tuple(step.arg_names) == self.arg_names:
            return
        lines = []
        for name in sorted(planned.keys() | found.keys()):
            have, want = found.get(name, "nothing"), planned.get(name, "nothing")
            if have != want:
                lines.append(f"  {name}: planned for {want}, got {have}")
        more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise PlanMismatch(
            "The arguments do not fit the plan:\n"
            + "\n".join(lines[:5])
            + more
            + "\nPass the arguments that were planned for, or plan again."
        )

    # -- use -----------------------------------------------------------------

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The step under this plan: compiled at the first call.

        Args:
            fn: the step that was planned.

        Returns:
            A function with the step's arguments and results.
        """
        compiled: list[CompiledStep] = []

        def step(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(self.compile(fn, *args, **kwargs))
            return compiled[0](*args, **kwargs)

        step.__name__ = getattr(fn, "__name__", "step")
        step.__doc__ = fn.__doc__
        return step

    def compile(
        self, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> CompiledStep:
        """Compiles the step for these arguments (arrays or shapes).

        Raises:
            PlanMismatch: the step or its arguments are not those of the plan.
        """
        bound = self.bind(fn, *args, **kwargs)
        assert bound.step is not None
        return compile_step(
            bound.step,
            bound._on_mesh(),
            self.fingerprint,
            self.arg_specs,
            self.output_specs,
            self.constraints,
            self.options,
        )

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an initialisation so that its result is made in the plan's shardings.

        Args:
            init_fn: makes an argument of the step (its state), or several of them in
                a tuple.
            args, kwargs: its arguments.

        Raises:
            PlanMismatch: the result does not fit any argument of the plan.
        """
        shape = jax.eval_shape(init_fn, *args, **kwargs)
        leaves, tree = tree_flatten(shape)
        specs = specs_like(shape, self.arg_names, self.arg_types, self.arg_specs)
        mesh = self._on_mesh()
        shardings = [
            NamedSharding(mesh, partition_spec(spec, len(leaf.shape)))
            for spec, leaf in zip(specs, leaves, strict=True)
        ]
        jitted = jax.jit(init_fn, out_shardings=tree_unflatten(tree, shardings))
        return jitted(*args, **kwargs)

    # -- files ---------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        """The plan as JSON text."""
        data = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "mesh_axes": self.mesh_axes,
            "arguments": [
                {"path": name, "type": kind, "spec": spec, "donated": donated}
                for name, kind, spec, donated in zip(
                    self.arg_names,
                    self.arg_types,
                    self.arg_specs,
                    self.donated,
                    strict=True,
                )
            ],
            "output_specs": self.output_specs,
            "constraints": constraints_to_json(self.constraints),
            "recompute": [asdict(one) for one in self.constraints.recompute],
            "winner": self.winner,
            "predicted_ms": self.predicted_ms,
            "measured_ms": self.measured_ms,
            "peak_bytes": self.peak_bytes,
            "rows": [asdict(row) for row in self.rows],
            "race": [asdict(row) for row in self.race],
            "options": dict(self.options),
            "environment": dict(self.environment),
            "search": dict(self.search),
            "static": self.static,
        }
        return json.dumps(data, indent=1)

    @classmethod
    def load(cls, path: str | Path, *, mesh: Mesh | None = None) -> Plan:
        """Reads a saved plan.

        Args:
            path: the file.
            mesh: the devices to run on; its axes must be those of the plan.

        Raises:
            PlanMismatch: the file is no plan, or is for another mesh.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanMismatch(f"Cannot read a plan from {path}: {error}") from error
        return cls.from_json(data, mesh=mesh)

    @classmethod
    def from_json(cls, data: Any, *, mesh: Mesh | None = None) -> Plan:
        """A plan from parsed JSON; see :meth:`load`."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanMismatch(
                f"Expected a plan of format {FORMAT}; this file is something else, or "
                "was written by another version of cfp. Plan again."
            )
        try:
            arguments = data["arguments"]
            plan = cls(
                fingerprint=data["fingerprint"],
                mesh_axes=tuple((name, size) for name, size in data["mesh_axes"]),
                arg_names=tuple(a["path"] for a in arguments),
                arg_types=tuple(a["type"] for a in arguments),
                arg_specs=tuple(spec_from_json(a["spec"]) for a in arguments),
                donated=tuple(bool(a["donated"]) for a in arguments),
                output_specs=tuple(spec_from_json(s) for s in data["output_specs"]),
                constraints=constraints_from_json(
                    data["constraints"], data["recompute"]
                ),
                winner=data["winner"],
                predicted_ms=data["predicted_ms"],
                measured_ms=data["measured_ms"],
                peak_bytes=data["peak_bytes"],
                rows=tuple(PlanRow(**row) for row in data["rows"]),
                race=tuple(
                    RaceRow(**{**row, "samples_ms": tuple(row["samples_ms"])})
                    for row in data["race"]
                ),
                options=data["options"],
                environment=data["environment"],
                search=data["search"],
                static=None if data["static"] is None else tuple(data["static"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanMismatch(
                f"The file is a damaged plan ({type(error).__name__}: {error}). "
                "Plan again."
            ) from error
        return plan.on(mesh) if mesh is not None else plan

    def on(self, mesh: Mesh) -> Plan:
        """The plan on a mesh with the axes it was made for.

        Raises:
            PlanMismatch: the mesh has other axes.
        """
        mesh = planning_mesh(mesh)
        axes = tuple((name, size) for name, size in mesh.shape.items() if size > 1)
        if axes != self.mesh_axes:
            raise PlanMismatch(
                f"The plan is for a mesh {dict(self.mesh_axes)}, got {dict(axes)}. "
                "Make that mesh, or plan again for this one."
            )
        return replace(self, mesh=mesh)


def _static_arguments(plan: Plan, args: Sequence[Any]) -> tuple[int | str, ...]:
    """Static arguments are known from the step that the plan was made with."""
    if plan.static is not None:
        return plan.static
    if plan.step is None:
        return tuple(i for i, arg in enumerate(args) if not _is_array_tree(arg))
    return tuple(key for key, _ in plan.step.static)


def _is_array_tree(arg: Any) -> bool:
    kinds = (jax.Array, jax.ShapeDtypeStruct, int, float, complex, bool)
    return all(
        isinstance(leaf, kinds) or hasattr(leaf, "__array__")
        for leaf in jax.tree_util.tree_leaves(arg)
    )
