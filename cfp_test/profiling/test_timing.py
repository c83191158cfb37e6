import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.profiling import runner as room
from cfp.profiling.runner import (
    ON_CPUS,
    Timing,
    TimingOptions,
    interquartile_range,
    relative_spread,
    timing_on,
)

LONG = TimingOptions(
    warmup_seconds=1.0,
    warmup_window=3,
    min_samples=5,
    max_samples=100,
    target_spread=0.005,
    budget_seconds=10.0,
    min_sample_ms=5.0,
    min_repeat=1,
)


def measure(
    run: room.Run,
    *,
    clock: Callable[[], float] = time.perf_counter,
    announce: Callable[[int], object] = int,
    **limits: float,
) -> Timing:
    """Measures with long limits, or others in their place."""
    return room.measure(run, replace(LONG, **limits), clock=clock, announce=announce)


class FakeDevice:
    """A clock, and things to run that move it."""

    def __init__(self):
        self.now = 100.0
        self.log: list[tuple[str, int]] = []

    def clock(self) -> float:
        return self.now

    def thing(
        self,
        name: str,
        seconds: Callable[[int, float], float],
        launch_seconds: float = 0.0,
    ):
        """`seconds(i, now)` is what the i-th execution takes."""
        executed = 0

        def run(n: int) -> None:
            nonlocal executed
            self.log.append((name, n))
            self.now += launch_seconds
            for _ in range(n):
                self.now += seconds(executed, self.now)
                executed += 1

        return run


def noise(index: int) -> float:
    return 1.0 + 0.1 * math.sin(12.9898 * index)


def test_a_constant_time_is_found_at_once():
    device = FakeDevice()
    timing = measure(device.thing("a", lambda *_: 0.010), clock=device.clock)
    assert len(timing.samples_ms) == 5
    assert timing.samples_ms == pytest.approx([10.0] * 5)
    assert timing.median_ms == pytest.approx(10.0)
    # A second of warm-up, and the first that is not charged.
    assert sum(timing.warmup_ms) == pytest.approx(1010, abs=11)
    assert all(n == 1 for _, n in device.log)


def test_a_short_thing_is_repeated_until_a_sample_is_long_enough():
    device = FakeDevice()
    run = device.thing("a", lambda *_: 20e-6, launch_seconds=50e-6)
    timing = measure(run, clock=device.clock, min_sample_ms=5.0, warmup_seconds=0.1)
    repeats = {n for _, n in device.log[-len(timing.samples_ms) :]}
    assert len(repeats) == 1
    repeat = repeats.pop()
    assert 5e-3 <= repeat * 20e-6 + 50e-6 < 10e-3
    # The launch is spread over the repeats, no longer two thirds of the sample.
    assert timing.median_ms == pytest.approx(0.020 + 0.050 / repeat)


def test_a_sample_holds_as_many_executions_as_asked_for():
    device = FakeDevice()
    run = device.thing("a", lambda *_: 0.1, launch_seconds=0.01)
    timing = measure(run, clock=device.clock, min_repeat=4)
    assert {n for _, n in device.log[-len(timing.samples_ms) :]} == {4}
    assert timing.median_ms == pytest.approx(100 + 10 / 4)


@pytest.mark.parametrize(("seconds", "repeat"), [(0.1, 3), (0.3, 2), (0.8, 1)])
def test_long_executions_are_repeated_less(seconds, repeat):
    device = FakeDevice()
    run = device.thing("a", lambda *_: seconds)
    timing = measure(run, clock=device.clock, min_repeat=3)
    assert {n for _, n in device.log[-len(timing.samples_ms) :]} == {repeat}


def test_what_takes_all_of_the_budget_is_executed_twice():
    device = FakeDevice()
    run = device.thing("a", lambda i, _: 3.0 - i)
    timing = measure(run, clock=device.clock, budget_seconds=2.0)
    assert timing.samples_ms == pytest.approx([2000.0])
    assert timing.warmup_ms == pytest.approx([3000.0])
    assert device.log == [("a", 1), ("a", 1)]


def test_warm_up_samples_are_a_third_as_long():
    device = FakeDevice()
    run = device.thing("a", lambda *_: 1e-3)
    timing = measure(run, clock=device.clock, min_sample_ms=30, warmup_seconds=0.5)
    count = len(timing.samples_ms)
    assert device.log[-count - 1][1] == 10
    assert {n for _, n in device.log[-count:]} == {33}


def test_one_slow_execution_does_not_settle_how_often_samples_repeat():
    device = FakeDevice()
    steps = {0: 0.2, 1: 0.006}
    run = device.thing("a", lambda i, _: steps.get(i, 20e-6), launch_seconds=100e-6)
    timing = measure(run, clock=device.clock, min_sample_ms=5.0, warmup_seconds=0.1)
    assert all(n * 20e-6 >= 4.5e-3 for _, n in device.log[-len(timing.samples_ms) :])


def test_warm_up_waits_for_clocks_that_drop_over_seconds():
    device = FakeDevice()
    started = device.now

    def throttling(_: int, now: float) -> float:
        return 0.010 * (1 + min((now - started) / 3.0, 1.0))

    timing = measure(
        device.thing("a", throttling), clock=device.clock, budget_seconds=20.0
    )
    assert 3.0 < sum(timing.warmup_ms) / 1e3 < 6.0
    assert timing.samples_ms == pytest.approx([20.0] * 5)


def test_warm_up_waits_for_clocks_that_drop_in_steps():
    device = FakeDevice()
    steps = iter([0.5, *[0.010] * 4, *[0.012] * 3, *[0.015] * 3, *[0.020] * 999])
    timing = measure(
        device.thing("b", lambda *_: next(steps)),
        clock=device.clock,
        warmup_seconds=0.05,
    )
    assert timing.samples_ms == pytest.approx([20.0] * len(timing.samples_ms))
    assert timing.warmup_ms[0] == pytest.approx(500.0)


def test_sampling_goes_on_until_the_median_is_sure():
    device = FakeDevice()
    run = device.thing("a", lambda index, _: 0.010 * noise(index))
    timing = measure(run, clock=device.clock, target_spread=0.02)
    assert relative_spread(timing.samples_ms) <= 0.02
    assert len(timing.samples_ms) > 5
    assert relative_spread(timing.samples_ms[:-1]) > 0.02


@pytest.mark.parametrize("budget_seconds", [0.0, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("step_seconds", [0.001, 0.3, 4.0])
def test_the_budget_holds(budget_seconds, step_seconds):
    device = FakeDevice()
    run = device.thing("a", lambda index, _: step_seconds * noise(index))
    started = device.now
    timing = measure(
        run,
        clock=device.clock,
        target_spread=0.0,
        max_samples=10**6,
        budget_seconds=budget_seconds,
    )
    assert len(timing.samples_ms) >= 1
    spent = device.now - started - timing.warmup_ms[0] / 1e3
    # One execution to calibrate and one sample are made in any case.
    assert spent <= budget_seconds + 2 * max(step_seconds * 1.1, 0.01)
    if step_seconds == 0.3 and budget_seconds == 5.0:
        assert spent >= budget_seconds
        assert 2.0 < sum(timing.samples_ms) / 1e3 < 4.4


def test_a_slow_first_execution_is_kept_but_not_charged():
    device = FakeDevice()
    run = device.thing("a", lambda index, _: 60.0 if index == 0 else 0.1)
    timing = measure(run, clock=device.clock, budget_seconds=10.0)
    assert timing.warmup_ms[0] == pytest.approx(60e3)
    assert len(timing.samples_ms) == 5


def test_every_execution_is_in_the_result():
    device = FakeDevice()
    run = device.thing("a", lambda index, _: 0.003 * noise(index))
    started = device.now
    timing = measure(run, clock=device.clock, max_samples=40)
    values = (*timing.warmup_ms, *timing.samples_ms)
    assert len(values) == len(device.log)
    total = sum(ms * n for ms, (_, n) in zip(values, device.log, strict=True))
    assert total / 1e3 == pytest.approx(device.now - started)


def test_what_is_executed_is_announced_before():
    device, announced = FakeDevice(), []
    run = device.thing("a", lambda i, _: 0.004 * noise(i))

    def announce(times: int) -> None:
        assert len(device.log) == len(announced)
        announced.append(times)

    measure(run, clock=device.clock, announce=announce)
    assert announced == [times for _, times in device.log] and len(announced) > 5


def test_failures_pass_through():
    def run(n: int) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure(run)


def test_wrong_limits_are_refused():
    with pytest.raises(ValueError, match="min_samples"):
        measure(lambda n: None, min_samples=3, max_samples=2)
    with pytest.raises(ValueError, match="min_samples"):
        measure(lambda n: None, min_samples=0)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_limits_that_are_not_given_are_those_of_the_platform(platform):
    usual = ON_CPUS if platform == "cpu" else TimingOptions()
    device = SimpleNamespace(platform=platform)
    mesh = SimpleNamespace(devices=np.array([device]))
    assert timing_on(mesh) == usual
    found = timing_on(mesh, min_samples=6)
    assert found.min_samples == 6
    assert replace(found, min_samples=usual.min_samples) == usual


@settings(deadline=None)
@given(st.lists(st.floats(min_value=0.001, max_value=1e6), min_size=2, max_size=50))
def test_spread_is_numpys_interquartile_range(samples):
    first, third = np.percentile(samples, [25, 75])
    width = interquartile_range(samples)
    assert width == pytest.approx(third - first, rel=1e-6, abs=1e-6)
    expected = width / statistics.median(samples) / math.sqrt(len(samples))
    assert relative_spread(samples) == pytest.approx(expected)


def test_spread_of_little():
    assert relative_spread([]) == relative_spread([3.0]) == math.inf
    assert relative_spread([3.0, 3.0]) == 0.0
    assert relative_spread([0.0, 0.0, 0.0, 5.0, 6.0]) == math.inf
