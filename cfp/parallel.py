"""`cfp.parallelize`: a step that plans itself at its first call."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from cfp.api import OPTIONS
from cfp.api import plan as plan_anew
from cfp.errors import (
    MemoryBudgetError,
    NoSuchFile,
    NotBound,
    OptionError,
    PlanMismatch,
    brief,
    known_names,
    warn,
)
from cfp.plan.execute import CompiledStep
from cfp.plan.parts import BINDS, type_text
from cfp.plan.plan import Plan
from cfp.printable import few
from cfp.printable import shown as brief_text
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.store import store_path
from cfp.program.jaxprs import mesh_around, trace_context_key
from cfp.program.step import FlatStep, flatten_step
from cfp.view.console import shown
from cfp.view.words import PINNED_BY_FIRST

# Options that decide a plan, which a saved plan excludes.
_DECIDES = {"memory_budget", "pins", "preset", "choose", "precision"}
_SILENCE = "cfp.parallelize(..., quiet=True) hides these lines"
# Environment variable with a plan's file, for steps without the argument `plan`.
PLAN_VARIABLE = "CFP_PLAN"


def parallelize(
    fn: Callable[..., Any] | None = None,
    *misplaced: Any,
    mesh: Mesh | None = None,
    plan: str | Path | Plan | None = None,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """Wraps a step: its first call plans, and every call runs sharded.

    Also a decorator: ``@cfp.parallelize(mesh=mesh, donate_argnums=0)``.

    Args:
        fn: the step, the only argument by position.
        mesh: the devices; by default a plan's, or those that :func:`plan` takes.
        plan: a plan or its file, used without planning. By default the environment
            variable ``CFP_PLAN`` names the file. The donated arguments are the plan's.
        quiet: True shows no progress; warnings stay. By default a terminal shows
            progress, and other outputs get lines on standard error.
        options: as for :func:`plan`.

    Returns:
        A :class:`ParallelStep`, called like ``fn``; without ``fn``, a decorator. Each
        call moves arguments to the plan's shardings if they have others. Donated state
        of weak types, as of ``jnp.full(shape, 0.1)``, gets the types of the results.

    Raises:
        OptionError: `fn` is no plain function; an option is unknown, or decides a plan
            beside a given `plan`.
        NoSuchFile: the file of `plan` does not exist.
        PlanMismatch: the file of `plan` contains no valid plan.
    """
    if misplaced or isinstance(fn, Mesh) or not (fn is None or callable(fn)):
        raise OptionError(
            "cfp.parallelize takes the step first, and all options by name. Write "
            "cfp.parallelize(step, mesh=mesh)."
        )
    if isinstance(fn, ParallelStep | CompiledStep):
        raise OptionError(
            "The step is wrapped already. Give the first decorator the plan, "
            "@cfp.parallelize(plan=...), or pass the function without decorator."
        )
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        known = ["mesh", "plan", "quiet", *OPTIONS]
        raise OptionError(
            f"cfp.parallelize has no option {', '.join(unknown)}. "
            f"{known_names(unknown[0], known)}"
        )
    if plan is not None and (decided := sorted(options.keys() & _DECIDES)):
        raise OptionError(
            f"cfp.parallelize got a plan together with {', '.join(decided)}, which "
            "decide a new plan. Leave out the plan or these options."
        )
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    wrap = partial(ParallelStep, mesh=mesh, quiet=quiet, options=options, plan=plan)
    return wrap if fn is None else wrap(fn)


class _Planned(NamedTuple):
    """A plan, the step compiled under it, and JAX's configuration at that time."""

    configuration: Hashable
    plan: Plan
    compiled: CompiledStep


@contextmanager
def _explained(path: str | None, changes_of: Callable[[], str]) -> Iterator[None]:
    """Adds to an error the arguments' changes, and that CFP_PLAN named `path`."""
    try:
        yield
    except (PlanMismatch, NoSuchFile) as error:
        changes = changes_of()
        lines = [f"The arguments have another structure: {changes}."]
        lines = [*lines * bool(changes), str(error)]
        if path:
            lines.append(
                f"The plan is {path}, since {PLAN_VARIABLE} names it for every "
                "cfp.parallelize without plan=. Give each of several steps its own "
                f"plan, and unset {PLAN_VARIABLE}."
            )
        raise type(error)("\n".join(lines)) from error.__cause__


class ParallelStep:
    """A step function that is planned at its first call; see :func:`parallelize`.

    A call with new shapes, types or static values, or under another configuration of
    JAX or ``jax.set_mesh``, plans again and warns. With a saved plan it raises
    `PlanMismatch` if the step differs. Later plans keep the first's shardings of
    unchanged arguments if these fit in memory, except with ``preset=``, several
    processes of JAX, or other devices or another order of them by ``jax.set_mesh``.

    Attributes:
        plans: all plans, in the order in which they were made.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh | None,
        quiet: bool,
        options: Mapping[str, Any],
        plan: Plan | None = None,
    ) -> None:
        self._fn = fn
        self._given = plan
        self._mesh = mesh
        self._fixed = plan.mesh if plan and mesh is None else mesh
        self._quiet = quiet
        self._options = {**options}
        self._steps: dict[Any, _Planned] = {}
        self._latest: _Planned | None = None
        self.plans: list[Plan] = []
        self.__name__ = getattr(fn, "__name__", "step")
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        state = self.plans[0] if self.plans else "it is planned at its first call"
        return f"ParallelStep of {self.__name__}: {state}"

    @property
    def plan(self) -> Plan:
        """The plan of the first call; :attr:`plans` lists all plans.

        Raises:
            NotBound: the step was not called yet.
        """
        if not self.plans:
            raise NotBound(
                "The step is planned at its first call. Call it, or use "
                "cfp.plan(step, *args, mesh=mesh) to plan without running."
            )
        return self.plans[0]

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Binds a decorated method to its object, as functions do."""
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        latest, now = self._latest, trace_context_key(self._fixed)
        if latest is not None and latest.configuration == now:
            leaves = latest.compiled.step.leaves_of(args, kwargs)
            if leaves is not None:
                look = latest.compiled.dispatch.look(leaves)
                if latest.compiled.dispatch.has_types(look):
                    return latest.compiled.run(look)
        options = self._options
        static = {k: options[k] for k in options if k.startswith("static_")}
        step = flatten_step(self._fn, args, kwargs, **static)
        kinds = tuple(type(value) for _, value in step.static)
        key = (step.in_tree, step.static, kinds, step.avals, now)
        if key not in self._steps:
            found = self._planned(step, args, kwargs, now)
            self.plans.append(found.plan)
            avals = found.compiled.step.avals  # State has the types of its results.
            as_returned = (step.in_tree, step.static, kinds, avals, now)
            self._steps[key] = self._steps.setdefault(as_returned, found)
        self._latest = self._steps[key]
        return self._latest.compiled(*args, **kwargs)

    def _as_saved(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], now: Hashable
    ) -> _Planned | None:
        """Binds and compiles `plan=`, or CFP_PLAN's file; None if neither is given."""
        path, saved = os.environ.get(PLAN_VARIABLE), self._given
        if saved is None and path:
            saved = Plan.load(path)
        if saved is None:
            return None
        # `parallelize` has refused these beside a given plan.
        ignored = sorted(self._options.keys() & _DECIDES)
        if ignored:
            warn(
                f"{PLAN_VARIABLE} names a saved plan, which ignores "
                f"{', '.join(ignored)}. Unset {PLAN_VARIABLE} to plan with these."
            )
        bind = {k: v for k, v in self._options.items() if k in BINDS}
        bound = saved.bind(self._fn, *args, mesh=self._mesh, **bind, **kwargs)
        kept = BuildEnvironment.beside(store_path(self._options.get("cache_dir")))
        bound = replace(bound, tuned=kept)
        doing = f"loading {self.__name__!r}, compiled under its saved plan"
        settings = self._options.get("settings")
        with shown(settings, doing, _SILENCE, self._quiet) as how:
            tell = how.progress or (lambda _: None)
            return _Planned(now, bound, bound.compile_bound(tell))

    def _changes(self, step: FlatStep) -> str:
        """Changes of the structure since the latest call or the given plan; or ""."""
        given = self._given.step if self._given else None
        before = self._latest.compiled.step if self._latest else given or step
        is_same = before.in_tree == step.in_tree
        return "" if is_same else before.changes(step.in_tree, step.avals)

    def _why_again(self, step: FlatStep, now: Hashable) -> str:
        """Returns how a call differs from the latest, "" if it is the first."""
        if self._latest is None:
            return ""
        before = self._latest.compiled.step
        if self._latest.configuration != now:
            return "under another configuration of JAX, or mesh of jax.set_mesh"
        if before.static != step.static:
            given, old = dict(step.static), dict(before.static)
            return f"for static arguments {brief_text(given)}, were {brief_text(old)}"
        if changes := self._changes(step):
            return f"for arguments of another structure ({changes})"
        pairs = zip(step.arg_names, before.avals, step.avals, strict=True)
        changed = [
            f"{name} of type {type_text(new)}, was {type_text(old)}"
            for name, old, new in pairs
            if type_text(old) != type_text(new)
        ]
        weakly = "for a number in place of an array, or the reverse"
        return f"for {few(changed, most=1)}" if changed else weakly

    @brief
    def _planned(
        self,
        step: FlatStep,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        now: Hashable,
    ) -> _Planned:
        """Loads or makes the plan for a call, and compiles the step."""
        path = None if self._given else os.environ.get(PLAN_VARIABLE)
        with _explained(path, partial(self._changes, step)):
            if (saved := self._as_saved(args, kwargs, now)) is not None:
                return saved
        again = self._why_again(step, now)
        if self._latest and self._latest.compiled.step.parted(step.arg_names):
            raise PlanMismatch(f"{self.__name__!r} is not planned again, {again}.")
        when = f"again, {again}" if again else "once for its first call"
        if self._latest and again:
            before, sizes = self._latest.compiled.step, [a.shape for a in step.avals]
            is_alike = before.in_tree == step.in_tree
            resized = is_alike and sizes != [a.shape for a in before.avals]
            warn(
                f"{self.__name__!r} is planned again, {again}. Planning and compiling "
                f"take time.{' Drop or pad a smaller last batch.' * resized} "
                "step.plans lists all plans."
            )
        doing = f"planning how to shard {self.__name__!r}, {when}"
        options = dict(self._options)
        if taken := sorted(kwargs.keys() & {*OPTIONS, "fn", "mesh", "quiet"}):
            raise OptionError(
                f"The step's keyword argument {taken[0]!r} has the name of an option "
                "of cfp.plan. Pass it by position, or give it another name."
            )
        shows = shown(options.pop("settings", None), doing, _SILENCE, self._quiet)
        with shows as how:
            options |= {"settings": how, "quiet": True}
            find = partial(plan_anew, self._fn, *args, **kwargs)
            found = self._find(step, find, options)
            tell = how.progress or (lambda _: None)
            return _Planned(now, found, found.compile_bound(tell))

    def _find(self, step: FlatStep, find: Callable[..., Plan], options: dict) -> Plan:
        """Plans a step; later plans keep the first's mesh and shardings if possible."""
        first, names = self.plans[0] if self.plans else None, step.arg_names
        meshes = mesh_around(), first and first.mesh
        here, before = ([*one.devices.flat] if one else [] for one in meshes)
        if not first or (here and here != before):
            return find(mesh=self._mesh, **options)
        now = {*zip(names, map(type_text, step.avals), strict=True)}
        leaves = zip(first.arg_names, first.arg_types, first.arg_specs, strict=True)
        pins = {
            name: PartitionSpec(*(axes or None for axes in spec))
            for name, kind, spec in leaves
            if (name, kind) in now and names.count(name) == 1
        }
        # A preset needs no pins; several processes cannot plan again after a failure.
        if not options.get("preset") and jax.process_count() == 1:
            alike = options | {"pins": {**(options.get("pins") or {}), **pins}}
            with suppress(MemoryBudgetError):
                found = find(mesh=first.mesh, **alike)
                more = {PINNED_BY_FIRST: len(pins)}
                return replace(found, search={**found.search, **more})
        return find(mesh=first.mesh, **options)
