"""Admits candidates to the race: compiles them until enough fit.

A candidate is a whole program. `compile_until_enough_fit` compiles candidates by
predicted time, under a memory budget. Three rules skip candidates:

- *Reach*: the predicted time exceeds `reach` times that of the fastest that fits.
- *Refusals*: `MOST_REFUSED` compiled candidates did not fit, or failed. Candidates too
  large in an earlier run count apart, by failures with a memory limit.
- *Memory*: by prediction the candidate cannot fit, even with the memory limit. If its
  predicted memory times `COMPILED_TO_PREDICTED` exceeds the budget, it is compiled with
  XLA's memory limit only (if a limit can help), at one constraint level.

=========================  ==========  =============  ===========
exempt from                reach       refusals       memory
=========================  ==========  =============  ===========
the plan, and remembered   yes         yes            yes
the best preset            yes         no             no
no predicted time / size   yes / no    no / no        no / yes
others                     no          no             no
=========================  ==========  =============  ===========

A candidate that does not fit is compiled again with memory limits, if it may fit then,
the loosest first. Such variants have no exemptions. Rematerialized programs are other
candidates (:mod:`cfp.race.programs`). After the deadline, at most one is compiled, if
none was before. Without a race, compiling ends with the first that fits. Without a
budget, only the reach and `MOST_RACED` skip candidates.

*Memory limit* is an option of XLA, not the budget. XLA uses free device memory to hide
latency. With a limit, it rematerializes ops to need about that much: fewer and cheaper
ops than a whole segment's.

If no program fits, an error names the largest parts of its memory, and remedies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod
from types import MappingProxyType
from typing import Any

from cfp.analysis.analyze import Analysis, model_work
from cfp.analysis.layout import Choice, lay_out
from cfp.analysis.presets import presets
from cfp.analysis.roles import batch_rows, data_arguments
from cfp.context import MemoryBudget
from cfp.cost.costs import segment_candidate
from cfp.cost.memory import can_rematerialize, result_bytes
from cfp.errors import CfpError, MemoryBudgetError
from cfp.printable import few, format_bytes
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
from cfp.search.guided import Candidate
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


def may_fit(memory: MemoryBudget, size: CompiledBytes) -> bool:
    """True if a program fits, or might if XLA has a memory limit.

    Args:
        size: memory without a limit; zeros, as of a failed compile, give False.
    """
    least = size.peak_bytes - (1.0 - LIMITED_MEMORY_AT_LEAST) * size.temp_bytes
    return 0 < least <= memory.budget_bytes


def limit_options(
    memory: MemoryBudget, size: CompiledBytes
) -> Mapping[str, Mapping[str, str]]:
    """Returns {suffix of a name: XLA options} that may save memory, the fastest first.

    Empty if XLA has no memory limit on the platform, or if a device's memory is unknown
    or at most the budget, or at most the program's memory without temporaries.

    Args:
        size: memory without these options.
    """
    fixed = size.peak_bytes - size.temp_bytes
    most = memory.device_bytes or 0
    if most <= max(fixed, memory.budget_bytes):
        return {}
    percent_bytes = (most - fixed) / 100
    asked = (memory.budget_bytes - fixed) / percent_bytes
    # The limit is a whole percentage, in steps of a gigabyte or so. The compiler misses
    # it by some percent, either way: a second, tighter limit makes more programs fit.
    shares = dict.fromkeys(max(1, n) for n in (round(asked), int(0.9 * asked)))
    limits: list[Mapping[str, str]] = [{MEMORY_SHARE: str(n)} for n in shares]
    if min(shares) * percent_bytes >= size.temp_bytes:
        limits = [{}]  # The program is below these limits anyway.
    names = ("within the budget", "well within the budget")
    found = {name: o for name, o in zip(names, limits, strict=False) if o}
    return found | {
        "within the budget, no latency hiding": {**limits[-1], **NO_LATENCY_HIDING}
    }


def expected_ms(candidate: Candidate) -> float:
    """Predicted step time, ms, corrected for a memory limit; infinity if unknown."""
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
    """Selects candidates within reach of the best, and exempt candidates.

    Args:
        candidates: all candidates; without a predicted time, they are exempt.
        however_slow: keys of exempt candidates.
        reach: ``{level: limit of predicted time}``, as a multiple of the best's.
        fitting: candidates known to fit, with the best among them; if empty, the best
            is among all candidates.
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
    """Returns keys of the plan (the first one) and of the preset predicted fastest."""
    known = [one for one in candidates if one.is_preset and one.predicted_ms]
    best = sorted(known, key=expected_ms)[:1]
    return {one.key for one in (*candidates[:1], *best)}


@dataclass(frozen=True, slots=True)
class Admitted:
    """Compiled and skipped candidates.

    Attributes:
        fitting: results of candidates that fit.
        refused: results of candidates that do not fit, failed, or were chosen too late.
        left: (candidate or variant, reason) of all that were skipped.
    """

    fitting: list[RaceResult] = field(default_factory=list)
    refused: list[RaceResult] = field(default_factory=list)
    left: list[tuple[Candidate, str]] = field(default_factory=list)


# One candidate's variants, in the order to try: without a limit, then tighter limits.
_Ways = Sequence[Candidate]


@dataclass(slots=True, kw_only=True)
class _Admission:
    """State of `compile_until_enough_fit`.

    Attributes:
        memory: the memory budget; None without one.
        exempt_from_refusals: keys of candidates that are compiled in spite of refusals.
        known_large: (choice, level) that an earlier run compiled too large.
        however_slow: keys of candidates to compile at any predicted time.
        queue: variants of each candidate, compiled in order until one fits.
        limited: choices that were queued with a memory limit.
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
        return [made.candidate for made in self.found.fitting]

    def add(self, one: Candidate, size: CompiledBytes | None) -> None:
        """Queues a candidate, perhaps only with memory limits; or skips it.

        Args:
            size: predicted memory; None queues the candidate without a check.
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
            # Other constraint levels need about the same memory.
            self.found.left.append((one, LIMITED_ONCE))
        else:
            self.limit(with_options(one, limits))

    def limit(self, ways: _Ways) -> None:
        """Queues variants of one candidate with memory limits, if there are any."""
        if ways:
            self.queue.append(ways)
            self.limited.add(ways[0].choice)

    def select(self) -> list[_Ways]:
        """Selects candidates, with variants, to compile next; empty ends compiling.

        In order: the plan and remembered candidates, the best preset, and others within
        reach, as many as limits leave. Without a race: the fastest, until one fits.
        """
        reach, however_slow = self.reach, self.however_slow
        self.queue.sort(key=lambda ways: expected_ms(ways[0]))
        fitting, large = self.fitting, {*self.known_large}
        # A candidate that fits under XLA's memory limit counts as no refusal.
        refused = [made.candidate for made in self.found.refused]
        failed = {(one.choice, one.level) for one in refused}
        failed -= {(one.choice, one.level) for one in fitting} | large
        limited = {(o.choice, o.level) for o in refused if MEMORY_SHARE in o.options}
        vain = large - limited if len(large & limited) >= MOST_REFUSED else set()
        queue = [w for w in self.queue if (w[0].choice, w[0].level) not in vain]
        allowed = max(0, MOST_REFUSED - len(failed))
        if self.memory is None:
            allowed = len(queue)
        first = [ways for ways in queue if ways[0].key in self.exempt_from_refusals]
        if reach is None:
            return [] if fitting else [*(queue if allowed else first)][:1]

        def near(some: Sequence[Candidate]) -> list[_Ways]:
            found = within_reach(some, however_slow, reach, fitting)
            return [w for w in queue if w[0] in found and w not in first]

        others = near([ways[0] for ways in queue])
        if self.memory is None:
            # At levels with a larger reach, steps may be faster than predicted.
            others.sort(key=lambda w: expected_ms(w[0]) / reach[w[0].level])
        others.sort(key=lambda ways: ways[0].key not in however_slow)
        found = [*first, *others][: max(allowed, len(first))]
        if self.memory is not None:
            return found
        some = [*fitting, *(ways[0] for ways in found)]
        few = [*dict.fromkeys(one.choice for one in some)][:MOST_RACED]
        return [ways for ways in found if ways[0].choice in few]

    def sort_in(self, ways: _Ways, made: Sequence[RaceResult]) -> None:
        """Records results of the first of a candidate's variants, up to one that fits.

        If none fits, queues the variants with memory limits that were not compiled.
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
        rest, near = [ways[0] for ways in self.queue], list[Candidate]()
        if is_late and not self.fitting:
            near = rest
        elif self.reach is not None:
            near = within_reach(rest, (), self.reach, self.fitting)
        few = BEHIND if self.memory is None else MANY_REFUSED
        why = TOO_LATE if is_late else few
        self.found.left.extend((one, why if one in near else TOO_FAR) for one in rest)


def compile_until_enough_fit(
    candidates: Sequence[Candidate],
    compile_all: Callable[[Sequence[Candidate]], Sequence[RaceResult]],
    *,
    memory: MemoryBudget | None,
    size_of: Callable[[Candidate], CompiledBytes | None],
    reach: Mapping[ConstraintLevel, float] | None,
    known: Collection[Any] = (),
    compiled: Mapping[Any, CompiledBytes] = MappingProxyType({}),
    at_once: int = 1,
    is_over: Callable[[], bool] = lambda: False,
) -> Admitted:
    """Compiles candidates until enough of them fit, by the rules of this module.

    Args:
        candidates: the plan first.
        compile_all: compiles candidates and returns their results, in order.
        memory: the memory budget; None without one.
        size_of: predicted memory of a candidate; None if unknown.
        reach: ``{level: limit of predicted time}``, as a multiple of the fastest that
            fits (of all, until one fits); None to end with the first that fits.
        known: keys of remembered candidates, exempt from all three rules.
        compiled: ``{key: memory}`` of candidates compiled in earlier runs.
        at_once: number of programs that compile side by side. With fewer candidates,
            tighter limits are tried beside the loosest.
        is_over: True after the deadline.
    """
    # The plan, and remembered candidates, are queued without a check of memory.
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
        is_sure = memory is None or one.key in exempt
        if one not in large:
            state.add(one, None if is_sure else size_of(one))
    first = (*candidates[:1], *(ways[0] for ways in state.queue))
    state.however_slow = exempt_from_reach(first)
    has_begun = False  # Sizes in the store do not count as compiled.
    while (chosen := state.select()) and not (has_begun and is_over()):
        has_begun = True
        state.queue = [ways for ways in state.queue if ways not in chosen]
        # Each candidate's first variant, then tighter ones of all in turn.
        depths = range(max(map(len, chosen)))
        places = enumerate(map(len, chosen))
        order = [(p, depth) for depth, (p, n) in product(depths, places) if depth < n]
        order = order[: max(len(chosen), 1 if reach is None else at_once)]
        results = compile_all([chosen[place][depth] for place, depth in order])
        for place, ways in enumerate(chosen):
            made = zip(order, results, strict=True)
            state.sort_in(ways, [one for (p, _), one in made if p == place])
    state.leave(is_late=bool(chosen))
    return state.found


_MOST_NAMED = 4
# Least shares of a program's memory that a message names, and has a remedy for.
_WORTH_NAMING = 0.005
_WORTH_A_REMEDY = 0.15

RESULTS = "results that reuse no donated argument"
TEMPORARIES = "temporaries"
RESERVE = "the allocator's reserve"
_SPLIT = "split it, if the step takes microbatches (--microbatches, cfp.plan_fastest)"


def over_budget(
    analysis: Analysis, problem: Problem, reserve_bytes: int = 0
) -> MemoryBudgetError:
    """Makes the error for a budget in which no choice fits by prediction.

    The user's budget is the problem's and `reserve_bytes`, for the allocator.
    """
    best = leanest(problem)
    needed = best.memory_bytes + reserve_bytes
    choice = whole_choice(analysis, problem, best)
    held = problem.fixed_bytes + problem.state_bytes(best.picks)
    results = result_bytes(lay_out(analysis.frame, choice))
    size = CompiledBytes(
        argument_bytes=held - results,
        output_bytes=results,
        temp_bytes=best.memory_bytes - held,
    )
    most = (problem.budget_bytes or 0) + reserve_bytes
    first = (
        f"No plan fits in {format_bytes(most)} of memory on each device. The smallest "
        f"sufficient budget is about {format_bytes(needed, up=True)}, predicted."
    )
    return _error(analysis, first, size, most, reserve_bytes, choice)


def no_winner(
    analysis: Analysis,
    results: Sequence[RaceResult],
    budget_bytes: int | None,
    reserve_bytes: int = 0,
) -> CfpError:
    """Makes the error for a race without a winner.

    A `MemoryBudgetError` if programs were compiled and all are over the budget.

    Args:
        results: results of all candidates chosen to compile.
        budget_bytes: largest memory of a program per device; None without a budget.
        reserve_bytes: the rest of the user's budget, for the allocator.
    """
    compiled = [r for r in results if r.peak_bytes]
    failed = [r for r in compiled if r.fits] if compiled else results
    if failed or not compiled:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in failed)
        reasons = reasons or "No candidate was compiled."
        return CfpError(f"No plan ran on the devices. {reasons}")
    best = min(compiled, key=lambda r: r.peak_bytes)
    most = (budget_bytes or 0) + reserve_bytes
    first = (
        f"No plan was found within the budget of {format_bytes(most)} on each device. "
        f"A budget of {format_bytes(best.peak_bytes + reserve_bytes, up=True)} is "
        "enough for the smallest compiled program; budgets between the two were not "
        f"searched.\n  {_described(analysis, best)}"
    )
    how = best.size, most, reserve_bytes, best.candidate.choice
    error = _error(analysis, first, *how)
    broken = defaultdict[str, list[str]](list)
    for one in results:
        if one.record and one.record.status not in ("ok", "out_of_memory"):
            broken[one.note.partition("\n")[0]].append(repr(one.name))
    for why, names in [*broken.items()][:_MOST_NAMED]:
        error = error.with_line(f"{', '.join(names)} failed: {why}")
    return error


def _described(analysis: Analysis, one: RaceResult) -> str:
    """Counts a program's segments by the preset that they follow."""
    choice, named = one.candidate.choice, presets(analysis.frame).items()
    names = Counter[str]()
    for index in range(len(analysis.segments)):
        own = segment_candidate(analysis, index, choice).plain.as_written
        alike = (n for n, c in named if segment_candidate(analysis, index, c) == own)
        names[next((f"as {n}" for n in alike), "unlike any preset")] += 1
    parts = few([f"{count} {name}" for name, count in names.most_common()])
    return f"That program shards its segments: {parts}."


def least_short(
    errors: Mapping[str, MemoryBudgetError], late: Sequence[str] = ()
) -> MemoryBudgetError:
    """Returns the error of the variant that needs the least memory, with all needs.

    Args:
        errors: ``{variant: error}``.
        late: variants that were not planned before the deadline.
    """
    needs = {name: one.smallest_feasible_bytes for name, one in errors.items()}
    best, *rest = sorted(needs, key=needs.__getitem__)
    others = ", ".join(f"{one} {format_bytes(needs[one], up=True)}" for one in rest)
    least = errors[best]
    if others:
        least = least.with_line(
            f"Variant {best}. Others need as much or more: {others}.", behind_first=True
        )
    if late:
        least = least.with_line(
            f"There was no time to plan {', '.join(late)}. Give planning more time "
            "(--time-budget, cfp.PlannerSettings(seconds=...))."
        )
    return least


def _error(
    analysis: Analysis,
    first: str,
    size: CompiledBytes,
    budget_bytes: int,
    reserve_bytes: int,
    choice: Choice,
) -> MemoryBudgetError:
    """Makes the error about a program of memory `size`; `first` is its first lines."""
    use = {
        "arguments": size.argument_bytes,
        RESULTS: size.output_bytes - size.alias_bytes,
        TEMPORARIES: size.temp_bytes,
        "code": size.code_bytes,
        RESERVE: reserve_bytes,
    }
    needed = size.peak_bytes + reserve_bytes
    parts = [(name, size) for name, size in Counter(use).most_common() if size > 0]
    uses = ", ".join(
        f"{name} {format_bytes(size)} ({size / needed:.0%})"
        for name, size in parts
        if size >= _WORTH_NAMING * needed
    )
    if (least := _least_state_bytes(analysis)) > budget_bytes - reserve_bytes:
        state = f"{format_bytes(least)} on each device if all shard it"
        uses += f".\n  The state alone needs {state}"
    large = {name for name, size in parts if size >= _WORTH_A_REMEDY * needed}
    advice = _advice(analysis, choice, large)
    text = f"{first}\n  That memory is for: {uses}.\n  Raise the budget{advice}."
    return MemoryBudgetError(text, smallest_feasible_bytes=needed, contributors=parts)


def _least_state_bytes(analysis: Analysis) -> int:
    """Bytes per device of the state outside host memory, if all devices shard it."""
    frame, devices = analysis.frame, prod(size for _, size in analysis.frame.mesh)
    program = frame.program
    here = (p for p in frame.group_of_arg if not any(program.arg_memory[p : p + 1]))
    return sum(program.values[program.args[p]].size_bytes for p in here) // devices


def _advice(analysis: Analysis, choice: Choice, large: set[str]) -> str:
    """Returns what follows "Raise the budget"; `large` are the parts worth a remedy."""
    frame, segments, advice = analysis.frame, analysis.segments, ""
    if large != {RESERVE}:  # Each device has a reserve, so more devices do not help.
        advice += ", use more devices"
    if not large or TEMPORARIES in large:
        samples = model_work(frame, data_arguments(frame)).get("batch_samples", 0)
        is_split = batch_rows(frame, round(samples)) < samples
        smaller = "its microbatches" if is_split else _SPLIT
        advice += f", make the batch smaller, or {smaller}"
    if RESULTS in large:
        advice += ", or donate the state (--donate 0, donate_argnums=0)"
    if able := sum(can_rematerialize(frame, one) for one in segments):
        advice += f". Rematerialized: {len(choice.remat)} of {able} possible segments"
        advice += "; more of them are not known to help" * (len(choice.remat) < able)
        if not any("rematted_computation" in op.scope for op in frame.program.ops):
            advice += "; jax.checkpoint in the model (--remat of cfp's) keeps less"
    return advice
