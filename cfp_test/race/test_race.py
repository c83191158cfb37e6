"""Races of deep programs: the best three by prediction run whole."""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
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
from cfp.race.programs import BEHIND, TOO_LARGE, UNMEASURED
from cfp.race.turns import second_race
from cfp.settings import MOST_RACED, TUNING_AT_ONCE, defaults_of
from cfp.solution import Candidate, Prediction
from cfp_test.race.deep import arguments, step
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
    samples_ms = tuple(factor * ms for ms in result.record.samples_ms)
    return replace(result, outcome=replace(result.record, samples_ms=samples_ms))


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


def test_the_best_three_race_and_the_leader_with_other_options(plan, raced):
    options = {"plain": {"xla_backend_optimization_level": "0"}}
    made = plan(compiler_options=options)
    assert len(set(raced)) == 1 and len(raced) == MOST_RACED + 1
    timed = [row.name for row in made.race if row.time_ms is not None]
    assert sum(name.endswith(", plain") for name in timed) == 1
    assert {*timed} & {*PRESETS}
    behind = [row for row in made.race if row.note == BEHIND]
    assert behind and all(row.time_ms is None for row in behind)
    expected, found = jax.jit(step)(*arguments()), made.apply(step)(*arguments())
    for have, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    raced.clear()
    again = plan(compiler_options=options)
    assert raced == [] and again.search["race_cached"] == 1.0
    assert (again.winner, again.measured_ms) == (made.winner, made.measured_ms)


def test_of_those_that_fail_the_next_take_the_places(plan, monkeypatch, tmp_path):
    build, failed = building.build, []

    def failing(program, mesh, job, environment):
        if len(failed) < 2:
            failed.append(job.label)
            job = replace(job, options=(("xla_no_such_option", "1"),))
        return build(program, mesh, job, environment)

    monkeypatch.setattr(building, "build", failing)
    made = plan(cache_dir=tmp_path)
    refused = [row for row in made.race if "xla_no_such_option" in row.note]
    assert len(failed) == 2 and len(refused) >= 2
    timed = {row.samples_ms for row in made.race if row.time_ms is not None}
    assert len(timed) == MOST_RACED


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
            assert len(order) == MOST_RACED and {*order[2:]} == known
            ms = dict(zip(order, (10.0, 10.1, best_ms), strict=True))
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
    assert len(begun) == MOST_RACED
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
