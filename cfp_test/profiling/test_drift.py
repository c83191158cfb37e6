import dataclasses
import math
from datetime import UTC, datetime

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfp.profiling import drift as drifting
from cfp.profiling import probes
from cfp.profiling.builder import Built
from cfp.profiling.drift import at_one_clock, drift, reference_task
from cfp.profiling.key import ProfileKey
from cfp.profiling.pipeline import run_tasks
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import execute, profile
from cfp.profiling.tasks import Task

around = st.floats(0.5, 2.0)


def record_of(samples, reference=(), status="ok"):
    return ProfileRecord(
        key="k",
        parts=(),
        status=status,
        samples_ms=tuple(samples),
        reference_ms=tuple(reference),
    )


# ------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ((), 0.0),
        ((1.1, 1.2), 0.1),
        ((1.2, 1.1), 0.1),
        ((0.8, 0.9), -0.1),
        ((0.9, 1.2), 0.0),
        ((1.0, 1.2), 0.0),
    ],
)
def test_drift_is_what_both_sides_agree_on(reference, wanted):
    assert drift(record_of([1.0], reference), 1.0) == pytest.approx(wanted)


@given(speeds=st.lists(around, min_size=3, max_size=9), cost=st.floats(0.1, 100.0))
def test_programs_of_one_cost_look_alike_however_fast_the_devices_were(speeds, cost):
    records = {
        str(i): record_of([cost * s, cost * s], [3.0 * s, 3.0 * s])
        for i, s in enumerate(speeds)
    }
    times = [record.time_ms for record in at_one_clock(records).values()]
    assert max(times) == pytest.approx(min(times))
    # And take what they take when the devices are as usual.
    assert min(r.time_ms for r in records.values()) <= times[0] * (1 + 1e-9)
    assert times[0] <= max(r.time_ms for r in records.values()) * (1 + 1e-9)


def test_a_drift_within_the_spread_of_the_samples_is_left():
    usual = {str(i): record_of([1.0, 1.0], [5.0, 5.0]) for i in range(3)}
    steady = record_of([1.04, 1.05, 1.05, 1.06], [5.5, 5.5])
    noisy = record_of([0.8, 1.0, 1.1, 1.3], [5.5, 5.5])
    found = at_one_clock({**usual, "steady": steady, "noisy": noisy})
    assert found["steady"].time_ms == pytest.approx(1.05 / 1.1)
    assert found["noisy"] == noisy
    assert found["0"] == usual["0"]


def test_without_a_reference_nothing_is_corrected():
    records = {"a": record_of([1.0, 2.0]), "b": record_of([], status="crashed")}
    assert at_one_clock(records) == records
    told = {**records, "c": record_of([1.0, 1.0], [2.0, 2.0])}
    assert at_one_clock(told) == told
    assert math.isinf(at_one_clock(told)["b"].time_ms)


# ---------------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(jnp.negative).lower(1.0).compile()


class Shop:
    """Tasks that say when they ran; the reference takes 1 ms, 2 ms, 3 ms, ..."""

    def __init__(self, compiled, broken=()):
        self.compiled, self.broken = compiled, broken
        self.ran = []

    def task(self, name):
        key = ProfileKey((("name", name),))

        def run(built):
            self.ran.append(name)
            if name in self.broken:
                return built.record("crashed", reason="boom")
            return built.record("ok", samples_ms=[float(self.ran.count(name))])

        return Task(
            key=key,
            label=name,
            build=lambda: Built(key=key, compiled=self.compiled),
            run=run,
        )

    def measure(self, names, store, **options):
        return run_tasks(
            map(self.task, names), store, reference=self.task("R"), **options
        )


def test_the_reference_runs_before_between_and_after(compiled, store):
    shop = Shop(compiled)
    found = shop.measure("abcdefgh", store)
    assert "".join(shop.ran) == "RabcdefRghR"
    told = [found.records[r.key].reference_ms for r in found.records.values()]
    assert told == [(1.0, 2.0)] * 6 + [(2.0, 3.0)] * 2
    # What is kept is told, too, and the samples are as they were.
    assert store.get_many(found.records) == found.records
    assert {r.samples_ms for r in found.records.values()} == {(1.0,)}
    assert (found.measured, len(store)) == (8, 9)


def test_where_all_is_known_no_reference_runs(compiled, store):
    Shop(compiled).measure("ab", store)
    again = Shop(compiled)
    assert again.measure("ab", store).cached == 2
    assert again.ran == []


def test_a_reference_that_fails_is_not_tried_again(compiled, store):
    shop = Shop(compiled, broken="R")
    found = shop.measure("abcdefgh", store)
    assert "".join(shop.ran) == "Rabcdefgh"
    assert {r.reference_ms for r in found.records.values()} == {()}
    later = Shop(compiled)
    later.measure("ij", store)
    assert "".join(later.ran) == "ij"


def kept_reference(store):
    [record] = [r for r in store.records() if dict(r.parts)["name"] == "R"]
    return record


def test_a_reference_that_failed_is_tried_again_when_asked(compiled, store):
    Shop(compiled, broken="R").measure("a", store)
    assert kept_reference(store).status == "crashed"
    again = Shop(compiled)
    found = again.measure("b", store, retry_failures=True)
    assert "".join(again.ran) == "RbR"
    [record] = found.records.values()
    assert record.reference_ms == (1.0, 2.0)
    assert kept_reference(store).ok


def test_a_reference_that_fails_again_is_not_tried_once_more(compiled, store):
    """A process that is started again asks for what failed before the first start."""
    shop = Shop(compiled, broken="R")
    shop.measure("a", store)
    long_ago = dataclasses.replace(
        kept_reference(store), created="2026-01-02T03:04:05+00:00", reason="old"
    )
    store.put(long_ago, replace=True)
    started = datetime(2026, 2, 3, tzinfo=UTC)
    shop.measure("b", store, retry_failures=started)
    assert "".join(shop.ran) == "RaRb"
    assert kept_reference(store).reason == "boom"
    shop.measure("c", store, retry_failures=started)
    assert "".join(shop.ran) == "RaRbc"


def test_a_reference_that_cannot_be_built_is_kept_too(compiled, store):
    shop = Shop(compiled)
    task = shop.task("R")
    refused = ProfileRecord(
        key=task.key.digest, parts=task.key.parts, status="compile_error"
    )
    asked = []

    def refuse():
        asked.append(task.key)
        return refused

    broken = dataclasses.replace(task, build=refuse)
    for name in "ab":
        run_tasks([shop.task(name)], store, reference=broken)
    assert len(asked) == 1 and kept_reference(store) == refused
    run_tasks([shop.task("c")], store, reference=broken, retry_failures=True)
    assert len(asked) == 2


def test_only_a_good_build_is_remembered(monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    task = reference_task(mesh, execute)
    built = Built(key=task.key, compiled=None)
    refused = built.record("compile_error")
    outcomes = iter([refused, built])
    monkeypatch.setattr(drifting, "build_probe", lambda *_: next(outcomes))
    assert [task.build() for _ in range(3)] == [refused, built, built]
    drifting._build_once.cache_clear()


def test_failures_have_no_reference(compiled, store):
    found = Shop(compiled, broken="b").measure("abc", store)
    told = [record.reference_ms for record in found.records.values()]
    assert told == [(1.0, 2.0), (), (1.0, 2.0)]


def test_an_interrupt_keeps_what_was_measured(compiled, store):
    shop = Shop(compiled)

    def interrupt(built):
        raise KeyboardInterrupt

    last = dataclasses.replace(shop.task("b"), run=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_tasks([shop.task("a"), last], store, reference=shop.task("R"))
    assert store.get(shop.task("a").key.digest).reference_ms == ()


def test_devices_run_the_reference(store, quick, live_arrays, monkeypatch):
    monkeypatch.setattr(probes, "_REFERENCE_WIDTH", 64)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    timing = {"timing": quick}
    task = reference_task(mesh, lambda *a, **k: execute(*a, **k, **timing))
    built = task.build()
    assert isinstance(built, Built)
    assert {c.kind for c in built.collectives} == {"all-to-all"}
    record = task.run(built)
    assert record.ok and record.time_ms > 0
    assert live_arrays() == 0


def test_profiles_keep_the_reference(case, mesh, store, quick, compiled):
    shop = Shop(compiled)
    found = profile(
        case.program, mesh, [case.job()], store, timing=quick, reference=shop.task("R")
    )
    [record] = found.records.values()
    assert record.reference_ms == (1.0, 2.0)
    # Virtual devices have no clocks: by default nothing runs in between.
    found = profile(case.program, mesh, [case.job("other")], store, timing=quick)
    [record] = found.records.values()
    assert record.reference_ms == ()
