"""Admits candidates to the race: compiles them until enough fit.

:func:`compile_until_enough_fit` takes candidates, sorted by predicted time, and a
memory budget. By three rules programs are not compiled:

- *Reach*: one that is not within `reach` of the fastest that fits is not.
- *Refusals*: after `MOST_REFUSED` that do not fit no others are. What was compiled
  before, and is known not to fit, is none of these; as many of it get a memory limit.
- *Memory*: what cannot fit by prediction, whatever the compiler does, is not. One whose
  predicted memory times `COMPILED_TO_PREDICTED` is more than the budget is compiled
  with the compiler's memory limit only, where the compiler takes one, and at one
  constraint level. Any other is compiled as it is.

=========================  ==========  =============  ===========
exempt from                reach       refusals       memory
=========================  ==========  =============  ===========
the plan, known to fit     yes         yes            yes
the best preset            yes         no             no
with compiler options      no          no             yes
without a prediction       yes         no             yes
others                     no          no             no
=========================  ==========  =============  ===========

What was compiled as it is and does not fit is compiled with the limit, if it may fit
then, the loosest first. Rematerialized programs are candidates of their own, see
:mod:`cfp.race.programs`. When time is over, nothing else is compiled after the first;
where one that fits is enough, nothing after the first that does. Without a budget only
reach counts.

*Memory limit* here is an option of XLA, not the budget: XLA schedules to hide latency,
and keeps what that needs, as far as the device's memory allows. With a limit it
rematerializes what exceeds it, less of it and cheaper than a whole segment.

If no program fits, an error names the largest parts of its memory, and remedies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from types import MappingProxyType
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, lay_out
from cfp.context import MemoryBudget
from cfp.cost.memory import (
    can_rematerialize,
    result_bytes,
)
from cfp.errors import CfpError, MemoryBudgetError
from cfp.printable import format_bytes
from cfp.profiling.record import MEMORY_SHARE, CompiledBytes
from cfp.race.programs import (
    BEHIND,
    LIMITED_ONCE,
    MANY_REFUSED,
    TOO_FAR,
    TOO_LARGE,
    TOO_LATE,
    RaceResult,
    with_options,
)
from cfp.search.choices import whole_choice
from cfp.search.solver import Problem, leanest
from cfp.settings import (
    COMPILED_TO_PREDICTED,
    LIMITED_MEMORY_AT_LEAST,
    LIMITED_TIME,
    MOST_RACED,
    MOST_REFUSED,
    NO_LATENCY_HIDING,
    ConstraintLevel,
)
from cfp.solution import Candidate


def may_fit(memory: MemoryBudget, size: CompiledBytes) -> bool:
    """True if a program may fit, if the compiler saves what it can.

    Args:
        size: what it needs otherwise; a failure to compile needs nothing.
    """
    least = size.peak_bytes - (1.0 - LIMITED_MEMORY_AT_LEAST) * size.temp_bytes
    return 0 < least <= memory.budget_bytes


def limit_options(
    memory: MemoryBudget, size: CompiledBytes
) -> Mapping[str, Mapping[str, str]]:
    """Compiler options with which a program may fit, by name, the fastest first.

    Args:
        size: what it needs without them.

    Returns:
        Nothing where the compiler takes no limit, or none that would change anything.
    """
    fixed = size.peak_bytes - size.temp_bytes
    most = memory.device_bytes or 0
    if most <= max(fixed, memory.budget_bytes):
        return {}
    percent_bytes = (most - fixed) / 100
    asked = (memory.budget_bytes - fixed) / percent_bytes
    # It is a whole number, more than a gigabyte, and the compiler misses it by some
    # percent, to either side: with a little less more programs fit.
    shares = dict.fromkeys(max(1, n) for n in (round(asked), int(0.9 * asked)))
    limits: list[Mapping[str, str]] = [{MEMORY_SHARE: str(n)} for n in shares]
    if min(shares) * percent_bytes >= size.temp_bytes:
        limits = [{}]  # So much is what it needs anyway.
    names = ("within the budget", "well within the budget")
    found = {name: o for name, o in zip(names, limits, strict=False) if o}
    return found | {
        "within the budget, no latency hiding": {**limits[-1], **NO_LATENCY_HIDING}
    }


Compile = Callable[[Sequence[Candidate]], Sequence[RaceResult]]


def expected_ms(candidate: Candidate) -> float:
    """Predicted step time, `LIMITED_TIME` times with the limit; infinity if unknown."""
    if candidate.predicted_ms is None:
        return inf
    limited = MEMORY_SHARE in candidate.options
    return candidate.predicted_ms * (LIMITED_TIME if limited else 1.0)


def within_reach(
    candidates: Sequence[Candidate],
    however_slow: Collection[Any],
    reach: Mapping[ConstraintLevel, float],
    fitting: Sequence[Candidate] = (),
) -> list[Candidate]:
    """Finds candidates that may be faster than the best, or race anyway.

    Args:
        candidates: all candidates; without a prediction each may be faster.
        however_slow: keys of candidates that race at any predicted time.
        reach: limit of predicted time, as a multiple of the best's.
        fitting: candidates known to fit; the best is one of these, or of all
            candidates.
    """
    best_ms = min(map(expected_ms, fitting or candidates), default=inf)

    def is_near(one: Candidate) -> bool:
        time_ms = expected_ms(one)
        return time_ms <= best_ms or time_ms <= reach[one.level] * best_ms

    return [
        one
        for one in candidates
        if one.key in however_slow or one.predicted_ms is None or is_near(one)
    ]


def exempt_from_reach(candidates: Sequence[Candidate]) -> set[Any]:
    """Keys of the plan and the best preset, which may be slower than reach allows."""
    known = [one for one in candidates if one.is_preset and one.predicted_ms]
    best = sorted(known, key=expected_ms)[:1]
    return {one.key for one in (*candidates[:1], *best)}


@dataclass(frozen=True, slots=True)
class Admitted:
    """Compiled and skipped candidates.

    Attributes:
        fitting: compiled, and they fit.
        refused: compiled, and they do not fit or fail, with the reasons.
        left: not compiled, with the reasons.
    """

    fitting: list[RaceResult] = field(default_factory=list)
    refused: list[RaceResult] = field(default_factory=list)
    left: list[tuple[Candidate, str]] = field(default_factory=list)


# A candidate as it is, or with memory limits, the loosest first.
_Ways = Sequence[Candidate]


@dataclass(slots=True, kw_only=True)
class _Admission:
    """Candidates on their way to the race.

    Attributes:
        memory: the memory that they must fit in, under a budget.
        reach: as for :func:`compile_until_enough_fit`.
        exempt_from_refusals: keys of candidates that are compiled in spite of refusals.
        known_large: choices and levels known not to fit, which count as no refusal.
        however_slow: keys of candidates to compile at any predicted time.
        found: results of compiled or skipped candidates.
        queue: candidates to compile.
        limited: choices that are compiled with the memory limit.
    """

    memory: MemoryBudget | None
    reach: Mapping[ConstraintLevel, float] | None
    exempt_from_refusals: Collection[Any]
    known_large: Collection[tuple[Choice, ConstraintLevel]] = ()
    however_slow: Collection[Any] = ()
    found: Admitted = field(default_factory=Admitted)
    queue: list[_Ways] = field(default_factory=list)
    limited: set[Choice] = field(default_factory=set)

    @property
    def fitting(self) -> list[Candidate]:
        """Candidates that were compiled, and fit."""
        return [made.candidate for made in self.found.fitting]

    def add(self, one: Candidate, size: CompiledBytes | None) -> None:
        """Queues a candidate, or skips it.

        Args:
            size: predicted memory; None to compile the candidate without a check.
        """
        memory, limits = self.memory, {}
        if memory is not None and size is not None:
            if not may_fit(memory, size):
                self.found.left.append((one, TOO_LARGE))
                return
            if size.peak_bytes * COMPILED_TO_PREDICTED > memory.budget_bytes:
                limits = limit_options(memory, size)
        if not limits:
            self.queue.append([one])
        elif one.choice in self.limited:
            # At another constraint level a choice needs as much.
            self.found.left.append((one, LIMITED_ONCE))
        else:
            self.limit(with_options(one, limits))

    def limit(self, ways: _Ways) -> None:
        """Queues a candidate with memory limits, if there are any."""
        if ways:
            self.queue.append(ways)
            self.limited.add(ways[0].choice)

    def select(self) -> list[_Ways]:
        """Selects the next candidates to compile; none if enough are compiled.

        The plan and candidates known to fit come first, whatever the refusals. Then
        come near candidates, the best preset first, as time may be too short for all.
        """
        reach, however_slow = self.reach, self.however_slow
        self.queue.sort(key=lambda ways: expected_ms(ways[0]))
        fitting, large = self.fitting, {*self.known_large}
        # What was refused as it is, and fits with the memory limit, fits.
        refused = [made.candidate for made in self.found.refused]
        failed = {(one.choice, one.level) for one in refused}
        failed -= {(one.choice, one.level) for one in fitting} | large
        limited = {(o.choice, o.level) for o in refused if MEMORY_SHARE in o.options}
        vain = large - limited if len(large & limited) >= MOST_REFUSED else set()
        queue = [w for w in self.queue if (w[0].choice, w[0].level) not in vain]
        allowed = max(0, MOST_REFUSED - len(failed))
        if self.memory is None:
            allowed = len(queue)
        exempt = self.exempt_from_refusals
        first = [ways for ways in queue if ways[0].key in exempt]
        if reach is None:
            return [] if fitting else [*(queue if allowed else first)][:1]

        def near(some: Sequence[Candidate]) -> list[_Ways]:
            found = within_reach(some, however_slow, reach, fitting)
            return [w for w in queue if w[0] in found and w not in first]

        others = near([ways[0] for ways in queue])
        if self.memory is None:
            # At some levels the compiler does better than is predicted.
            others.sort(key=lambda w: expected_ms(w[0]) / reach[w[0].level])
        others.sort(key=lambda ways: ways[0].key not in however_slow)
        found = [*first, *others][: max(allowed, len(first))]
        if self.memory is not None:
            return found
        some = [*fitting, *(ways[0] for ways in found)]
        few = [*dict.fromkeys(one.choice for one in some)][:MOST_RACED]
        return [ways for ways in found if ways[0].choice in few]

    def sort_in(self, ways: _Ways, made: Sequence[RaceResult]) -> None:
        """Adds a candidate to what fits, or does not; then to the queue again.

        Args:
            made: what became of the first of its ways, or more of them.
        """
        for one in made:
            if one.may_race:
                self.found.fitting.append(one)
                return
            self.found.refused.append(one)
        one, first = ways[0], made[0]
        if (
            self.memory is not None
            and not (first.fits or one.choice in self.limited)
            and MEMORY_SHARE not in one.options
            and may_fit(self.memory, first.size)
        ):
            ways = [one, *with_options(one, limit_options(self.memory, first.size))]
        self.limit(ways[len(made) :])

    def leave(self, *, is_late: bool) -> None:
        """Skips the rest of the queue."""
        rest, near = [ways[0] for ways in self.queue], list[Candidate]()
        if is_late and not self.fitting:
            near = rest
        elif self.reach is not None:
            near = within_reach(rest, (), self.reach, self.fitting)
        few = BEHIND if self.memory is None else MANY_REFUSED
        why = TOO_LATE if is_late else few
        self.found.left.extend((one, why if one in near else TOO_FAR) for one in rest)


def _side_by_side(chosen: Sequence[_Ways], most: int) -> list[tuple[int, int]]:
    """Places of candidates, and ways of theirs, that compile side by side.

    Of each the loosest, which come first as time may be too short for all; and tighter
    ones, of all in turn, up to so many programs.
    """
    depths = range(max(map(len, chosen)))
    places = enumerate(map(len, chosen))
    every = [(p, depth) for depth, (p, n) in product(depths, places) if depth < n]
    return every[: max(len(chosen), most)]


def compile_until_enough_fit(
    candidates: Sequence[Candidate],
    compile_all: Compile,
    *,
    memory: MemoryBudget | None,
    size_of: Callable[[Candidate], CompiledBytes | None],
    reach: Mapping[ConstraintLevel, float] | None,
    known: Collection[Any] = (),
    compiled: Mapping[Any, CompiledBytes] = MappingProxyType({}),
    at_once: int = 1,
    is_over: Callable[[], bool] = lambda: False,
) -> Admitted:
    """Compiles candidates until enough of them fit.

    Args:
        candidates: the plan first.
        compile_all: compiles some, and returns their memory, or why they cannot race.
        memory: the memory that they must fit in, under a budget.
        size_of: predicted memory of a candidate, if known.
        reach: limit of time, as a multiple of the fastest that fits; None if one that
            fits is enough, without a race.
        known: keys of candidates compiled before that fit.
        compiled: memory of candidates compiled before, by key.
        at_once: number of programs that compile side by side. With fewer candidates,
            tighter limits are tried beside the loosest.
        is_over: True if time is over, so that compiled programs must do.
    """
    # The plan is compiled as it is, and what is known to fit needs no prediction.
    exempt = {*known, *(one.key for one in candidates[:1])}
    most = memory.budget_bytes if memory is not None else inf
    too_large = {key for key, size in compiled.items() if size.peak_bytes > most}
    large = [one for one in candidates if one.key in too_large]
    state = _Admission(
        memory=memory,
        reach=reach,
        exempt_from_refusals=exempt,
        known_large={(one.choice, one.level) for one in large},
    )
    for one, made in zip(large, compile_all(large) if large else (), strict=True):
        state.sort_in([one], [made])
    for one in candidates:
        is_sure = memory is None or one.options or one.key in exempt
        if one not in large:
            state.add(one, None if is_sure else size_of(one))
    first = [ways[0] for ways in state.queue]
    state.however_slow = exempt_from_reach([*candidates[:1], *first])
    while chosen := state.select():
        if (state.fitting or state.found.refused) and is_over():
            break
        state.queue = [ways for ways in state.queue if ways not in chosen]
        order = _side_by_side(chosen, 1 if reach is None else at_once)
        results = compile_all([chosen[place][depth] for place, depth in order])
        for place, ways in enumerate(chosen):
            made = zip(order, results, strict=True)
            state.sort_in(ways, [one for (p, _), one in made if p == place])
    state.leave(is_late=bool(chosen))
    return state.found


_MOST_NAMED = 4
# Of all memory: what takes less is not named, and no remedy is for it.
_WORTH_NAMING = 0.005
_WORTH_A_REMEDY = 0.15

ARGUMENTS = "arguments"
RESULTS = "results that take no donated argument's place"
TEMPORARIES = "temporaries"
CODE = "code"
RESERVE = "what the allocator may add"


def over_budget(
    analysis: Analysis, problem: Problem, reserve_bytes: int = 0
) -> MemoryBudgetError:
    """The error for a budget, and its reserve, that nothing fits in by prediction."""
    best = leanest(problem)
    needed = best.memory_bytes + reserve_bytes
    choice = whole_choice(analysis, problem, best)
    held = problem.fixed_bytes + problem.state_bytes(best.picks)
    results = result_bytes(lay_out(analysis.frame, choice))
    use = {
        ARGUMENTS: held - results,
        RESULTS: results,
        TEMPORARIES: best.memory_bytes - held,
        RESERVE: reserve_bytes,
    }
    budget = format_bytes((problem.budget_bytes or 0) + reserve_bytes)
    first = (
        f"No plan fits in {budget} of memory on each device. The smallest budget that "
        f"would do is about {format_bytes(needed, up=True)}, by prediction."
    )
    return _error(analysis, first, needed, use, choice)


def no_winner(
    analysis: Analysis,
    results: Sequence[RaceResult],
    budget_bytes: int | None,
    reserve_bytes: int = 0,
) -> CfpError:
    """The error for a race that nothing finished, in a budget and its reserve.

    Args:
        results: of all that was compiled, or failed.
        budget_bytes: what a program may need on each device.
        reserve_bytes: what the allocator may add.
    """
    # Of what could not be compiled it is not known what it needs.
    compiled = [r for r in results if r.peak_bytes]
    failed = [r for r in compiled if r.fits] if compiled else results
    if failed or not compiled:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in failed)
        reasons = reasons or "None was compiled."
        return CfpError(f"No plan ran on the devices. {reasons}")
    best = min(compiled, key=lambda r: r.peak_bytes)
    needed = best.peak_bytes + reserve_bytes
    programs = len({r.record.key for r in compiled if r.record is not None})
    smallest = f"Of {programs} compiled plans the smallest, {best.name},"
    most = (budget_bytes or 0) + reserve_bytes
    first = (
        f"{smallest if programs > 1 else f'The plan {best.name!r}, compiled,'} needs "
        f"{format_bytes(needed, up=True)} on each device, "
        f"{format_bytes(needed - most, up=True)} more than the budget of "
        f"{format_bytes(most)}."
    )
    size = best.size
    use = {
        ARGUMENTS: size.argument_bytes,
        RESULTS: size.output_bytes - size.alias_bytes,
        TEMPORARIES: size.temp_bytes,
        CODE: size.code_bytes,
        RESERVE: reserve_bytes,
    }
    error = _error(analysis, first, needed, use, best.candidate.choice)
    broken = defaultdict[str, list[str]](list)
    for one in results:
        if one.record and one.record.status not in ("ok", "out_of_memory"):
            broken[one.note.partition("\n")[0]].append(repr(one.name))
    for why, names in [*broken.items()][:_MOST_NAMED]:
        error = error.with_line(f"{', '.join(names)} failed otherwise: {why}")
    return error


def least_short(
    errors: Mapping[str, MemoryBudgetError],
    late: Sequence[str] = (),
) -> MemoryBudgetError:
    """Returns the error of the variant with the smallest need.

    Args:
        errors: by the variants' names.
        late: variants that time was too short for.
    """
    needs = {name: one.smallest_feasible_bytes for name, one in errors.items()}
    best = min(needs, key=needs.__getitem__)
    least = errors[best]
    others = ", ".join(
        f"{name} {format_bytes(size, up=True)}"
        for name, size in needs.items()
        if name != best
    )
    if others:
        least = least.with_line(
            f"That is {best}. Others need as much or more: {others}.", behind_first=True
        )
    if late:
        least = least.with_line(
            f"There was no time to plan {', '.join(late)}: with a longer --time-budget "
            "one may fit."
        )
    return least


def _error(
    analysis: Analysis,
    first: str,
    needed_bytes: int,
    use: Mapping[str, int],
    choice: Choice,
) -> MemoryBudgetError:
    """The error with all lines of its message.

    Args:
        first: what does not fit.
        needed_bytes: what the leanest needs.
        use: what that is for, in bytes.
        choice: what it chooses.
    """
    parts = sorted(
        ((name, size) for name, size in use.items() if size > 0), key=lambda p: -p[1]
    )
    uses = [
        f"{name} {format_bytes(size)} ({size / needed_bytes:.0%})"
        for name, size in parts
        if size >= _WORTH_NAMING * needed_bytes
    ]
    lines = [first]
    if uses:
        lines.append(f"That memory is for: {', '.join(uses)}.")
    large = {name for name, size in parts if size >= _WORTH_A_REMEDY * needed_bytes}
    advice = f"Raise the budget to {format_bytes(needed_bytes, up=True)}"
    lines.append(advice + _advice(analysis, choice, [n for n, _ in parts], large))
    return MemoryBudgetError(
        "\n  ".join(lines), smallest_feasible_bytes=needed_bytes, contributors=parts
    )


def _advice(
    analysis: Analysis, choice: Choice, parts: Sequence[str], large: set[str]
) -> str:
    """Suggests more remedies, by what takes most memory."""
    advice = ""
    if large != {RESERVE}:  # Each of more devices has as much for its allocator.
        advice += ", use more devices"
    if not parts or parts[0] == TEMPORARIES or TEMPORARIES in large:
        advice += (
            ", make the batch smaller, or, if the step takes microbatches, let it "
            "through in parts (--microbatches, cfp.plan_fastest)"
        )
    if RESULTS in large:
        advice += ", or donate the state (--donate 0, donate_argnums=0)"
    able = [s.index for s in analysis.segments if can_rematerialize(analysis.frame, s)]
    if not able:
        return f"{advice}."
    return (
        f"{advice}. {len(choice.remat)} of {len(able)} possible segments are "
        "rematerialized; jax.checkpoint in the model (zoo: --remat) keeps less."
    )
