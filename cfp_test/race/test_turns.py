"""The race, and what failed before."""

from collections import Counter
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import jax
import pytest

from cfp.analysis.layout import Choice
from cfp.context import DetailedSettings, PlanContext
from cfp.errors import CfpError
from cfp.profiling import runner
from cfp.profiling.builder import Built
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import measure
from cfp.profiling.tasks import MeasureOptions
from cfp.race import compile as building
from cfp.race import turns as room
from cfp.race.compile import Builder, compile_programs
from cfp.race.programs import RaceProgram
from cfp.race.turns import race_programs
from cfp.search.guided import Candidate
from cfp.settings import defaults_of
from cfp_test.support.at_work import alone, at_work

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")


def entrant(case, name):
    return RaceProgram(candidate=Candidate(name, Choice((), ())), job=case.job(name))


def builder(case, store, budget_bytes=None, end=inf, built=None, **options):
    """A builder that knows a budget, a deadline and options of measuring."""
    context = PlanContext(
        mesh=case.mesh,
        store=store,
        settings=DetailedSettings(),
        defaults=defaults_of("cpu"),
        environment=(),
        measure=MeasureOptions(**options),
        memory=None,
        device_bytes=budget_bytes,
        end=end,
    )
    return Builder(context, case.program, {} if built is None else built)


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

    def go(names: str, **how) -> tuple[list[str], dict[str, ProfileRecord]]:
        turns.clear()
        programs = [entrant(case, name) for name in names]
        results = race_programs(builder(case, store, **how), programs, rounds=1)
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
    assert timed("abc")[0] == ["a", "b", "c"]
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


def test_an_answer_stays_whatever_races_with_it_meanwhile(dated):
    dated("ab")
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


def test_a_budget_leaves_good_records_alone(timed, case, store):
    _, before = timed("a")
    needed = before["a"].peak_bytes
    turns, found = timed("ab", budget_bytes=needed - 1)
    assert turns == []
    assert found["a"] == before["a"]
    assert found["b"].status == "out_of_memory"
    # Only a race in the same budget is its answer.
    assert timed("a", budget_bytes=needed)[0] == ["a"]
    assert timed("a") == ([], before)


def test_what_ran_out_of_memory_is_not_tried_again(timed, case, store):
    _, found = timed("a")
    ran_out = replace(found["a"], status="out_of_memory", samples_ms=())
    store.put(ran_out, replace=True)
    assert timed("a") == ([], {"a": ran_out})


@pytest.fixture
def raced(case, store, monkeypatch):
    """Races programs whose turns take what a test says, and names their turns."""

    def go(names, rounds, time_ms, programs=None, looks=None, **how):
        def turn(built, job, program, mesh, *, timing) -> ProfileRecord:
            go.turns.append(job.label)
            found = time_ms(job.label)
            if isinstance(found, str):
                return built.record(found, reason="boom")
            return built.record("ok", samples_ms=[found], run_seconds=0.1)

        monkeypatch.setattr(room, "run", turn)
        programs = programs or [entrant(case, name) for name in names]
        more = {} if looks is None else {"looks": looks}
        return race_programs(builder(case, store, **how), programs, rounds, **more)

    go.turns = []
    return go


@pytest.mark.parametrize("slowed", [1.0, 1.3, 4.0])
def test_nothing_wins_by_having_been_left_out(raced, slowed):
    """The devices become slower while one, which is behind, is left out."""
    alone_ms = {"a": 10.0, "b": 10.1, "c": 12.0}

    def time_ms(name):
        return alone_ms[name] * (slowed if len(raced.turns) > 3 else 1.0)

    a, b, c = raced("abc", 3, time_ms)
    assert raced.turns == ["a", "b", "c", "b", "a", "a", "b"]
    assert a.time_ms == pytest.approx(10.0 * slowed)
    assert b.time_ms == pytest.approx(10.1 * slowed)
    # As far behind as it was in its turn, whose sample is kept as it was taken.
    assert c.time_ms == pytest.approx(12.0 * slowed)
    assert c.record.samples_ms == (12.0,)
    assert c.record.drift == pytest.approx(slowed)
    again = raced("abc", 3, time_ms)
    assert [one.time_ms for one in again] == [a.time_ms, b.time_ms, c.time_ms]


def test_a_program_that_fails_runs_once(raced):
    times = {"a": 10.0, "b": "out_of_memory"}
    raced("ab", 3, times.get)
    assert raced.turns == ["a", "b"]
    raced("b", 3, times.get, retry_failures=True)
    assert raced.turns == ["a", "b", "b"]


def test_a_short_race_is_no_answer_to_a_longer_one(raced):
    """As where nothing follows the first turn any more, since time is over."""
    times = {"a": 10.0, "b": 10.1, "c": 12.0}
    for rounds, count in ((1, 3), (1, 0), (3, 7), (3, 0), (1, 0)):
        raced.turns.clear()
        raced("abc", rounds, times.get)
        assert len(raced.turns) == count


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
            where = builder(case, store, budget_bytes, **options)
            [found] = compile_programs(where, [entrant(case, name)])
            if found.may_race:
                peak = found.peak_bytes
                break
            refused.append(found)
        return list(built), [(r.name, r.fits, r.record.status) for r in refused], peak

    return go


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


def test_lost_devices_end_a_race(raced, case, store, monkeypatch):
    """A crashed program is known; of the others nothing was said."""

    def gone(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: the context is gone")

    monkeypatch.setattr(runner, "make_inputs", gone)
    with pytest.raises(CfpError, match="boom"):
        raced("abc", 1, lambda _: "crashed")
    assert raced.turns == ["a"]
    kept = [(record.key, record.status) for record in store.records()]
    assert kept == [(case.job("a").key.digest, "crashed")]


@pytest.fixture
def on_gpus(monkeypatch):
    """Races as on GPUs."""
    monkeypatch.setattr(room, "defaults_of", lambda _: defaults_of("gpu"))


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
def test_a_race_on_gpus_ends_when_it_has_told(raced, on_gpus, times, turns):
    """The same race has its answer then, though it ended before its last turn."""
    counts = Counter()

    def time_ms(name):
        counts[name] += 1
        return times[name][(counts[name] - 1) % len(times[name])]

    results = raced("abc", 4, time_ms)
    assert Counter(raced.turns) == Counter(turns)
    for one in results:  # The look is none of the samples, if there were turns.
        looks = 1 + (one.name == "a")
        assert len(one.samples_ms) == max(1, turns.count(one.name) - looks)
    again = raced("abc", 4, time_ms)
    assert len(raced.turns) == len(turns)
    assert [one.record for one in again] == [one.record for one in results]


def test_what_had_a_look_just_now_needs_none(raced, on_gpus, case, store):
    """A look is kept under the key of this race where nothing follows it."""
    a, b, c = (entrant(case, name) for name in "abc")
    looks = {
        one.identity: ProfileRecord(
            key="of another race", parts=(), status="ok", samples_ms=(sample_ms,)
        )
        for one, sample_ms in ((a, 10.0), (b, 10.8))
    }
    times = {"a": 10.0, "b": 10.8, "c": 10.1}
    results = raced("", 4, times.get, programs=[a, b, c], looks=looks)
    assert raced.turns == ["a", "c", "a", "c", "c", "a"], "the first warms devices up"
    assert [one.samples_ms for one in results] == [(10.0,) * 2, (10.8,), (10.1,) * 2]
    assert store.get(b.job.key.digest) == results[1].record


def test_a_program_that_races_alone_on_cpus_has_one_turn(raced):
    times = {"a": 10.0, "b": 20.0}
    raced("a", 3, times.get)
    assert raced.turns == ["a"]
    raced("ab", 3, times.get)
    assert raced.turns == ["a", "a", "b", "a"], "b is far behind, and a is alone"


def test_where_time_is_over_after_a_turn_no_look_wins(raced, on_gpus, monkeypatch):
    """The devices are slower in turns; what was left out before has a look alone."""

    def time_ms(name):
        slow = 1.1 if len(raced.turns) > 3 else 1.0  # Warm, and two looks.
        return slow * {"a": 10.0, "b": 10.5}[name]

    clock = SimpleNamespace(monotonic=lambda: float(len(raced.turns)))
    monkeypatch.setattr("cfp.context.time", clock)
    a, b = raced("ab", 4, time_ms, end=3.5)
    assert raced.turns == ["a", "b", "a", "a"]
    assert a.time_ms == pytest.approx(11.0) and b.time_ms == pytest.approx(11.55)
