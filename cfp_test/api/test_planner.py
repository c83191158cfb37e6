"""Candidates that race beside plain plans: rematerialization, compiler options."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Choice
from cfp.context import DetailedSettings, PlannerSettings, open_context
from cfp.errors import CfpError
from cfp.passes import preset_solution, profile, search, search_further
from cfp.plan.describe import compose_plan
from cfp.profiling.builder import build
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race import compile as building
from cfp.race.admission import exempt_from_reach, within_reach
from cfp.race.compile import EARLIER_RUN
from cfp.race.programs import TOO_LATE, RaceOutcome
from cfp.race.race import race
from cfp.search.guided import Candidate, Stage
from cfp.settings import MOST_REFUSED, ConstraintLevel, defaults_of
from cfp.view.remarks import remarks
from cfp_test.program.stacks import stack_step
from cfp_test.support.covering import at_night
from cfp_test.support.injected import inject_times

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")

STEP, ARGS = stack_step()
PRESETS = cfp.PRESETS
RESERVE = 100


@pytest.fixture(scope="module", autouse=True)
def injected():
    """No noise decides what leads a race, or is near enough to race."""
    with pytest.MonkeyPatch.context() as patch:
        inject_times(patch)
        yield


@pytest.fixture(scope="module")
def plan(mesh, tmp_path_factory):
    """Plans the model with what a test asks for; profiles are measured once."""
    folder = tmp_path_factory.mktemp("profiles")

    def make(memory_budget=None, preset=None, cache_dir=folder, **settings):
        return cfp.plan(
            STEP,
            *ARGS,
            mesh=mesh,
            memory_budget=memory_budget,
            preset=preset,
            cache_dir=cache_dir,
            settings=DetailedSettings(
                **{"per_kind": 5, "in_context": False, "measure": True, **settings}
            ),
        )

    return make


def rows(plan):
    return {row.name: row for row in plan.race}


def check_step(plan):
    """Runs the plan for a step, and one device, too."""
    expected, found = jax.jit(STEP)(*ARGS), plan.apply(STEP)(*ARGS)
    for have, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_leaders_race_with_other_compiler_options(plan, tmp_path, mesh):
    options = {"plain": {"xla_backend_optimization_level": "0"}}
    made = plan(compiler_options=options)
    varied = [name for name in rows(made) if name.endswith(", plain")]
    assert len(varied) == 1
    for name in varied:
        assert rows(made)[name].time_ms is not None
        assert name.removesuffix(", plain") in rows(made)
    assert made.options == (options["plain"] if made.winner in varied else {})
    # All of them are in the store now: nothing is timed again.
    again = plan(compiler_options=options)
    assert again.search["race_cached"] == 1.0
    assert again.winner == made.winner


def test_options_that_win_are_part_of_the_plan(plan, tmp_path, mesh, monkeypatch):
    """With the same option under two names, the plan says what it was measured with."""
    options = {"a": {"xla_backend_optimization_level": "1"}}
    made = plan(compiler_options=options)
    made.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    assert loaded.options == made.options
    check_step(loaded)


def test_options_that_the_compiler_refuses_are_rows_with_a_reason(plan):
    made = plan(compiler_options={"wrong": {"xla_no_such_option": "1"}})
    wrong = [row for name, row in rows(made).items() if name.endswith(", wrong")]
    assert len(wrong) == 1
    assert all(row.time_ms is None for row in wrong)
    assert all("xla_no_such_option" in row.note for row in wrong)
    assert not made.winner.endswith(", wrong")


def platform(monkeypatch, **changes):
    """Other defaults than those of virtual devices."""
    changed = replace(defaults_of("cpu"), **changes)
    monkeypatch.setattr("cfp.context.defaults_of", lambda name: changed)


def test_a_budget_that_the_allocator_may_take_is_refused_at_once(
    mesh, tmp_path, monkeypatch
):
    platform(monkeypatch, reserve_bytes=2**20)
    with pytest.raises(CfpError, match=r"leaves nothing .* may add 1\.00 MiB"):
        cfp.plan(STEP, *ARGS, mesh=mesh, memory_budget=2**11, cache_dir=tmp_path)
    with (
        pytest.raises(CfpError, match="Give a larger budget"),
        open_context(mesh, tmp_path, 2**20),
    ):
        pass


@pytest.fixture
def lean_compiler(monkeypatch):
    """A compiler that makes do with half of the temporaries under a memory limit.

    It takes its word for CPUs, too, which have no such thing.
    """
    platform(monkeypatch, limits_memory=True, reserve_bytes=RESERVE)
    monkeypatch.setattr("cfp.context.device_memory", lambda mesh: 2**16)

    def lean(program, mesh, job, environment):
        built = build(program, mesh, job, environment)
        less = built.temp_bytes // 2
        return replace(built, temp_bytes=less) if job.options else built

    monkeypatch.setattr(building, "build", lean)


def test_the_budget_is_passed_to_the_compiler(plan, lean_compiler, tmp_path, mesh):
    quick = {"cache_dir": tmp_path, "per_kind": 2, "compiler_options": {}}
    free = plan(**quick)
    least = min(row.peak_bytes for row in free.race if row.time_ms is not None)
    little = least - 1 + RESERVE
    made = plan(little, **quick)
    assert "within the budget" in made.winner
    assert "xla_gpu_enable_latency_hiding_scheduler" in made.options
    assert made.peak_bytes < least
    large = [row for row in made.race if row.note == "over the memory budget"]
    assert large, "what won so is compared with what did not fit"
    check_step(made)
    # What was compiled so is known: it does for its own size, with the same limit.
    known = made.peak_bytes + RESERVE
    again = plan(known, **quick)
    assert again.peak_bytes <= made.peak_bytes
    assert plan(known, **quick).search["race_cached"] == 1.0
    # Without a race, too.
    assert plan(little, race=False, **quick).peak_bytes < least


def test_the_budget_that_an_error_names_does(plan, lean_compiler, tmp_path):
    quick = {"cache_dir": tmp_path, "per_kind": 2, "compiler_options": {}}
    named = {}
    for races in (True, False):
        with pytest.raises(cfp.MemoryBudgetError) as caught:
            plan(1024, race=races, **quick)
        named[races] = caught.value.smallest_feasible_bytes
        made = plan(named[races], race=races, **quick)
        assert made.peak_bytes <= named[races] - RESERVE
    assert named[True] == named[False]


def test_a_refused_budget_names_the_smallest_known_program(plan, tmp_path, monkeypatch):
    """Also a smaller program than the leanest by prediction, and of an earlier run."""
    sizes = []

    def refused(budget):
        with pytest.raises(cfp.MemoryBudgetError) as caught:
            plan(budget, race=False, cache_dir=tmp_path)
        return caught.value.smallest_feasible_bytes

    def smaller(program, mesh, job, environment):
        made = build(program, mesh, job, environment)
        less = 8 * bool(sizes)  # The first is the leanest by prediction.
        made = replace(made, temp_bytes=made.temp_bytes - less)
        sizes.append(made.peak_bytes)
        return made

    monkeypatch.setattr(building, "build", smaller)
    least = refused(1024)
    assert len(sizes) > 1 and least == min(sizes)
    for budget in (least - 16, 1024):
        assert refused(budget) == min(sizes)
    assert plan(min(sizes), race=False, cache_dir=tmp_path).peak_bytes == min(sizes)


def test_a_refused_budget_leaves_no_worse_plan_behind(plan, tmp_path, monkeypatch):
    """Also if as many candidates as a search compiles do not fit."""
    built, too_large = [], []

    def swollen(program, mesh, job, environment):
        made = build(program, mesh, job, environment)
        built.append(json.loads(job.choice)["choice"])  # At any constraint level.
        return replace(made, temp_bytes=2**40) if built[-1] in too_large else made

    monkeypatch.setattr(building, "build", swollen)
    for number in range(MOST_REFUSED + 1):
        folder = tmp_path / str(number)
        asked = {"race": False, "measure": None, "cache_dir": folder / "refused"}
        with pytest.raises(cfp.MemoryBudgetError):
            plan(1024, **asked)
        after = plan("1GiB", **asked)
        fresh = plan("1GiB", **{**asked, "cache_dir": folder / "fresh"})
        assert after.predicted_ms == fresh.predicted_ms
        assert after.peak_bytes == fresh.peak_bytes
        # It comes back within a budget of its own size.
        assert plan(fresh.peak_bytes, **asked).predicted_ms <= fresh.predicted_ms
        too_large.append(built[-1])


def test_a_preset_is_within_the_budget_or_refused_though_none_races(plan):
    free = plan(preset="data_parallel", race=False)
    assert free.peak_bytes is None
    with pytest.raises(
        cfp.MemoryBudgetError, match=r"segments: \d+ as data_parallel\."
    ) as caught:
        plan(2000, preset="data_parallel", race=False)
    needed = caught.value.smallest_feasible_bytes
    with pytest.raises(cfp.MemoryBudgetError):
        plan(needed - 1, preset="data_parallel", race=False)
    made = plan(needed, preset="data_parallel", race=False)
    assert (made.winner, made.peak_bytes) == ("data_parallel", needed)
    assert made.arg_specs == free.arg_specs
    assert made.measured_ms is None and not made.race


def test_without_a_race_the_compiler_says_what_fits(plan, tmp_path, monkeypatch):
    """The best by prediction turns out too large; then, the next; at last, all."""
    built, too_large = [], set()

    def swollen(program, mesh, job, environment):
        made = build(program, mesh, job, environment)
        built.append(job.key.digest)
        return replace(made, temp_bytes=2**40) if job.key.digest in too_large else made

    monkeypatch.setattr(building, "build", swollen)
    monkeypatch.setattr("cfp.race.race.keep_built", lambda *_: None)
    plans = []
    with pytest.raises(cfp.MemoryBudgetError, match="is enough for"):
        while True:
            made = plan("1GiB", cache_dir=tmp_path, per_kind=1, race=False)
            assert 0 < made.peak_bytes <= 2**30
            check_step(made)
            plans.append(made)
            assert built[-1] not in too_large
            too_large.add(built[-1])
    assert plans[0].winner == "planned"
    # The leanest, which may be one of them, and presets as by hand are tried last.
    late = "leanest", "arguments constrained"
    entries = [made for made in plans if not made.winner.endswith(late)]
    assert entries[1:] and entries == plans[: len(entries)], "the leanest comes last"
    for made in entries[1:]:
        assert made.winner in PRESETS or made.winner.startswith("planned ")
    times = [made.predicted_ms or float("inf") for made in entries]
    assert times == sorted(times)


def test_where_nothing_is_compiled_nothing_is_hoped_of_the_compiler(plan, monkeypatch):
    def planned(device_bytes):
        monkeypatch.setattr("cfp.context.device_memory", lambda mesh: device_bytes)
        return plan(race=False)

    with pytest.raises(cfp.MemoryBudgetError, match="predicted") as caught:
        planned(1000)
    least = caught.value.smallest_feasible_bytes
    assert sum(size for _, size in caught.value.contributors) == least
    with pytest.raises(cfp.MemoryBudgetError, match="predicted"):
        planned(least - 1)
    assert planned(least).winner == "planned"


@pytest.mark.parametrize(("share", "more"), [(4.0, False), (1.05, True)])
def test_a_budget_asks_for_more_presets_only_where_memory_is_short(
    plan, monkeypatch, share, more, tmp_path
):
    platform(monkeypatch, estimate_reach=0.0)
    asked = {"race": False, "cache_dir": tmp_path, "per_kind": 1}
    free = plan(**asked)
    assert free.predicted_bytes is not None
    within = plan(int(share * free.predicted_bytes), **asked)
    known = free.search["strategies_measured"] + free.search["strategies_cached"]
    assert 0 < within.search["strategies_cached"] <= known
    assert more or within.search["strategies_cached"] == known
    assert (within.search["strategies_measured"] > 0) == more


def test_time_ends_the_first_measurements_too(plan, mesh, tmp_path):
    """A plan takes one strategy of each kind of segment, and no more is measured."""
    made = plan(cache_dir=tmp_path, seconds=0.0)
    program, _ = trace(flatten_step(STEP, ARGS, {}), planning_mesh(mesh))
    kinds = len(analyze(program, tuple(mesh.shape.items())).representatives)
    assert made.search["strategies_measured"] == kinds
    assert made.search["strategies_unmeasured"] > 0
    [remark] = (one for one in remarks(made) if "too short" in one)
    assert f"{made.search['strategies_unmeasured']:.0f} strateg" in remark
    assert any(row.note == TOO_LATE for row in made.race)
    # What was not measured is not said to be of no use.
    assert made.figures is not None
    assert all(one.without_ms is not None for one in made.figures.worth)
    full = plan(cache_dir=tmp_path, race=False)
    assert full.search["strategies_measured"] > kinds
    assert "strategies_unmeasured" not in full.search
    assert not any("too short" in one for one in remarks(full))


def test_a_plan_that_rematerializes_runs_and_is_kept(mesh, tmp_path):
    flat = flatten_step(STEP, ARGS, {})
    found = planning_mesh(mesh)
    program, lowering = trace(flat, found)
    analysis = analyze(program, tuple(found.shape.items()))
    settings = PlannerSettings(measure=True, race=False)
    with open_context(found, tmp_path, settings=settings) as context:
        taken = preset_solution(context, analysis, "fully_sharded")
        everything = tuple(range(len(analysis.segments)))
        [best] = taken.candidates
        choice = replace(best.choice, remat=everything)
        solution = replace(taken, candidates=[replace(best, choice=choice)])
        outcome = race(context, analysis, solution)
        made = compose_plan(analysis, found, dict(context.environment), outcome)
    made = made.bound_to(flat, lowering.out_tree)
    assert made.constraints.rematerialized
    assert all(segment.rematerialized for segment in made.segments)
    made.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    assert loaded.constraints.rematerialized == made.constraints.rematerialized
    check_step(loaded)


def near_and_far(plan, others, reach):
    anyway = exempt_from_reach(
        [plan, *(replace(one, is_preset=True) for one in others)]
    )
    near = within_reach(others, anyway, reach, [plan])
    return [c.name for c in near], [c.name for c in others if c not in near]


def candidate(name, predicted_ms):
    return Candidate(name, Choice((), (), tuple(map(ord, name))), predicted_ms)


def test_what_is_predicted_far_behind_is_out_of_reach():
    plan = candidate("planned", 100.0)
    others = [
        candidate("near", 109.0),
        candidate("far", 111.0),
        candidate("unknown", None),
        candidate("fast", 90.0),
    ]
    reach = {ConstraintLevel.EVERYTHING: 1.1, ConstraintLevel.ARGUMENTS: 1.2}
    assert near_and_far(plan, others, reach) == (["near", "unknown", "fast"], ["far"])
    # The best preset races however slow it is, so that there is something to compare.
    behind = [candidate("a", 150.0), candidate("b", 200.0)]
    assert near_and_far(plan, behind, reach) == (["a"], ["b"])
    # What has no prediction itself leaves nothing out.
    unknown = candidate("planned", None)
    assert near_and_far(unknown, others, reach)[1] == []
    # With fewer constraints the prediction is less sure.
    less = [replace(c, level=ConstraintLevel.ARGUMENTS) for c in others]
    assert near_and_far(plan, less, reach)[1] == []


@pytest.mark.parametrize(
    "options", [{"slow": {"xla_backend_optimization_level": "0"}}, *at_night([{}])]
)
def test_an_absurd_budget_compiles_the_leanest_and_lean_presets(
    plan, tmp_path, options
):
    """The budget that is named is then the same for any refused budget.

    Nothing leads a race that nothing can win, to be built with other options, too.
    """
    plan(race=False, cache_dir=tmp_path)
    compiled = []
    asked = {"cache_dir": tmp_path, "compiler_options": options}
    with pytest.raises(cfp.MemoryBudgetError) as caught:
        plan(1024, progress=compiled.append, **asked)
    events = [str(event).partition(", about")[0] for event in compiled]
    first, *others = [e for e in events if e.startswith("compiling")]
    assert first == "compiling 'planned'"
    assert others and all("arguments constrained" in e for e in others)
    assert "is enough for the smallest compiled program" in str(caught.value)
    least = caught.value.smallest_feasible_bytes
    assert plan(least, cache_dir=tmp_path).peak_bytes <= least


def predicted_presets(plan):
    found = {name: row for name, row in rows(plan).items() if name in PRESETS}
    return {name: row for name, row in found.items() if row.predicted_ms is not None}


def test_what_is_out_of_reach_stands_in_the_table(plan):
    known = predicted_presets(plan(reach=1e-9))
    best = min(row.predicted_ms for row in known.values())
    raced = {name for name, row in known.items() if row.predicted_ms == best}
    assert raced < known.keys()
    for name, row in known.items():
        assert (row.time_ms is not None) == (name in raced)
        assert ("too slow" in row.note) == (name not in raced)


def test_without_a_race_a_remembered_program_ends_no_search(mesh, tmp_path):
    program, _ = trace(flatten_step(STEP, ARGS, {}), planning_mesh(mesh))
    analysis = analyze(program, tuple(mesh.shape.items()))
    with open_context(mesh, tmp_path, 2**30) as context:
        solution = search(context, analysis, profile(context, analysis))
        best = solution.candidates[0]
        known = replace(best, name=EARLIER_RUN)

        def goes_on(winner, stage=Stage.PREDICTED):
            at = replace(solution, stage=stage)
            outcome = RaceOutcome(solution=at, winner=winner)
            return search_further(context, analysis, outcome) is not None

        assert not goes_on(best)
        assert goes_on(known) and not goes_on(known, Stage.CORRECTED)
    # What is found stays, if the time is over before anything else is compiled.
    found, later = (RaceOutcome(solution=solution, winner=w) for w in (known, None))
    assert later.after(found).winner == known
