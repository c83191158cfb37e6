"""Races of deep programs: the best by prediction run whole."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import cfp
from cfp.analysis.presets import PRESETS
from cfp.context import DetailedSettings, MemoryBudget
from cfp.profiling.collectives import Rates
from cfp.profiling.record import Collective, CompiledBytes, ProfileRecord
from cfp.race import compile as building
from cfp.race.admission import limit_options
from cfp.race.programs import variants, with_options, without_first_options
from cfp.race.race import Race, race
from cfp.race.turns import second_race
from cfp.search.guided import Candidate, Solution
from cfp.settings import MOST_RACED, ConstraintLevel, defaults_of
from cfp_test.race.deep import arguments, step
from cfp_test.race.results import result_of

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


@pytest.fixture
def raced(monkeypatch):
    """The parts that were built for races, in turn: how many ops each has."""
    counts, build = [], building.build

    def counting(program, mesh, job, environment):
        counts.append(len(job.part.ops))
        return build(program, mesh, job, environment)

    monkeypatch.setattr(building, "build", counting)
    return counts


def test_the_best_race_and_the_leader_with_other_options(plan, raced):
    options = {"plain": {"xla_backend_optimization_level": "0"}}
    made = plan(compiler_options=options)
    assert len(set(raced)) == 1 and len(raced) <= MOST_RACED + 1
    timed = [row.name for row in made.race if row.time_ms is not None]
    assert sum(name.endswith(", plain") for name in timed) == 1
    assert {*timed} & {*PRESETS}
    expected, found = jax.jit(step)(*arguments()), made.apply(step)(*arguments())
    for have, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    raced.clear()
    again = plan(compiler_options=options)
    assert raced == [] and again.search["race_cached"] == 1.0
    assert (again.winner, again.measured_ms) == (made.winner, made.measured_ms)


def timed(entry, ms=9.0):
    record = ProfileRecord(key=entry.name, parts=(), status="ok", samples_ms=(ms,))
    return result_of(entry, record)


def test_the_leader_alone_races_with_other_options():
    usual = defaults_of("gpu")
    first = usual.first_options

    def races_again(**times_ms):
        """Names of what is timed again, and of the leader's variants."""
        shared = usual.shared_options
        field = [
            (Candidate(n, n, options=shared, is_preset=n != "planned"), ms)
            for n, ms in times_ms.items()
        ]
        field = [(with_options(one, first)[0], ms) for one, ms in field]
        raced = [timed(e, ms) for e, ms in field]
        again, new = second_race(raced, usual)
        assert len({one.key for one in new}) == len(new)
        [leader] = {one.choice for one in new}
        names = [one.name.partition(",")[0] for one in again]
        for one in new:  # A name says what was compiled.
            assert shared.items() <= one.options.items()
            large = {*first["large collectives"].items()} <= {*one.options.items()}
            assert large == ("large collectives" in one.name)
        return names, leader, {one.level for one in new}

    everything, _, arguments = ConstraintLevel
    near = {"tensor_parallel": 9.3, "data_parallel": 9.2, "zero1": 9.5}
    again, leader, new = races_again(planned=9.0, **near)
    assert leader == "planned" and new == {everything}
    assert {*again} == {"planned", "data_parallel", "tensor_parallel"}
    again, leader, new = races_again(planned=9.0, zero1=9.5)
    # The best preset is timed again, to be compared with.
    assert leader == "planned" and again == ["planned", "zero1"]
    _, leader, new = races_again(planned=9.0, zero1=8.5)
    assert leader == "zero1" and arguments in new


@pytest.mark.parametrize("ms", [2.0, 3.0])
def test_options_for_collectives_race_only_where_these_take_long(ms):
    """2 of 9 ms are less than a quarter, 3 are more: then all choices race with them.

    A user's own options race with the leader alone.
    """
    usual = defaults_of("gpu")
    curves = {("all-gather", ("x",)): ((1 << 20, ms / 4),)}
    rates = replace(Rates.default((("x", 2),)), curves=curves)
    gathers = Collective(kind="all-gather", bytes=1 << 20, group_size=2, count=4)
    entries = [
        with_options(Candidate(name, name), usual.first_options)[0]
        for name in ("planned", "zero1")
    ]
    raced = [
        replace(timed(one, 9.0 + place), collectives=(gathers,))
        for place, one in enumerate(entries)
    ]
    names = ["planned", "planned, no latency hiding", "zero1, no latency hiding"]
    new = [one.name for one in second_race(raced, usual, rates)[1]]
    assert new == (names if ms > 2 else [])
    own = replace(usual, first_options={})
    assert {one.choice for one in second_race(raced, own, rates)[1]} == {"planned"}


class Seen(Exception):
    """Ends a race before anything is compiled."""


@pytest.mark.parametrize("memory", [None, MemoryBudget(budget_bytes=9, device_bytes=9)])
def test_the_plan_by_prediction_races_with_kernels_slow_to_tune(monkeypatch, memory):
    """Without a budget, and also if the race's solution races again."""
    seen = list[Candidate]()

    def remember(self, candidates):
        seen[:] = candidates
        raise Seen

    monkeypatch.setattr(Race, "remember", remember)
    usual, names = defaults_of("gpu"), ("planned", "zero1")
    solution = Solution([Candidate(name, name) for name in names])  # pyright: ignore
    context = SimpleNamespace(defaults=usual, races=True, compiles=True, memory=memory)
    with pytest.raises(Seen):
        race(context, None, solution)  # pyright: ignore
    off = usual.shared_options.items()
    with_off = [off <= one.options.items() for one in seen]
    if memory is None:
        plain = [one.name.removesuffix(", large collectives") for one in seen]
        assert plain == ["planned", "planned, Triton", "zero1"]
        assert with_off == [True, False, True]
    else:
        assert [one.name for one in seen] == [*names] and all(with_off)


def test_first_options_go_from_a_name_with_a_constraint_level():
    rules, preset = defaults_of("gpu"), Candidate("zero1", "a choice", is_preset=True)
    [first] = with_options(preset, rules.first_options)
    others = [one for one in variants(first, rules) if one.level is not first.level]
    assert [one.name for one in others] == [
        "zero1, large collectives, arguments constrained"
    ]
    plain = without_first_options(others[0], rules)
    assert (plain.name, plain.options) == ("zero1, arguments constrained", {})


def test_no_two_programs_of_a_race_have_one_name():
    """Programs are known by the names of candidates, from one race to the next."""
    memory = MemoryBudget(budget_bytes=40, device_bytes=120)
    limits = limit_options(memory, CompiledBytes(argument_bytes=10, temp_bytes=40))
    limited = with_options(Candidate("one", "a choice", 9.0), limits)
    assert len({one.key for one in limited}) == 3
    first, new = second_race([timed(e) for e in limited], defaults_of("gpu"))
    asked = [*first, *new]
    names = [one.name for one in asked]
    assert len(set(names)) == len(names) == len({one.key for one in asked})
    assert "one, within the budget, large collectives" in names
