"""Whole programs that may race: the plan, its rivals, presets and variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import AS_WRITTEN, Choice, SegmentKernels
from cfp.cost.costs import Costs, SegmentChoice, segment_candidate
from cfp.presets.presets import BY_HAND, FROM_ARGUMENTS
from cfp.profiling.rates import Rates
from cfp.search.choices import kernel_variants, picks_of, whole_choice
from cfp.search.problem import Problem
from cfp.search.solver import leanest, solve
from cfp.settings import ConstraintLevel, PlatformDefaults, Replacing
from cfp.solution import Candidate


def level_name(name: str, level: ConstraintLevel) -> str:
    """Returns the name of a choice under a constraint level."""
    whole = level is ConstraintLevel.EVERYTHING
    return name if whole else f"{name}, {level} constrained"


# Levels at which presets are constrained, and propagation's choices; of these the
# compiler is asked again what it was asked before. With all values constrained these
# are points of the search like any other.
_PRESET_LEVELS = (ConstraintLevel.EVERYTHING, ConstraintLevel.ARGUMENTS)
_PROPAGATED_LEVELS = {
    BY_HAND: ConstraintLevel.ACTIVATIONS,
    FROM_ARGUMENTS: ConstraintLevel.ARGUMENTS,
}


def named_candidates(
    named: Mapping[str, Choice], levels: Sequence[ConstraintLevel]
) -> list[Candidate]:
    """Makes candidates of presets at their first level, and of propagated choices.

    Args:
        named: choices by name; rematerialized ones have a suffix behind a comma.
    """
    usual = [level for level in levels if level in _PRESET_LEVELS][:1]
    found = []
    for name, choice in named.items():
        own = _PROPAGATED_LEVELS.get(name.partition(",")[0])
        for level in usual if own is None else {own}.intersection(levels):
            title = level_name(name, level)
            found.append(Candidate(title, choice, None, level, {}, own is None))
    return found


def variants(one: Candidate, rules: PlatformDefaults) -> list[Candidate]:
    """Returns a leader without the first options, with others, and at other levels."""
    plain = one
    for name, chosen in rules.first_options.items():
        if one.name.endswith(f", {name}"):
            kept = {key: one.options[key] for key in one.options.keys() - chosen.keys()}
            plain = replace(one, name=one.name.removesuffix(f", {name}"), options=kept)
    others = [
        replace(one, name=level_name(one.name, level), level=level)
        for level in rules.levels
        if one.is_preset and level in _PRESET_LEVELS and level is not one.level
    ]
    return [plain, *with_options(plain, rules.compiler_options), *others]


def with_options(
    one: Candidate, options: Mapping[str, Mapping[str, str]]
) -> list[Candidate]:
    """Returns a candidate's variants, one for each set of compiler options."""
    return [
        replace(one, name=f"{one.name}, {name}", options={**one.options, **chosen})
        for name, chosen in options.items()
    ]


LESS_MEMORY = "planned, less memory"


def less_memory(number: int) -> str:
    """Names a choice that was searched for by what others need, as compiled."""
    return LESS_MEMORY if number == 1 else f"{LESS_MEMORY} {number}"


def leanest_of(analysis: Analysis, problem: Problem) -> Candidate:
    """Returns the choice of least predicted memory, the last resort.

    Among equals it is the fastest: rematerializing a program of one segment saves
    nothing.
    """
    least = leanest(problem)
    within = replace(problem, budget_bytes=least.memory_bytes)
    best = solve(within) or least
    return Candidate("leanest", whole_choice(analysis, problem, best), best.cost_ms)


def rematerialized(
    analysis: Analysis, problems: Sequence[Problem], presets: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Presets that fit with some of their segments rematerialized.

    Presets with a part that is no option are left out. Where a preset has several
    options for segments of one kind, its own is the one of the last of these.

    Args:
        problems: what fits; the first in which anything does decides.
    """
    problem, found = problems[0], dict[str, Choice]()
    for name, choice in presets.items():
        if (picks := picks_of(analysis, problem, choice)) is None:
            continue
        picked = zip(problem.kinds, picks, strict=True)
        own = {k: problem.options[k][pick].candidate.plain for k, pick in picked}
        kept = [
            [i for i, o in enumerate(options) if o.candidate.plain == own[kind]]
            for kind, options in enumerate(problem.options)
        ]
        solved = (solve(one.among(kept)) for one in problems)
        if (best := next(filter(None, solved), None)) is not None:
            again = whole_choice(analysis, problem, best)
            if again.remat:
                found[f"{name}, rematerialized"] = again
    return found


def with_kernels(
    analysis: Analysis, problem: Problem, named: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Choices with the kernels that are best for them by what the search knows.

    A person who shards by hand takes them, too: as written a preset would only show
    what its kernels are worth.
    """
    every = (option for options in problem.options for option in options)
    if not any(option.candidate.kernels for option in every):
        return dict(named)
    free, found = replace(problem, budget_bytes=None), dict(named)
    for name, choice in named.items():
        # Of several for segments of one kind, the last one's.
        own = {
            segment.kind: segment_candidate(analysis, segment.index, choice)
            for segment in analysis.segments
        }
        kept = [
            [i for i, o in enumerate(options) if o.candidate.as_written == own[kind]]
            for kind, options in enumerate(problem.options)
        ]
        if all(kept) and (best := solve(free.among(kept))) is not None:
            found[name] = whole_choice(analysis, problem, best)
    return found


def with_preferred_kernels(
    analysis: Analysis, choice: Choice, replacing: Replacing, rates: Rates | None
) -> Choice:
    """Adds attention kernels to a choice as written, without a search.

    Each segment gets the kernel with the largest estimated gain, if there is a gain. If
    rates are unknown, it gets the preferred kernel that can compute its attentions.
    """
    costs = Costs(analysis, rates) if rates is not None else None

    @cache
    def best_of(kind: int, own: SegmentChoice) -> SegmentKernels:
        saved_ms = {AS_WRITTEN: 0.0}
        for one in kernel_variants(analysis, kind, own, replacing):
            saved = costs.saved_by_kernel_ms(kind, one) if costs else float("inf")
            saved_ms[one.kernels] = saved
        return max(saved_ms, key=saved_ms.__getitem__)

    found = [
        (segment.index, best_of(segment.kind, own))
        for segment in analysis.segments
        for own in [segment_candidate(analysis, segment.index, choice)]
    ]
    return replace(choice, kernels=tuple(pair for pair in found if pair[1]))
