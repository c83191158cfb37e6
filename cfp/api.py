"""The public functions that plan: `cfp.plan` and `cfp.parallelize`.

They check options, resolve the mesh (several are variants, :mod:`cfp.variants`) and
show progress. :mod:`cfp.find` runs the passes, which :mod:`cfp.passes.pipeline` lists.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from cfp.cluster.on_ray import plan_step
from cfp.context import settings_or_defaults
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError, OptionError, PlanMismatch, known_names
from cfp.passes.pipeline import Pins
from cfp.plan.parts import type_text
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings, dimensions_of
from cfp.platform import all_meshes
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.store import store_path
from cfp.program.calling import check_keywords
from cfp.program.meaning import trace_context_key
from cfp.program.step import FlatStep, flatten_step
from cfp.runtime.execute import CompiledStep
from cfp.settings import Dimension
from cfp.variants import Variant, plan_fastest
from cfp.view.progress import shown


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | DescribedMesh | AbstractMesh | None = None,
    quiet: bool = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    memory_budget: int | str | None = None,
    pins: Pins | None = None,
    preset: str | None = None,
    choose: Iterable[str] | None = None,
    precision: str | None = None,
    cache_dir: str | Path | None = None,
    settings: PlannerSettings | None = None,
    **kwargs: Any,
) -> Plan:
    """Plans how to shard a step on a mesh.

    Args:
        fn: any function of pytrees that ``jax.jit`` accepts: a training step, an
            evaluation step, anything.
        args, kwargs: its arguments, as arrays or ``jax.ShapeDtypeStruct`` s. They are
            not overwritten, and may be anywhere.
        mesh: the devices; profiling runs on them, as if all of their memory were free.
            By default all that are there, in the mesh of one or two axes that is the
            fastest; one axis with a preset. On those of :func:`cfp.described` nothing
            runs: the plan is by estimates, and is used later with ``plan.on(mesh)``. A
            mesh without devices names those of a Ray cluster's node:
            ``PlannerSettings(ray=...)``.
        quiet: whether to show nothing; by default progress is shown on a terminal, and
            elsewhere by a line on standard error at first, and one now and then. With
            ``settings.progress`` nothing is shown either.
        static_argnums, static_argnames: arguments that are not arrays, by position or
            name.
        donate_argnums, donate_argnames: arguments that the step may overwrite, usually
            the training state.
        memory_budget: memory of one device that the plan may use, in bytes or as
            text such as "80GiB"; by default all of the device's. A plan fits in a
            given budget as compiled, also without a race. On GPUs 128 MiB of it are
            left for the allocator.
        pins: shardings that the plan must keep, by path of the argument, with globs:
            ``{"params/*/kernel": PartitionSpec(None, "x")}``.
        preset: a preset to take instead of searching, such as "data_parallel",
            "fully_sharded" or "tensor_parallel"; its attentions have kernels where a
            search may choose them.
        choose: kinds of choices to make, such as ``("sharding", "kernels")``; by
            default all, see :class:`PlannerSettings`.
        precision: "fp8" for FP8 products, see :class:`PlannerSettings`.
        cache_dir: folder of the measurements; by default the user's cache directory.
        settings: how much to measure, and a callback for progress.

    Raises:
        CfpError: the step, the arguments, the mesh, the pins or the budget cannot be
            planned; each message says what to do.
        KeyboardInterrupt: the user has interrupted. What was measured is kept, and the
            same call goes on from there.
    """
    if choose is not None:
        settings = settings_or_defaults(settings)
        names = tuple(sorted(dimensions_of(choose)))
        settings = replace(settings, choose=names)
    if precision is not None:
        settings = replace(settings_or_defaults(settings), precision=precision)
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "memory_budget": memory_budget,
        "pins": pins,
        "preset": preset,
        "cache_dir": cache_dir,
        "settings": settings,
    }
    if isinstance(settings, PlannerSettings) and settings.ray is not None:
        if isinstance(mesh, DescribedMesh):
            raise CfpError(
                "A described mesh cannot run, so it cannot be combined with "
                "PlannerSettings(ray=...)."
            )
        if mesh is None:
            raise CfpError(
                "A plan on a Ray cluster needs its mesh: "
                "mesh=jax.sharding.AbstractMesh((4,), ('x',))."
            )
        return plan_step(plan, fn, args, kwargs, mesh, **options)
    if isinstance(mesh, AbstractMesh):
        raise CfpError(
            "A mesh without devices is for PlannerSettings(ray=...). Pass a Mesh, or "
            "cfp.described(...) to plan for devices that are not here."
        )
    check_keywords(fn, kwargs, ["mesh", "quiet", *_OPTIONS])
    may = Dimension.MESH in settings_or_defaults(settings).dimensions
    most_axes = 2 if may and preset is None else 1
    meshes = {"": mesh} if mesh is not None else all_meshes(most_axes)
    return plan_fastest(
        [
            Variant(name=name, fn=fn, args=args, kwargs=kwargs, mesh=one)
            for name, one in meshes.items()
        ],
        **options,
        quiet=quiet,
    ).plan


_OPTIONS = tuple(signature(plan).parameters)[4:-1]  # not fn, args, mesh, quiet, kwargs

# What decides a plan; a saved one has decided.
_DECIDES = {"memory_budget", "pins", "preset", "choose", "precision"}
_SILENCE = "cfp.parallelize(..., quiet=True) says nothing"
_OF_CALLS = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames"}
# Names a plan's file for the steps of `parallelize` that are given none.
PLAN_VARIABLE = "CFP_PLAN"


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    plan: str | Path | Plan | None = None,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """A step that plans itself at its first call, and then runs sharded.

    Also a decorator: ``@cfp.parallelize(mesh=mesh, donate_argnums=0)``.

    Args:
        fn: the step.
        mesh: the devices; by default all that are there, as for :func:`plan`, or with a
            plan the first of them.
        plan: a saved plan, or its file, that is used as it is: nothing is planned, and
            donated arguments need not be named. By default the file that the
            environment variable ``CFP_PLAN`` names, if any.
        quiet: whether planning shows nothing; by default its progress is shown on a
            terminal, and elsewhere by a line now and then on standard error.
        options: as for :func:`plan`.

    Returns:
        A callable like ``fn``; its ``plan`` is the plan of the latest call. Arguments
        that do not have the plan's shardings are moved there at each call. Donated
        state that is weakly typed, such as ``jnp.full(shape, 0.1)`` or a counter that
        begins as ``0``, is taken as the step returns it, or a checkpoint restores it.

    Raises:
        OptionError: there is no such option, or a given plan has decided it already.
        PlanMismatch: the file is no plan, or is not there.
    """
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        known = ["mesh", "plan", "quiet", *_OPTIONS]
        raise OptionError(
            f"cfp.parallelize has no option {', '.join(unknown)}. "
            f"{known_names(unknown[0], known)}"
        )
    if plan is not None and (decided := sorted(options.keys() & _DECIDES)):
        raise OptionError(
            f"cfp.parallelize has a plan, which {', '.join(decided)} would decide. "
            "Leave out the one or the other."
        )
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    wrap = partial(ParallelStep, mesh=mesh, quiet=quiet, options=options, plan=plan)
    return wrap if fn is None else wrap(fn)


def _say_nothing(_: str) -> None:
    pass


class _Planned(NamedTuple):
    """A plan, the step compiled under it, and JAX's configuration at that time."""

    configuration: Hashable
    plan: Plan
    compiled: CompiledStep


@contextmanager
def _named_by_environment(may_be: bool) -> Iterator[None]:
    """Has errors of a plan that the environment names say so."""
    path = os.environ.get(PLAN_VARIABLE)
    try:
        yield
    except PlanMismatch as error:
        if not (may_be and path):
            raise
        raise type(error)(
            f"{error}\nThe plan is {path}, which {PLAN_VARIABLE} names for each step "
            "that cfp.parallelize is given without plan=. If there are several, give "
            f"each its own plan, and unset {PLAN_VARIABLE}."
        ) from error


class ParallelStep:
    """A step function that is planned at its first call; see :func:`parallelize`.

    Arguments of other shapes or types are planned anew, like ``jax.jit`` compiles
    anew, and so is every call under a configuration of JAX that changes what the step
    means, such as ``jax.enable_x64(True)``.
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
        self._quiet = quiet
        self._options = {**options}
        self._steps: dict[Any, _Planned] = {}
        self._latest: _Planned | None = None
        self.__name__ = getattr(fn, "__name__", "step")
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        state = self._latest.plan if self._latest else "it is planned at its first call"
        return f"ParallelStep of {self.__name__}: {state}"

    @property
    def plan(self) -> Plan:
        """The plan of the latest call.

        Raises:
            AttributeError: there was none yet.
        """
        if self._latest is None:
            raise AttributeError(
                "The step is planned at its first call. Call it, or use "
                "cfp.plan(step, *args, mesh=mesh) to plan without running."
            )
        return self._latest.plan

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Binds a method to its object, as functions and ``jax.jit``'s do."""
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        latest, now = self._latest, trace_context_key()
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
            found = self._planned(args, kwargs, now, self._why_again(step, now))
            avals = found.compiled.step.avals  # Of weakly typed state as returned.
            as_returned = (step.in_tree, step.static, kinds, avals, now)
            self._steps[key] = self._steps.setdefault(as_returned, found)
        self._latest = self._steps[key]
        return self._latest.compiled(*args, **kwargs)

    def _saved(self) -> Plan | None:
        """The plan that was given, or that the environment names; None if neither."""
        if self._given is not None:
            return self._given
        path = os.environ.get(PLAN_VARIABLE)
        return Plan.load(path) if path else None

    def _as_saved(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], now: Hashable
    ) -> _Planned | None:
        """The saved plan for some arguments, with the step; None if there is none."""
        if (saved := self._saved()) is None:
            return None
        # A plan that was given refuses these at once.
        ignored = sorted(self._options.keys() & _DECIDES)
        if ignored and not self._quiet:
            warnings.warn(
                f"{PLAN_VARIABLE} names a saved plan, which has decided what "
                f"{', '.join(ignored)} would decide: not used.",
                stacklevel=4,
            )
        bind = {k: v for k, v in self._options.items() if k in _OF_CALLS}
        bound = saved.bind(self._fn, *args, mesh=self._mesh, **bind, **kwargs)
        kept = BuildEnvironment.beside(store_path(self._options.get("cache_dir")))
        bound = replace(bound, tuned=kept)
        doing = f"loading {self.__name__!r}, compiled under its saved plan"
        settings = self._options.get("settings")
        with shown(settings, doing, _SILENCE, self._quiet) as how:
            tell = how.progress or _say_nothing
            return _Planned(now, bound, bound.compile_bound(tell))

    def _why_again(self, step: FlatStep, now: Hashable) -> str:
        """Says in what a call differs from the latest; "" of the first."""
        if self._latest is None:
            return ""
        before = self._latest.compiled.step
        if self._latest.configuration != now:
            return "under another configuration of JAX"
        if before.in_tree != step.in_tree or before.static != step.static:
            return "for arguments of another structure, or other static ones"
        pairs = zip(step.arg_names, before.avals, step.avals, strict=True)
        changed = [
            f"{name} of type {type_text(new)}, was {type_text(old)}"
            for name, old, new in pairs
            if type_text(old) != type_text(new)
        ]
        weakly = "for a number in place of an array, or the reverse"
        more = f" and {len(changed) - 1} more" * (len(changed) > 1)
        return f"for {changed[0]}{more}" if changed else weakly

    def _planned(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        now: Hashable,
        again: str,
    ) -> _Planned:
        """The plan for some arguments, and the step compiled under it."""
        with _named_by_environment(self._given is None):
            if (saved := self._as_saved(args, kwargs, now)) is not None:
                return saved
        when = f"again, {again}" if again else "once for its first call"
        doing = f"planning how to shard {self.__name__!r}, {when}"
        options = dict(self._options)
        if taken := sorted(kwargs.keys() & {*_OPTIONS, "fn", "mesh", "quiet"}):
            raise CfpError(
                f"The step's keyword argument {taken[0]!r} has the name of an option "
                "of cfp.plan. Pass it by position, or give it another name."
            )
        shows = shown(options.pop("settings", None), doing, _SILENCE, self._quiet)
        with shows as how:
            options |= {"settings": how, "quiet": True}
            found = plan(self._fn, *args, mesh=self._mesh, **options, **kwargs)
            tell = how.progress or _say_nothing
            return _Planned(now, found, found.compile_bound(tell))
