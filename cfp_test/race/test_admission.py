"""The one rule of what races, on made-up sizes: what is compiled, and when it ends."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.analysis.layout import Choice
from cfp.context import MemoryBudget
from cfp.profiling.record import MEMORY_SHARE, CompiledBytes
from cfp.race.admission import compile_until_enough_fit
from cfp.race.programs import LIMITED_ONCE, MANY_REFUSED, TOO_FAR, TOO_LARGE, TOO_LATE
from cfp.search.guided import Candidate
from cfp.settings import MOST_REFUSED, ConstraintLevel, defaults_of

REACH = defaults_of("gpu").reach
BUDGET = 100
# What the memory limit leaves of the temporaries, which are half of everything here.
LIMITED = 0.6


def candidate(name, predicted_ms, level=ConstraintLevel.EVERYTHING):
    return Candidate(name, Choice((), (), tuple(map(ord, name))), predicted_ms, level)


def split(peak_bytes):
    half = peak_bytes // 2
    return CompiledBytes(argument_bytes=half, temp_bytes=peak_bytes - half)


class Compiler:
    """Compiles programs of given sizes; 0 fails. Notes what it was asked for."""

    def __init__(self, sizes, stubborn=(), most=99):
        self.sizes, self.stubborn, self.most = sizes, stubborn, most
        self.asked = []

    def is_over(self):
        return len(self.asked) >= self.most

    def __call__(self, candidates) -> Any:
        # The first of a call is compiled however late it is.
        return [self.one(one, place > 0) for place, one in enumerate(candidates)]

    def one(self, candidate, may_be_late):
        is_late = may_be_late and self.is_over()
        self.asked.append(candidate.name)
        base = candidate.name.partition(", ")[0]
        size = split(self.sizes[base])
        if candidate.options and base not in self.stubborn:
            less = round(LIMITED * size.temp_bytes)
            size = CompiledBytes(argument_bytes=size.argument_bytes, temp_bytes=less)
        peak = size.peak_bytes
        return SimpleNamespace(
            candidate=candidate,
            peak_bytes=peak,
            size=size,
            fits=peak <= BUDGET,
            may_race=0 < peak <= BUDGET and not is_late,
        )


def admit(
    sizes,
    times,
    *,
    predicted=None,
    limits=True,
    stubborn=(),
    presets=True,
    most=99,
    **how,
):
    """Admits programs that need some bytes and should take some time."""
    compiler = Compiler(sizes, stubborn, most)
    first, *others = (candidate(name, times[name]) for name in sizes)
    known = sizes if presets is True else presets or ()
    others = [replace(one, is_preset=one.name in known) for one in others]
    candidates = [first, *others]
    memory = MemoryBudget(
        budget_bytes=BUDGET, device_bytes=10 * BUDGET if limits else None
    )
    expected = sizes if predicted is None else predicted
    how = {"reach": REACH, **how}
    found = compile_until_enough_fit(
        candidates,
        compiler,
        memory=memory,
        size_of=lambda one: split(expected[one.name]) if expected[one.name] else None,
        is_over=compiler.is_over,
        **how,
    )
    return found, compiler.asked


def bases(candidates):
    return {one.name.partition(", ")[0] for one in candidates}


def fitting(found):
    return bases(made.candidate for made in found.fitting)


def left(found, why):
    return [one for one, reason in found.left if reason == why]


def test_what_fits_and_is_in_reach_is_compiled_and_nothing_else():
    sizes = {"planned": 90, "near": 80, "far": 70}
    found, asked = admit(sizes, {"planned": 10.0, "near": 10.9, "far": 12.0})
    assert asked == ["planned", "near"] and fitting(found) == {"planned", "near"}
    assert bases(left(found, TOO_FAR)) == {"far"}


def test_the_best_preset_is_compiled_however_slow():
    sizes = {"planned": 90, "slow": 80, "slower": 70}
    found, _ = admit(sizes, {"planned": 10.0, "slow": 20.0, "slower": 30.0})
    assert fitting(found) == {"planned", "slow"} and bases(left(found, TOO_FAR)) == {
        "slower"
    }


def test_what_is_too_large_by_prediction_gets_the_memory_limit_at_once():
    sizes = {"planned": 90, "large": 122}
    found, asked = admit(sizes, {"planned": 10.0, "large": 8.0})
    assert "large" not in asked and "large, within the budget" in asked
    assert fitting(found) == {"planned", "large"}


def test_what_turns_out_too_large_gets_the_memory_limit_then():
    sizes, predicted = {"planned": 90, "large": 122}, {"planned": 90, "large": 95}
    times = {"planned": 10.0, "large": 8.0}
    found, asked = admit(sizes, times, predicted=predicted)
    assert asked.index("large") < asked.index("large, within the budget")
    assert fitting(found) == {"planned", "large"}
    # With it a step takes longer: it must be worth that.
    times = {"planned": 10.0, "large": 10.9}
    found, asked = admit(sizes, times, predicted=predicted, presets=False)
    assert not [name for name in asked if name.startswith("large, ")]


def test_a_tighter_limit_is_tried_where_the_looser_one_does_not_do():
    """In all recorded races the loosest with which a program fits was the fastest."""
    sizes = {"planned": 90, "large": 122}
    _, asked = admit(sizes, {"planned": 10.0, "large": 8.0})
    assert [name for name in asked if "large" in name] == ["large, within the budget"]
    times = {"planned": 10.0, "large": 8.0}
    found, asked = admit(sizes, times, stubborn={"large"})
    assert [name for name in asked if "large" in name] == [
        "large, within the budget",
        "large, well within the budget",
        "large, within the budget, no latency hiding",
    ]
    assert fitting(found) == {"planned"}


def test_without_a_memory_limit_it_is_compiled_as_it_is():
    sizes = {"planned": 90, "large": 122}
    found, asked = admit(sizes, {"planned": 10.0, "large": 8.0}, limits=False)
    assert asked == ["planned", "large"] and fitting(found) == {"planned"}


def test_what_cannot_fit_is_not_compiled():
    sizes = {"planned": 90, "huge": 200}
    found, asked = admit(sizes, {"planned": 10.0, "huge": 1.0})
    assert asked == ["planned"] and bases(left(found, TOO_LARGE)) == {"huge"}


def test_with_fewer_constraints_a_choice_needs_no_less():
    """To give one choice the memory limit at both levels lost: it needs 5 % more."""
    less = candidate("large", 8.0, ConstraintLevel.ARGUMENTS)
    both = [candidate("planned", 10.0), candidate("large", 8.0), less]
    compiler = Compiler({"planned": 90, "large": 122})
    found = compile_until_enough_fit(
        both,
        compiler,
        memory=MemoryBudget(budget_bytes=100, device_bytes=999),
        size_of=lambda one: split(compiler.sizes[one.name]),
        reach=REACH,
    )
    fitting = [made.candidate for made in found.fitting]
    levels = {one.level for one in fitting if MEMORY_SHARE in one.options}
    assert levels == {ConstraintLevel.EVERYTHING}
    assert found.left == [(less, LIMITED_ONCE)]


def test_faster_rivals_that_do_not_fit_take_no_presets_place():
    """As for a mixture of experts at 60 %: two faster choices were compiled within the
    budget, and expert parallelism, which fits so and was the fastest, never was.
    """
    sizes = {"planned": 90, "first": 122, "second": 122, "experts": 122, "data": 95}
    times = {"planned": 10.0, "first": 8.0, "second": 8.1, "experts": 8.4, "data": 9.9}
    found, asked = admit(sizes, times, stubborn={"first", "second"})
    assert "experts, within the budget" in asked
    assert {"planned", "experts"} <= fitting(found)
    # Those that fit as well do not take it either.
    found, _ = admit(sizes, times)
    assert {"first", "second", "experts"} <= fitting(found)


def test_what_was_out_of_reach_of_something_too_large_is_compiled():
    """As at budgets of 5.36 to 5.73 GiB: what was left out for the sake of faster plans
    that then did not fit was the fastest that does.
    """
    sizes = {"planned": 90, "hoped": 122, "near": 95, "far": 80}
    times = {"planned": 10.0, "hoped": 7.0, "near": 10.5, "far": 12.0}
    found, _ = admit(sizes, times, stubborn={"hoped"})
    assert fitting(found) == {"planned", "near"}
    assert bases(made.candidate for made in found.refused) == {"hoped"}
    found, _ = admit(sizes, times)
    assert "near" not in fitting(found) and bases(left(found, TOO_FAR)) >= {"far"}


def test_it_ends_when_too_many_do_not_fit():
    sizes = {"planned": 120, **{f"p{n}": 120 for n in range(3 * MOST_REFUSED)}}
    times = {name: 10.0 + 0.01 * place for place, name in enumerate(sizes)}
    predicted = dict.fromkeys(sizes, 90)
    found, asked = admit(sizes, times, predicted=predicted, limits=False)
    assert not found.fitting and len(asked) == MOST_REFUSED
    assert len(left(found, MANY_REFUSED)) == len(sizes) - MOST_REFUSED


@pytest.mark.parametrize("reach", [REACH, None])
def test_the_plan_is_compiled_however_many_faster_ones_do_not_fit(reach):
    faster = {f"p{n}": 10.0 + 0.01 * n for n in range(2 * MOST_REFUSED)}
    sizes = {"planned": 90, **dict.fromkeys(faster, 120)}
    predicted = {**dict.fromkeys(sizes, 95), "planned": 90}
    times = {"planned": 20.0, **faster}
    found, asked = admit(sizes, times, predicted=predicted, limits=False, reach=reach)
    assert fitting(found) == {"planned"} and len(asked) <= MOST_REFUSED + 1
    # They are faster by prediction, and were not tried.
    assert reach is None or bases(left(found, MANY_REFUSED)) < faster.keys()


def test_where_the_best_preset_does_not_fit_no_slower_one_is_compiled():
    """On one H100 that was three programs more, 27 s, and none that fits."""
    sizes = {"planned": 90, "best": 120, "next": 80, "last": 70}
    times = {"planned": 10.0, "best": 15.0, "next": 20.0, "last": 30.0}
    predicted = {**sizes, "best": 90}
    found, asked = admit(sizes, times, predicted=predicted, limits=False)
    assert fitting(found) == {"planned"} and asked == ["planned", "best"]


def test_the_best_preset_has_a_place_among_many_that_are_faster():
    faster = {f"p{n}": 10.0 + 0.01 * n for n in range(2 * MOST_REFUSED)}
    sizes = {"planned": 90, **dict.fromkeys(faster, 120), "preset": 80}
    times = {"planned": 20.0, **faster, "preset": 30.0}
    predicted = dict.fromkeys(sizes, 90)
    how = {"predicted": predicted, "limits": False, "presets": {"preset"}}
    found, _ = admit(sizes, times, **how)
    assert fitting(found) == {"planned", "preset"}


@pytest.mark.parametrize("reach", [REACH, None])
def test_what_is_known_to_fit_is_tried_however_many_do_not(reach):
    sizes = {"planned": 120, **{f"p{n}": 120 for n in range(2 * MOST_REFUSED)}}
    sizes["known"] = 90
    times = {name: 10.0 + 0.01 * place for place, name in enumerate(sizes)}
    key = candidate("known", times["known"]).key
    predicted = {**dict.fromkeys(sizes, 90), "known": 300}
    how = {"limits": False, "reach": reach, "known": {key}}
    found, _ = admit(sizes, times, predicted=predicted, **how)
    assert fitting(found) == {"known"}


@pytest.mark.parametrize("most", [1, 2])
def test_where_time_is_over_nothing_else_is_asked_for(most):
    """The next preset is not compiled where the best is too late, or does not fit."""
    sizes = {"planned": 90, "best": 120, "next": 120, "last": 70}
    times = {"planned": 10.0, "best": 15.0, "next": 20.0, "last": 30.0}
    predicted = dict.fromkeys(sizes, 90)
    found, asked = admit(sizes, times, predicted=predicted, limits=False, most=most)
    assert asked == ["planned", "best"] and fitting(found) == {"planned"}
    assert bases(left(found, TOO_FAR)) == {"next", "last"}
    times = {name: 10.0 + 0.01 * n for n, name in enumerate(sizes)}
    sizes |= {f"p{n}": 80 for n in range(MOST_REFUSED)}
    times |= {f"p{n}": 10.5 for n in range(MOST_REFUSED)}
    predicted = dict.fromkeys(sizes, 90)
    found, _ = admit(sizes, times, predicted=predicted, limits=False, most=most)
    assert len(left(found, TOO_LATE)) == len(sizes) - MOST_REFUSED


@pytest.mark.parametrize("reach", [REACH, None])
@pytest.mark.parametrize("most", [1, 2])
def test_where_time_is_over_and_nothing_fits_nothing_else_is_asked_for(reach, most):
    sizes = {"planned": 120, **{f"p{n}": 120 for n in range(MOST_REFUSED)}, "last": 70}
    times = {name: 10.0 + n for n, name in enumerate(sizes)}
    predicted = dict.fromkeys(sizes, 90)
    how = {"limits": False, "presets": False, "reach": reach}
    found, asked = admit(sizes, times, predicted=predicted, most=most, **how)
    # Without a race they are compiled one by one; in one, the best preset beside it.
    assert len(asked) <= 2 and not found.fitting
    assert len(left(found, TOO_LATE)) == len(sizes) - len(asked)


@pytest.mark.parametrize("reach", [REACH, None])
def test_known_sizes_do_not_count_as_compiled_after_the_deadline(reach):
    """A planned step is planned again in no time, also if the store has refusals."""
    sizes, times = {"planned": 90, "large": 120}, {"planned": 10.0, "large": 9.0}
    large = {candidate("large", times["large"]).key: split(sizes["large"])}
    how = {"limits": False, "compiled": large, "most": 0, "reach": reach}
    found, asked = admit(sizes, times, **how)
    assert asked == ["large", "planned"] and fitting(found) == {"planned"}


@pytest.mark.parametrize("reach", [0.5, float("inf")])
def test_where_nothing_fits_yet_the_next_is_compiled(reach):
    sizes = {"planned": 120, "planned 2": 90}
    predicted = dict.fromkeys(sizes, 90)
    times = (
        {"planned": 10.0, "planned 2": 11.0} if reach < 1 else dict.fromkeys(sizes, 0.0)
    )
    how = {"limits": False, "presets": False, "reach": dict.fromkeys(REACH, reach)}
    found, _ = admit(sizes, times, predicted=predicted, **how)
    assert fitting(found) == {"planned 2"}


def test_without_a_race_one_that_fits_is_enough():
    sizes = {"planned": 120, "next": 90, "last": 80}
    times = {"planned": 10.0, "next": 20.0, "last": 30.0}
    found, asked = admit(sizes, times, limits=False, reach=None)
    assert asked == ["planned", "next"] and fitting(found) == {"next"}


def test_what_has_no_prediction_may_win():
    sizes = {"planned": 90, "unknown": 80}
    found, _ = admit(sizes, {"planned": 10.0, "unknown": None}, presets=False)
    assert fitting(found) == {"planned", "unknown"}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(20, 200), st.floats(1.0, 20.0)), max_size=7),
    st.booleans(),
)
def test_nothing_in_reach_of_the_fastest_that_fits_is_left_out(others, limits):
    sizes = {"planned": 90, **{f"p{n}": size for n, (size, _) in enumerate(others)}}
    times = {"planned": 10.0, **{f"p{n}": ms for n, (_, ms) in enumerate(others)}}
    found, asked = admit(sizes, times, limits=limits)
    assert len(asked) == len(set(asked))
    best_ms = min(times[name] for name in fitting(found))
    plain = {made.candidate.name for made in found.fitting}
    for name, size in sizes.items():
        if size <= BUDGET and times[name] <= best_ms:
            assert name in plain
    for one in left(found, TOO_FAR):
        assert one.predicted_ms > best_ms
    every = [one for one, _ in found.left]
    every += [made.candidate for made in found.refused]
    assert bases(every) | fitting(found) == set(sizes)


@pytest.mark.parametrize("name", ["first", "planned"])
def test_what_fails_is_refused_and_the_next_has_its_turn(name):
    sizes = {"planned": 90, "first": 90, "next": 90}
    times = {"planned": 10.0, "first": 5.0, "next": 10.1}
    found, _ = admit({**sizes, name: 0}, times, predicted=sizes)
    assert bases(made.candidate for made in found.refused) == {name}
    expected = {"planned", "next"} if name == "first" else {"first", "next"}
    assert fitting(found) <= expected and fitting(found)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(90, 140), st.floats(9.0, 12.0)), max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(2, 12),
)
def test_limits_beside_each_other_lose_nothing(others, stubborn, at_once):
    """Tighter limits are tried where threads idle; of what fits the loosest races."""
    sizes = {"planned": 122, **{f"p{n}": size for n, (size, _) in enumerate(others)}}
    times = {"planned": 10.0, **{f"p{n}": ms for n, (_, ms) in enumerate(others)}}
    how = {"stubborn": {f"p{n}" for n in stubborn}, "presets": False}
    one_by_one, _ = admit(sizes, times, **how)
    found, asked = admit(sizes, times, at_once=at_once, **how)
    assert fitting(one_by_one) <= fitting(found)
    assert len(asked) == len(set(asked))
    names = [made.candidate.name for made in found.fitting]
    assert len({name.partition(",")[0] for name in names}) == len(names)
    limits = [name.partition(", ")[2] for name in names]
    assert {*limits} <= {"", "within the budget"}


def test_only_threads_that_idle_try_tighter_limits():
    sizes, times = {"planned": 122, "next": 122}, {"planned": 10.0, "next": 10.1}
    how = {"predicted": dict.fromkeys(sizes, 80), "stubborn": {*sizes}}
    _, asked = admit(sizes, times, at_once=3, **how)
    loose, tight = ", within the budget", ", well within the budget"
    assert asked[2:5] == [f"planned{loose}", f"next{loose}", f"planned{tight}"]
    _, asked = admit(sizes, times, **how)
    assert asked[2:5] == [f"planned{loose}", f"next{loose}", f"planned{tight}"]
    _, asked = admit(sizes, times, at_once=6, **how)
    assert asked[2:6] == [f"{n}{how}" for how in (loose, tight) for n in sizes]


@pytest.mark.parametrize(("reach", "new_ms"), [(REACH, 10.4), (None, 30.0)])
def test_of_what_is_known_not_to_fit_few_get_a_memory_limit(reach, new_ms):
    """With smaller budgets in turn, as of a store that has many programs."""
    names = ["planned", *(f"p{n}" for n in range(1, 4 * MOST_REFUSED))]
    sizes = {**dict.fromkeys(names, 122), "new": 90}
    times = {name: 10.0 + 0.01 * place for place, name in enumerate(names)}
    found, asked = admit(
        sizes,
        {**times, "new": new_ms},
        predicted=dict.fromkeys(sizes, 80),
        stubborn=names,
        compiled={candidate(name, 0.0).key: split(122) for name in names},
        presets=False,
        reach=reach,
    )
    limited = {name.partition(", ")[0] for name in asked if ", " in name}
    assert limited == {*names[:MOST_REFUSED]}
    assert fitting(found) == {"new"}


def test_one_choice_under_two_names_is_compiled_under_both():
    """As the plan, where it is a preset's."""
    one = candidate("planned", 10.0)
    compiler = Compiler({"planned": 90, "preset": 90})
    found = compile_until_enough_fit(
        [one, replace(one, name="preset", is_preset=True)],
        compiler,
        memory=None,
        size_of=lambda one: None,
        reach=REACH,
        at_once=8,
    )
    assert [made.candidate.name for made in found.fitting] == ["planned", "preset"]
