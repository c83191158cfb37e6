"""Kernels are tuned before programs are built, where there is something to tune."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from cfp.profiling import jobs
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.jobs import Measurer, first_of_kernels, tune_kernels
from cfp.profiling.record import ProfileRecord
from cfp.profiling.tasks import MeasureOptions
from cfp.program.part import cut_part
from cfp_test.support.waiting import GUARD_SECONDS


@pytest.fixture
def tunable(monkeypatch):
    """Has the virtual devices pass for some whose compiler keeps what it tuned."""
    monkeypatch.setattr(
        BuildEnvironment,
        "options",
        lambda self, platform: {"xla_llvm_disable_expensive_passes": "False"},
    )
    built = []
    monkeypatch.setattr(jobs, "build", lambda *job: built.append(job[2].label))
    return built


def test_nothing_is_built_where_nothing_is_tuned(case, store):
    assert tune_kernels(case.program, case.mesh, [case.job()], store) == {}


def test_each_is_built_once(case, store, tunable):
    several = [case.job(name) for name in ("a", "b", "c")]
    said = []
    tune_kernels(
        case.program, case.mesh, several, store, MeasureOptions(progress=said.append)
    )
    assert sorted(tunable) == ["a", "b", "c"]
    assert said[1] == "tuning kernels for b, 2 of 3"


def test_as_many_as_there_are_devices_are_built_at_once(
    case, store, tunable, monkeypatch
):
    seen, lock = [], threading.Lock()
    together = threading.Barrier(case.mesh.devices.size)

    def build(program, mesh, job, environment):
        together.wait(timeout=GUARD_SECONDS)
        with lock:
            seen.append(
                (mesh.devices.flat[0].id, bool(jax.config.jax_enable_x64))  # pyright: ignore
            )
        assert {d.id for d in mesh.devices.flat} == devices
        assert mesh.shape == case.mesh.shape

    monkeypatch.setattr(jobs, "build", build)
    monkeypatch.setattr(jobs, "default_threads", lambda platform: 99)
    devices = {device.id for device in case.mesh.devices.flat}
    assert len(devices) > 1
    several = [case.job(str(number)) for number in range(2 * len(devices))]
    with jax.enable_x64(True):
        tune_kernels(case.program, case.mesh, several, store)
    assert sorted(device for device, _ in seen) == sorted(2 * [*devices])
    assert all(x64 for _, x64 in seen), "threads have the settings of their caller"


def test_the_first_of_those_that_share_kernels_is_tuned_for_each_round(
    case, store, tunable, monkeypatch
):
    """Whatever is measured, not presets alone; what is known, or shared, is not."""
    rounds = []

    def run_jobs(*_, **__):
        rounds.append(sorted(tunable))
        tunable.clear()
        return {}

    monkeypatch.setattr(jobs, "run_jobs", run_jobs)
    look = Measurer(case.program, case.mesh, store, True, MeasureOptions())
    look([case.job("a", kernels=1), case.job("pair"), case.job("b", kernels=1)])
    key = case.job("c").key
    failed = {"status": "compile_error", "reason": "no"}
    store.put(ProfileRecord(key=key.digest, parts=key.parts, **failed))
    look([case.job("a", kernels=1), case.job("c", kernels=2), case.job("d", kernels=3)])
    look([case.job("e", kernels=3), case.job("f", kernels=2)])
    assert rounds == [["a"], ["d"], ["f"]]


def test_the_largest_is_tuned_first_and_what_has_no_kernel_in_place_last(case):
    jobs = [case.job(name, kernels=name) for name in "abc"]
    small = cut_part(case.program, case.part.ops[:1])
    jobs[0] = SimpleNamespace(kernels="a", part=small, constraints=jobs[0].constraints)
    placed = replace(jobs[2].constraints, replaced=("a kernel",))
    jobs[2] = replace(jobs[2], constraints=placed)
    found = first_of_kernels(jobs)
    assert [job.kernels for job in found] == ["c", "b", "a"]


def test_nothing_is_tuned_when_time_is_over(case, store, tunable):
    several = [case.job(name) for name in "ab"]
    tune_kernels(case.program, case.mesh, several, store, is_late=lambda: True)
    assert tunable == []
