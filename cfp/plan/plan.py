"""Plans: what was decided, as plain data that can be saved, read and applied."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from cfp.analysis.strategies import Spec
from cfp.devices.described import slice_of
from cfp.errors import PlanMismatch
from cfp.plan.figures import Figures
from cfp.plan.file import plan_data, plan_fields, read_json
from cfp.plan.parts import (
    BINDS,
    PlanRow,
    PlanSegment,
    Site,
    check_arguments,
    check_binding,
    check_donated,
    static_arguments,
    type_text,
)
from cfp.plan.placing import Arguments, devices_here, made, mesh_here, placed
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.compiler_options import refused_option
from cfp.profiling.store import store_path
from cfp.program.calling import released, sequence
from cfp.program.constrain import Constraints
from cfp.program.meaning import trace_context_key
from cfp.program.memory import HOST, in_memory
from cfp.program.outline import Outline
from cfp.program.part import shardings
from cfp.program.step import FlatStep, flatten_step, typed_as_returned
from cfp.program.trace import check_mesh
from cfp.race.programs import RaceRow
from cfp.runtime.executables import ReusableExecutable
from cfp.runtime.execute import (
    CompiledStep,
    LoweredStep,
    compiling_text,
    export_planned,
    load_early,
    load_or_lower,
    start_devices,
    told_while,
)
from cfp.settings import ConstraintLevel


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shardings for a step on a mesh, and how they were found.

    Attributes:
        fingerprint: of the planned program's structure, without values of constants.
        mesh_axes: names and sizes of the mesh's axes.
        arg_names, arg_types: paths and types of the argument leaves.
        arg_specs, output_specs: their shardings, and those of the results.
        constraints: shardings of values inside, by the program's op numbers.
        donated: which argument leaves the step may overwrite.
        in_host: argument leaves that are in the memory of the host between steps, each
            with the result leaf that is its new value: state that a plan puts there
            where nothing else fits.
        precision: "fp8" if large products are computed in FP8.
        products: numbers of 16-bit products by outcome and parameter, if FP8 was asked
            for.
        static: positions and keywords of the arguments that are no arrays.
        winner: name of the candidate that won, such as "planned".
        predicted_ms, predicted_bytes: step time and memory, or None.
        measured_ms: step time measured on the whole program, or None.
        peak_bytes: memory that the compiled program needs on each device, or None.
        level: how much the compiler is constrained.
        segments: the choice for each segment.
        rows: the blocks, with the strategy of each.
        uneven: arguments that stay whole because no axis divides them, with the size.
        undonated: argument leaves that are there twice, since they are not donated.
        weak: donated argument leaves that are weakly typed; a checkpoint restores them
            as arrays that are not, which are taken as these.
        site_checks: replaced parts that were refused, or not compared with the step.
        uncounted: loops that predictions and FLOPs count as one iteration, since the
            program does not say how many there are; and branches, of which times are
            those of one.
        replicated_ops: what every device runs in full: loops, and ops without a
            sharding rule.
        host_callbacks_skipped: functions of the host that are not called while it is
            measured.
        options: XLA compiler options that the plan was measured with.
        environment: versions and devices that the plan was made for.
        search: counts of the search: strategies measured, answered from the cache,
            failed, and seconds of every pass; how many sharding constraints of the
            step's own were left out; and entries that `verify` leaves.
        rung: what its numbers are from: "estimated" or "measured".
        figures: the numbers that it was chosen by, for a report; None if there are
            none.
        outline: the operations of the planned program, to say where another differs.
        sites: constrained values by source line, for people.
        traced_under: the configuration of JAX in which `bind` traced the step; None of
            a plan that came by its step otherwise.
        raced: the program that won, as the race compiled it; files have none.
        tuned: where the race kept what it tuned; files have none, and use what is kept
            in the user's cache directory.
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
    level: ConstraintLevel = ConstraintLevel.EVERYTHING
    segments: tuple[PlanSegment, ...] = ()
    rows: tuple[PlanRow, ...] = ()
    uneven: tuple[str, ...] = ()
    undonated: tuple[int, ...] = ()
    weak: tuple[int, ...] = ()
    uncounted: tuple[str, ...] = ()
    site_checks: tuple[str, ...] = ()
    replicated_ops: tuple[str, ...] = ()
    host_callbacks_skipped: tuple[str, ...] = ()
    race: tuple[RaceRow, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    search: Mapping[str, float] = field(default_factory=dict)
    in_host: tuple[tuple[int, int], ...] = ()
    precision: str = ""
    products: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    static: tuple[int | str, ...] | None = None
    rung: str = "measured"
    predicted_bytes: int | None = None
    figures: Figures | None = None
    outline: Outline | None = field(default=None, compare=False, repr=False)
    sites: tuple[Site, ...] = field(default=(), compare=False)
    mesh: Mesh | None = field(default=None, compare=False, repr=False)
    step: FlatStep | None = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)
    traced_under: Hashable = field(default=None, compare=False, repr=False)
    raced: ReusableExecutable | None = field(default=None, compare=False, repr=False)
    tuned: BuildEnvironment | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        from cfp.view.text import short_text

        return short_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Steps, devices and compiled programs stay in the process that has them.
        return partial(_loaded, allowed_options=[*self.options]), (self.to_json(),)

    def __copy__(self) -> Plan:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """A copy with the same step, devices and executables."""
        rest = [one.name for one in fields(self) if one.name not in _HERE]
        copied = {name: deepcopy(getattr(self, name), memo) for name in rest}
        return replace(self, **copied)

    def _repr_html_(self) -> str:
        """Shows a notebook the small form of the page of ``cfp show --html``."""
        from cfp.view.page import small_html

        return small_html(self)

    # -- shardings -----------------------------------------------------------

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """NamedShardings of the arguments: a tuple of pytrees, one per argument.

        Raises:
            PlanMismatch: the plan was loaded and has not seen the step's arguments;
                see :meth:`bind`.
        """
        step = self._bound()
        leaves = shardings(self._on_mesh(), self.arg_specs, step.avals)
        leaves = in_memory(leaves, step.memory_kinds)
        return released(tree_unflatten(step.in_tree, leaves)[0], lambda _: None)

    @property
    def out_shardings(self) -> Any:
        """NamedShardings of the results: a pytree like the results."""
        step, mesh = self._bound(), self._on_mesh()
        results = tree_leaves(step.traced.out_info)
        leaves = shardings(mesh, self.output_specs, results)
        leaves = in_memory(leaves, step.result_memory_kinds)
        return released(tree_unflatten(self.out_tree, leaves), lambda _: None)

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
        """The plan with the pytrees of a step's arguments, as a loaded plan needs them.

        Takes what :func:`cfp.plan` takes, so that either may stand in a program. Which
        arguments are static, and which are donated, the plan knows. The step is traced,
        and :meth:`apply` of the same function does not trace it again, unless its state
        is weakly typed. Meanwhile the plan's devices, if they are there, take their
        memory.

        Args:
            fn: the step that was planned.
            args, kwargs: arrays or ``jax.ShapeDtypeStruct`` s like those planned for.
            mesh: the devices; by default the plan's, or the first of those that are
                there, if they are those that it is for.
            quiet: of no effect: nothing is shown.
            static_argnums, static_argnames, donate_argnums, donate_argnames: as the
                plan was made; refused where they differ.

        Raises:
            PlanMismatch: the arguments are not those of the plan.
        """
        check_binding(fn, kwargs)
        plan = self if mesh is None else self.on(mesh)
        calls = {
            "static_argnums": static_argnums,
            "static_argnames": static_argnames,
            "donate_argnums": donate_argnums,
            "donate_argnames": donate_argnames,
        }
        step = plan._flat(fn, args, kwargs, calls)
        start_devices(devices := plan._devices())
        if plan.mesh is None and devices:
            plan = replace(plan, mesh=plan._on_mesh())
        step = typed_as_returned(step)
        out_tree, now = tree_structure(step.traced.out_info), trace_context_key()
        return replace(plan, step=step, out_tree=out_tree, traced_under=now)

    def _flat(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        calls: Mapping[str, Any],
    ) -> FlatStep:
        """A call of the step, which is not traced yet; see `bind`."""
        kinds = {"static_argnums": int, "static_argnames": str}
        if not any(sequence(calls.get(name, ()), of) for name, of in kinds.items()):
            known = static_arguments(self.static, self.step, args)
            calls = {**calls} | {
                name: [key for key in known if isinstance(key, of)]
                for name, of in kinds.items()
            }
        step = flatten_step(fn, args, kwargs, **calls, precision=self.precision)
        check_arguments(self.arg_names, self.arg_types, step)
        check_donated(self.donated, step)
        step = step.with_state_in_host(self.in_host).with_donated(self.donated)
        return step.with_weak_types(self.weak)

    def as_in_file(self) -> Plan:
        """The plan as a file would have it: without step, devices and programs."""
        return replace(self, **dict.fromkeys(_HERE))

    def bound_to(self, step: FlatStep, out_tree: Any) -> Plan:
        """The plan with the step that it was made for.

        Types are named as the step shows them: a PRNG key is a key, and not the
        integers that it is in the program.
        """
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
            raise PlanMismatch(
                "This plan was loaded from a file, which knows its arguments by path "
                "but not their pytrees. Call plan = plan.bind(step, *args) first."
            )
        return self.step

    def _on_mesh(self) -> Mesh:
        if self.mesh is None:
            return mesh_here(self.mesh_axes, self.environment)
        return self.mesh

    def _devices(self) -> Sequence[Any]:
        """Lists the devices that the step would run on, if they are there."""
        if self.mesh is None:
            return devices_here(self.mesh_axes, self.environment)
        return self.mesh.local_devices

    # -- use -----------------------------------------------------------------

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The step under this plan: compiled at the first call.

        A plan that was loaded without a mesh takes the first of the devices. One that
        is bound to the same function begins at once, in a thread, to load what an
        earlier process compiled; what goes wrong there the call raises.

        Under a configuration of JAX that changes what the step means it is traced
        again, and refused if another program comes of it.

        Args:
            fn: the step that was planned.

        Returns:
            A function with the step's arguments and results.
        """
        compiled: dict[Any, CompiledStep] = {}
        is_bound = self.step is not None and self.step.fn is fn
        key = self.traced_under if is_bound else None
        early = None if key is None else load_early(self._load_or_lower, key)

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal early
            now = trace_context_key()
            if now not in compiled:
                if now == key and self._takes(args, kwargs):
                    loading, early = early, None
                    lowered = loading.result() if loading is not None else None
                    compiled[now] = self._compiled(lowered or self._load_or_lower())
                else:
                    compiled[now] = self.compile(fn, *args, **kwargs)
                    early = None
            return compiled[now](*args, **kwargs)

        step.__name__ = getattr(fn, "__name__", "step")
        step.__doc__ = fn.__doc__
        return step

    def _takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a call is one of the step as `bind` traced it."""
        step = self._bound()
        if not kwargs.keys().isdisjoint(BINDS):
            return False  # Names of arguments of `bind`, which reads them.
        check_binding(step.fn, kwargs)
        return typed_as_returned(self._flat(step.fn, args, kwargs, {})) == step

    def compile(self, fn: Callable[..., Any], *args: Any, **kw: Any) -> CompiledStep:
        """Compiles the step for these arguments (arrays or shapes).

        Raises:
            PlanMismatch: the step or its arguments are not those of the plan.
        """
        return self.bind(fn, *args, **kw).compile_bound()

    def compile_bound(
        self, progress: Callable[[str], None] | None = None
    ) -> CompiledStep:
        """Compiles the step that the plan was made for, or bound to, as it was traced.

        Args:
            progress: called with what is compiled, and how long it took before, where
                no executable is kept. By default lines on standard error say so, if it
                takes more than some seconds.

        Raises:
            PlanMismatch: the plan was loaded, and is not bound to a step.
        """
        return self._compiled(self._load_or_lower(), progress)

    def _load_or_lower(self) -> LoweredStep:
        return load_or_lower(
            self._bound(),
            self._on_mesh(),
            self.fingerprint,
            self.arg_specs,
            self.output_specs,
            self.constraints,
            self.options,
            raced=self.raced,
            planned=(self.outline, self.environment),
            environment=self.tuned or BuildEnvironment.beside(store_path(None)),
        )

    def _compiled(
        self, lowered: LoweredStep, progress: Callable[[str], None] | None = None
    ) -> CompiledStep:
        name = getattr(self._bound().fn, "__name__", "the step")
        seconds = self.search.get("compile_seconds")
        text = compiling_text(name, seconds)
        return lowered.compile(partial(told_while, text, progress))

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an initialisation so that its result is made in the plan's shardings.

        Args:
            init_fn: makes an argument of the step (its state), or several of them in
                a tuple.
            args, kwargs: its arguments.

        Raises:
            PlanMismatch: the result does not fit any argument of the plan.
        """
        return made(self._arguments(), init_fn, args, kwargs)

    def place(self, batch: Any, argument: str | None = None) -> Any:
        """Takes a batch from the host to the plan's shardings.

        Args:
            batch: a pytree of NumPy arrays, as an argument of the step has it. With
                several processes each passes the part that its devices are to have.
            argument: the argument's name; by default the first that looks like it.

        Raises:
            PlanMismatch: it looks like no argument, or has other sizes.
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
        """Writes the plan as JSON; makes the folder, if it is missing.

        Pickles of a plan have the same, and come without a step and devices, too.
        Warns of compiler options that :meth:`load` will not follow by itself.
        """
        if (refused := refused_option(self.options)) is not None:
            warnings.warn(
                f"The plan has {refused}: to load it again, name its options in "
                "Plan.load(path, allowed_options=[...]).",
                stacklevel=2,
            )
        _write(path, self.to_json())

    def report(self, path: str | Path) -> None:
        """Writes the plan as one page of HTML that needs no network and no scripts.

        Makes the folder, if it is missing.
        """
        from cfp.view.page import page_html

        _write(path, page_html(self))

    def export(self, path: str | Path) -> None:
        """Writes the step under the plan as `jax.export` serialises it.

        What `jax.export.deserialize` reads takes and returns the leaves of arguments
        and results, and needs no cfp: see docs/reading-plans.md. Makes the folder, if
        it is missing.

        Raises:
            PlanMismatch: the plan is not bound to a step, or the step calls functions
                of this process.
        """
        data = export_planned(
            self._bound(),
            self._on_mesh(),
            self.fingerprint,
            self.arg_specs,
            self.output_specs,
            self.constraints,
            (self.outline, self.environment),
        )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(plan_data(self), indent=1, default=_plain)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        mesh: Mesh | None = None,
        allowed_options: Collection[str] = (),
    ) -> Plan:
        """Reads a saved plan, and checks every field of it.

        Args:
            path: the file.
            mesh: the devices to run on; its axes must be those of the plan. By default
                the first of those that are there, where the plan is used.
            allowed_options: names of compiler options that the file may ask for beside
                those that are known to be harmless. Some options write files, or
                change results: name them only if you know where the plan comes from.

        Raises:
            PlanMismatch: the file is no plan, damaged, or asks for anything else.
            PlanMismatch: it is for another mesh.
        """
        data = read_json(path)
        return cls.from_json(data, mesh=mesh, allowed_options=allowed_options)

    @classmethod
    def from_json(
        cls,
        data: Any,
        *,
        mesh: Mesh | None = None,
        allowed_options: Collection[str] = (),
    ) -> Plan:
        """A plan from parsed JSON; see :meth:`load`."""
        plan = cls(**plan_fields(data, allowed_options))
        return plan.on(mesh) if mesh is not None else plan

    def on(self, mesh: Mesh) -> Plan:
        """The plan on a mesh with the axes it was made for.

        Raises:
            PlanMismatch: the mesh has other axes, or is of another slice of TPUs.
        """
        check_mesh(mesh)
        axes = tuple((name, size) for name, size in mesh.shape.items() if size > 1)
        if axes != self.mesh_axes:
            raise PlanMismatch(
                f"The plan is for {_mesh_text(self.mesh_axes)}, got "
                f"{_mesh_text(axes)}. Pass that mesh (a command: neither --devices "
                "nor --mesh), or plan again."
            )
        here = slice_of([*mesh.devices.flat])
        if here and here != (wanted := self.environment.get("slice", here)):
            raise PlanMismatch(
                f"The plan is for a slice {wanted}, and this is {here}. Plan again."
            )
        return replace(self, mesh=mesh, raced=None)


# What a plan has in one process alone: its step, its devices and compiled programs.
_HERE = ("mesh", "step", "out_tree", "traced_under", "raced", "tuned")


def _write(path: str | Path, text: str) -> None:
    """Writes a file, and makes its folder if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _loaded(text: str, allowed_options: Collection[str]) -> Plan:
    """A plan of what :meth:`Plan.to_json` wrote."""
    return Plan.from_json(json.loads(text), allowed_options=allowed_options)


def _plain(value: Any) -> dict[str, Any]:
    """A record, or a mapping, as JSON has it."""
    return dict(value) if isinstance(value, Mapping) else asdict(value)


def _mesh_text(axes: Sequence[tuple[str, int]]) -> str:
    return f"a mesh {dict(axes)}" if axes else "one device"
