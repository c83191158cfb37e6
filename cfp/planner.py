"""The passes behind :mod:`cfp.api` that need devices: profile, search and race."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.contest import Contest
from cfp.entries import (
    computed_again,
    leanest_of,
    nearly_fitting,
)
from cfp.errors import CfpError
from cfp.plan import Plan
from cfp.planner_parts import (
    Decision,
    Ground,
    PlannerSettings,
    Profiles,
    device_memory,
    room_within,
)
from cfp.presets import CLASSICS, presets
from cfp.profiling.collectives import Rates, measure_rates
from cfp.profiling.key import GPU_PLATFORMS, environment_parts
from cfp.profiling.looker import Looker
from cfp.profiling.processes import Agreement
from cfp.profiling.store import ProfileStore, store_path
from cfp.search.assemble import best_solutions, whole_choice
from cfp.search.costs import Costs, build_problem, measured_options
from cfp.search.effort import Explored
from cfp.search.guided import explore
from cfp.search.reshard import moves_between_measured
from cfp.search.shortlist import estimate_kinds, leading_classics
from cfp.search.squeeze import LEFT, TURNED_OUT, squeezed
from cfp.search.wanted import WantedMaker, tuning_jobs
from cfp.shortage import over_budget

# Classics that are estimated to take so many times as long as the best of them are not
# measured. Estimates leave out what hides behind computing: on 4 H200 without
# peer-to-peer access they were 0.9 to 1.5 times what measured segments add up to, and
# within one model off by 1.4 against each other at most.
# Virtual devices, which share processors, are estimated worse.
_REACH_BY_ESTIMATE = 1.6
_REACH_ON_CPUS = float("inf")


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
        if not isinstance(settings, PlannerSettings | None):
            raise CfpError(
                f"settings is a {type(settings).__name__}. Pass "
                "cfp.PlannerSettings(per_kind=8), for instance."
            )
        self.settings = settings or PlannerSettings()
        self.environment = environment_parts(list(mesh.devices.flat))
        device_bytes = device_memory(mesh)
        platform = mesh.devices.flat[0].platform
        self.store = ProfileStore(store_path(cache_dir))
        self.ground = Ground(
            analysis=analysis,
            mesh=mesh,
            store=self.store,
            settings=self.settings,
            room=room_within(budget_bytes, device_bytes, platform),
            device_bytes=device_bytes,
            environment=self.environment,
        )
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
        rates = measure_rates(self.mesh, self.store, **self.ground.manner)
        classics, found, looker = self.explore(rates, self.settings.measure)
        moved_ms = looker.moves(
            moves_between_measured(self.analysis, rates, found), self.environment
        )
        self.interrupted = looker.interrupted
        done = [found.records.get(item.own_job.key.digest) for item in found.wanted]
        cached = sum(item.own_job.key.digest in looker.known for item in found.wanted)
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
        every = leading_classics(analysis, estimates, self.classics)
        reach = _REACH_ON_CPUS if self.ground.platform == "cpu" else _REACH_BY_ESTIMATE
        # What saves memory is worth measuring however long it takes, if need be, and so
        # are all where one could not be built or run; which depends on times, too, that
        # several processes may know differently.
        near = leading_classics(analysis, estimates, every, reach)
        alone = Agreement.of(self.mesh).alone
        costs, room = Costs(analysis, rates), self.ground.room
        if room is not None:
            needs = {name: costs.least_peak_bytes(c) for name, c in every.items()}
            able = {n: every[n] for n, b in needs.items() if b <= room.budget_bytes}
            every = able or every
        classics = near if room is None and alone else every
        looker = Looker(
            analysis.frame.program,
            self.mesh,
            self.store,
            lambda: tuning_jobs(analysis, classics, self.environment),
            measure,
            self.ground.manner,
        )
        end = time.monotonic() + settings.seconds
        effort, on_gpus = self.ground.effort, self.ground.platform in GPU_PLATFORMS
        if not alone:
            # What is asked for later depends on times, which processes that remember
            # different runs know differently: they measure all at once.
            effort = replace(effort, at_first=settings.per_kind)

        def is_over() -> bool:
            return not alone or looker.interrupted or time.monotonic() > end

        def explored(leading: dict[str, Choice]) -> Explored:
            where = (analysis, leading, estimates, self.environment)
            return explore(
                estimates,
                WantedMaker(*where, settings.in_context),
                costs,
                effort=effort,
                budget_bytes=self.ground.budget_bytes,
                look=looker,
                is_over=is_over,
                left=LEFT if on_gpus and self._may_save else 1.0,
            )

        found = explored(classics)
        failed = any(not record.ok for record in found.records.values())
        wider = (found.tight or failed) and classics != every
        if wider and not looker.interrupted:
            more = explored(every)
            # Interrupted at first, it knows less than what was there.
            if more.tight or not looker.interrupted:
                classics, found = every, more
        return classics, found, looker

    def search(self, profiles: Profiles) -> Decision:
        """The fastest measured choice that fits in memory, by prediction.

        Where none does it is the leanest, if that is compiled next: only the compiler
        knows what a plan needs, and so what budget would do.

        Raises:
            MemoryBudgetError: none fits, and nothing is compiled to make sure.
        """
        started = time.perf_counter()
        self.ground.tell("searching among what was measured")
        costs = Costs(self.analysis, profiles.rates, profiles.moved_ms)
        known = (profiles.found.wanted, profiles.found.records)
        # With times in context, and with times alone.
        problem, other = (
            build_problem(
                costs, measured_options(costs, *known, alone), self.ground.budget_bytes
            )
            for alone in (False, True)
        )
        classics = profiles.classics
        found: dict[Choice, float] = {}
        tight, plans = profiles.found.tight, self.ground.plans
        for one in (problem, other):
            good = best_solutions(one, max(1, plans - 1) if tight else plans)
            if tight and plans > 1 and self._compiles:
                good = [*good, *best_solutions(squeezed(one, TURNED_OUT), 1)]
            for best in good:
                choice = whole_choice(self.analysis, one, best)
                found.setdefault(choice, problem.cost_ms(best.picks))
        # Where the compiler may yet save some memory, more may fit; it will say so.
        hoped = squeezed(problem) if self._may_save else problem
        if tight:
            for best in best_solutions(hoped, 1):
                choice = whole_choice(self.analysis, hoped, best)
                found.setdefault(choice, best.cost_ms)
            again = computed_again(self.analysis, (problem, hoped), classics)
            classics = dict(classics) | again
        if not found:
            if not self._compiles:
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
            unmeasured=tuple(
                name
                for name in CLASSICS
                if name in self.classics.keys() - profiles.classics.keys()
            ),
            problem=problem,
            search=counts,
        )

    def race(self, decision: Decision) -> Plan:
        """Times the decision and the classics, and keeps the fastest.

        What won is in :attr:`winner` then. Without a race that is the decision; or,
        where a budget was asked for, the best by prediction that fits when compiled.

        Raises:
            MemoryBudgetError: none of them fits in memory.
            DeviceError: none of them runs.
        """
        contest = Contest(self.ground, decision)
        if self._races:
            made = contest.race()
        elif self.ground.room is None:
            made = contest.trusted()
        else:
            made = contest.compiled_within(self.ground.room)
        self.winner = contest.winner
        return made

    @property
    def _compiles(self) -> bool:
        """Whether a plan is compiled before it is the answer."""
        return self._races or self.ground.room is not None

    @property
    def _may_save(self) -> bool:
        """Whether a compiler may make a program fit that by prediction does not."""
        return bool(self.ground.device_bytes) and self._compiles

    @property
    def _races(self) -> bool:
        return self.settings.race and self.settings.measure and not self.interrupted
