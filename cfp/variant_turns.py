"""Plans variants of a step in turn, in the time that all of them share.

Variants that estimates rule out are planned only if none of the others fits in memory;
then those with a part of their state in the host's memory, and leaner ones. Each is
planned as if it were the only one, with one store for all, and a share of the time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from types import MappingProxyType
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
from cfp.settings import (
    ESTIMATES_SHARE,
    REACH_BY_ESTIMATE,
)
from cfp.solution import Estimate
from cfp.view.words import SAME_MS

now = time.monotonic  # Of the time that all variants share.


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The end of the time that all variants share.

    Attributes:
        began, end: of that time, as `time.monotonic` counts.
    """

    began: float
    end: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The end of a time that begins now."""
        began = now()
        return cls(began=began, end=began + seconds)

    @property
    def spent_seconds(self) -> float:
        """The time since it began."""
        return now() - self.began

    def is_over(self, spared: float = 0.0) -> bool:
        """True if no more than some seconds are left."""
        return self.end - now() <= spared


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One attempt to plan a variant."""

    name: str
    seconds: float = 0.0
    found: FoundPlan | None = None
    error: CfpError | None = None
    why_not: str = ""

    @property
    def note(self) -> str:
        return self.why_not or str(self.error or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Variants that were planned in turn, and what came of each.

    Attributes:
        variants: those that were asked for, and those that need less memory.
        estimates: of the best plans of those that were estimated.
    """

    variants: tuple[Variant, ...]
    tries: Mapping[str, Try]
    estimates: Mapping[str, Estimate]

    @property
    def found(self) -> dict[str, FoundPlan]:
        """The plans that there are."""
        tries = self.tries.items()
        return {name: one.found for name, one in tries if one.found is not None}


def plan_in_turn(
    variants: Sequence[Variant],
    calls: Mapping[str, Any],
    options: PlanOptions,
    deadline: Deadline,
    *,
    rule_out: bool,
    leaner: Callable[[], Iterable[Variant]],
) -> Tried:
    """Plans variants, one after another, for as long as there is time.

    Args:
        rule_out, leaner: as for :func:`cfp.plan_fastest`.

    Raises:
        CfpError: none can be planned.
        ProcessError: the processes do not plan together.
    """
    work = _Planning(variants, calls, options, deadline)
    is_preset = options.preset is not None
    is_timed = isfinite(options.settings.seconds)
    if len(variants) > 1 and not is_preset and (rule_out or is_timed):
        work.estimate(rule_out)
    work.plan(work.turns)
    if work.ruled_out and work.nothing_fits():
        work.plan_ruled_out()
    if work.nothing_fits():
        if not is_preset:
            work.plan_with_state_in_host()
        work.plan_leaner(leaner)
    if not work.has_plan():
        too_large = {} if work.leaner else work.too_large
        raise _no_plan(work.errors(), work.late(), too_large)
    every = (*variants, *work.leaner)
    tries = {one.name: Try(name=one.name) for one in every} | work.tries
    tries |= {one.name: one for one in work.ruled_out}
    return Tried(variants=every, tries=tries, estimates=work.estimates)


class _Planning:
    """Variants that are planned in turn, in the time that all of them share.

    Attributes:
        turns: variants in the order of their turns.
        leaner: those among them that were made since nothing else fits in memory.
        ruled_out: those that estimates leave out.
        estimates: of the best plans of those that can be estimated, by name.
        tries: what came of those that had a turn, by name.
        too_large: what leaner ones that do not fit by estimate are estimated to need,
            in bytes, by name.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        calls: Mapping[str, Any],
        options: PlanOptions,
        deadline: Deadline,
    ) -> None:
        self._variants, self._options, self._deadline = variants, options, deadline
        self._calls, self._settings = calls, options.settings
        self._known: dict[str, tuple[FlatStep, Analyzed]] = {}
        self._broken: dict[int, StepNotTraceable] = {}
        self._late: list[str] = []
        self.turns = [*variants]
        self.leaner: list[Variant] = []
        self.ruled_out: list[Try] = []
        self.estimates: dict[str, Estimate] = {}
        self.tries: dict[str, Try] = {}
        self.too_large: dict[str, int] = {}

    def analyzed(self, variant: Variant) -> tuple[FlatStep, Analyzed]:
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
                made = self._analyze(variant, step)
            except StepNotTraceable as error:
                self._broken[key] = error
                raise
            self._known[variant.name] = step, made
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

    def has_plan(self) -> bool:
        """True if any variant has one."""
        return any(one.found is not None for one in self.tries.values())

    def errors(self) -> list[tuple[str, CfpError]]:
        """The reasons why there are no plans.

        Of the variants that were asked for, and of leaner ones that need too much.
        """
        asked, leaner = (
            [one for one in map(self.tries.get, names) if one and one.error]
            for names in (
                [one.name for one in self._variants],
                [one.name for one in self.leaner],
            )
        )
        short = [one for one in leaner if isinstance(one.error, MemoryBudgetError)]
        return [(one.name, one.error) for one in (*asked, *short) if one.error]

    def late(self) -> list[str]:
        """Variants that there was no time for."""
        tries = self.tries.values()
        return self._late + [one.name for one in tries if one.why_not == UNPLANNED]

    def nothing_fits(self) -> bool:
        """True if all that were planned need more memory than there is."""
        tries = self.tries.values()
        return all(isinstance(one.error, MemoryBudgetError) for one in tries)

    def estimate(self, rule_out: bool) -> None:
        """Estimates variants in a share of the time, the first of each mesh first.

        In the time that there is, the most promising are planned first then.

        Args:
            rule_out: whether what estimates have far behind is left out, which spares
                more time than they take: then they may take all that there is.
        """
        count, seconds = len(self.turns), self._settings.seconds
        spared = 0.0 if rule_out else (1.0 - ESTIMATES_SHARE) * seconds
        for place, variant in enumerate(_by_turns(self.turns), start=1):
            if self.estimates and self._deadline.is_over(spared):
                break
            which = f"{variant.name} ({place} of {count})"
            if (estimate := self._estimated(variant, which)) is not None:
                self.estimates[variant.name] = estimate
        if rule_out:
            self._rule_out()
        self.turns.sort(key=self._rank)

    def plan(
        self,
        variants: Sequence[Variant],
        how: Callable[[Variant, float], FoundPlan] | None = None,
    ) -> None:
        """Plans one after another, at least one, until time is over.

        Args:
            how: plans one in so many seconds, if not as it is.

        Raises:
            ProcessError: the processes do not plan together.
        """
        how = how or self._plan_one
        for place, variant in enumerate(variants):
            name = variant.name
            if place and self._deadline.is_over():
                self.tries[name] = Try(name=name, why_not=UNPLANNED)
                continue
            found = error = None
            started = now()
            # The last race takes a share, too.
            shares = len(variants) - place + (len(variants) > 1)
            try:
                found = how(variant, max(0.0, (self._deadline.end - started) / shares))
            except ProcessError:
                raise
            except CfpError as reason:
                error = reason
            before = self.tries[name].seconds if name in self.tries else 0.0
            seconds = before + now() - started
            self.tries[name] = Try(name=name, seconds=seconds, found=found, error=error)

    def plan_ruled_out(self) -> None:
        """Plans what estimates left out: they may be wrong of memory."""
        names = {one.name for one in self.ruled_out}
        spared = [one for one in self._variants if one.name in names]
        spared.sort(key=self._rank)
        self.turns += spared
        for place, one in enumerate(spared):
            if self._deadline.is_over():
                self._late += [each.name for each in spared[place:]]
                break
            self.plan([one])
            if self.has_plan():
                break
        self.ruled_out = [one for one in self.ruled_out if one.name not in self.tries]

    def plan_with_state_in_host(self) -> None:
        """Plans what does not fit with a part of its state in the host's memory.

        What lacks least is first, and says it if there is no time for that, either.
        """
        lacking = [(n, e) for n, e in self.errors() if isinstance(e, MemoryBudgetError)]
        errors = dict(lacking)
        short = [one for one in self._variants if one.name in errors]
        short.sort(key=lambda one: errors[one.name].smallest_feasible_bytes)

        def in_host(variant: Variant, seconds: float) -> FoundPlan:
            step, analyzed = self.analyzed(variant)
            options, end = self._options_of(variant.name, seconds), now() + seconds
            error = errors[variant.name]
            how = partial(self._analyze, variant)
            return find_with_state_in_host(step, error, end, analyzed, options, how)

        for place, one in enumerate(short):
            if place and self._deadline.is_over():
                return
            self.plan([one], in_host)
            if self.has_plan():
                return

    def plan_leaner(self, leaner: Callable[[], Iterable[Variant]]) -> None:
        """Plans variants that need less memory, until one of them fits."""
        for one in leaner():
            if self._deadline.is_over():
                self._late.append(one.name)
                return
            estimate = self._estimated(one, one.name)
            if estimate is None:
                continue
            if not estimate.fits:
                self.too_large[one.name] = estimate.memory_bytes
                continue
            self.estimates[one.name] = estimate
            self.leaner.append(one)
            self.turns.append(one)
            self.plan([one])
            if self.tries[one.name].found is not None:
                return

    def _estimated(self, variant: Variant, which: str) -> Estimate | None:
        """Estimates a variant's best plan; None if it cannot be.

        Args:
            which: the variant, in events.
        """
        told = _telling(self._settings, which)
        if told.progress is not None:
            told.progress("reading the step")
        try:
            _, analyzed = self.analyzed(variant)
            return estimate_plan(analyzed, replace(self._options, settings=told))
        except ProcessError:
            raise
        except CfpError:
            return None

    def _rank(self, variant: Variant) -> tuple[bool, float]:
        """Sort key: choices that fit come first, then fast ones.

        What was not estimated comes last: what cannot be fails as a plan, too.
        """
        if (estimate := self.estimates.get(variant.name)) is None:
            return True, inf
        return not estimate.fits, estimate.time_ms

    def _rule_out(self) -> None:
        """Leaves out variants that are not the fastest by estimates."""
        known = [one for one in self.turns if one.name in self.estimates]
        if not known:
            return
        best = min(known, key=self._rank)
        is_final = self.estimates[best.name].is_final
        misfit, best_ms = self._rank(best)
        for variant in known:
            misfits, time_ms = self._rank(variant)
            is_slow = misfits > misfit or time_ms > REACH_BY_ESTIMATE * best_ms
            if variant is best or not (is_final or is_slow):
                continue
            memory = ", does not fit in memory" if misfits else ""
            why = f"estimated at {time_ms:.3f} ms{memory}; {best.name} at {best_ms:.3f}"
            if not memory and abs(time_ms - best_ms) <= SAME_MS:
                why = f"estimated at {time_ms:.3f} ms, a tie with {best.name}"
            self.ruled_out.append(Try(name=variant.name, why_not=why))
        far = {one.name for one in self.ruled_out}
        self.turns = [one for one in self.turns if one.name not in far]

    def _plan_one(self, variant: Variant, seconds: float) -> FoundPlan:
        place = [one.name for one in self.turns].index(variant.name) + 1
        which = f"{variant.name} ({place} of {len(self.turns)})"
        started = now()
        step, analyzed = self.analyzed(variant)
        options = self._options_of(which, seconds - (now() - started))
        known = self.estimates.get(variant.name)
        if known is not None and (profiles := known.profiles) is not None:
            again = analyzed.seconds + profiles.counts["estimate_seconds"]
            analyzed = replace(analyzed, profiles=profiles, seconds=again)
        return find_plan(step, variant.mesh, options, analyzed)

    def _options_of(self, which: str, seconds: float) -> PlanOptions:
        """The options of one variant; its events say which of several it is."""
        told = self._settings
        told = _telling(told, which) if len(self._variants) > 1 else told
        return replace(self._options, settings=replace(told, seconds=max(0.0, seconds)))


def _by_turns(variants: Sequence[Variant]) -> list[Variant]:
    """The first variants of all meshes, then the second of each, and so on."""
    turns, seen = dict[str, int](), Counter[tuple[tuple[str, int], ...]]()
    for one in variants:
        axes = tuple(one.mesh.shape.items())
        turns[one.name] = seen[axes]
        seen[axes] += 1
    return sorted(variants, key=lambda one: turns[one.name])


def _telling(settings: PlannerSettings, name: str) -> PlannerSettings:
    """Settings whose events say which variant they are about."""
    progress = settings.progress
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
    errors: Sequence[tuple[str, CfpError]],
    late: Sequence[str] = (),
    too_large: Mapping[str, int] = MappingProxyType({}),
) -> CfpError:
    """The error where every variant failed: each that there is, once.

    Where none fits in memory that is the error of the one that needs least.

    Args:
        too_large: what others need by estimate, in bytes, by name.
    """
    short = {n: one for n, one in errors if isinstance(one, MemoryBudgetError)}
    if errors and len(short) == len(errors):
        return least_short(short, late, too_large)
    by_text: dict[str, list[str]] = {}
    for name, error in errors:
        by_text.setdefault(str(error), []).append(name)
    if len(by_text) == 1:
        return errors[0][1]
    lines = [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
    return CfpError("\n".join(["None of the variants can be planned.", *lines]))
