"""Kernels are tuned once, by the first of the programs that contain them."""

import threading
from dataclasses import replace

import jax
import pytest

from cfp.profiling import jobs, runner
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.jobs import Measurer, first_of_kernels
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import place_of_parts
from cfp.profiling.tasks import InFlight, MeasureOptions
from cfp_test.support.waiting import GUARD_SECONDS


@pytest.fixture
def tunable(monkeypatch):
    """Has the virtual devices pass for some whose compiler keeps what it tuned.

    Returns (label, first device) of each build.
    """
    monkeypatch.setattr(
        BuildEnvironment,
        "options",
        lambda self, platform: {"xla_llvm_disable_expensive_passes": "False"},
    )
    monkeypatch.setattr(runner, "default_threads", lambda platform: 99)
    built, lock = [], threading.Lock()

    def build(program, mesh, job, environment):
        with lock:
            built.append((job.label, mesh.devices.flat[0].id))
        return ProfileRecord(
            key=job.key.digest, parts=job.key.parts, status="compile_error", reason="no"
        )

    monkeypatch.setattr(runner, "build", build)
    return built


def build_all(place, several, store, build=None, threads=4):
    """Builds jobs of a place as `run_jobs` does."""
    with InFlight(store) as in_flight:
        return jobs.build_all(
            several,
            build or place.build,
            in_flight,
            threads=threads,
            tell=lambda *_: None,
            tuning=place.tuning,
            tuners=place.tuners,
        )


def test_builds_end_with_an_error_while_others_wait_for_kernels(case, store):
    """A job whose kernels will never be tuned does not wait for them."""
    raised = threading.Event()

    def build(job):
        assert raised.wait(GUARD_SECONDS)
        return ProfileRecord(
            key=job.key.digest, parts=job.key.parts, status="compile_error", reason="no"
        )

    def tell(*_):
        raised.set()
        raise ZeroDivisionError

    several = [case.job(name, kernels=(name,)) for name in "abcd"]
    waiting = case.job("waits", kernels=("d",))
    tuning = [job.key.digest for job in several]
    before = {*threading.enumerate()}
    with pytest.raises(ZeroDivisionError), InFlight(store) as in_flight:
        jobs.build_all(
            [*several, waiting],
            build,
            in_flight,
            threads=2,
            tell=tell,
            tuning=tuning,
            tuners=1,
        )
    for thread in {*threading.enumerate()} - before:
        thread.join(GUARD_SECONDS)
        assert not thread.is_alive()


def place_of(case, first):
    return place_of_parts(case.program, case.mesh, BuildEnvironment(), first=first)


def test_nothing_is_tuned_where_the_compiler_tunes_nothing(case):
    assert place_of(case, [case.job(kernels=(1,))]).tuning == []


def test_what_tunes_for_another_order_is_built_again_for_its_own(case, store, tunable):
    """Each device is once the first; what others build for is the mesh as it is."""
    ids = [device.id for device in case.mesh.devices.flat]
    assert len(ids) > 1
    several = [case.job(str(number), kernels=(number,)) for number in range(len(ids))]
    place = place_of(case, several)
    barrier = threading.Barrier(len(ids))

    def build(job):
        barrier.wait(timeout=GUARD_SECONDS)
        assert jax.config.jax_enable_x64  # pyright: ignore
        return place.build(job)

    with jax.enable_x64(True):
        build_all(place, several, store, build, threads=2)
    assert {device for _, device in tunable} == {*ids}
    assert len(tunable) == 2 * len(ids) - 1
    last = {label: device for label, device in tunable}
    assert {*last.values()} == {ids[0]}


@pytest.mark.parametrize("threads", [1, 4])
def test_others_wait_for_the_kernels_that_they_contain(case, store, tunable, threads):
    a, b = (case.job(name, kernels=(name,)) for name in "ab")
    both = case.job("both", kernels=("a", "b"))
    again = case.job("again", kernels=("a",))
    alone = case.job("alone")
    place, ended, lock = place_of(case, [b, a]), [], threading.Lock()
    free = threading.Event()

    def build(job):
        if job is b and threads > 1:
            assert free.wait(GUARD_SECONDS), "what needs another kernel, or none, began"
        with lock:
            ended.append(job.label)
            if {"again", "alone"} <= {*ended}:
                free.set()
        return place.build(job)

    build_all(place, [a, both, again, alone, b], store, build, threads)
    assert ended.index("both") > max(ended.index("a"), ended.index("b"))
    assert ended.index("again") > ended.index("a")
    assert sorted(ended) == ["a", "again", "alone", "b", "both"]


def test_what_another_process_has_tuned_is_not_waited_for(case, store, tunable):
    """Only jobs that are built here begin first, and are waited for."""
    first = case.job("a", kernels=("a",))
    place = place_of(case, [first])
    found = build_all(place, [case.job("b", kernels=("a",))], store)
    assert [label for label, _ in tunable] == ["b"] and len(found) == 1


def test_the_first_of_those_that_share_kernels_is_tuned_for_each_round(
    case, store, tunable, monkeypatch
):
    """Whatever is measured, not presets alone; what is known, or shared, is not."""
    rounds = []

    def run_jobs(place, *_, **__):
        rounds.append([*place.tuning])
        return {}

    monkeypatch.setattr(jobs, "run_jobs", run_jobs)
    look = Measurer(case.program, case.mesh, store, True, MeasureOptions())

    def job(name, *kernels):
        return case.job(name, kernels=kernels)

    look([job("a", 1), case.job("pair"), job("b", 1), job("both", 1, 2)])
    key = case.job("c").key
    failed = {"status": "compile_error", "reason": "no"}
    store.put(ProfileRecord(key=key.digest, parts=key.parts, **failed))
    look([job("a", 1), job("c", 2), job("d", 3)])
    look([job("e", 3), job("f", 2)])
    digests = [[case.job(name).key.digest for name in some] for some in ("a", "d", "f")]
    assert rounds == digests


def test_what_has_a_kernel_in_place_is_tuned_first(case):
    several = [case.job(name, kernels=(name,)) for name in "abc"]
    placed = replace(several[2].constraints, replaced=("a kernel",))
    several[2] = replace(several[2], constraints=placed)
    found = first_of_kernels(several)
    assert [job.kernels for job in found] == [("c",), ("a",), ("b",)]
