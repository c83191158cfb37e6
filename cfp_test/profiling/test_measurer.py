"""Answers of the store, and measurements of the rest."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cfp.profiling import measurer
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.measurer import Measurer
from cfp.profiling.options import MeasureOptions
from cfp.profiling.outlook import Outlook, Stage
from cfp.profiling.record import ProfileRecord


@pytest.fixture
def look(case, store, monkeypatch):
    """Makes what looks jobs up, and a list of what was measured."""
    measured = []

    def profile(program, mesh, jobs, store, *, options, **_):
        retry_failures = options.retry_failures
        records = store.common({job.key.digest for job in jobs})
        for job in jobs:
            digest = job.key.digest
            if digest not in records or (retry_failures and not records[digest].ok):
                measured.append(job.label)
                records[digest] = record_of(job, "ok")
        return SimpleNamespace(records=records)

    monkeypatch.setattr("cfp.profiling.measurer.profile", profile)

    def make(measure=True, **options):
        where = (case.program, case.mesh, store)
        return Measurer(*where, measure, MeasureOptions(**options))

    return make, measured


def record_of(job, status):
    samples = (1.0,) if status == "ok" else ()
    key = job.key
    return ProfileRecord(
        key=key.digest, parts=key.parts, status=status, samples_ms=samples
    )


@pytest.mark.parametrize("retry", [False, True])
def test_a_failure_that_is_tried_again_is_not_known(case, store, look, retry):
    make, measured = look
    failed, known, new = jobs = [case.job(name) for name in "abc"]
    store.put(record_of(failed, "crashed"))
    store.put(record_of(known, "ok"))
    measurer = make(retry_failures=retry)
    found = measurer(jobs)
    assert found[failed.key.digest].ok == retry
    assert measured == (["a", "c"] if retry else ["c"])
    answered = {known.key.digest} if retry else {known.key.digest, failed.key.digest}
    assert measurer.known == answered
    store.put(found[new.key.digest])
    measurer(jobs)
    assert measurer.known == answered, "what was measured just now was not known"


def test_where_nothing_is_measured_failures_are_known(case, store, look):
    make, measured = look
    store.put(record_of(case.job("a"), "crashed"))
    measurer = make(measure=False, retry_failures=True)
    assert measurer([case.job("a"), case.job("b")]).keys() == measurer.known
    assert len(measurer.known) == 1 and measured == []


@pytest.mark.parametrize("tunes", [False, True])
def test_there_is_time_for_what_usually_takes_no_longer(
    case, store, monkeypatch, tunes
):
    """Measured jobs take none, and kernels are tuned once, where they are at all."""
    options = {"tries": "kernels"} if tunes else {}
    monkeypatch.setattr(BuildEnvironment, "options", lambda *_: options)
    monkeypatch.setattr(measurer, "time", SimpleNamespace(monotonic=lambda: 100.0))
    jobs = [replace(case.job(name), kernels=name in "ab") for name in "abc"]
    outlook = Outlook()
    kernels = 2 if tunes else 0
    counts = {Stage.TUNING: kernels, Stage.BUILDS: 3, Stage.RUNS: 3}
    seconds = outlook.expected_seconds(counts)
    assert seconds == pytest.approx(1.2 * kernels + 3 * (0.25 + 0.2))

    def made(end):
        how = MeasureOptions(outlook=outlook)
        return Measurer(case.program, case.mesh, store, True, how, end)

    def has_time(end):
        return made(end).has_time_for([*jobs, jobs[0]])

    assert has_time(100.01 + seconds) and not has_time(99.99 + seconds)
    assert has_time(math.inf)
    # Kernels that an earlier plan tuned are.
    if tunes:
        learnt = BuildEnvironment.beside(store.build_path).learnt_dir
        learnt.mkdir(parents=True)
        (learnt / jobs[0].key.digest).touch()
        assert has_time(98.81 + seconds) and not has_time(98.79 + seconds)
    for job in jobs:
        store.put(record_of(job, "ok"))
    assert has_time(100.0) and not has_time(99.9)
    assert made(0.0).look_up(jobs).keys() == {job.key.digest for job in jobs}
