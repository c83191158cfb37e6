"""Choices by estimates, the default on virtual devices: nothing runs."""

import itertools
import re
from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.cost.costs import Costs
from cfp.cost.memory import can_rematerialize
from cfp.profiling.builder import build
from cfp.profiling.collectives import Rates
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race import compile as building
from cfp.race.compile import EARLIER_RUN
from cfp.race.programs import NOT_RUN, RaceOutcome
from cfp.search.choices import estimate_kinds, whole_choice
from cfp.search.guided import Candidate, Solution, build_problem, estimate_options
from cfp.search.solver import Assignment, solve
from cfp.settings import Replacing
from cfp.view.evidence import with_figures
from cfp.view.words import summary_line
from cfp_test.program.stacks import stack_step
from cfp_test.support.checking import make_mesh

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")

SIZES = (("x", 4),)
STEP, ARGS = stack_step()


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    plan = cfp.plan(STEP, *ARGS, mesh=make_mesh(SIZES), cache_dir=folder)
    with closing(ProfileStore(store_path(folder))) as store:
        return plan, store.records()


@pytest.fixture(scope="module")
def parts():
    """The program's analysis, estimates, presets and costs."""
    mesh = planning_mesh(make_mesh(SIZES))
    program, _ = trace(flatten_step(STEP, ARGS, {}), mesh)
    analysis = analyze(program, SIZES)
    rates = Rates.of_virtual_devices(SIZES)
    return (
        analysis,
        estimate_kinds(analysis, rates),
        presets(analysis.frame),
        Costs(analysis, rates),
    )


def test_nothing_runs(planned):
    plan, records = planned
    [kept] = records
    assert dict(kept.parts)["outcome"] == "compiled" and not kept.run_seconds
    assert plan.measured_ms is None and plan.search["race_cached"] == 0.0
    assert plan.rung == "estimated" and plan.raced is not None
    assert plan.peak_bytes and plan.predicted_ms
    [own] = [row for row in plan.race if row.name == plan.winner]
    assert own.note.startswith("compiled, not run")
    others = [row for row in plan.race if row is not own]
    assert {row.note for row in others} == {NOT_RUN}
    assert {row.name for row in others} >= {"data_parallel", "fully_sharded"}
    assert all(plan.predicted_ms <= row.predicted_ms for row in others)


def test_the_seconds_of_passes_add_up(planned):
    passes, _, every = summary_line(planned[0]).partition("; ")
    seconds = [float(text) for text in re.findall(r"([0-9.]+) s", passes)]
    assert passes.startswith("trace ")
    assert sum(seconds) == pytest.approx(float(every.split(" ")[0]), abs=0.06)


def test_a_plan_that_is_a_presets_program_names_the_preset(tmp_path):
    step, args = layers_step()
    how = {"mesh": make_mesh(SIZES), "donate_argnums": 0, "cache_dir": tmp_path}
    text = " ".join(str(cfp.plan(step, *args, **how)).split())
    assert "chosen: by estimates, the same program as data_parallel; nothing" in text
    assert "as fast as data_parallel" not in text


def test_a_program_with_parts_that_nothing_estimated_says_so(planned, parts):
    """Only an earlier run's program may be one; figures of others are not its own."""
    analysis, estimates, named, costs = parts
    how = {"per_kind": 1, "budget_bytes": None, "replacing": Replacing()}
    problem = estimate_options(estimates, named, costs, **how).problem
    able = [s for s in analysis.segments if can_rematerialize(analysis.frame, s)]
    own = replace(named["data_parallel"], remat=tuple(one.index for one in able))
    plan = replace(planned[0], race=(), predicted_ms=None, winner=EARLIER_RUN)
    solution = Solution([Candidate("planned", own)], problem=problem)
    outcome = RaceOutcome(solution=solution, winner=Candidate(EARLIER_RUN, own))
    told = with_figures(plan, analysis, outcome, Replacing())
    assert told.figures.kinds[0].options and not told.figures.worth
    assert "chosen: the only program known to fit; its time is unknown" in str(told)


def test_what_compiled_before_is_not_compiled_again(tmp_path):
    how = {"mesh": make_mesh(SIZES), "cache_dir": tmp_path}
    first, again = (cfp.plan(STEP, *ARGS, **how) for _ in range(2))
    assert again.search["race_cached"] == 0.0 and again.raced is None
    assert (again.winner, again.race) == (first.winner, first.race)
    assert again.peak_bytes == first.peak_bytes
    seconds = first.search["compile_seconds"]
    assert again.search["compile_seconds"] == seconds > 0.0
    with pytest.raises(cfp.MemoryBudgetError):
        cfp.plan(STEP, *ARGS, **how, memory_budget="1000B")


def test_what_does_not_compile_is_replaced_by_the_next(tmp_path, monkeypatch):
    def fail(program, mesh, job, environment):
        if job.label != "planned":
            return build(program, mesh, job, environment)
        key = {"key": job.key.digest, "parts": job.key.parts}
        return ProfileRecord(**key, status="compile_error", reason="no such kernel")

    monkeypatch.setattr(building, "build", fail)
    plan = cfp.plan(STEP, *ARGS, mesh=make_mesh(SIZES), cache_dir=tmp_path)
    notes = {row.name: row.note for row in plan.race}
    assert notes["planned"].startswith("compile_error: no such kernel")
    others = {row.name: row.predicted_ms for row in plan.race if row.name != "planned"}
    assert plan.predicted_ms == min(others.values()) == others[plan.winner]


def test_each_that_does_not_compile_is_named_once(tmp_path, monkeypatch):
    def fail(program, mesh, job, environment):
        key = {"key": job.key.digest, "parts": job.key.parts}
        return ProfileRecord(**key, status="compile_error", reason="no such kernel")

    monkeypatch.setattr(building, "build", fail)
    with pytest.raises(cfp.CfpError) as caught:
        cfp.plan(STEP, *ARGS, mesh=make_mesh(SIZES), cache_dir=tmp_path)
    [_, *failed] = str(caught.value).replace("devices. ", "devices; ").split("; ")
    assert "planned: no such kernel" in failed
    assert len({*failed}) == len(failed) > 1


def test_the_best_of_all_options_is_found(parts):
    """And it costs what its parts and what moves between them are estimated to."""
    analysis, estimates, presets, costs = parts
    given = {"per_kind": 2, "budget_bytes": None, "replacing": Replacing()}
    found = estimate_options(estimates, presets, costs, **given)
    problem = build_problem(costs, found.problem.options, None)
    best = solve(problem)
    ways = itertools.product(
        *(range(len(found.problem.options[k])) for k in problem.kinds)
    )
    assert best.cost_ms == pytest.approx(min(map(problem.cost_ms, ways)))
    assert not found.memory_bound
    # A choice alike in all segments costs what the estimate of each says, its twin's
    # handover included.
    for name, choice in presets.items():
        total = 0.0
        picks = []
        for segment in analysis.segments:
            options = found.problem.options[segment.kind]
            own = [
                i
                for i, option in enumerate(options)
                if option.candidate.strategies
                == tuple(choice.blocks[b] for b in segment.blocks)
                and option.candidate.storage
                in {choice.storage[g] for g in segment.groups}
            ]
            picks.append(own[0])
            total += options[own[0]].time_ms
        assert problem.cost_ms(picks) >= total * (1 - 1e-12) > 0.0, name
        made = whole_choice(
            analysis,
            problem,
            Assignment(picks=tuple(picks), cost_ms=0.0, memory_bytes=0),
        )
        assert made.blocks == choice.blocks


def test_what_follows_a_segment_is_not_counted_twice(parts):
    _, estimates, presets, costs = parts
    given = {"per_kind": 2, "budget_bytes": None, "replacing": Replacing()}
    found = estimate_options(estimates, presets, costs, **given)
    for kind, options in enumerate(found.problem.options):
        alone = replace(estimates[kind], edge_ms=estimates[kind].own_edge_ms)
        for option in options:
            assert option.time_ms == pytest.approx(alone.total_ms(option.candidate))


def test_where_memory_decides_segments_may_be_rematerialized(parts):
    analysis, estimates, presets, costs = parts
    where = (estimates, presets, costs)
    given = {"per_kind": 2, "replacing": Replacing()}
    plenty = estimate_options(*where, budget_bytes=2**40, **given)
    small = estimate_options(*where, budget_bytes=1, **given)
    assert not plenty.memory_bound and small.memory_bound
    assert not any(o.candidate.remat for kind in plenty.problem.options for o in kind)
    for kind, options in enumerate(small.problem.options):
        again = [o for o in options if o.candidate.remat]
        assert bool(again) == costs.can_rematerialize(kind)
        for option in again:
            plain = next(o for o in options if o.candidate == option.candidate.plain)
            assert option.time_ms > plain.time_ms
            assert option.residual_bytes <= plain.residual_bytes
    assert len(analysis.representatives) == len(small.problem.options)


@pytest.fixture
def keeps_barriers(monkeypatch):
    """XLA for CPUs merges what is rematerialized with what it was made of."""
    keep = (("xla_disable_hlo_passes", "cse_barrier_expander"),)

    def build_with_barriers(program, mesh, job, environment):
        return build(program, mesh, replace(job, options=keep), environment)

    monkeypatch.setattr(building, "build", build_with_barriers)


def layers_step():
    """Four layers that keep more than is estimated."""

    def layer(x, w):
        h = x @ w["up"]
        for _ in range(4):
            h = jnp.tanh(jnp.sin(h))
        return x + h @ w["down"]

    def loss(params, x):
        for w in params:
            x = layer(x, w)
        return jnp.mean(x**2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = [{"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))} for _ in range(4)]
    return step, (params, jnp.ones((1024, 16)))


def test_what_needs_more_than_predicted_may_be_rematerialized(tmp_path, keeps_barriers):
    """By estimates there was no need of it."""
    step, args = layers_step()

    def plan(budget, folder=tmp_path, race=False, **settings):
        return cfp.plan(
            step,
            *args,
            mesh=make_mesh((("x", 2),)),
            donate_argnums=0,
            memory_budget=budget,
            cache_dir=folder,
            settings=cfp.PlannerSettings(race=race, **settings),
        )

    plenty = plan("1GiB")
    budget = round(0.9 * plenty.peak_bytes)
    made = plan(budget)
    assert not any(one.rematerialized for one in plenty.segments)
    assert any(one.rematerialized for one in made.segments)
    assert made.peak_bytes <= budget and made.predicted_ms > plenty.predicted_ms
    with pytest.raises(cfp.MemoryBudgetError, match="Rematerialized: 0 of 4"):
        plan(budget, choose=("sharding", "storage"))
    # The store has the size of the program that fits.
    assert plan(budget, seconds=0.0).peak_bytes <= budget
    # Whatever was planned before: a smaller budget has more rematerialized.
    smaller = plan(round(0.7 * plenty.peak_bytes), tmp_path / "other", race=True)
    again = plan(budget, tmp_path / "other")

    def rematerialized(plan):
        return sum(one.rematerialized for one in plan.segments)

    assert rematerialized(smaller) > rematerialized(made)
    assert rematerialized(again) == rematerialized(made)
    assert (again.winner, again.predicted_ms) == (made.winner, made.predicted_ms)


def test_measuring_is_there_for_the_asking(tmp_path):
    settings = cfp.PlannerSettings(per_kind=1, race=False, measure=True)

    def step(w, x):
        return w - x.T @ (x @ w)

    plan = cfp.plan(
        step,
        jnp.ones((8, 8)),
        jnp.ones((8, 8)),
        mesh=make_mesh(SIZES),
        cache_dir=tmp_path,
        settings=settings,
    )
    assert plan.search["strategies_measured"] > 0


def test_a_race_leaves_no_times_in_a_plan_by_estimates(tmp_path):
    how = {"mesh": make_mesh(SIZES), "cache_dir": tmp_path, "preset": "zero1"}
    before = cfp.plan(STEP, *ARGS, **how, settings=cfp.PlannerSettings(measure=True))
    assert before.rung == "measured" and before.race[0].samples_ms
    plan = cfp.plan(STEP, *ARGS, **how)
    assert plan.rung == "estimated" and plan.measured_ms is None
    assert plan.search["strategies_estimated"] > 0
    [row] = plan.race
    assert (row.rung, row.time_ms, row.samples_ms) == ("estimated", None, ())
    assert row.note.startswith("compiled, not run") and row.peak_bytes
    assert row.predicted_ms == plan.predicted_ms


def test_when_time_is_over_one_program_is_compiled(tmp_path):
    how = {"mesh": make_mesh(SIZES), "cache_dir": tmp_path}
    plan = cfp.plan(STEP, *ARGS, **how, settings=cfp.PlannerSettings(seconds=0.0))
    compiled = [row.name for row in plan.race if row.note != NOT_RUN]
    assert compiled == [plan.winner] and plan.peak_bytes
