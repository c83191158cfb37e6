"""Plans the best variants of a step, in the time that all of them share.

All are estimated, and planned in the order of their estimates until two have a plan, or
one where choices are made by estimates anyway. If all lack memory, those with a part of
their state in the host's memory are planned, and leaner ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from jax.sharding import Mesh

from cfp.errors import CfpError, MemoryBudgetError, ProcessError, StepNotTraceable
from cfp.find import (
    FoundPlan,
    PlanOptions,
    estimate_plan,
    find_plan,
    find_with_state_in_host,
)
from cfp.outcomes import Variant
from cfp.passes.pipeline import Analyzed, analyze_step
from cfp.plan.figures import UNPLANNED
from cfp.planner_settings import PlannerSettings
from cfp.profiling.processes import differing, leading
from cfp.profiling.tasks import Progress
from cfp.program.meaning import check_settings, unchecked
from cfp.program.step import FlatStep, flatten_step
from cfp.race.shortage import least_short
from cfp.settings import ESTIMATES_SHARE
from cfp.solution import Estimate
from cfp.view.words import SAME_MS

now = time.monotonic  # Of the time that all variants share.
_PLANNED = 2


@dataclass(slots=True, kw_only=True)
class Tried:
    """A variant, and what came of it.

    Attributes:
        estimate: of its best plan, if it can be estimated.
        note: why it was not planned.
        seconds: what planning took.
    """

    variant: Variant
    estimate: Estimate | None = None
    found: FoundPlan | None = None
    error: CfpError | None = None
    note: str = ""
    seconds: float = 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: choices that fit come first, then fast ones.

        What was not estimated comes last: what cannot be fails as a plan, too.
        """
        known = self.estimate
        return (not known.fits, known.time_ms) if known else (True, inf)

    @property
    def is_short(self) -> bool:
        """True if it needs more memory than there is."""
        return isinstance(self.error, MemoryBudgetError)

    def left_out(self, best: Tried | None = None) -> None:
        """Notes that it is not planned: time is over, or estimates have it behind."""
        self.note = UNPLANNED if best is None else f"behind {best.variant.name}"
        if (known := self.estimate) is None:
            return
        memory = "" if known.fits else ", does not fit in memory"
        estimated = f"estimated at {known.time_ms:.3f} ms{memory}"
        if best is None or best.estimate is None:
            self.note += f"; {estimated}"
            return
        best_ms = best.estimate.time_ms
        self.note = f"{estimated}; {best.variant.name} at {best_ms:.3f}"
        if known.fits and known.time_ms - best_ms <= SAME_MS:
            self.note = f"{estimated}, a tie with {best.variant.name}"


def plan_best(
    variants: Sequence[Variant],
    calls: Mapping[str, Any],
    options: PlanOptions,
    leaner: Callable[[], Iterable[Variant]],
) -> list[Tried]:
    """Plans the best variants, one after another.

    Args:
        calls: which arguments are static, and which donated.
        options: as for one plan; its seconds hold for all variants together.
        leaner: as for :func:`cfp.plan_fastest`.

    Raises:
        CfpError: none can be planned.
        ProcessError: the processes do not plan together.
    """
    work = _Planning(calls, options, len(variants))
    every = [Tried(variant=one) for one in variants]
    order, most = every, len(every)
    if most > 1 and options.preset is None:
        for place, one in enumerate(every, start=1):
            if place == 1 or not work.is_over(ESTIMATES_SHARE):
                work.estimate(one, place)
        order = sorted(every, key=lambda one: one.rank)
        best = order[0].estimate
        most = 1 if best is not None and best.is_final else _PLANNED
    work.plan(order, most)
    more: list[Tried] = []
    late = [one.variant.name for one in order if one.note.startswith(UNPLANNED)]
    too_large: dict[str, int] = {}
    if all(one.is_short for one in order):
        if options.preset is None:
            work.plan_with_state_in_host(order)
        for one in (Tried(variant=one) for one in leaner()):
            if work.is_over():
                late.append(one.variant.name)
                break
            work.estimate(one)
            if one.estimate is not None and one.estimate.fits:
                more.append(one)
                work.plan([one], 1)
                if one.found is not None:
                    break
            elif one.estimate is not None:
                too_large[one.variant.name] = one.estimate.memory_bytes
    if all(one.found is None for one in (*every, *more)):
        failed = [*every, *(one for one in more if one.is_short)]
        raise _no_plan(failed, late, {} if more else too_large)
    return [*every, *more]


class _Planning:
    """Variants that are planned in turn, in the time that all of them share."""

    def __init__(
        self, calls: Mapping[str, Any], options: PlanOptions, count: int
    ) -> None:
        self._calls, self._options, self._count = calls, options, count
        self._began, self._seconds = now(), options.settings.seconds
        self._known: dict[str, tuple[FlatStep, Analyzed]] = {}
        self._broken: dict[int, StepNotTraceable] = {}

    def is_over(self, share: float = 1.0) -> bool:
        """True if a share of the time is over."""
        return now() - self._began >= share * self._seconds

    def estimate(self, one: Tried, place: int = 0) -> None:
        """Estimates a variant's best plan, if it can be."""
        told = self._told(one.variant, place)
        if told.progress is not None:
            told.progress("reading the step")
        options = replace(self._options, settings=told)
        try:
            one.estimate = estimate_plan(self._analyzed(one.variant)[1], options)
        except ProcessError:
            raise
        except CfpError:
            return  # It is planned last, and fails with its reason.

    def plan(self, order: Sequence[Tried], most: int) -> None:
        """Plans one after another, at least one, until time is over.

        Args:
            most: with so many plans it ends.
        """
        left = most
        for place, one in enumerate(order, start=1):
            if not left:
                one.left_out(order[0])
            elif place > 1 and self.is_over():
                one.left_out()
            else:
                # The last race takes a share, too.
                self._plan_one(one, place, left + (most > 1), self._find)
                left -= one.found is not None

    def plan_with_state_in_host(self, short: Sequence[Tried]) -> None:
        """Plans with a part of the state in the host's memory, until one fits.

        What lacks least is first, and says it if there is no time for that, either.
        """

        errors = {id(one): one.error for one in short}

        def lacks(one: Tried) -> MemoryBudgetError:
            error = errors[id(one)]
            assert isinstance(error, MemoryBudgetError), "memory is what all lack"
            return error

        def in_host(one: Tried, options: PlanOptions) -> FoundPlan:
            step, analyzed = self._analyzed(one.variant)
            end, how = (
                now() + options.settings.seconds,
                partial(self._analyze, one.variant),
            )
            return find_with_state_in_host(
                step, lacks(one), end, analyzed, options, how
            )

        order = sorted(short, key=lambda one: lacks(one).smallest_feasible_bytes)
        for place, one in enumerate(order):
            if place and self.is_over():
                return
            self._plan_one(one, 0, len(order) - place, in_host)
            if one.found is not None:
                return

    def _plan_one(
        self,
        one: Tried,
        place: int,
        shares: int,
        how: Callable[[Tried, PlanOptions], FoundPlan],
    ) -> None:
        """Plans a variant in a share of the time that is left."""
        started = now()
        left = max(0.0, self._began + self._seconds - started)
        told = self._options.settings
        told = self._told(one.variant, place) if self._count > 1 else told
        settings = replace(told, seconds=left / shares)
        try:
            one.found = how(one, replace(self._options, settings=settings))
            one.error = None
        except ProcessError:
            raise
        except CfpError as error:
            one.error = error
        one.seconds += now() - started

    def _find(self, one: Tried, options: PlanOptions) -> FoundPlan:
        started = now()
        step, analyzed = self._analyzed(one.variant)
        left = options.settings.seconds - (now() - started)
        settings = replace(options.settings, seconds=max(0.0, left))
        if one.estimate is not None and (made := one.estimate.profiles) is not None:
            again = analyzed.seconds + made.counts["estimate_seconds"]
            analyzed = replace(analyzed, profiles=made, seconds=again)
        return find_plan(
            step, one.variant.mesh, replace(options, settings=settings), analyzed
        )

    def _analyzed(self, variant: Variant) -> tuple[FlatStep, Analyzed]:
        """The step of a variant, traced once, and analysed once on its mesh.

        Raises:
            CfpError: it cannot be; a step that JAX cannot trace is tried once.
        """
        if variant.name not in self._known:
            key = id(variant.fn)
            if key in self._broken:
                raise self._broken[key]
            try:
                step = flatten_step(
                    variant.fn, variant.args, variant.kwargs, **self._calls
                )
                # Of several meshes the step is the same, and traced once.
                before = (one for one, _ in self._known.values() if one == step)
                step = next(before, step)
                check_settings()
                self._known[variant.name] = step, self._analyze(variant, step)
            except StepNotTraceable as error:
                self._broken[key] = error
                raise
        return self._known[variant.name]

    def _analyze(self, variant: Variant, step: FlatStep) -> Analyzed:
        """Analyses a variant's step, in all processes that have devices of its mesh."""
        mesh = variant.mesh
        talk = leading(mesh) if isinstance(mesh, Mesh) else None
        number = talk.say("trace", variant.name, step.in_host) if talk else 0
        with unchecked():
            made = analyze_step(step, mesh, self._options.pins)
        if talk is not None:
            mine = made.analysis.frame.program.fingerprint
            facts = [{"program": one[:12]} for one in (mine, *talk.answers(number))]
            if (difference := differing(facts)) is not None:
                raise difference
        return made

    def _told(self, variant: Variant, place: int) -> PlannerSettings:
        """Settings whose events say which variant they are about."""
        settings = self._options.settings
        progress = settings.progress
        name = variant.name + (f" ({place} of {self._count})" if place else "")
        if progress is None:
            return settings

        def tell(event: Progress | str) -> None:
            if isinstance(event, str):
                progress(f"{name}: {event}")
            else:
                label = f"{name}: {event.label}" if event.label else name
                progress(replace(event, label=label))

        return replace(settings, progress=tell)


def _no_plan(
    failed: Sequence[Tried], late: Sequence[str], too_large: Mapping[str, int]
) -> CfpError:
    """The error where every variant failed: each that there is, once.

    Where none fits in memory that is the error of the one that needs least.

    Args:
        late: variants that there was no time for.
        too_large: what others need by estimate, in bytes, by name.
    """
    errors = {one.variant.name: one.error for one in failed if one.error}
    short = {n: one for n, one in errors.items() if isinstance(one, MemoryBudgetError)}
    if len(short) == len(errors):
        return least_short(short, late, too_large)
    by_text: dict[str, list[str]] = {}
    for name, error in errors.items():
        by_text.setdefault(str(error), []).append(name)
    if len(by_text) == 1:
        return next(iter(errors.values()))
    lines = [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
    return CfpError("\n".join(["None of the variants can be planned.", *lines]))
