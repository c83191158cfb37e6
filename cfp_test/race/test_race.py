"""Races of deep programs: truncated ones run, and the winner whole."""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp import context as contexts
from cfp.context import MemoryBudget
from cfp.cost.costs import Costs
from cfp.passes.search import search
from cfp.planner_settings import DetailedSettings
from cfp.presets.presets import PRESETS, PROPAGATED, named_choices
from cfp.profiling import compile_pool, runner
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.record import CompiledBytes, ProfileRecord
from cfp.race import compile as building
from cfp.race import race as steps
from cfp.race import race as story
from cfp.race.admission import limit_options
from cfp.race.candidates import with_options
from cfp.race.programs import TOO_LARGE, UNMEASURED
from cfp.race.race import Run
from cfp.race.truncated import truncate
from cfp.race.turns import second_race
from cfp.settings import (
    TUNING_AT_ONCE,
    defaults_of,
)
from cfp.solution import Candidate, Prediction
from cfp.view.text import plan_text
from cfp_test.race.deep import LAYERS, arguments, step
from cfp_test.race.results import result_of
from cfp_test.support.covering import at_night
from cfp_test.support.waiting import GUARD_SECONDS

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture
def plan(mesh, folder):
    def make(memory_budget=None, cache_dir=folder, preset=None, **settings):
        # Noise is not to decide what races.
        asked = {"per_kind": 3, "in_context": False, "compiler_options": {}}
        asked |= {"reach": float("inf"), **settings}
        return cfp.plan(
            step,
            *arguments(),
            mesh=mesh,
            memory_budget=memory_budget,
            preset=preset,
            cache_dir=cache_dir,
            settings=DetailedSettings(**{"measure": True, **asked}),
        )

    return make


def slowed(result, factor):
    """A result that took so many times as long."""
    program = result.program
    ratios = replace(program.ratios, time=factor * program.ratios.time)
    return replace(result, program=replace(program, ratios=ratios))


def patient(monkeypatch, **changes):
    """Other defaults than those of virtual devices."""
    changed = replace(defaults_of("cpu"), **changes)
    monkeypatch.setattr("cfp.context.defaults_of", lambda platform: changed)


@pytest.fixture
def raced(monkeypatch):
    """The parts that were built for races, in turn: how many ops each has."""
    counts, build = [], building.build

    def counting(program, mesh, job, environment):
        counts.append(len(job.part.ops))
        return build(program, mesh, job, environment)

    monkeypatch.setattr(building, "build", counting)
    return counts


def test_a_deep_program_is_raced_truncated_and_the_winner_whole(plan, raced):
    made = plan(compiler_options={"plain": {"xla_backend_optimization_level": "0"}})
    *short, whole = raced
    assert len(short) > 3
    assert max(short) < 0.6 * whole
    assert made.search["segments_raced"] < made.search["segments"]
    timed = [row for row in made.race if row.time_ms is not None]
    assert len(timed) == len({row.name for row in timed}) > 3
    assert made.measured_ms is not None and made.peak_bytes
    text = plan_text(made)
    count = made.search["segments_raced"]
    assert f"Timed with {count:.0f} of {made.search['segments']:.0f} segments" in text
    expected, found = jax.jit(step)(*arguments()), made.apply(step)(*arguments())
    for have, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    raced.clear()
    again = plan(compiler_options={"plain": {"xla_backend_optimization_level": "0"}})
    assert raced == [] and again.search["race_cached"] == 1.0
    assert (again.winner, again.measured_ms) == (made.winner, made.measured_ms)


@pytest.fixture
def change_ratios(monkeypatch):
    """Puts something else in the place of what truncated programs say."""

    def make(change):
        def changed(*asked):
            found = truncate(*asked)
            return found and {
                choice: (program, change(choice, ratios))
                for choice, (program, ratios) in found.items()
            }

        monkeypatch.setattr(story, "truncate", changed)

    return make


def test_what_was_measured_is_scaled_to_the_whole_program(plan, change_ratios):
    made = plan()
    found = []

    def tripled(choice, ratios):
        found.append(ratios)
        return replace(ratios, time=3 * ratios.time)

    change_ratios(tripled)
    again = plan()
    assert again.search["race_cached"] == 1.0
    for row, other in zip(made.race, again.race, strict=True):
        if row.time_ms is not None:
            assert other.time_ms == pytest.approx(3 * row.time_ms)
    assert again.measured_ms == made.measured_ms
    # Half of the layers, which take most of a step, were left out.
    assert all(1 < one.time < LAYERS for one in found)
    assert all(1.2 < one.memory < LAYERS / 4 for one in found)


@pytest.mark.parametrize("asked", [{"repeats": None}, {"memory_budget": 2**30}])
def test_whole_programs_race_if_asked_or_under_a_budget(plan, raced, asked):
    made = plan(**asked)
    assert len(set(raced)) <= 1
    assert "segments_raced" not in made.search
    assert "Timed with" not in plan_text(made)


def test_memory_of_arguments_that_were_left_out_is_named_too(mesh, tmp_path):
    """Weights are arguments like any other if nothing is trained."""

    def serve(params, x):
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return x @ params["head"]

    (params, _), x = arguments()
    settings = DetailedSettings(
        per_kind=1,
        in_context=False,
        measure=True,
        compiler_options={},
        reach=float("inf"),
    )
    how = {"mesh": mesh, "cache_dir": tmp_path, "settings": settings}
    made = cfp.plan(serve, params, x, **how)
    assert "segments_raced" in made.search
    # Whoever wins by time: this one's memory is compared.
    [row] = [row for row in made.race if row.name == "data_parallel"]
    whole = cfp.plan(serve, params, x, preset="data_parallel", **how)
    assert row.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.1)


@pytest.mark.parametrize("best_ms", [10.3, *at_night([20.0])])
def test_the_best_preset_runs_beside_the_leader(plan, monkeypatch, tmp_path, best_ms):
    """Only times of one run compare."""
    stages, race = [], steps.race_programs

    def watched(builder, programs, rounds):
        results = race(builder, programs, rounds)
        if not stages:
            # What no preset is leads; one that is no leader is close, and no other.
            known = {f.job.key.digest for f in programs if f.name in PRESETS}
            every = dict.fromkeys(f.job.key.digest for f in programs)
            order = sorted(every, key=lambda digest: digest in known)
            assert len(order) > 3 and not known & {*order[:2]}
            ms = dict(zip(order, (10.0, 10.1, 10.2, *range(21, 99)), strict=False))
            ms[next(digest for digest in order[3:] if digest in known)] = best_ms
            factors = [ms[r.record.key] / r.time_ms for r in results]
            results = [slowed(r, f) for r, f in zip(results, factors, strict=True)]
        stages.append((programs, results))
        return results

    monkeypatch.setattr(steps, "race_programs", watched)
    options = {"plain": {"xla_backend_optimization_level": "0"}}
    # By estimates, which do not vary: measured, a preset may be what is planned.
    plan(plans=3, compiler_options=options, cache_dir=tmp_path, measure=None)
    (first, results), (beside, _), *_ = stages
    digest_of = {candidate.name: candidate.job.key.digest for candidate in first}
    ranked = sorted(results, key=lambda result: result.time_ms)
    leader = ranked[0].name
    close = {result.name for result in ranked if result.time_ms < 10.4}
    best = next(result for result in ranked if result.name in PRESETS)
    names = [candidate.name for candidate in beside]
    assert [n for n in names if n.endswith(", plain")] == [f"{leader}, plain"]
    assert {leader, *close} <= set(names)
    # What was planned may be a preset, too.
    assert digest_of[best.name] in {digest_of.get(name) for name in names}
    others = set(names) - {f"{leader}, plain", leader, *close}
    assert {digest_of[name] for name in others} <= {digest_of[best.name]}


@pytest.mark.nightly
def test_a_budget_that_was_asked_for_before_has_its_answer(plan, raced, tmp_path):
    """Though another one was asked for meanwhile, and more is known by now."""
    options = {"plain": {"xla_backend_optimization_level": "0"}}
    asked = {"cache_dir": tmp_path, "plans": 2, "compiler_options": options}
    free = plan(**asked)
    large, small = 2 * free.peak_bytes, int(1.1 * free.peak_bytes)
    before = [plan(memory_budget=budget, **asked) for budget in (large, small)]
    raced.clear()
    again = [plan(memory_budget=budget, **asked) for budget in (large, small, None)]
    assert raced == []
    for made, other in zip(again, (*before, free), strict=True):
        assert made.search["race_cached"] == 1.0
        assert (made.winner, made.measured_ms) == (other.winner, other.measured_ms)
        assert made.race == other.race


def test_what_cannot_fit_however_rematerialized_is_not_measured(plan, monkeypatch):
    least = Costs.least_peak_bytes
    swollen = {"data_parallel"}

    def swell(costs, choice):
        named = named_choices(costs.analysis.frame)
        is_large = any(named.get(name) == choice for name in swollen)
        return 2**31 if is_large else least(costs, choice)

    monkeypatch.setattr(Costs, "least_peak_bytes", swell)

    def asked():
        made = plan(memory_budget=2**30)
        row = next(row for row in made.race if row.name == "data_parallel")
        counts = (made.search[f"strategies_{how}"] for how in ("measured", "cached"))
        return row, sum(counts)

    row, count = asked()
    assert row.note == TOO_LARGE and row.predicted_ms is None
    # Where none can fit, all are measured: an error is to say what would do.
    swollen.update(PRESETS, PROPAGATED)
    row, every = asked()
    assert row.note == "" and every > count


def test_what_is_estimated_far_behind_is_named(plan, monkeypatch, tmp_path):
    patient(monkeypatch, estimate_reach=1.0)
    made = plan(cache_dir=tmp_path)
    unmeasured = [row.name for row in made.race if row.note == UNMEASURED]
    raced = {row.name for row in made.race if row.time_ms is not None}
    assert len(unmeasured) >= 3 and set(unmeasured) < set(PRESETS)
    assert raced.isdisjoint(unmeasured)
    # So it is under a budget that has room for all.
    made = plan(memory_budget=2**30, cache_dir=tmp_path)
    assert unmeasured == [row.name for row in made.race if row.note == UNMEASURED]
    assert TOO_LARGE not in [row.note for row in made.race]
    # What cannot be built may need any of them.
    build, failed = runner.build, []

    def first_fails(program, mesh, job, environment):
        if not failed:
            failed.append(job)
            job = replace(job, options=(("xla_no_such_option", "1"),))
        return build(program, mesh, job, environment)

    monkeypatch.setattr(runner, "build", first_fails)
    made = plan(cache_dir=tmp_path / "new")
    assert UNMEASURED not in [row.note for row in made.race]
    assert made.search["strategies_failed"] == 1


@pytest.mark.parametrize("repeats", [-1, 0, 1])
def test_what_is_left_out_stands_between_two_repeats(repeats):
    with pytest.raises(cfp.CfpError, match=f"got repeats={repeats}"):
        cfp.PlannerSettings(measure=True, repeats=repeats)


@pytest.fixture
def whole_fails(monkeypatch):
    """Returns programs that won truncated, so many that cannot be built whole."""
    build = building.build
    failed, most, gone = [], [], set()

    def failing(program, mesh, job, environment):
        alone = ("race", "the winner of truncated ones") in job.key.parts
        parts = dict(job.key.parts)
        one = parts["ops"], parts["shardings"]
        if alone and len(failed) < most[0]:
            failed.append(job.key.digest)
            gone.add(one)
        if one in gone and (alone or most[0] == 1):
            job = replace(job, options=(("xla_no_such_option", "1"),))
        return build(program, mesh, job, environment)

    def fail(count):
        most[:] = [count]
        monkeypatch.setattr(building, "build", failing)
        return failed

    return fail


@pytest.mark.parametrize("is_late", [True, *at_night([False])])
def test_what_does_not_run_whole_gives_way_to_the_next(
    is_late, plan, whole_fails, monkeypatch, tmp_path
):
    """Though time is over by then: another whole program follows in any case."""
    failed = whole_fails(1)
    monkeypatch.setattr(Run, "is_over", lambda _: is_late and bool(failed))
    made = plan(per_kind=2, cache_dir=tmp_path)
    assert len(failed) == 1
    assert "segments_raced" in made.search
    refused = [row for row in made.race if "xla_no_such_option" in row.note]
    assert refused and all(row.time_ms is None for row in refused)
    assert made.winner not in [row.name for row in refused]
    assert made.measured_ms is not None
    timed = [row for row in made.race if row.time_ms is not None]
    assert min(timed, key=lambda row: row.time_ms).name == made.winner
    again = plan(per_kind=2, cache_dir=tmp_path)
    assert again.search["race_cached"] == 1.0
    assert (again.winner, again.race) == (made.winner, made.race)


def test_whole_programs_race_if_none_of_the_winners_runs_whole(
    plan, whole_fails, tmp_path
):
    failed = whole_fails(99)
    made = plan(per_kind=2, cache_dir=tmp_path)
    assert len(failed) == len(set(failed)) > 1
    assert "segments_raced" not in made.search
    assert made.measured_ms is not None


def test_memory_decides_what_races_among_truncated_programs(plan, monkeypatch):
    """A candidate that surely does not fit is out; one that may fit races."""
    needs = {}

    def predicted(analysis, problem, choice):
        need = needs.setdefault(choice, 10 * (len(needs) + 1))
        return Prediction(1.0, need and CompiledBytes(temp_bytes=need))

    monkeypatch.setattr("cfp.context.device_memory", lambda mesh: 2**40)
    monkeypatch.setattr(story, "prediction_of", predicted)
    assert "segments_raced" in plan().search
    for need, refused in ((10 * 2**40, 1), (2**40, 0)):
        needs[list(needs)[-1]] = need
        made = plan()
        assert "segments_raced" in made.search
        assert [row.note for row in made.race].count(TOO_LARGE) == refused
    needs[list(needs)[-1]] = None
    assert "segments_raced" not in plan().search


def test_the_first_programs_are_compiled_one_by_one_where_nothing_is_tuned(
    plan, monkeypatch, tmp_path
):
    """Programs that share kernels would all tune them, on one device."""
    busy, begun, build = {}, [], building.build
    lock = threading.Lock()

    def watched(program, mesh, job, environment):
        with lock:
            busy[id(job)] = job
            begun.append([*busy.values()])
        try:
            return build(program, mesh, job, environment)
        finally:
            with lock:
                del busy[id(job)]

    monkeypatch.setattr(building, "build", watched)
    monkeypatch.setattr(building, "default_threads", lambda platform: 4)
    monkeypatch.setattr(BuildEnvironment, "is_untuned", lambda *_: True)
    plan(cache_dir=tmp_path)
    assert len(begun) > 3
    assert [len(jobs) for jobs in begun[:2]] == [1, 1]
    assert max(map(len, begun)) <= TUNING_AT_ONCE
    assert begun[0][0] is not begun[1][0]


@pytest.mark.parametrize(
    ("seconds", "begun"),
    # Nothing is begun later, but for the first smaller program.
    [
        (0.0, [0.0, 10.0]),
        (25.0, [0.0, 10.0, 20.0, 30.0]),
        (float("inf"), None),
        *at_night([(15.0, [0.0, 10.0, 20.0])]),
    ],
)
def test_where_nothing_fits_planning_ends_with_its_time(
    plan, monkeypatch, tmp_path, seconds, begun
):
    """Each program takes 10 s to compile, and none fits."""
    now, built, build = [0.0], [], building.build

    def slow(program, mesh, job, environment):
        built.append(now[0])
        now[0] += 10.0
        return replace(build(program, mesh, job, environment), temp_bytes=2**30)

    monkeypatch.setattr(building, "build", slow)
    monkeypatch.setattr(building, "default_threads", lambda platform: 1)
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])

    def smaller(run, refused):
        tried = {one.candidate.choice for one in refused if one.peak_bytes}
        every = {one.choice: one for one in run.solution.candidates}
        untried = [one for choice, one in every.items() if choice not in tried]
        return untried[:4] if len(built) < 4 else []  # Each is compiled.

    monkeypatch.setattr(story.Run, "smaller", smaller)
    for room in (building, contexts):
        monkeypatch.setattr(room, "time", clock)
    with pytest.raises(
        cfp.MemoryBudgetError, match=r"needs .*, .* more than the budget of .*\."
    ) as e:
        plan("300KB", cache_dir=tmp_path, measure=None, plans=8, seconds=seconds)
    if begun is None:
        assert len(built) > 3 and "Time for planning" not in str(e.value)
    else:
        assert built == begun
        assert "Time for planning was over" in str(e.value)
        assert "--time-budget" in str(e.value)


def test_the_last_program_says_that_it_is_awaited(plan, monkeypatch, tmp_path):
    told, is_told, build = [], threading.Event(), building.build

    def slow(*how):
        assert is_told.wait(GUARD_SECONDS)
        return build(*how)

    def progress(event):
        told.append(str(event))
        if told[-1].startswith("waiting for 1 program to compile, "):
            is_told.set()

    monkeypatch.setattr(building, "build", slow)
    monkeypatch.setattr(compile_pool, "_TELL_SECONDS", 0.0)
    plan(cache_dir=tmp_path, preset="data_parallel", progress=progress)
    assert is_told.is_set()
    assert any(re.search(r" so far: .*data_parallel", text) for text in told)


def test_presets_that_cannot_fit_whatever_the_compiler_does_are_not_compiled(
    plan, monkeypatch, tmp_path
):
    known = {}  # What is said of what fits, and of what nothing is known.

    def predicted(analysis, problem, choice):
        return Prediction(1.0, known.get(choice, CompiledBytes(temp_bytes=2**31)))

    def seen(*how):
        solution = search(*how)
        named = {one.name: one.choice for one in solution.candidates}
        known[named["data_parallel"]] = None
        return solution

    monkeypatch.setattr(steps, "prediction_of", predicted)
    monkeypatch.setattr("cfp.find.search", seen)
    made = plan(memory_budget=2**30, cache_dir=tmp_path)
    notes = {row.name: row.note for row in made.race}
    assert notes["data_parallel"] == ""
    assert list(notes.values()).count(TOO_LARGE) >= 2
    refused = [row for row in made.race if row.note == TOO_LARGE]
    assert {row.name for row in refused} <= set(cfp.PRESETS)
    assert not any(row.peak_bytes for row in refused)


def test_what_was_compiled_before_goes_by_its_own_size(plan, monkeypatch, tmp_path):
    """However much more is predicted, it races if it fits."""
    first = plan(memory_budget=2**30, cache_dir=tmp_path)
    ran = {row.name for row in first.race if row.time_ms is not None}
    assert len(ran & {*cfp.PRESETS}) >= 2
    most = max(row.peak_bytes for row in first.race)
    huge = Prediction(1.0, CompiledBytes(temp_bytes=2**31))
    monkeypatch.setattr(steps, "prediction_of", lambda *_: huge)
    again = plan(memory_budget=most, cache_dir=tmp_path)
    assert ran <= {row.name for row in again.race if row.time_ms is not None}


def timed(entry, ms=9.0):
    record = ProfileRecord(key=entry.name, parts=(), status="ok", samples_ms=(ms,))
    return result_of(entry, record)


def test_the_leader_alone_races_with_other_options():
    options = defaults_of("gpu").compiler_options

    def races_again(**times_ms):
        """Names of what is timed again, and of what has other options."""
        field = [
            (Candidate(n, n, is_preset=n != "planned"), ms)
            for n, ms in times_ms.items()
        ]
        first, new = second_race([timed(e, ms) for e, ms in field], options)
        assert len({one.key for one in new}) == len(new)
        varied = {one.choice for one in new}
        return [one.name for one in first], varied

    near = {"tensor_parallel": 9.3, "data_parallel": 9.2, "zero1": 9.5}
    first, varied = races_again(planned=9.0, **near)
    assert varied == {"planned"}
    assert {*first} == {"planned", "data_parallel", "tensor_parallel"}
    first, varied = races_again(planned=9.0, zero1=9.5)
    # The best preset is timed again, to be compared with.
    assert varied == {"planned"} and first == ["planned", "zero1"]


def test_no_two_programs_of_a_race_have_one_name():
    """Programs are known by the names of candidates, from one race to the next."""
    memory = MemoryBudget(budget_bytes=40, device_bytes=120)
    limits = limit_options(memory, CompiledBytes(argument_bytes=10, temp_bytes=40))
    limited = with_options(Candidate("one", "a choice", 9.0), limits)
    assert len({one.key for one in limited}) == 3
    options = defaults_of("gpu").compiler_options
    first, new = second_race([timed(e) for e in limited], options)
    asked = [*first, *new]
    names = [one.name for one in asked]
    assert len(set(names)) == len(names) == len({one.key for one in asked})
    assert "one, within the budget, large collectives" in names
