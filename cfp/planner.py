"""The passes behind :mod:`cfp.api` that need devices: profile, search and race."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.contest import Contest
from cfp.devices.described import DescribedMesh
from cfp.entries import (
    computed_again,
    leanest_of,
    nearly_fitting,
    predicted_ms,
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
from cfp.search.estimated import estimate_options
from cfp.search.guided import explore
from cfp.search.problem import Problem
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
# Compiling whole programs is what takes time on virtual devices.
_CLASSICS_BY_ESTIMATE = 2


class Planner:
    """Profiles, searches and races one analysed program; owns the store."""

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh | DescribedMesh,
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
        if isinstance(mesh, DescribedMesh):
            self.environment = tuple(mesh.environment.items())
        else:
            self.environment = environment_parts(list(mesh.devices.flat))
        device_bytes = device_memory(mesh)
        platform = dict(self.environment)["platform"]
        self.store = ProfileStore(store_path(cache_dir))
        self.ground = Ground(
            analysis=analysis,
            mesh=mesh,
            store=self.store,
            settings=self.settings,
            room=room_within(budget_bytes, device_bytes, platform),
            device_bytes=device_bytes,
            environment=self.environment,
            end=time.monotonic() + self.settings.seconds,
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
        if self.ground.estimates:
            return self._estimated(started)
        rates = measure_rates(self.ground.devices, self.store, **self.ground.manner)
        classics, found, looker = self.explore(
            rates, self.settings.measure is not False
        )
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

    def _estimated(self, started: float) -> Profiles:
        """Options by estimates, of virtual or described devices; nothing is run."""
        self.ground.tell("estimating what each strategy takes")
        analysis = self.analysis
        described = self.ground.described
        rates = (
            described.rates
            if described is not None
            else Rates.of_virtual_devices(self.ground.devices)
        )
        estimates = estimate_kinds(analysis, rates)
        classics = leading_classics(analysis, estimates, self.classics)
        found = estimate_options(
            estimates,
            classics,
            Costs(analysis, rates),
            per_kind=self.settings.per_kind,
            budget_bytes=self.ground.budget_bytes,
        )
        return Profiles(
            classics,
            found,
            rates,
            measured=0,
            cached=0,
            failed=0,
            seconds=time.perf_counter() - started,
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
        alone = Agreement.of(self.ground.devices).alone
        costs, room = Costs(analysis, rates), self.ground.room
        if room is not None:
            needs = {name: costs.least_peak_bytes(c) for name, c in every.items()}
            able = {n: every[n] for n, b in needs.items() if b <= room.budget_bytes}
            every = able or every
        classics = near if room is None and alone else every
        looker = Looker(
            analysis.frame.program,
            self.ground.devices,
            self.store,
            lambda: tuning_jobs(analysis, classics, self.environment),
            measure,
            self.ground.manner,
        )
        end = self.ground.end
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
        problems = self._problems(costs, profiles.found)
        problem, classics = problems[0], profiles.classics
        if profiles.found.estimated and self._races:
            classics = self._fastest(classics, problem)
        found: dict[Choice, float] = {}
        tight, plans = profiles.found.tight, self.ground.plans
        for one in problems:
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
            **_counts(profiles),
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
                if name in self.classics.keys() - classics.keys()
            ),
            problem=problem,
            search=counts,
        )

    def predicted(self, decision: Decision) -> Callable[[Choice], float | None]:
        """What the search of a decision predicts of any choice."""
        return lambda c: predicted_ms(self.analysis, decision.problem, c)

    def _problems(self, costs: Costs, found: Explored) -> list[Problem]:
        """What is to be searched: with times in context, and with times alone."""
        budget = self.ground.budget_bytes
        if found.estimated:
            return [build_problem(costs, found.estimated, budget)]
        known = (found.wanted, found.records)
        return [
            build_problem(costs, measured_options(costs, *known, alone), budget)
            for alone in (False, True)
        ]

    def _fastest(
        self, classics: Mapping[str, Choice], problem: Problem
    ) -> dict[str, Choice]:
        """The classics that race where choices are made by estimates."""
        times = {
            name: predicted_ms(self.analysis, problem, choice) or float("inf")
            for name, choice in classics.items()
        }
        best = sorted(times, key=times.__getitem__)[:_CLASSICS_BY_ESTIMATE]
        return {name: choice for name, choice in classics.items() if name in best}

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
        elif not self._compiles:
            made = contest.trusted()
        else:
            assert self.ground.room is not None, "otherwise nothing is compiled"
            made = contest.compiled_within(self.ground.room)
        self.winner = contest.winner
        return made

    @property
    def _compiles(self) -> bool:
        """Whether a plan is compiled before it is the answer."""
        if self.ground.described is not None:
            return False
        return self._races or self.ground.room is not None

    @property
    def _may_save(self) -> bool:
        """Whether a compiler may make a program fit that by prediction does not."""
        return bool(self.ground.device_bytes) and self._compiles

    @property
    def _races(self) -> bool:
        settings = self.settings
        able = self.ground.described is None and not self.interrupted
        return able and settings.race and settings.measure is not False


def _counts(profiles: Profiles) -> dict[str, float]:
    """What a plan says of how its choices were made."""
    if profiles.found.estimated:
        options = sum(map(len, profiles.found.estimated))
        return {"strategies_estimated": options, "estimate_seconds": profiles.seconds}
    return {
        "strategies_measured": profiles.measured,
        "strategies_cached": profiles.cached,
        "strategies_failed": profiles.failed,
        "profile_seconds": profiles.seconds,
        "gap": profiles.found.gap,
    }
