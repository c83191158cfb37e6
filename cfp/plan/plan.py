"""Plans: shardings of a step, as plain data that can be saved, loaded and applied."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jax.tree_util import tree_structure, tree_unflatten
from pydantic import ConfigDict

from cfp.cost.described import DescribedMesh
from cfp.errors import NotBound, PlanMismatch, warn
from cfp.plan import file
from cfp.plan.execute import (
    Arguments,
    CompiledStep,
    LoweredStep,
    ReusableExecutable,
    check_devices,
    checked_shardings,
    device_difference,
    load_or_lower,
    lower_constrained,
    made,
    mesh_here,
    placed,
    start_devices,
)
from cfp.plan.file import Local
from cfp.plan.parts import (
    Figures,
    Site,
    check_arguments,
    check_binding,
    check_donated,
    static_arguments,
    type_text,
)
from cfp.printable import Count, Name, Number, Rung, Time, Words, clock_text, mesh_text
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.record import refused_option
from cfp.profiling.store import store_path
from cfp.program.calling import released, sequence
from cfp.program.constrain import Constraints
from cfp.program.jaxprs import trace_context_key
from cfp.program.memory import HOST
from cfp.program.partitioned import TARGET as PARTITIONED_TARGET
from cfp.program.read import Outline
from cfp.program.step import FlatStep, flatten_step, typed_as_returned
from cfp.program.trace import exported, planning_mesh
from cfp.race.programs import RaceRow
from cfp.settings import ConstraintLevel


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shardings for a step on a mesh, and the record of the choice.

    Attributes:
        fingerprint: digest of the program's structure, without most constants' values.
        mesh_axes: names and sizes of the mesh's axes that are larger than 1.
        arg_names, arg_types: paths and types of the argument leaves.
        arg_specs, output_specs: shardings of the argument leaves and the results.
        constraints: shardings inside the step; ops to rematerialize or replace.
        donated: for each argument leaf, True if the step may overwrite it.
        in_host: (argument leaf, result leaf) of state in host memory between steps.
        precision: precision of large products, as a user gave it; "" for the step's.
        products: with `precision`, {outcome: {parameter: number of 16-bit products}}.
        static: positions and keywords of static arguments; None if unknown.
        winner: name of the chosen candidate, such as "planned".
        predicted_ms, predicted_bytes: step time, and memory on each device, or None.
        measured_ms: step time measured on the whole program, or None.
        peak_bytes: memory of the compiled program on each device, or None.
        level: how much the compiler is constrained.
        segments: the choice for each segment.
        rows: the blocks, with the strategy of each.
        split: batches that stay whole because of a reshape, with the bytes to save.
        uneven: arguments that stay whole as axes do not divide a dim, with the size.
        pinned: positions of argument leaves whose shardings were given by pins.
        undonated: positions of state that is twice in memory, since it is not donated.
        weak: positions of donated leaves of weak types, which may be strong in a call.
        site_checks: parts whose kernel was wrong, or could not be compared.
        uncounted: long loops of unknown length, which predictions and FLOPs count once;
            and long branches, whose measured times are those of one branch.
        replicated_ops: ops that every device runs in full, such as unsharded loops and
            ops without a sharding rule. Small ones are left out.
        race: rows of the race's candidates, with times and notes.
        host_callbacks_skipped: host callbacks that measuring does not call.
        options: XLA compiler options of the step.
        environment: versions and devices that the plan was made with, by name.
        search: counts of the search (strategies measured, cached, failed), seconds of
            every pass, and other numbers by name.
        rung: source of the numbers: "estimated" or "measured".
        figures: numbers behind the choice, for a report; or None.
        outline: operations of the program, to locate a difference in another.
        sites: constrained values and operands by source line, for people.
        mesh, step, out_tree: devices, traced step and tree of its results; or None.
        traced_under: JAX's configuration at `bind`, or None.
        raced: the compiled winner of the race; not in files.
        tuned: folder of the race's tuning; not in files.
    """

    # pydantic checks files by these types, and refuses other fields.
    __pydantic_config__ = ConfigDict(extra="forbid")

    fingerprint: file.Fingerprint
    mesh_axes: file.MeshAxes
    arg_names: tuple[Name, ...]
    arg_types: file.Types
    arg_specs: file.ArgumentSpecs
    output_specs: tuple[file.SpecOnMesh, ...]
    constraints: file.Inside
    donated: file.Donated
    winner: Words
    predicted_ms: Time | None
    measured_ms: Time | None
    peak_bytes: Count | None
    level: ConstraintLevel = ConstraintLevel.EVERYTHING
    segments: file.Segments = ()
    rows: file.Blocks = ()
    split: tuple[Words, ...] = ()
    uneven: tuple[Words, ...] = ()
    pinned: file.Positions = ()
    undonated: file.Positions = ()
    weak: file.Positions = ()
    uncounted: tuple[Words, ...] = ()
    site_checks: tuple[Words, ...] = ()
    replicated_ops: tuple[Words, ...] = ()
    host_callbacks_skipped: tuple[Words, ...] = ()
    race: tuple[RaceRow, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[Words, Words] = field(default_factory=dict)
    search: Mapping[Words, Number] = field(default_factory=dict)
    in_host: file.Leaves = ()
    precision: file.Precision = ""
    products: Mapping[Words, Mapping[str, Count]] = field(default_factory=dict)
    static: file.Static | None = None
    rung: Rung = "measured"
    predicted_bytes: Count | None = None
    figures: Figures | None = None
    outline: Outline | None = field(default=None, compare=False, repr=False)
    sites: tuple[Site, ...] = field(default=(), compare=False)
    mesh: Local[Mesh] = field(default=None, compare=False, repr=False)
    step: Local[FlatStep] = field(default=None, compare=False, repr=False)
    out_tree: Local[Any] = field(default=None, compare=False, repr=False)
    traced_under: Local[Hashable] = field(default=None, compare=False, repr=False)
    raced: Local[ReusableExecutable] = field(default=None, compare=False, repr=False)
    tuned: Local[BuildEnvironment] = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        from cfp.view.text import short_text

        return short_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles leave out the step, devices and compiled programs, as files do.
        read = partial(Plan.from_json, allowed_options=[*self.options])
        return read, (json.loads(self.to_json()),)

    def __copy__(self) -> Plan:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """Copies fields deeply; the copy shares step, devices and executables."""
        rest = [one.name for one in fields(self) if one.name not in _HERE]
        copied = {name: deepcopy(getattr(self, name), memo) for name in rest}
        return replace(self, **copied)

    def _repr_html_(self) -> str:
        """Renders the plan for notebooks: a short form of :meth:`report`."""
        from cfp.view.text import page_html

        return page_html(self, is_small=True)

    @property
    def draws(self) -> bool:
        """True if the step draws random numbers by ops for one platform (Threefry)."""
        kinds = self.outline.kinds if self.outline else ()
        return any(kind.startswith("shift_left ui32") for kind in kinds)

    # -- shardings -----------------------------------------------------------

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """NamedShardings of positional arguments: a tuple with a pytree for each.

        Static and keyword-only arguments are left out.

        Raises:
            NotBound: a loaded plan is not bound.
            PlanMismatch: the devices here do not fit the plan.
        """
        leaves, _ = self._shardings()
        tree = self._bound().in_tree
        return released(tree_unflatten(tree, leaves), lambda _: None)[0]

    @property
    def out_shardings(self) -> Any:
        """NamedShardings of the results, a pytree; raises as `in_shardings`."""
        _, leaves = self._shardings()
        return released(tree_unflatten(self.out_tree, leaves), lambda _: None)

    def _shardings(self) -> tuple[Sequence[Any], Sequence[Any]]:
        specs = self.arg_specs, self.output_specs
        return checked_shardings(self._bound(), self._on_mesh(), *specs)

    def bind(
        self,
        fn: Callable[..., Any],
        *args: Any,
        mesh: Mesh | None = None,
        quiet: bool = True,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        donate_argnames: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> Plan:
        """Returns the plan bound to a step, which is traced with these arguments.

        While it traces, JAX reserves the devices' memory. Static and donated arguments
        are by default the plan's. Bound again with equal types and configuration of
        JAX, a function without static arguments and weakly typed state is not traced.

        Args:
            fn: the planned step.
            args, kwargs: arrays or ``jax.ShapeDtypeStruct`` s of the planned types.
            mesh: the devices; by default the plan's, ``jax.set_mesh``'s, or the first.
            quiet: has no effect; accepted as by :func:`cfp.plan`.
            static_argnums, static_argnames, donate_argnums, donate_argnames: as for
                :func:`cfp.plan`; must agree with the plan.

        Raises:
            OptionError: a keyword is no argument of the step.
            PlanMismatch: arguments, donations, devices or number of results differ from
                the plan's. The program is compared later, before the step is compiled.
        """
        check_binding(fn, kwargs)
        plan = self if mesh is None else self.on(mesh)
        if not sequence(static_argnums, int) and not sequence(static_argnames, str):
            known = static_arguments(self.static, self.step, args)
            static_argnums = [key for key in known if isinstance(key, int)]
            static_argnames = [key for key in known if isinstance(key, str)]
        step = flatten_step(
            fn,
            args,
            kwargs,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            precision=self.precision,
        )
        if self.step and self.step.parted(step.arg_names):
            self.step.flatten(args, kwargs)  # Raises, and names the object.
        if pair := step.parted(self.arg_names):
            raise PlanMismatch(
                f"The arguments do not fit the plan: {pair} are one object, and were "
                "two. Call with a copy of one: jax.tree.map(jnp.copy, ...)."
            )
        check_arguments(self.arg_names, self.arg_types, step)
        check_donated(self.donated, step)
        step = step.with_state_in_host(self.in_host).with_donated(self.donated)
        step = step.with_weak_types(step.weak.union(self.weak))
        plan = replace(plan, mesh=plan._on_mesh())
        start_devices(plan._on_mesh().local_devices)
        step, now = typed_as_returned(step), trace_context_key(plan.mesh)
        if not step.static and (step, now) == (self.step, self.traced_under):
            step = self.step or step  # It is traced already.
        out_tree = tree_structure(step.traced.out_info)
        plan = replace(plan, step=step, out_tree=out_tree, traced_under=now)
        plan._shardings()  # Raises if the results are others.
        return plan

    def as_in_file(self) -> Plan:
        """Returns the plan without step, devices and programs, as in a file."""
        return replace(self, **dict.fromkeys(_HERE))

    def bound_to(self, step: FlatStep, out_tree: Any) -> Plan:
        """Returns the plan with `step`, its types, static arguments and precision."""
        types = tuple(type_text(aval) for aval in step.avals)
        static = tuple(key for key, _ in step.static)
        step = step.with_donated(self.donated)
        donated = [i for i, given in enumerate(step.donated) if given]
        return replace(
            self,
            step=step,
            out_tree=out_tree,
            arg_types=types,
            static=static,
            weak=tuple(i for i in donated if step.avals[i].weak_type),
            in_host=step.in_host,
            precision=step.precision,
        )

    def _bound(self) -> FlatStep:
        if self.step is None:
            raise NotBound(
                "This plan has no step, as it was loaded from a file. Call "
                "plan = plan.bind(step, *args) first."
            )
        return self.step

    def _program(self) -> tuple[FlatStep, Mesh, str, Any, Any, Constraints]:
        specs = self.arg_specs, self.output_specs
        where = self._bound(), self._on_mesh()
        return *where, self.fingerprint, *specs, self.constraints

    def _on_mesh(self) -> Mesh:
        if self.mesh is None:
            return mesh_here(self.mesh_axes, self.environment, self.draws)
        return self.mesh

    # -- use -----------------------------------------------------------------

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs `fn`, the planned step, under this plan.

        The first call compiles or loads the step, without a mesh in the plan on the
        devices of ``jax.set_mesh`` or the first. Under another configuration of JAX or
        ``jax.set_mesh``, or with other functions or static values in the arguments, the
        step is traced again. Calls raise PlanMismatch if program or arguments differ.
        """
        compiled = deque[tuple[Hashable, CompiledStep]](maxlen=_MOST_TRACES)

        def step(*args: Any, **kwargs: Any) -> Any:
            changed, now = None, trace_context_key(self.mesh)
            for one in [one for under, one in compiled if under == now]:
                try:
                    look = one.look(args, kwargs)
                except PlanMismatch as error:
                    changed = changed or error
                else:
                    return one.run(look)
            try:
                one = self.compile(fn, *args, **kwargs)
            except PlanMismatch as error:
                raise changed or error from None
            compiled.appendleft((now, one))
            return one(*args, **kwargs)

        step.__name__ = getattr(fn, "__name__", "step")
        step.__doc__ = fn.__doc__
        return step

    def compile(self, fn: Callable[..., Any], *args: Any, **kw: Any) -> CompiledStep:
        """Compiles or loads the step; takes the same arguments as :meth:`bind`.

        Raises:
            PlanMismatch: the step or its arguments differ from the plan's.
        """
        return self.bind(fn, *args, **kw).compile_bound()

    def compile_bound(
        self, progress: Callable[[str], None] | None = None
    ) -> CompiledStep:
        """Compiles or loads the step of :meth:`bind` without tracing it again.

        Args:
            progress: called with a text if the step must be compiled. By default
                progress is shown as for :func:`cfp.plan`.

        Raises:
            PlanMismatch: the plan is not bound, or the step's program is another.
        """
        if progress is None:
            from cfp.view.console import Display

            with Display() as display:
                return self.compile_bound(display.tell)
        name = getattr(self._bound().fn, "__name__", "the step")
        text = f"compiling {name!r} under its plan"
        if round(seconds := self.search.get("compile_seconds", 0.0)):
            text += f", which took {clock_text(seconds)} when it was planned"
        return self.lower().compile(partial(progress, text))

    def lower(self, **how: Any) -> LoweredStep:
        """Lowers the bound step; `how` has keyword arguments of `load_or_lower`."""
        usual = {
            "raced": self.raced,
            "planned": (self.outline, self.environment),
            "environment": self.tuned or BuildEnvironment.beside(store_path(None)),
        }
        return load_or_lower(*self._program(), self.options, **{**usual, **how})

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``init_fn(*args, **kwargs)`` under jit, with the plan's shardings.

        Args:
            init_fn: makes an argument of the step (its state), or a tuple of several.

        Raises:
            PlanMismatch: the result, or a part of the tuple, has no argument's leaves.
        """
        return made(self._arguments(), init_fn, args, kwargs)

    def place(self, batch: Any, argument: str | None = None) -> Any:
        """Moves a batch to the plan's shardings.

        Args:
            batch: an argument of the step, as a pytree of arrays. With several
                processes, NumPy arrays are the parts for a process's own devices.
            argument: the argument's name; by default the first with the batch's
                structure, shapes and types.

        Raises:
            PlanMismatch: the batch fits no argument, or has other sizes or types.
        """
        return placed(self._arguments(), batch, argument)

    def _arguments(self) -> Arguments:
        leaves = self.arg_names, self.arg_types, self.arg_specs
        kinds = self.step.memory_kinds if self.step is not None else ()
        in_host = {argument for argument, _ in self.in_host}
        kinds = kinds or tuple(
            HOST if i in in_host else "" for i in range(len(self.arg_names))
        )
        return Arguments(*leaves, kinds, self._on_mesh())

    # -- files ---------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, and makes the folder if it is missing.

        Warns of compiler options that :meth:`load` accepts only by name. Pickles of a
        plan have the same contents.
        """
        if (refused := refused_option(self.options)) is not None:
            warn(
                f"The plan has {refused}: to load it again, name its options in "
                "Plan.load(path, allowed_options=[...])."
            )
        _write(path, self.to_json().encode())

    def report(self, path: str | Path) -> None:
        """Writes the plan as one HTML file that needs no network and no scripts."""
        from cfp.view.text import page_html

        _write(path, page_html(self).encode())

    def export(self, path: str | Path) -> None:
        """Writes the step under the plan for `jax.export.deserialize`.

        Running the file takes no cfp. The exported function takes the leaves of the
        arguments, and returns those of the results: see docs/reading-plans.md.

        Raises:
            PlanMismatch: the plan is not bound to a step, or the step's program differs
                from the plan's, or has host callbacks or custom_partitioning ops.
        """
        planned = self.outline, self.environment
        lowering, *_ = lower_constrained(*self._program(), planned)
        if lowering.calls_host or PARTITIONED_TARGET in lowering.text:
            raise PlanMismatch(
                "The step calls Python functions of this process, which an exported "
                "file cannot call. Use the shardings that cfp show plan.json --python "
                "prints."
            )
        _write(path, bytes(exported(self._bound(), lowering).serialize()))

    def to_json(self) -> str:
        """Returns the plan as JSON text."""
        return file.file_text(self, _HERE)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        mesh: Mesh | DescribedMesh | None = None,
        allowed_options: Collection[str] = (),
    ) -> Plan:
        """Reads a saved plan, and checks all of its fields.

        Args:
            mesh: the devices, or a described mesh, with the plan's axes. By default
                those of ``jax.set_mesh`` or the first, when the plan is used.
            allowed_options: compiler options to accept beside harmless ones. They may
                write files or change results: name them only for files that you trust.

        Raises:
            NoSuchFile: the file does not exist.
            PlanMismatch: the file is damaged or has other compiler options; or `mesh`
                does not fit the plan, as in :meth:`on`.
        """
        data = file.read_json(path)
        return cls.from_json(data, mesh=mesh, allowed_options=allowed_options)

    @classmethod
    def from_json(
        cls,
        data: Any,
        *,
        mesh: Mesh | DescribedMesh | None = None,
        allowed_options: Collection[str] = (),
    ) -> Plan:
        """Makes a plan of parsed JSON; arguments and errors as of :meth:`load`."""
        plan = file.read_plan(cls, data, _HERE, allowed_options)
        return plan.on(mesh) if mesh is not None else plan

    def on(self, mesh: Mesh | DescribedMesh, *, other_devices: bool = False) -> Plan:
        """Returns the plan for use on a mesh with the plan's axes.

        Args:
            mesh: the devices. A described mesh is only compared with the plan's; the
                result has no devices.
            other_devices: True allows other kinds of devices and versions of JAX.

        Raises:
            PlanMismatch: the mesh has other axes; or, without `other_devices`, devices
                of another kind or TPU slice, or JAX has another version.
        """
        if isinstance(mesh, DescribedMesh):
            devices, here = mesh, None
        else:
            auto = planning_mesh(mesh)
            devices = [*auto.devices.flat]
            here = mesh if "explicit_axes" in self.environment else auto
        axes = tuple((name, size) for name, size in mesh.shape.items() if size > 1)
        differ = device_difference(axes, self.environment, devices)
        if axes != self.mesh_axes and (other_devices or not differ):
            raise PlanMismatch(
                f"The plan's mesh is {mesh_text(self.mesh_axes) or 'one device'}, got "
                f"{mesh_text(axes) or 'one device'}. Pass the plan's mesh (in a "
                "command leave out --devices and --mesh), or plan again."
            )
        if not other_devices:
            check_devices(self.mesh_axes, self.environment, devices, self.draws)
        return replace(self, mesh=here, raced=None)


# Traces that a function of `Plan.apply` keeps. Guess.
_MOST_TRACES = 16
# Fields of a plan in one process alone: its step, devices and compiled programs.
_HERE = ("mesh", "step", "out_tree", "traced_under", "raced", "tuned")


def _write(path: str | Path, data: bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)
