import itertools
import math
from functools import partial
from types import SimpleNamespace

import jax
import pytest

from cfp.errors import CfpError
from cfp.profiling import runner
from cfp.profiling.builder import Built, build
from cfp.profiling.inputs import make_inputs
from cfp.profiling.runner import measure as timing_measure
from cfp.profiling.runner import run
from cfp_test.profiling.conftest import profile

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture
def built(case) -> Built:
    outcome = build(case.program, case.mesh, case.job())
    assert isinstance(outcome, Built)
    return outcome


def failing(message: str, times: int = 1):
    """A stand-in for `measure` that fails at first."""
    left = [times]

    def measure(loop, timing, **options):
        loop(1)
        if left[0]:
            left[0] -= 1
            raise jax.errors.JaxRuntimeError(message)
        return timing_measure(loop, timing, **options)

    return measure


# -------------------------------------------------------------------------------- runs


def test_a_run_gives_samples(case, built, quick, monkeypatch):
    ticks = itertools.count()
    measure = partial(timing_measure, clock=lambda: next(ticks) / 1e3)
    monkeypatch.setattr(runner, "measure", measure)
    record = run(built, case.job(), case.program, case.mesh, timing=quick)
    assert record.ok
    assert len(record.samples_ms) == 2
    assert record.time_ms == pytest.approx(1.0)
    assert record.run_seconds > 0
    assert record.key == built.key.digest
    assert record.alias_bytes == built.alias_bytes


def test_nothing_stays_on_the_devices(case, built, quick, live_arrays):
    run(built, case.job(), case.program, case.mesh, timing=quick)
    assert live_arrays() == 0


def test_outputs_take_the_place_of_donated_inputs(case, built, quick, monkeypatch):
    job = case.job()
    [count] = [i for i, spec in enumerate(job.in_specs) if spec == ()]
    made, seen = [], []

    def note(*args):
        made.extend(make_inputs(*args))
        return list(made)

    def measure(loop, timing, **options):
        first = list(loop.inputs)
        assert all(now is then for now, then in zip(first, made, strict=True))
        loop(3)
        for place, (now, then) in enumerate(zip(loop.inputs, first, strict=True)):
            # The memory of what was donated has gone over to the output.
            assert then.is_deleted() == (place in job.donated)
            assert (now is then) == (place not in job.donated)
        seen.append(int(loop.inputs[count]))
        loop(2)
        seen.append(int(loop.inputs[count]))
        return timing_measure(loop, timing, **options)

    monkeypatch.setattr(runner, "make_inputs", note)
    monkeypatch.setattr(runner, "measure", measure)
    assert run(built, job, case.program, case.mesh, timing=quick).ok
    assert seen == [1 + 3, 1 + 5]
    assert all(array.is_deleted() for array in made)


def test_a_part_without_feedback_runs_on_the_same_inputs(case, quick):
    job = case.job(feedback=())
    built = build(case.program, case.mesh, job)
    assert isinstance(built, Built)
    assert built.alias_bytes == 0
    assert run(built, job, case.program, case.mesh, timing=quick).ok


# ---------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.", "out_of_memory"),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "out_of_memory"),
        ("INTERNAL: an illegal memory access was encountered", "crashed"),
    ],
)
def test_errors_of_the_runtime_are_records(
    case, built, quick, monkeypatch, live_arrays, message, status
):
    monkeypatch.setattr(runner, "measure", failing(message))
    record = run(built, case.job(), case.program, case.mesh, timing=quick)
    assert (record.status, record.samples_ms) == (status, ())
    assert message in record.reason
    assert record.time_ms == math.inf
    assert record.temp_bytes == built.temp_bytes
    assert live_arrays() == 0


def test_other_errors_are_our_own_bugs(case, built, quick, monkeypatch, live_arrays):
    def broken(loop, **_):
        loop(1)
        raise TypeError("a bug")

    monkeypatch.setattr(runner, "measure", broken)
    with pytest.raises(TypeError):
        run(built, case.job(), case.program, case.mesh, timing=quick)
    assert live_arrays() == 0


def test_what_cannot_fit_is_not_tried(built):
    def mesh_of(*limits):
        return SimpleNamespace(
            local_devices=[
                SimpleNamespace(platform="gpu", memory_stats=lambda stats=stats: stats)
                for stats in limits
            ]
        )

    peak = built.peak_bytes
    roomy, full = {"bytes_limit": peak}, {"bytes_limit": peak - 1}
    assert runner.shortage(built, mesh_of(roomy, roomy)) == ""
    assert "needs" in runner.shortage(built, mesh_of(roomy, full))
    assert runner.shortage(built, mesh_of(None, {})) == ""


# ---------------------------------------------------------------------------- profiles


def jobs_of(case):
    return [
        case.job("sharded"),
        case.job("replicated", shard_batch=False),
        case.job("refused", options=(("xla_no_such_option", "1"),)),
    ]


def test_the_second_time_nothing_is_measured(case, store, quick, monkeypatch):
    jobs = jobs_of(case)
    first = profile(case, jobs, store)
    assert [record.status for record in first.values()] == ["ok", "ok", "compile_error"]
    assert list(first) == [job.key.digest for job in jobs]
    assert all(0 < record.build_seconds for record in first.values())
    monkeypatch.setattr(runner, "build", None)
    assert profile(case, jobs, store) == first


# ------------------------------------------------------------------------- lost devices


def test_a_crash_does_not_end_a_profile(case, store, quick, monkeypatch):
    monkeypatch.setattr(runner, "measure", failing("INTERNAL: boom"))
    jobs = [case.job("a"), case.job("b")]
    found = profile(case, jobs, store)
    assert [r.status for r in found.values()] == ["crashed", "ok"]


def test_lost_devices_end_a_profile(case, store, quick, monkeypatch):
    lost = []

    def measure(loop, *_, **__):
        lost.append(True)
        raise jax.errors.JaxRuntimeError("INTERNAL: illegal address")

    def make(*args):
        if lost:
            raise jax.errors.JaxRuntimeError("INTERNAL: the context is gone")
        return make_inputs(*args)

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(runner, "make_inputs", make)
    jobs = [case.job("a"), case.job("b"), case.job("c")]
    with pytest.raises(CfpError, match="illegal address"):
        profile(case, jobs, store)
    # What crashed is known; of the others nothing was said.
    assert [record.key for record in store.records()] == [jobs[0].key.digest]
