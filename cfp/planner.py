"""The passes behind :mod:`cfp.api` that need devices: profile, search and race."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.entries import (
    computed_again,
    extent_name,
    in_reach,
    known_to_fit,
    leanest_of,
    let_down,
    nearly_fitting,
    one_by_one,
    predicted_ms,
    told_of_budget,
    with_options,
)
from cfp.errors import CfpError
from cfp.plan import Plan
from cfp.planner_parts import (
    Decision,
    PlannerSettings,
    Profiles,
    compose_plan,
    device_memory,
    finalists,
    left_out,
    race_row,
    room_within,
)
from cfp.presets import presets
from cfp.profiling.builder import Built
from cfp.profiling.collectives import Rates, measure_rates
from cfp.profiling.key import Parts, environment_parts
from cfp.profiling.looker import Looker
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.search.assemble import best_solutions, whole_choice
from cfp.search.compiler import variants
from cfp.search.costs import Costs, build_problem, measured_options
from cfp.search.guided import Explored, explore
from cfp.search.measure import Told
from cfp.search.race import Finalist, RaceResult, first_that_fits, race
from cfp.search.reshard import moves_between_measured
from cfp.search.shortlist import estimate_kinds, leading_classics
from cfp.search.squeeze import Room, squeezed
from cfp.search.wanted import WantedMaker, tuning_jobs
from cfp.shortage import no_winner, over_budget

# How many of the fastest are raced with other compiler options, too.
_LEADERS = 2
# Nobody is so far behind there that it would have to be found out first.
_ROUNDS_AMONG_LEADERS = 2
# A classic that is predicted to take this many times as long as the plan is not raced.
# On 2 H200 predictions were off by 8% at most, and what is told of arguments alone, for
# which the same prediction stands, was up to 8% faster; virtual devices vary more.
_REACH = {Told.EVERYTHING: 1.1, Told.ARGUMENTS: 1.2}
_REACH_ON_CPUS = 2.0


class Planner:
    """Profiles, searches and races one analysed program; owns the store."""

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh,
        cache_dir: str | Path | None = None,
        budget_bytes: int | None = None,
        settings: PlannerSettings | None = None,
    ) -> None:
        self.analysis = analysis
        self.mesh = mesh
        self.devices = list(mesh.devices.flat)
        self.settings = settings or PlannerSettings()
        is_cpu = (platform := self.devices[0].platform) == "cpu"
        self.plans = self.settings.plans or (1 if is_cpu else 2)
        everywhere = self.settings.reach or (_REACH_ON_CPUS if is_cpu else None)
        self.reach = dict.fromkeys(Told, everywhere) if everywhere else _REACH
        asked = self.settings.compiler_options
        self.options = variants(platform) if asked is None else asked
        every = (Told.EVERYTHING,) if is_cpu else tuple(Told)
        self.extents = self.settings.extents or every
        self.device_bytes = device_memory(mesh)
        self.room = room_within(budget_bytes, self.device_bytes, platform)
        self.budget_bytes = self.room.budget_bytes if self.room else self.device_bytes
        self.reserve = self.room.reserve_bytes if self.room else 0
        self.environment = environment_parts(self.devices)
        self.store = ProfileStore(store_path(cache_dir))
        self.classics = presets(analysis.frame)
        self.winner: Decision | None = None
        self.interrupted = False

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def preset(self, name: str) -> Decision:
        """A classic strategy, by name."""
        if name not in self.classics:
            raise CfpError(
                f"There is no preset {name!r} for this program. There are: "
                f"{', '.join(self.classics)}."
            )
        return Decision(name, self.classics[name])

    def profile(self) -> Profiles:
        """Measures candidates of every kind of segment, as the search asks for them.

        Interrupted, once every kind has some, it makes do with what was measured.
        """
        started = time.perf_counter()
        rates = measure_rates(self.mesh, self.store, **self._manner)
        classics, found, looker = self.explore(rates, self.settings.measure)
        moved_ms = looker.moves(
            moves_between_measured(self.analysis, rates, found), self.environment
        )
        self.interrupted = looker.interrupted
        done = [found.records.get(item.job.key.digest) for item in found.wanted]
        cached = sum(item.job.key.digest in looker.known for item in found.wanted)
        return Profiles(
            classics,
            found,
            rates,
            measured=sum(r is not None for r in done) - cached,
            cached=cached,
            failed=sum(r is not None and not r.ok for r in done),
            seconds=time.perf_counter() - started,
            moved_ms=moved_ms,
        )

    def explore(
        self, rates: Rates, measure: bool
    ) -> tuple[dict[str, Choice], Explored, Looker]:
        """The classics that are worth it, all that is wanted, and who looked.

        Args:
            rates: the devices' rates.
            measure: whether to measure; otherwise no device is used.
        """
        analysis, settings = self.analysis, self.settings
        estimates = estimate_kinds(analysis, rates)
        classics = leading_classics(analysis, estimates, self.classics)
        looker = Looker(
            analysis.frame.program,
            self.mesh,
            self.store,
            lambda: tuning_jobs(analysis, classics, self.environment),
            measure,
            self._manner,
        )
        end = time.monotonic() + settings.seconds
        effort = settings.effort
        alone = Agreement.of(self.mesh).alone
        if not alone:
            # What is asked for later depends on times, which processes that remember
            # different runs know differently: they measure all at once.
            effort = replace(effort, at_first=settings.per_kind)

        def is_over() -> bool:
            return not alone or looker.interrupted or time.monotonic() > end

        found = explore(
            estimates,
            WantedMaker(
                analysis, classics, estimates, self.environment, settings.in_context
            ),
            Costs(analysis, rates),
            effort=effort,
            budget_bytes=self.budget_bytes,
            look=looker,
            is_over=is_over,
        )
        return classics, found, looker

    def search(self, profiles: Profiles) -> Decision:
        """The fastest measured choice that fits in memory, by prediction.

        Where none does it is the leanest, if that is compiled next: only the compiler
        knows what a plan needs, and so what budget would do.

        Raises:
            MemoryBudgetError: none fits, and nothing is compiled to make sure.
        """
        started = time.perf_counter()
        self._tell("searching among what was measured")
        costs = Costs(self.analysis, profiles.rates, profiles.moved_ms)
        known = (profiles.found.wanted, profiles.found.records)
        # With times in context, and with times alone.
        problem, other = (
            build_problem(
                costs, measured_options(costs, *known, alone), self.budget_bytes
            )
            for alone in (False, True)
        )
        classics = profiles.classics
        found: dict[Choice, float] = {}
        for one in (problem, other):
            for best in best_solutions(one, self.plans):
                choice = whole_choice(self.analysis, one, best)
                found.setdefault(choice, problem.cost_ms(best.picks))
        is_compiled = self._races or self.room is not None
        # Where the compiler may yet save some memory, more may fit; it will say so.
        hoped = squeezed(problem) if self.device_bytes and is_compiled else problem
        if profiles.found.tight:
            for best in best_solutions(hoped, 1):
                choice = whole_choice(self.analysis, hoped, best)
                found.setdefault(choice, best.cost_ms)
            again = computed_again(self.analysis, (problem, hoped), classics)
            classics = dict(classics) | again
        if not found:
            if not is_compiled:
                raise over_budget(self.analysis, problem)
            lean = leanest_of(self.analysis, problem)
            found[lean.choice] = lean.predicted_ms or 0.0
            classics = nearly_fitting(self.analysis, hoped, classics)
        counts = {
            "strategies_measured": profiles.measured,
            "strategies_cached": profiles.cached,
            "strategies_failed": profiles.failed,
            "profile_seconds": profiles.seconds,
            "gap": profiles.found.gap,
            "search_seconds": time.perf_counter() - started,
        }
        (choice, best_ms), *others = found.items()
        rivals = tuple(
            Decision(f"planned {number}", other, cost)
            for number, (other, cost) in enumerate(others, 2)
        )
        return Decision(
            "planned",
            choice,
            best_ms,
            rivals=rivals,
            classics=classics,
            problem=problem,
            search=counts,
        )

    def race(self, decision: Decision) -> Plan:
        """Times the decision and the classics on the whole program; keeps the fastest.

        What won is in :attr:`winner` then. Without a race that is the decision; or,
        where a budget was asked for, the best by prediction that fits when compiled.

        Raises:
            MemoryBudgetError: none of them fits in memory.
            DeviceError: none of them runs.
        """
        self.winner = decision
        if not self._races:
            if self.room is None:
                return self._plan(decision, decision, [])
            return self._compiled_within(self.room, decision)
        started = time.perf_counter()
        entries, far = self._entries(decision)
        programs: dict[str, Built] = {}
        results = self._race(entries, self.environment, programs)
        if decision.problem and not any(r.ran for r in results):
            lean = leanest_of(self.analysis, decision.problem)
            entries, far = [*entries, *far], []
            entries += [lean] if lean.key not in {e.key for e in entries} else []
            results = self._race(entries, self.environment, programs)
        leaders = sorted(range(len(entries)), key=lambda i: results[i].time_ms)
        # Who does not fit or run leads nobody.
        able = [i for i in leaders[:_LEADERS] if results[i].ran]
        first = [entries[i] for i in able]
        programs = {e.name: programs[e.name] for e in first if e.name in programs}
        again = with_options(first, self.options)
        told = told_of_budget(entries, results, self.room) if self.room else []
        if again := [*again, *told]:
            again = [*first, *again]
            # The leaders run again beside them, since only times of one run compare,
            # and are kept apart: who leads must not change with it.
            entries = [entries[i] for i in leaders[len(able) :]]
            results = [results[i] for i in leaders[len(able) :]]
            beside = (*self.environment, ("race", "with other compiler options"))
            shorter = self._race(again, beside, programs, rounds=_ROUNDS_AMONG_LEADERS)
            results = [*shorter, *results]
            entries = [*again, *entries]
        ran = [e for e, r in zip(entries, results, strict=True) if r.ran]
        if (sober := let_down(decision, told, ran)) is not None:
            return self.race(sober)  # Who was left out for them may win.
        # Who was not among the leaders has lost already, at another time.
        contest = [i for i in range(len(again)) if results[i].ran]
        best = min(contest or range(len(results)), key=lambda i: results[i].time_ms)
        if not results[best].ran:
            raise no_winner(self.analysis, results, self.budget_bytes, self.reserve)
        counts = {**decision.search, "race_seconds": time.perf_counter() - started}
        counts["race_cached"] = float(all(r.cached for r in results))
        self.winner = replace(entries[best], search=counts)
        rows = [*map(race_row, results), *map(left_out, far)]
        return self._plan(self.winner, decision, rows, results[best])

    def _entries(self, decision: Decision) -> tuple[list[Decision], list[Decision]]:
        """Who takes part, and who does only if none of them can."""
        if decision.problem is None:
            return [decision], []
        varied = [
            Decision(
                extent_name(name, extent),
                choice,
                predicted_ms(self.analysis, decision.problem, choice),
                extent=extent,
            )
            for extent in self.extents
            for name, choice in decision.classics.items()
        ]
        classics, far = in_reach(decision, varied, self.reach)
        rivals, behind = in_reach(decision, decision.rivals, self.reach)
        entries, far = [decision, *classics, *rivals], [*far, *behind]
        if self.room is not None and Agreement.of(self.mesh).alone:
            where = (self.analysis, self.store, self.environment)
            how = (self.plans, self.options.values(), self.room)
            entries += known_to_fit(*where, entries, *how)
        return entries, far

    # -- inside --------------------------------------------------------------

    def _plan(self, winner: Decision, *how: Any) -> Plan:
        return compose_plan(
            self.analysis, self.mesh, dict(self.environment), winner, *how
        )

    def _compiled_within(self, room: Room, decision: Decision) -> Plan:
        """The best by prediction whose whole program, compiled, fits in a budget."""
        [_, *near], far = self._entries(decision)
        rest = sorted([*near, *far], key=lambda e: e.predicted_ms or float("inf"))
        lean = decision.problem and leanest_of(self.analysis, decision.problem)
        entries: list[Decision] = []

        def record_of(entry: Decision) -> ProfileRecord | None:
            [finalist] = finalists(self.analysis, [entry], self.environment)
            return self.store.get(finalist.job.key.digest)

        def hopefuls() -> Iterator[Finalist]:
            for entry in one_by_one([decision, *rest], lean, record_of, room):
                entries.append(entry)
                yield from finalists(self.analysis, [entry], self.environment)

        refused, peak_bytes = first_that_fits(
            self.analysis.frame.program,
            self.mesh,
            hopefuls(),
            self.store,
            budget_bytes=room.budget_bytes,
            **self._manner,
        )
        if peak_bytes is None:
            raise no_winner(self.analysis, refused, self.budget_bytes, self.reserve)
        self.winner = replace(entries[len(refused)], search=decision.search)
        return replace(self._plan(self.winner, decision, []), peak_bytes=peak_bytes)

    @property
    def _races(self) -> bool:
        return self.settings.race and self.settings.measure and not self.interrupted

    def _race(
        self,
        entries: list[Decision],
        environment: Parts,
        programs: dict[str, Built],
        **how: Any,
    ) -> list[RaceResult]:
        return race(
            self.analysis.frame.program,
            self.mesh,
            finalists(self.analysis, entries, environment),
            self.store,
            budget_bytes=self.budget_bytes,
            programs=programs,
            **how,
            **self._manner,
        )

    @property
    def _manner(self) -> dict[str, Any]:
        return {
            "retry_failures": self.settings.retry_failures,
            "progress": self._tell,
            "limits": self.settings.limits,
        }

    def _tell(self, event: Any) -> None:
        if self.settings.progress is not None:
            self.settings.progress(event)
