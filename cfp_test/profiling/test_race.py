"""The race, and what failed before."""

from dataclasses import replace

import pytest

from cfp.profiling.builder import Built
from cfp.profiling.marks_folder import MarksFolder
from cfp.profiling.record import ProfileRecord
from cfp.search import race as room
from cfp.search.race import Finalist, race


@pytest.fixture
def timed(case, store, monkeypatch):
    """Races finalists by name, and tells whose turns there were."""
    turns = []

    def turn(built: Built, job, program, mesh, *, timing) -> ProfileRecord:
        [alive] = MarksFolder(store.path).living()
        [mark] = [mark for mark in alive.marks if mark.doing == "run"]
        assert (mark.key, mark.label) == (job.key, job.label)
        turns.append(job.label)
        return built.record("ok", samples_ms=[1.0], run_seconds=0.1)

    monkeypatch.setattr(room, "run", turn)

    def go(names: str, **options) -> tuple[list[str], dict[str, ProfileRecord]]:
        turns.clear()
        finalists = [Finalist(name=name, job=case.job(name)) for name in names]
        results = race(case.program, case.mesh, finalists, store, rounds=1, **options)
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


def test_a_larger_budget_is_a_new_chance(timed):
    turns, found = timed("a", budget_bytes=10)
    assert turns == []
    assert found["a"].status == "out_of_memory"
    needed = found["a"].peak_bytes
    assert timed("a", budget_bytes=needed - 1)[0] == []
    turns, found = timed("a", budget_bytes=needed)
    assert turns == ["a"]
    assert found["a"].ok


def test_who_ran_out_of_memory_has_had_its_chance(timed, case, store):
    _, found = timed("a")
    ran_out = replace(found["a"], status="out_of_memory", samples_ms=())
    store.put(ran_out, replace=True)
    assert timed("a") == ([], {"a": ran_out})


def test_nobody_is_marked_after_a_race(timed, store):
    timed("ab")
    left = [path.name for path in MarksFolder(store.path).path.iterdir()]
    assert left == ["lock"]
