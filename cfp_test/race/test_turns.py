"""The race, and what failed before."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from cfp.analysis.layout import Choice
from cfp.errors import DeviceError
from cfp.profiling import runner
from cfp.profiling.builder import Built
from cfp.profiling.options import MeasureOptions
from cfp.profiling.record import ProfileRecord
from cfp.profiling.timing import measure
from cfp.race import compile as building
from cfp.race import turns as room
from cfp.race.compile import Builder, compile_programs
from cfp.race.programs import RaceProgram, Skipped
from cfp.race.turns import race_programs
from cfp.settings import defaults_of
from cfp.solution import Candidate
from cfp_test.support.at_work import alone, at_work

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")


def entrant(case, name):
    return RaceProgram(candidate=Candidate(name, Choice((), ())), job=case.job(name))


@pytest.fixture
def timed(case, store, monkeypatch):
    """Races candidates by name, and says which turns there were."""
    turns = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        [mark] = [mark for mark in alone(store) if mark.doing == "run"]
        assert (mark.key, mark.label) == (job.key.digest, job.label)
        turns.append(job.label)
        return built.record("ok", samples_ms=[1.0], run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)

    def go(
        names: str, retry_failures=False, **how
    ) -> tuple[list[str], dict[str, ProfileRecord]]:
        turns.clear()
        programs = [entrant(case, name) for name in names]
        how["options"] = MeasureOptions(retry_failures=retry_failures)
        where = {"program": case.program, "mesh": case.mesh, "store": store}
        results = race_programs(Builder(**where, **how), programs, rounds=1)
        return list(turns), {result.name: result.record for result in results}

    return go


def test_what_failed_is_not_run_again_unless_asked(timed, case, store):
    key = case.job("b").key
    crash = ProfileRecord(
        key=key.digest, parts=key.parts, status="crashed", reason="boom"
    )
    store.put(crash)
    turns, found = timed("abc")
    assert turns == ["a", "c"]
    assert found["b"] == crash
    assert timed("abc")[0] == []
    # Only times of one race compare.
    assert timed("abcd")[0] == ["a", "c", "d"]
    turns, found = timed("abcd", retry_failures=True)
    assert turns == ["a", "b", "c", "d"]
    assert all(record.ok for record in found.values())
    assert store.get(key.digest) == found["b"]


def test_times_of_two_races_are_not_compared(timed, monkeypatch):
    moments = iter(["2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"])
    monkeypatch.setattr(room, "utc_now", lambda: next(moments))
    _, first = timed("ab")
    timed("bc")
    assert timed("bc")[0] == []
    # What each of them measured is known still, though b has run again.
    assert timed("ab") == ([], first)
    monkeypatch.setattr(room, "utc_now", lambda: "2026-01-03T00:00:00+00:00")
    assert timed("ac")[0] == ["a", "c"]
    assert timed("ac")[0] == []
    assert timed("ab") == ([], first)
    turns, again = timed("abc")
    assert turns == ["a", "b", "c"]
    # A part of a race is one, too; unless it has been one of its own.
    assert timed("c") == ([], {"c": again["c"]})
    assert timed("ab") == ([], first)


@pytest.fixture
def dated(timed, case, store, monkeypatch):
    """Races, one a minute, of candidates of which "l" needs ten times the memory.

    Says which turns there were, and in the minute of which race each program ran.
    """
    now = [-1]

    def fake(program, mesh, job, environment) -> Built:
        need = 100 if job.label == "l" else 10
        return Built(key=job.key, compiled=None, temp_bytes=need)

    monkeypatch.setattr(building, "build", fake)
    monkeypatch.setattr(room, "utc_now", lambda: f"2026-01-01T00:{now[0]:02}:00+00:00")

    def go(names: str, budget_bytes: int = 1000, **options) -> tuple[str, dict]:
        now[0] += 1
        turns, found = timed(names, budget_bytes=budget_bytes, **options)
        ran = {n: r for n, r in found.items() if r.ok and r.peak_bytes <= budget_bytes}
        return "".join(turns), {n: int(r.created[14:16]) for n, r in ran.items()}

    return go


def test_what_was_too_large_is_not_compared_with_what_ran_later(dated):
    assert dated("la") == ("la", {"l": 0, "a": 0})
    assert dated("lab", 50) == ("ab", {"a": 1, "b": 1})
    assert dated("lab") == ("lab", {"l": 2, "a": 2, "b": 2})
    # With each budget it has its answer.
    assert dated("lab", 50) == ("", {"a": 1, "b": 1})
    assert dated("lab") == ("", {"l": 2, "a": 2, "b": 2})


def test_a_refusal_does_not_replace_what_another_process_measured(
    dated, case, store, monkeypatch
):
    """The other one runs it, with more memory, while this one compiles it."""
    job = case.job("l")
    other = Built(key=job.key, compiled=None, temp_bytes=100)
    other = other.record("ok", samples_ms=[1.0], run_seconds=0.1)
    build = building.build

    def slow(*args) -> Built:
        store.put(other)
        return build(*args)

    monkeypatch.setattr(building, "build", slow)
    assert dated("la", 50) == ("a", {"a": 0})
    assert store.get(job.key.digest) == other
    # It is no part of a race that it was refused from, though it has run.
    dated("lab", 50)
    raced = [dict(record.parts).get("among") for record in store.records()]
    assert len(raced) - raced.count(None) == len("a" + "ab")


def test_an_answer_stays_whatever_races_with_it_meanwhile(dated):
    dated("abc")
    assert dated("ab") == ("", {"a": 0, "b": 0}), "known by a race of more"
    for others in ("bd", "ad", "abd"):
        assert dated(others)[0] == others
        assert dated("ab") == ("", {"a": 0, "b": 0})


def test_what_fails_later_has_no_answer_any_more(dated, case, store):
    dated("abc")
    dated("bd")
    key = case.job("a").key
    crash = ProfileRecord(key=key.digest, parts=key.parts, status="crashed")
    store.put(crash, replace=True)
    assert dated("abc") == ("", {"b": 0, "c": 0})
    dated("ad", retry_failures=True)
    assert dated("abc") == ("", {"a": 0, "b": 0, "c": 0})


def test_what_failed_before_it_was_tried_again_races(dated, case, store):
    key = case.job("a").key
    store.put(ProfileRecord(key=key.digest, parts=key.parts, status="crashed"))
    assert dated("abc") == ("bc", {"b": 0, "c": 0})
    assert dated("ad", retry_failures=True)[0] == "ad"
    assert dated("abc")[0] == "abc"


def test_an_answer_that_was_imported_in_parts_is_none(dated, case, store, tmp_path):
    """Samples that are there stay; missing or failed ones are taken from the file."""
    key = case.job("a").key
    store.put(ProfileRecord(key=key.digest, parts=key.parts, status="crashed"))
    dated("abc")
    before = store.records()
    assert dated("abc", retry_failures=True)[0] == "abc"
    store.export(tmp_path / "file")
    store.put_all(before, replace=True)
    store.merge(tmp_path / "file")
    assert dated("abc") == ("abc", {"a": 2, "b": 2, "c": 2})


def test_a_larger_budget_is_a_new_chance(timed):
    turns, found = timed("a", budget_bytes=10)
    assert turns == []
    assert found["a"].status == "out_of_memory"
    needed = found["a"].peak_bytes
    assert timed("a", budget_bytes=needed - 1)[0] == []
    turns, found = timed("a", budget_bytes=needed)
    assert turns == ["a"]
    assert found["a"].ok


def test_what_is_known_to_be_too_large_is_not_compiled_again(timed, monkeypatch):
    _, before = timed("a")
    compiled = []

    def note(program, mesh, job, environment):
        compiled.append(job.label)
        return build(program, mesh, job, environment)

    build = building.build
    monkeypatch.setattr(building, "build", note)
    timed("ab", budget_bytes=before["a"].peak_bytes - 1)
    assert compiled == ["b"]


def test_a_budget_leaves_good_records_alone(timed, case, store):
    _, before = timed("a")
    needed = before["a"].peak_bytes
    turns, found = timed("ab", budget_bytes=needed - 1)
    assert turns == []
    assert found["a"] == before["a"]
    assert found["b"].status == "out_of_memory"
    # So under a larger one it need not run for what is known.
    assert timed("a", budget_bytes=needed) == ([], before)


def test_what_ran_out_of_memory_is_not_tried_again(timed, case, store):
    _, found = timed("a")
    ran_out = replace(found["a"], status="out_of_memory", samples_ms=())
    store.put(ran_out, replace=True)
    assert timed("a") == ([], {"a": ran_out})


@pytest.mark.parametrize("slowed", [1.0, 1.3, 4.0])
def test_nothing_wins_by_having_been_left_out(case, store, monkeypatch, slowed):
    """The devices become slower while one, which is behind, is left out."""
    turns = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        slow = slowed if len(turns) >= 3 else 1.0
        turns.append(job.label)
        alone_ms = {"a": 10.0, "b": 10.1, "c": 12.0}[job.label]
        return built.record("ok", samples_ms=[slow * alone_ms], run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)
    programs = [entrant(case, name) for name in "abc"]
    builder = Builder(program=case.program, mesh=case.mesh, store=store)
    a, b, c = race_programs(builder, programs, rounds=3)
    assert turns == ["a", "b", "c", "b", "a", "a", "b"]
    assert a.time_ms == pytest.approx(10.0 * slowed)
    assert b.time_ms == pytest.approx(10.1 * slowed)
    # As far behind as it was in its turn, whose sample is kept as it was taken.
    assert c.time_ms == pytest.approx(12.0 * slowed)
    assert c.record.samples_ms == (12.0,)
    assert c.record.drift == pytest.approx(slowed)
    again = race_programs(builder, programs, rounds=3)
    assert [one.time_ms for one in again] == [a.time_ms, b.time_ms, c.time_ms]


@pytest.fixture
def three(case, store, monkeypatch):
    """Races three programs, of which the last is far behind, and tells their turns."""
    turns = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        turns.append(job.label)
        samples_ms = [{"a": 10.0, "b": 10.1, "c": 12.0}[job.label]]
        return built.record("ok", samples_ms=samples_ms, run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)
    programs = [entrant(case, name) for name in "abc"]
    builder = Builder(program=case.program, mesh=case.mesh, store=store)

    def go(rounds: int) -> list[str]:
        turns.clear()
        race_programs(builder, programs, rounds=rounds)
        return list(turns)

    return go


def test_what_is_far_behind_is_left_out_of_turns(three):
    assert three(3) == ["a", "b", "c", "b", "a", "a", "b"]


def test_events_say_how_many_programs_have_a_turn(three, monkeypatch):
    told = []
    monkeypatch.setattr(MeasureOptions, "tell", lambda _, event: told.append(event))
    three(1)
    turns = [one.partition(", about ")[0] for one in told if one.startswith("timing ")]
    assert turns == [
        f"timing {name}, {place} of 3, turn 1 of 1"
        for place, name in enumerate("abc", start=1)
    ]


def test_a_program_that_fails_runs_once(case, store, monkeypatch):
    turns = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        turns.append(job.label)
        if job.label == "b":
            return built.record("out_of_memory", reason="boom")
        return built.record("ok", samples_ms=[10.0] * 2, run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)
    where = {"program": case.program, "mesh": case.mesh, "store": store}
    both = [entrant(case, name) for name in "ab"]
    race_programs(Builder(**where), both, rounds=3)
    assert turns == ["a", "b"]
    turns.clear()
    alone = [RaceProgram(candidate=both[1].candidate, job=case.job("b"))]
    retried = MeasureOptions(retry_failures=True)
    race_programs(Builder(**where, options=retried), alone, rounds=3)
    assert turns == ["b"]


def test_a_short_race_is_no_answer_to_a_longer_one(three):
    """As where nothing follows the first turn any more, since time is over."""
    for rounds, count in ((1, 3), (1, 0), (3, 7), (3, 0), (1, 0)):
        assert len(three(rounds)) == count


# ---------------------------------------------------------------- without a race


@pytest.fixture
def compiled(case, store, monkeypatch):
    """Finds the first that fits of one that needs 200 bytes and one that needs 100.

    Says what was compiled, what was refused and what the other needs.
    """
    built = []

    def fake(program, mesh, job, environment) -> Built:
        found = [(mark.key, mark.doing) for mark in alone(store)]
        assert found == [(job.key.digest, "build")]
        built.append(job.label)
        return Built(key=job.key, compiled=None, temp_bytes=NEEDS[job.label])

    def never(*args, **options):
        raise AssertionError("nothing runs")

    monkeypatch.setattr(building, "build", fake)
    monkeypatch.setattr(room, "run", never)

    def go(budget_bytes: int, **options):
        built.clear()
        refused, peak = [], None
        for name in NEEDS:
            builder = Builder(
                program=case.program,
                mesh=case.mesh,
                store=store,
                budget_bytes=budget_bytes,
                options=MeasureOptions(**options),
            )
            program = entrant(case, name)
            [found] = compile_programs(builder, [program])
            if found.may_race:
                peak = found.peak_bytes
                break
            refused.append(found)
        return list(built), [(r.name, r.fits, r.record.status) for r in refused], peak

    return go


@pytest.fixture
def begun(case, store, monkeypatch):
    """Compiles programs by name where time is over; names what is begun."""
    labels, build, built = [], building.build, {}
    monkeypatch.setattr(building, "default_threads", lambda platform: 4)

    def watched(program, mesh, job, environment):
        labels.append(job.label)
        return build(program, mesh, job, environment)

    monkeypatch.setattr(building, "build", watched)

    def go(names: str, **how) -> str:
        labels.clear()
        where = {"program": case.program, "mesh": case.mesh, "store": store}
        builder = Builder(**where, built=built, end=0.0, **how)
        programs = [entrant(case, name) for name in names]
        results = compile_programs(builder, programs)
        assert [one.name for one in results] == [*names]
        skipped = [one for one in results if isinstance(one.outcome, Skipped)]
        assert len(skipped) + len(labels) + len({*names} & known) == len(names)
        known.update(labels)
        return "".join(labels)

    known = set()
    return go


def test_when_time_is_over_one_program_is_begun_on_all_threads(begun):
    assert len(begun("abcd")) == 1


def test_when_time_is_over_nothing_is_begun_beside_what_is_built(begun):
    [first] = begun("ab")
    others = [name for name in "abcd" if name != first]
    assert begun(first) == begun("".join([*others, first])) == ""
    # What is built is too large for another budget: then one more is begun, alone.
    assert len(begun("cd", budget_bytes=1)) == 1


NEEDS = {"large": 200, "small": 100}
TOO_LARGE = ("large", False, "out_of_memory")


def test_the_first_that_fits_is_found_by_compiling(compiled):
    assert compiled(200) == (["large"], [], 200)
    assert compiled(199) == (["large", "small"], [TOO_LARGE], 100)
    # What was refused is remembered until the budget is larger.
    assert compiled(100) == (["small"], [TOO_LARGE], 100)
    both = [TOO_LARGE, ("small", False, "out_of_memory")]
    assert compiled(99) == (["small"], both, None)
    assert compiled(99) == ([], both, None)
    assert compiled(200) == (["large"], [], 200)


def test_what_was_raced_need_not_be_compiled(compiled, case, store):
    key = case.job("large").key
    raced = ProfileRecord(
        key=key.digest, parts=key.parts, status="ok", samples_ms=(1.0,), temp_bytes=50
    )
    store.put(raced)
    assert compiled(50) == ([], [], 50)
    assert compiled(49)[1][0] == ("large", False, "ok")


def test_what_failed_does_not_fit_in_nothing(compiled, case, store):
    key = case.job("large").key
    store.put(ProfileRecord(key=key.digest, parts=key.parts, status="crashed"))
    assert compiled(200) == (["small"], [("large", True, "crashed")], 100)
    assert compiled(200, retry_failures=True) == (["large"], [], 200)


def test_nothing_is_marked_after_a_race(timed, store):
    timed("ab")
    assert at_work(store) == {}


def test_what_is_compiled_already_is_not_compiled_again(timed, case, monkeypatch):
    programs: dict[str, Built] = {}
    timed("ab", built=programs)
    assert set(programs) == {entrant(case, name).identity for name in "ab"}

    def only_c(program, mesh, job, environment) -> Built:
        assert job.label == "c"
        return Built(key=job.key, compiled=None)

    monkeypatch.setattr(building, "build", only_c)
    turns, found = timed("abc", built=programs)
    assert turns == ["a", "b", "c"]
    assert found["a"].key == case.job("a").key.digest


def test_threads_see_the_64_bit_setting_of_the_caller(timed, monkeypatch):
    seen, build = [], building.build

    def noted(*job):
        seen.append(bool(jax.config.jax_enable_x64))  # pyright: ignore
        return build(*job)

    monkeypatch.setattr(building, "build", noted)
    timed("a")
    with jax.enable_x64(True):
        timed("bc")
    assert seen == [False, True, True]


@pytest.mark.parametrize("step_ms", [122.5, 125.0, 145.0, 150.0])
def test_on_gpus_every_program_executes_as_often_in_a_turn(step_ms):
    """Clocks drop as devices work: what ran longer before its sample looks slower."""

    def executions(timing):
        now, runs = [0.0], []

        def run(times):
            runs.append(times)
            now[0] += times * step_ms / 1e3

        found = measure(run, timing, clock=lambda: now[0])
        assert len(found.samples_ms) == 1
        return runs

    look = replace(room._timing("gpu", None), min_sample_ms=60.0, min_repeat=3)
    assert executions(look) == [1, 1, 3]
    assert executions(room._timing("gpu", 100.0)) == [1, 1, 5]
    assert executions(room._timing("gpu", 600.0)) == [1, 1, 1]


def test_what_makes_inputs_is_compiled_before_anything_is_timed(
    case, store, monkeypatch
):
    told = []

    def ran(built, job, *_, timing):
        told.append(f"ran {job.label}")
        return built.record("ok", samples_ms=(1.0,))

    def made(program, mesh, job):
        told.append(f"made {job.label}")

    monkeypatch.setattr(room, "run", ran)
    monkeypatch.setattr(room, "compile_generators", made)
    builder = Builder(program=case.program, mesh=case.mesh, store=store)
    race_programs(builder, [entrant(case, name) for name in "ab"], rounds=1)
    assert sorted(told[:2]) == ["made a", "made b"]
    assert sorted(told[2:]) == ["ran a", "ran b"]


def test_lost_devices_end_a_race(case, store, monkeypatch):
    """A crashed program is known; of the others nothing was said."""
    ran = []

    def crash(built, job, *_, timing):
        ran.append(job.label)
        return built.record("crashed", reason="INTERNAL: illegal address")

    def gone(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: the context is gone")

    monkeypatch.setattr(room, "run", crash)
    monkeypatch.setattr(runner, "make_inputs", gone)
    programs = [entrant(case, name) for name in "abc"]
    builder = Builder(program=case.program, mesh=case.mesh, store=store)
    with pytest.raises(DeviceError, match="illegal address"):
        race_programs(builder, programs, rounds=1)
    assert ran == ["a"]
    kept = [(record.key, record.status) for record in store.records()]
    assert kept == [(case.job("a").key.digest, "crashed")]


@pytest.mark.parametrize(
    ("times", "turns"),
    [
        # Warm first, then a look. All alike: two turns, however many there could be.
        ({"a": [10.0], "b": [10.05], "c": [10.09]}, "a" + "abc" + "abcabc"),
        # The others are slower in each turn: two, too; but one for what is 2 % slower.
        ({"a": [10.0], "b": [10.15], "c": [10.3]}, "a" + "abc" + "abcab"),
        # One is slower in one turn and faster in the next: it goes on.
        (
            {
                "a": [11.0, 11.0, 12.0, 10.0, 10.0],
                "b": [11.0, 12.24, 9.99, 9.99],
                "c": [13.0],
            },
            "a" + "abc" + "ababab",
        ),
        # A look counts for nothing beside turns: by it b would be slower in each.
        (
            {"a": [10.0, 9.0, 10.0], "b": [9.2, 9.9, 9.9], "c": [12.0]},
            "a" + "abc" + "abab",
        ),
        # What a look finds 4 % behind is left out, and later what is 2 % behind.
        ({"a": [10.0], "b": [10.5], "c": [10.3]}, "a" + "abc" + "aca"),
        ({"a": [10.0], "b": [10.5], "c": [10.6]}, "a" + "abc" + "aa"),
        # It is the fastest, and wins, whichever was warm.
        ({"a": [10.5], "b": [10.0], "c": [10.6]}, "a" + "abc" + "bb"),
    ],
)
def test_a_race_on_gpus_ends_when_it_has_told(case, store, monkeypatch, times, turns):
    """The same race has its answer then, though it ended before its last turn."""
    ran = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        if not ran:
            assert timing.warmup_seconds == 3.0
        mine = times[job.label]
        sample_ms = mine[ran.count(job.label) % len(mine)]
        ran.append(job.label)
        return built.record("ok", samples_ms=[sample_ms], run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)
    monkeypatch.setattr(room, "defaults_of", lambda _: defaults_of("gpu"))
    programs = [entrant(case, name) for name in "abc"]
    builder = Builder(program=case.program, mesh=case.mesh, store=store)
    results = race_programs(builder, programs, rounds=4)
    assert len(ran) == len(turns)
    assert Counter(ran) == Counter(turns)
    for one in results:  # The look is none of the samples, if there were turns.
        looks = 1 + (one.name == "a")
        assert len(one.samples_ms) == max(1, turns.count(one.name) - looks)
    again = race_programs(builder, programs, rounds=4)
    assert len(ran) == len(turns)
    assert [one.record for one in again] == [one.record for one in results]


def test_what_had_a_look_just_now_needs_none(case, store, monkeypatch):
    """A look is kept under the key of this race where nothing follows it."""
    ran = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        ran.append(job.label)
        sample_ms = {"a": 10.0, "b": 10.8, "c": 10.1}[job.label]
        return built.record("ok", samples_ms=[sample_ms], run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)
    monkeypatch.setattr(room, "defaults_of", lambda _: defaults_of("gpu"))
    a, b, c = (entrant(case, name) for name in "abc")
    looks = {
        one.identity: ProfileRecord(
            key="of another race", parts=(), status="ok", samples_ms=(sample_ms,)
        )
        for one, sample_ms in ((a, 10.0), (b, 10.8))
    }
    builder = Builder(program=case.program, mesh=case.mesh, store=store)
    results = race_programs(builder, [a, b, c], rounds=4, looks=looks)
    assert ran == ["a", "c", "a", "c", "c", "a"], "the first warms up the devices"
    assert [one.samples_ms for one in results] == [(10.0,) * 2, (10.8,), (10.1,) * 2]
    assert store.get(b.job.key.digest) == results[1].record


def test_a_program_that_races_alone_on_cpus_has_one_turn(case, store, monkeypatch):
    ran = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        ran.append(job.label)
        sample_ms = {"a": 10.0, "b": 20.0}[job.label]
        return built.record("ok", samples_ms=[sample_ms] * 3, run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)
    builder = Builder(program=case.program, mesh=case.mesh, store=store)
    race_programs(builder, [entrant(case, "a")], rounds=3)
    assert ran == ["a"]
    race_programs(builder, [entrant(case, name) for name in "ab"], rounds=3)
    assert ran == ["a", "a", "b", "a"], "b is far behind, and a is alone"


def test_where_time_is_over_after_a_turn_no_look_wins(case, store, monkeypatch):
    """The devices are slower in turns; what was left out before has a look alone."""
    ran = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        ran.append(job.label)
        slow = 1.1 if len(ran) > 3 else 1.0  # Warm, and two looks.
        sample_ms = slow * {"a": 10.0, "b": 10.5}[job.label]
        return built.record("ok", samples_ms=[sample_ms], run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)
    monkeypatch.setattr(room, "defaults_of", lambda _: defaults_of("gpu"))
    clock = SimpleNamespace(monotonic=lambda: float(len(ran)))
    monkeypatch.setattr(room, "time", clock)
    monkeypatch.setattr(building, "time", clock)
    programs = [entrant(case, name) for name in "ab"]
    builder = Builder(program=case.program, mesh=case.mesh, store=store, end=3.5)
    a, b = race_programs(builder, programs, rounds=4)
    assert ran == ["a", "b", "a", "a"]
    assert a.time_ms == pytest.approx(11.0) and b.time_ms == pytest.approx(11.55)
