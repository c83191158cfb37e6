"""Kernels are tuned once, by the first of the programs that contain them."""

import threading

import jax
import pytest

from cfp.profiling import jobs, runner
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import place_of_parts
from cfp.profiling.tasks import InFlight
from cfp_test.support.waiting import GUARD_SECONDS


def failed(job):
    parts = job.key.parts
    return ProfileRecord(
        key=job.key.digest, parts=parts, status="compile_error", reason="no"
    )


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
        return failed(job)

    monkeypatch.setattr(runner, "build", build)
    return built


def build_all(several, store, build, threads=4, tell=lambda *_: None, **how):
    with InFlight(store) as in_flight:
        how |= {"threads": threads, "tell": tell}
        return jobs.build_all(several, build, in_flight, **how)


def some(case, *names, kernels=None):
    return [case.job(name, kernels=frozenset(kernels or name)) for name in names]


def test_builds_end_with_an_error_while_others_wait_for_kernels(case, store):
    """A job whose kernels will never be tuned does not wait for them."""
    raised = threading.Event()

    def wait(job):
        assert raised.wait(GUARD_SECONDS)
        return failed(job)

    def tell(*_):
        raised.set()
        raise ZeroDivisionError

    several = some(case, "a", "b", "c", "d")
    before = {*threading.enumerate()}
    with pytest.raises(ZeroDivisionError):
        build_all(several, store, wait, threads=2, tell=tell, tune=wait)
    for thread in {*threading.enumerate()} - before:
        thread.join(GUARD_SECONDS)
        assert not thread.is_alive()


def place_of(case):
    return place_of_parts(case.program, case.mesh, BuildEnvironment())


def test_nothing_is_tuned_where_the_compiler_tunes_nothing(case):
    assert place_of(case).tune is None


def test_each_device_tunes_and_all_is_built_for_the_mesh_as_it_is(case, store, tunable):
    ids = [device.id for device in case.mesh.devices.flat]
    assert len(ids) > 1
    several = some(case, *"abcdefgh"[: len(ids)])
    place, barrier = place_of(case), threading.Barrier(len(ids))

    def tune(job):
        barrier.wait(timeout=GUARD_SECONDS)
        assert jax.config.jax_enable_x64  # pyright: ignore
        assert place.tune is not None
        place.tune(job)

    with jax.enable_x64(True):
        found = build_all(several, store, place.build, tune=tune, tuners=place.tuners)
    assert {device for _, device in tunable} == {*ids} and len(found) == len(ids)
    # The one that tunes on the first device is not built again.
    assert len(tunable) == 2 * len(ids) - 1
    assert [device for _, device in tunable].count(ids[0]) == len(ids)


@pytest.mark.parametrize("threads", [2, 4])
def test_builds_wait_for_the_kernels_that_they_contain(case, store, threads):
    a, b = some(case, "a", "b")
    [both], [again] = some(case, "both", kernels="ab"), some(case, "again", kernels="a")
    alone = case.job("alone")
    events, lock, free = list[str](), threading.Lock(), threading.Event()

    def note(text):
        with lock:
            events.append(text)
            if {"a", "again", "alone"} <= {*events}:
                free.set()

    def tune(job):
        if job is b:
            assert free.wait(GUARD_SECONDS), "jobs that need no b were not built"
        note(f"tune {job.label}")

    def build(job):
        note(job.label)
        return failed(job)

    several = [a, b, both, again, alone]
    found = build_all(several, store, build, threads, tune=tune, tuners=2)
    labels = ["a", "again", "alone", "b", "both", "tune a", "tune b"]
    assert sorted(events) == labels and len(found) == 5
    assert events.index("both") > events.index("tune b")
    assert events.index("a") > events.index("tune a")


def test_a_kernel_that_another_job_has_tuned_is_not_tuned_again(case, store):
    tuned = list[str]()
    several = [case.job(name, kernels=frozenset(name)) for name in ("ab", "a", "bc")]
    build_all(several, store, failed, tune=lambda job: tuned.append(job.label))
    assert tuned == ["ab", "bc"]


def test_what_was_tuned_before_is_not_tuned_again(case, store):
    labels, tuned = list[str](), {"a"}
    several = [case.job(name, kernels=frozenset(name)) for name in ("a", "ab")]
    how = {"tune": lambda job: labels.append(job.label), "tuned": tuned}
    for _ in range(2):
        assert len(build_all(several, store, failed, **how)) == 2
    assert labels == ["ab"] and tuned == {"a", "b"}


def test_one_thread_tunes_nothing_ahead(case, store):
    """A build that may have killed a process has no other beside it."""

    def tune(job):
        raise AssertionError

    assert len(build_all(some(case, "a", "b"), store, failed, 1, tune=tune)) == 2
