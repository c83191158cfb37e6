"""Kernels are tuned one program at a time, where there is something to tune."""

import pytest

from cfp.profiling import tuning
from cfp.profiling.builder import BuildEnvironment, build_failure
from cfp.profiling.tuning import tune_kernels


@pytest.fixture
def tunable(monkeypatch):
    """Has the virtual devices pass for some whose compiler keeps what it tuned."""
    monkeypatch.setattr(
        BuildEnvironment, "options", lambda self, platform: {"kept": platform}
    )
    built = []
    monkeypatch.setattr(tuning, "build", lambda *job: built.append(job[2].label))
    return built


def test_nothing_is_built_where_nothing_is_tuned(case, store):
    assert tune_kernels(case.program, case.mesh, [case.job()], store) == 0


def test_each_is_built_once_in_order(case, store, tunable):
    jobs = [case.job(name) for name in ("a", "b", "c")]
    said = []
    count = tune_kernels(case.program, case.mesh, jobs, store, progress=said.append)
    assert count == 3
    assert tunable == ["a", "b", "c"]
    assert said[1] == "tuning kernels for b, 2 of 3"


def test_what_was_learnt_is_not_built_again(case, store, tunable):
    tune_kernels(case.program, case.mesh, [case.job("a")], store)
    jobs = [case.job("a"), case.job("b")]
    assert tune_kernels(case.program, case.mesh, jobs, store) == 1
    assert tune_kernels(case.program, case.mesh, jobs, store) == 0
    assert tunable == ["a", "b"]


def test_what_a_process_died_of_is_left_out(case, store, tunable):
    jobs = [case.job(name) for name in ("a", "b")]
    store.put(build_failure(jobs[0].key, RuntimeError("died"), build_seconds=1.0))
    tune_kernels(case.program, case.mesh, jobs, store)
    assert tunable == ["b"]
    tune_kernels(case.program, case.mesh, jobs, store, retry_failures=True)
    assert tunable == ["b", "a"]
