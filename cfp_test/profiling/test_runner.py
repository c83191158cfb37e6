import itertools
import math
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cfp.errors import DeviceError
from cfp.profiling import runner
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.inputs import make_inputs
from cfp.profiling.options import MeasureOptions
from cfp.profiling.runner import StopOnDeviceLoss, execute, profile, run
from cfp.profiling.timing import ON_CPUS, Timing, TimingOptions
from cfp.profiling.timing import measure as timing_measure

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


def test_timing_options_are_passed_on(case, built, quick, monkeypatch):
    seen = {}

    def measure(loop, timing, **options):
        seen.update(options, timing=timing)
        return timing_measure(loop, timing, **options)

    monkeypatch.setattr(runner, "measure", measure)
    run(built, case.job(), case.program, case.mesh, timing=quick)
    assert seen.pop("agree")(0.25) == 0.25
    assert seen == {"timing": quick}


@pytest.mark.parametrize(
    ("platform", "usual"), [("cpu", ON_CPUS), ("cuda", TimingOptions())]
)
def test_timing_that_is_not_given_is_that_of_the_devices(
    platform, usual, built, monkeypatch
):
    seen = []

    def measure(loop, timing, **options):
        seen.append(timing)
        return Timing(samples_ms=(1.0,), warmup_ms=())

    monkeypatch.setattr(runner, "measure", measure)
    device = SimpleNamespace(platform=platform, process_index=0, memory_stats=dict)
    mesh = SimpleNamespace(devices=np.array([device]), local_devices=[device])
    assert execute(built, [], mesh).ok
    assert seen == [usual]


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


def test_too_little_memory_for_the_inputs_is_a_record(case, built, quick, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(runner, "make_inputs", full)
    record = run(built, case.job(), case.program, case.mesh, timing=quick)
    assert record.status == "out_of_memory"


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


def test_a_shortage_is_a_record(case, built, quick, monkeypatch):
    monkeypatch.setattr(runner, "shortage", lambda *_: "needs 2 GiB of 1")
    record = run(built, case.job(), case.program, case.mesh, timing=quick)
    assert (record.status, record.reason) == ("out_of_memory", "needs 2 GiB of 1")


# ---------------------------------------------------------------------------- profiles


def jobs_of(case):
    return [
        case.job("sharded"),
        case.job("replicated", shard_batch=False),
        case.job("refused", options=(("xla_no_such_option", "1"),)),
    ]


def test_the_second_time_nothing_is_measured(case, store, quick):
    jobs = jobs_of(case)
    first = profile(case.program, case.mesh, jobs, store, timing=quick)
    assert (first.measured, first.cached, first.failed) == (2, 0, 1)
    assert [record.status for record in first.records.values()] == [
        "ok",
        "ok",
        "compile_error",
    ]
    assert list(first.records) == [job.key.digest for job in jobs]
    assert 0 < first.build_seconds
    again = profile(case.program, case.mesh, jobs, store, timing=quick)
    assert (again.measured, again.cached, again.failed) == (0, 3, 0)
    assert again.records == first.records
    assert (again.build_seconds, again.run_seconds) == (0.0, 0.0)


def test_equal_jobs_are_built_once(case, store, quick, monkeypatch):
    built = []

    def note(program, mesh, job, environment):
        built.append(job.label)
        return build(program, mesh, job, environment)

    monkeypatch.setattr(runner, "build", note)
    jobs = [case.job("one"), case.job("two"), case.job("one", label="another label")]
    summary = profile(case.program, case.mesh, jobs, store, timing=quick)
    assert sorted(built) == ["one", "two"]
    assert summary.measured == 2


def test_failures_are_retried_if_asked(case, store, quick, monkeypatch):
    job = case.job()
    message = "RESOURCE_EXHAUSTED: Out of memory"
    monkeypatch.setattr(runner, "measure", failing(message))
    first = profile(case.program, case.mesh, [job], store, timing=quick)
    assert first.failed == 1
    again = profile(case.program, case.mesh, [job], store, timing=quick)
    assert (again.cached, again.measured) == (1, 0)
    retried = profile(
        case.program,
        case.mesh,
        [job],
        store,
        MeasureOptions(retry_failures=True),
        timing=quick,
    )
    assert retried.measured == 1
    assert store.get(job.key.digest).ok


def test_an_interrupt_while_running_keeps_records(case, store, quick, monkeypatch):
    jobs = [case.job("a"), case.job("b"), case.job("c")]
    runs = []

    def measure(loop, timing, **options):
        runs.append(loop)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return timing_measure(loop, timing, **options)

    monkeypatch.setattr(runner, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        profile(case.program, case.mesh, jobs, store, timing=quick)
    assert len(store) == 1
    rest = profile(case.program, case.mesh, jobs, store, timing=quick)
    assert (rest.measured, rest.cached) == (2, 1)


def test_progress_is_reported(case, store, quick):
    events = []
    jobs = jobs_of(case)
    summary = profile(
        case.program,
        case.mesh,
        jobs,
        store,
        MeasureOptions(progress=events.append),
        timing=quick,
    )
    assert [event.label for event in events if event.phase == "run"] == [
        "sharded",
        "replicated",
    ]
    assert events[-1].done == events[-1].total == 3
    assert events[-1].failed == summary.failed == 1
    assert events[-1].best_ms == min(r.time_ms for r in summary.records.values())


def test_several_threads(case, store, quick, live_arrays, monkeypatch):
    monkeypatch.setattr(runner, "default_threads", lambda platform: 3)
    jobs = [case.job(f"job {i}", shard_batch=i % 2 == 0) for i in range(5)]
    summary = profile(case.program, case.mesh, jobs, store, timing=quick)
    assert summary.measured == 5
    assert [bool(r.collectives) for r in summary.records.values()] == [
        i % 2 == 0 for i in range(5)
    ]
    assert live_arrays() == 0


def test_the_store_has_the_compilers_directory_beside_it(
    case, store, quick, monkeypatch
):
    seen = []

    def note(program, mesh, job, environment):
        seen.append(environment)
        return build(program, mesh, job, environment)

    monkeypatch.setattr(runner, "build", note)
    profile(case.program, case.mesh, [case.job()], store, timing=quick)
    assert seen == [
        BuildEnvironment(
            autotune_dir=store.path.parent / "autotune",
            executables_dir=store.path.parent / "executables",
        )
    ]


# ------------------------------------------------------------------------- lost devices


def test_a_crash_does_not_end_a_profile(case, store, quick, monkeypatch):
    monkeypatch.setattr(runner, "measure", failing("INTERNAL: boom"))
    jobs = [case.job("a"), case.job("b")]
    summary = profile(case.program, case.mesh, jobs, store, timing=quick)
    assert [r.status for r in summary.records.values()] == ["crashed", "ok"]


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
    with pytest.raises(DeviceError, match="illegal address"):
        profile(case.program, case.mesh, jobs, store, timing=quick)
    # What crashed is known; of the others nothing was said.
    assert [record.key for record in store.records()] == [jobs[0].key.digest]


@pytest.mark.parametrize("lost", [False, True])
def test_after_a_crash_the_devices_are_asked_whether_they_answer(
    case, built, quick, monkeypatch, lost
):
    kept, crashed = [], []
    crash = failing("INTERNAL: illegal address")

    def measure(loop, timing, **options):
        crashed.append(True)
        return crash(loop, timing, **options)

    def make(*args):
        if crashed and lost:
            raise jax.errors.JaxRuntimeError("INTERNAL: the context is gone")
        return make_inputs(*args)

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(runner, "make_inputs", make)
    run_next = StopOnDeviceLoss(run, kept.append)
    what = (built, case.job(), case.program, case.mesh)
    first = run_next(*what, timing=quick)
    assert first.status == "crashed" and kept == []
    if not lost:
        assert run_next(*what, timing=quick).ok and kept == []
        return
    with pytest.raises(DeviceError, match="the context is gone"):
        run_next(*what, timing=quick)
    assert kept == [first]
    assert len(crashed) == 1
