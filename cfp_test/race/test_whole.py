"""Who wins abridged, and whole."""

from dataclasses import replace

import pytest

from cfp.profiling.record import ProfileRecord
from cfp.race.programs import RaceResult
from cfp.race.truncated import Ratios
from cfp.race.whole import UNTRIED, first_whole
from cfp.settings import ConstraintLevel
from cfp.solution import Candidate


def result(entry, time_ms=None, peak_bytes=10):
    """How somebody did; nobody runs in no time."""
    record = ProfileRecord(
        key=entry.name,
        parts=(),
        status="ok" if time_ms else "out_of_memory",
        reason="" if time_ms else "needs much",
        samples_ms=(time_ms,) if time_ms else (),
        temp_bytes=peak_bytes,
    )
    return RaceResult(
        name=entry.name,
        predicted_ms=1.0,
        record=record,
        peak_bytes=peak_bytes,
        fits=True,
        cached=False,
        ratios=Ratios(time=2.0),
    )


@pytest.fixture
def entries():
    """Four choices, the first of which has variants; the best first."""
    one, *others = (Candidate(name, name) for name in "abcd")
    plain = replace(one, name="a, plain", options={"plain": "1"})
    told = replace(one, name="a, arguments told", level=ConstraintLevel.ARGUMENTS)
    return [one, plain, told, *others]


def raced(entries, fails, large=()):
    ranked = [
        (entry, result(entry, 1.0 + place, 99 if entry.name in large else 10))
        for place, entry in enumerate(entries)
    ]
    tried = []

    def run(entry):
        tried.append(entry.name)
        return result(entry, None if entry.name in fails else 30.0)

    found, refused = first_whole(ranked, 50, run)
    rows = [refused.row(*entrant) for entrant in ranked]
    return found and found[0].name, tried, {row.name: row for row in rows}


def test_the_first_that_runs_whole_wins(entries):
    winner, tried, rows = raced(entries, fails=())
    assert (winner, tried) == ("a", ["a"])
    assert [row.time_ms for row in rows.values()] == [2, 4, 6, 8, 10, 12]
    assert not any(row.note for row in rows.values())


def test_variants_of_what_does_not_run_are_not_tried(entries):
    winner, tried, rows = raced(entries, fails={"a", "a, arguments told"})
    assert (winner, tried) == ("b", ["a", "a, arguments told", "b"])
    assert rows["a"].note == "out_of_memory: needs much" and not rows["a"].time_ms
    assert rows["a, plain"].note == UNTRIED and not rows["a, plain"].time_ms
    assert rows["b"].time_ms == 8 and not rows["b"].note


def test_after_three_none_is_tried(entries):
    plain = [entry for entry in entries if len(entry.name) == 1]
    winner, tried, _ = raced(plain, fails=set("abcd"))
    assert (winner, tried) == (None, ["a", "b", "c"])


def test_who_would_be_too_large_is_not_tried(entries):
    winner, tried, rows = raced(entries, fails=(), large={"a", "b"})
    assert (winner, tried) == ("a, arguments told", ["a, arguments told"])
    assert rows["a"].note == "over the memory budget"
    assert rows["b"].note == "", "slower than the winner anyway"


def test_who_did_not_run_abridged_is_not_tried(entries):
    ranked = [(entry, result(entry)) for entry in entries]
    found, refused = first_whole(ranked, 50, lambda entry: pytest.fail(entry.name))
    assert found is None and not refused.found
